"""The GPU side of ``ft bench offload --prefill``: forwards of many tokens, behind others, over offloaded experts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from engine.bench_offload import FirstToken, Suffix
from engine.bench_trace import ForcedRouting
from engine.device.bench import Bench
from engine.experts.offload import DECODED, OffloadedExperts
from engine.experts.residency import BYTES, CPU, FETCHED, HITS
from engine.experts.waves import LEFT, LINK, ROWS
from engine.kernels.resident import ResidentExperts
from engine.runner import Rows

_WARM, _TIMED = 3, 5


class PrefillBench(Bench):
    """One model, one sequence; as ``Bench``."""

    def __init__(self, options: argparse.Namespace, tell: Callable[[str], None]) -> None:
        options.context = max(1, options.behind, options.cold)
        super().__init__(options, tell)
        self.title += ", equally likely experts"
        self.first_tokens: list[FirstToken] = []
        self._nowhere = torch.full((len(self._pool),), -1, dtype=torch.int32, device=self._device)

    def run(self) -> list[Suffix]:
        self._experts.now = ResidentExperts.of_pool(self._pool, self._device)
        self._tell("all experts on the device")
        dense = {rows: median(self._forwards(rows)) for rows in self._options.prefill}
        results = [one for cap in self._options.caps for one in self._offloaded(cap, dense)]
        self.close()
        return results

    def _offloaded(self, gigabytes: float, dense: dict[int, float]) -> list[Suffix]:
        experts = self._empty(gigabytes)
        results = []
        for rows, at_once in dense.items():
            self._tell(f"{gigabytes:g} GB for experts, {rows} tokens")
            results.append(self._suffix(experts, gigabytes, rows, at_once))
        if self._options.cold:
            self._tell(f"{gigabytes:g} GB for experts, {self._options.cold} cold tokens")
            self.first_tokens.append(self._first_token(experts, gigabytes, max(dense)))
        experts.close()
        return results

    def _empty(self, gigabytes: float) -> OffloadedExperts:
        """With room for so many experts, none there yet."""
        pool = self._pool
        slots = min(len(pool), int(gigabytes * 1e9) // pool.stride - 1)
        room = torch.empty(slots + 1, pool.stride, dtype=torch.uint8, device=self._device)
        experts = OffloadedExperts(pool, self._executor, self._driver, self._split(), room)
        self._experts.now = experts
        experts.start()
        experts.fix(self._options.split)
        return experts

    def _first_token(self, experts: OffloadedExperts, gigabytes: float, rows: int) -> FirstToken:
        """Kernels are compiled by now. With one slot for a moment, all but one expert are gone."""
        tokens, slots = self._options.cold, experts.residency.slots
        experts.resize(1)
        experts.resize(slots)
        cold, *there = self._forwards(rows, experts, behind=0, warm=0)
        last = self._forwards(rows, experts, behind=(tokens - 1) // rows * rows, warm=1)
        return FirstToken(gigabytes, tokens, rows, cold, median(there[1:]), median(last))

    def _suffix(self, experts: OffloadedExperts, gigabytes: float, rows: int, at_once: float) -> Suffix:
        parts, link = self._pool.layout.parts, self.bandwidths.link
        counted: list[list[int]] = []
        seconds = median(self._forwards(rows, experts, counted))
        experts.residency.check()
        change = [(last - first) / _TIMED for first, last in zip(counted[_WARM - 1], counted[-1], strict=True)]
        ahead = rows > DECODED and experts.prefill.streamed
        return Suffix(
            rows=rows,
            gigabytes=gigabytes,
            seconds=seconds,
            moved=change[BYTES],
            found=round(change[HITS] / parts),
            brought=round(change[FETCHED] / parts),
            left=round(change[CPU] / parts),
            ahead=ahead,
            dense=at_once,
            split=change[BYTES] / link if ahead else self._split_seconds(experts, rows),
            pool=len(self._pool) * self._pool.layout.nbytes / link,
        )

    def _split_seconds(self, experts: OffloadedExperts, rows: int) -> float:
        """Of all layers of the last call: the longer of what the link and the CPU take for their experts."""
        layout, costs, link = self._pool.layout, experts.prefill.costs, self.bandwidths.link
        if rows <= DECODED:
            part = layout.nbytes / layout.parts
            cpu = self.bandwidths.cpu
            work: list[list[int]] = experts.residency.work.tolist()
            return sum(max(layer[FETCHED] * part / link, layer[CPU] * part / cpu) for layer in work)
        told: list[list[int]] = experts.prefill.waves.told.tolist()
        return sum(
            max(layer[LINK] * layout.nbytes / link, 1e-9 * (layer[LEFT] * costs.cpu + layer[ROWS] * costs.row))
            for layer in told
        )

    def _forwards(
        self, rows: int, experts: OffloadedExperts | None = None, counted: list[list[int]] | None = None,
        behind: int | None = None, warm: int = _WARM,
    ) -> list[float]:  # fmt: skip
        """Seconds of each after ``warm`` ones, each with other experts, ``behind`` so many tokens; ``counted``: the
        counters after each, the first ones included."""
        pool, ranks = self._pool, self._executor.layout.ranks
        routing = ForcedRouting(pool.layers, pool.experts, rows, ranks, self._device)
        self._ops.routing = routing
        position = self._options.behind if behind is None else behind
        tokens = Rows((1,) * rows, position, range(self._pages), 1, logits=True)
        times = []
        for _ in range(warm + _TIMED):
            routing.draw(self._nowhere, 0.0)
            torch.cuda.synchronize()
            start = time.perf_counter()
            self._runner.forward([tokens])
            if experts is not None:
                experts.report()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            if experts is not None:
                experts.after_step()
                experts.learn()
            if experts is not None and counted is not None:
                counted.append(experts.residency.counters.tolist())
        return times[warm:]
