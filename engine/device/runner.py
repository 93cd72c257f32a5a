"""Runs the model on a device, and hands over what tokens are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from engine.device.graph import DecodeSteps
from engine.device.hosted import Hosted
from engine.device.masks import Masks, in_time
from engine.device.reduce import Reduced, reduce
from engine.experts.offload import OffloadedExperts
from engine.experts.residency import BYTES, CPU, FETCHED, HITS, ONE
from engine.grammar import Mask
from engine.layers.ops import Ops
from engine.memory.store import StateStore
from engine.models.model import Cache, Model, Progress, Wait, all_there
from engine.runner import Rows, Runner
from engine.sampling import Logits, Row

_Scored = tuple[Reduced, list[Mask | None], Tensor]
_WARM_UP = 0, 1
"""A page and a state that no sequence has yet while steps are prepared."""


class DeviceRunner(Runner):
    """A step of one token for each of up to ``most`` sequences is made of graphs; any other runs at once. Masks of
    grammars are made while scores are computed; those that come later are left to the sampler.

    ``pages``: of the longest sequence. ``experts``: those that are not all on the device, if any. ``hosted``: where
    what leaves the device is kept, unless the processor addresses it there. A step whose experts
    the CPU did not compute raises ExecutorError, and nothing of it can be used.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        dtype: torch.dtype,
        cache: Cache,
        experts: OffloadedExperts | None,
        hosted: Hosted | None,
        *,
        pages: int,
        most: int,
        device: torch.device,
    ) -> None:
        super().__init__(model, ops, dtype, cache=cache, mover=hosted.staging if hosted else None, device=device)
        self._hosted = hosted
        self._experts, self._pages, self._most = experts, pages, most
        self._steps = DecodeSteps(
            model, self.cache, self._finish, pages=pages, scratch=_WARM_UP, device=device, way=self._way
        )
        self._masks = Masks(model.vocab_size, most, device)
        self._fetched_rows = self._graphs = self._masked_rows = self._graph_bytes = 0
        self.brought = 0
        """Steps so far that did not ask the CPU."""
        self._learns = False
        self._outs: dict[tuple[int, bool], tuple[Tensor, Reduced]] = {}

    def prepare(self, progress: Progress) -> None:
        """Capture all graphs. Before any sequence is there."""
        page, state = _WARM_UP
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor[page] = 0
        for tensor in self.cache.states:
            tensor[state] = 0  # what was never written may be no number
        free = self._free()
        for rows in range(1, self._most + 1):
            self._steps.prepare(rows)
            if self._experts is not None and self._experts.may_bring(rows):
                self._steps.prepare(rows, other=True)
            progress("decode steps", rows, self._most)
        self._graph_bytes = free - self._free()

    def score(
        self, parts: Sequence[Rows], wait: Wait = all_there, meanwhile: Callable[[], None] = lambda: None
    ) -> Sequence[Row]:
        decodes = wait is all_there and self._decodes(parts)
        brings = decodes and self._experts is not None and self._experts.brings(len(parts))
        try:
            if decodes:
                reduced, masks, logits = self._replay(parts, brings, meanwhile)
            else:
                if self._experts is not None:
                    self._experts.executor.rouse()
                meanwhile()
                reduced, masks, logits = self._at_once(parts, wait)
        finally:
            if self._experts is not None:
                self._experts.after_step(graph=decodes, brought=brings)
        self._learns = decodes
        temperatures = [part.temperature for part in parts if part.logits]
        masked = [mask is not None for mask in masks]
        self._masked_rows += sum(masked)
        return reduced.best(temperatures, masked, partial(self._fetch, logits))

    def gauges(self) -> dict[str, float]:
        """``graph_bytes``: that making the graphs took. ``brought_steps``: those that did not ask the CPU.
        ``experts_*`` count parts of experts since the start.
        ``layers_*``: what the layers' misses are split into now; a mode that no layer has does not pay."""
        gauges = {
            "graphs": float(self._most),
            "graph_bytes": float(self._graph_bytes),
            "graph_steps": float(self._graphs),
            "brought_steps": float(self.brought),
            "fetched_rows": float(self._fetched_rows),
            "masked_rows": float(self._masked_rows),
            **({} if self._hosted is None else self._hosted.gauges()),
        }
        if self._experts is None:
            return gauges
        residency = self._experts.residency
        counters, shares = residency.counters.tolist(), residency.share.tolist()
        only_link, only_cpu = shares.count(ONE), shares.count(0)
        return gauges | {
            "experts_hit": float(counters[HITS]),
            "experts_fetched": float(counters[FETCHED]),
            "experts_on_cpu": float(counters[CPU]),
            "experts_fetched_bytes": float(counters[BYTES]),
            "layers_fetched": float(only_link),
            "layers_on_cpu": float(only_cpu),
            "layers_split": float(len(shares) - only_link - only_cpu),
        }

    @property
    def hosted(self) -> bool:
        return self._hosted is not None

    def tier(self, store: StateStore | None) -> StateStore | None:
        return store if self._hosted is None else self._hosted.tier(store)

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._hosted is not None:
            self._hosted.close()
        if self._experts is not None:
            self._experts.close()
            self._experts.executor.close()

    def _free(self) -> int:
        """Bytes of the device that nothing has, torch's cache included."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def _decodes(self, parts: Sequence[Rows]) -> bool:
        return len(parts) <= self._most and all(
            part.logits and len(part.tokens) == 1 and not part.snapshots and len(part.table) <= self._pages
            for part in parts
        )

    def _way(self, brings: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._experts is None else self._experts.bringing(brings)

    def _replay(self, parts: Sequence[Rows], brings: bool, meanwhile: Callable[[], None]) -> _Scored:
        """The best of each row, what they were found within, and all scores, which are on the device."""
        wanted = [part.mask for part in parts]
        masks: list[Mask | None] = [None] * len(parts)
        if not any(wanted):
            self._masks.copy(masks)
        step = self._steps.launch(parts, other=brings)
        if self._experts is not None and not brings:
            self._experts.executor.rouse()  # they wake while the first layer is computed
        over = self._marked() if any(wanted) else None
        meanwhile()
        if self._experts is not None and self._learns:
            self._experts.learn()  # from the step before, while this one runs
        if over is not None:
            masks = in_time(wanted, over, alone=len(parts) == 1)
            self._masks.copy(masks)
            self._steps.finish_again(step)
        self._graphs, self.brought = self._graphs + 1, self.brought + brings
        return self._reduced(self._steps.wait(step), brings), masks, step.logits

    def _reduced(self, out: Tensor, brings: bool) -> Reduced:
        """Of a graph's rows, which are always in the same place."""
        graph = len(out), brings
        if graph not in self._outs or self._outs[graph][0] is not out:
            self._outs[graph] = out, Reduced(out, self.model.vocab_size)
        return self._outs[graph][1]

    @torch.inference_mode()
    def _at_once(self, parts: Sequence[Rows], wait: Wait) -> _Scored:
        """As ``_replay``."""
        if self._experts is not None:
            self._experts.prefill.settle()
        logits = self.forward(parts, wait)
        wanted = [part for part in parts if part.logits]
        masks = in_time([part.mask for part in wanted], self._marked(), alone=len(parts) == 1)
        temperatures = torch.tensor([part.temperature for part in wanted], dtype=torch.float32, device=self.device)
        reduced = []
        for first in range(0, max(1, len(wanted)), self._most):
            some = slice(first, first + self._most)
            self._masks.copy(masks[some])
            reduced.append(self._finish(logits[some], temperatures[some]).cpu())
        return Reduced(torch.cat(reduced), self.model.vocab_size), masks, logits

    def _marked(self) -> Callable[[], bool]:
        """Says whether the device has done what it was given until now."""
        if self.device.type != "cuda":
            return lambda: True
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.query

    def _finish(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        """The last work of a step."""
        if self._experts is not None:
            self._experts.report()
        return reduce(logits, temperatures, self._masks)

    def _fetch(self, logits: Tensor, row: int) -> Logits:
        self._fetched_rows += 1
        whole: Logits = logits[row].cpu().numpy()
        return whole
