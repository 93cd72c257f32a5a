"""Routed experts of a model that holds them in host memory: on the device, fetched, or computed by the CPU.

Every layer of a step is the same sequence of work on the device, so that it can be captured into a graph: decide on the
device and ask the CPU for its part; fetch; compute what is on the device, the shared expert too; wait for the CPU; add
its part. Where experts are changes speed, and the last bits of the sums.

There is a second kind of step, which brings all that it misses and has no request, no wait and no answer in it: all its
kernels are launched early.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.device.driver import Driver
from engine.device.watchdog import PATIENCE, Watchdog
from engine.experts.bringing import Bringing
from engine.experts.cost import cpu_costs
from engine.experts.executor import Executor, ExecutorError
from engine.experts.pinning import Pinned, pin
from engine.experts.pool import Pool, Progress
from engine.experts.prefill import Prefill
from engine.experts.replay import Chooser
from engine.experts.residency import CPU, MOST_PAIRS, ONE, WINDOW, Decision, Residency, of_told
from engine.experts.split import Split
from engine.kernels import experts as kernels
from engine.kernels import mxfp4
from engine.kernels.experts import Sums
from engine.kernels.mailbox import Request, add_answer
from engine.kernels.pointwise import route
from engine.kernels.resolve import resolve
from engine.layers.ops import Routing

_log = logging.getLogger(__name__)

_Told = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Of the last step: the executor's times, what was done where, what was routed."""

DECODED = 16
"""Rows at most that one decision is made for; more are prefill."""
BROUGHT = 4
"""Rows at most of steps that can do without the CPU: more miss too much for that to pay."""
_COPIES, _COPIED = 3, 32
"""How often how many experts are copied, to measure the link."""


class OffloadedExperts:
    """Implements ``engine.kernels.ops.DeviceExperts`` over a pool that holds all experts and an executor for it.

    ``split``: what goes over the link. ``slots`` uint8 [slots + 1, pool.stride] on the device: room for experts, the
    last one scratch; how many of them are used is ``residency.limit``. Layers are packed in order; ``start`` comes
    after the last one and before the first ``run``. A step ends with ``report``; ``after_step`` comes when its results
    are there, and ``learn`` at leisure, best while the next step runs.
    """

    def __init__(
        self,
        pool: Pool,
        executor: Executor,
        driver: Driver,
        split: Split,
        slots: Tensor,
        patience: float = PATIENCE,
    ) -> None:
        """Raises ValueError for slots of another size, and for more rows times ranks than one decision takes."""
        ranks, device = executor.layout.ranks, slots.device
        if slots.dim() != 2 or slots.shape[1] != pool.stride or slots.dtype != torch.uint8 or not slots.is_contiguous():
            raise ValueError(f"slots must be bytes [slots + 1, {pool.stride}], not {slots.dtype} {list(slots.shape)}")
        self.pool, self.executor, self._driver, self._device = pool, executor, driver, device
        self._split, self._slots = split, slots
        self._bringing = Bringing(pool.layers, split.link_alone)
        self.residency = Residency.create(pool.layout, pool.layers, pool.experts, slots.shape[0] - 1, device)
        self._all = replace(self.residency, share=torch.full_like(self.residency.share, ONE))
        self._limit = self.residency.slots
        self._brings = self._brought = False
        self._most = min(executor.layout.rows, DECODED, max(1, MOST_PAIRS // ranks))
        self._decisions = [Decision.create(rows + 1, ranks, device) for rows in range(self._most)]
        pinned = device.type == "cuda"
        self._reported = torch.zeros(self.residency.told.shape, dtype=torch.int32, pin_memory=pinned)
        self._shares = torch.full((pool.layers,), ONE, dtype=torch.int32, pin_memory=pinned)  # as residency begins
        routed, work = (tensor.numpy() for tensor in of_told(self._reported, pool.layers))
        routed[:] = -1
        routed = routed[:, : self._most * ranks]
        self._told: _Told = executor.times, work, routed
        self._learnt_from: _Told = executor.times.copy(), work.copy(), routed.copy()
        self._chooser = Chooser(pool.layers, pool.experts, self.residency.slots)
        self._arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        self.prefill = Prefill(pool, executor, driver, split, self.residency, slots, self._arrivals)
        self._mailbox = 0
        self._pinned: Pinned | None = None
        self._packed = 0
        self._watchdog = Watchdog(executor, patience)

    def pack(self, gate_up: Tensor, down: Tensor) -> int:
        """gate_up [experts, 2 * inner, hidden], down [experts, hidden, inner] into the pool. -> the layer's number."""
        layer, self._packed = self._packed, self._packed + 1
        for expert in range(self.pool.experts):
            self.pool.put(layer, expert, gate_up[expert], down[expert])
        return layer

    def start(
        self, fetches: bool = True, *, measures: bool = False, progress: Progress = lambda done, total: None
    ) -> None:
        """Map pool and mailbox for the device: filled memory is pinned several times faster. ``progress`` in layers.
        Layers that cannot be pinned are left to the CPU. Without ``fetches`` all are, and the split stays fixed at 0.
        ``measures``: the split is not to believe what it began with. Raises DriverError when the mailbox cannot be
        mapped either."""
        self._mailbox = self._driver.register(self.executor.mailbox.data_ptr(), self.executor.layout.nbytes)
        done = self.executor.layout.done
        self.executor.mailbox[done : done + 8].view(torch.int64).fill_(1)  # nothing has been asked
        if fetches:
            self._pinned = pinned = pin(self._driver, self.pool, progress)
            self._split.link(pinned.layers)
            if measures and pinned.layers:
                self._split.expect(*self._measured())
                self._bringing.expect(self._split.link_alone)
            if pinned.why is None:
                self.prefill.start(pinned.pointer, self._mailbox, pinned.pieces)
            else:
                _log.warning(
                    "the experts of %d of %d layers can be pinned for the device (%s); the CPU computes the others, "
                    "and prompts are slow: allow more locked memory (RLIMIT_MEMLOCK, `ulimit -l`)",
                    pinned.layers, self.pool.layers, pinned.why,
                )  # fmt: skip
        self._share()

    def close(self) -> None:
        """Nothing may be running on the device. Pool and executor stay."""
        self._watchdog.close()
        if self._pinned is not None:
            self._pinned.unpin(self._driver)
        if self._mailbox:
            self._driver.unregister(self.executor.mailbox.data_ptr())

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        """As ``Ops.experts``; -1 in ids stands for no expert."""
        most = self._most
        if x.shape[0] <= most:
            return self._run(x, ids, weights, layer)
        if self.prefill.possible:
            return self.prefill.run(x, ids, weights, layer)
        chunks = [slice(start, start + most) for start in range(0, x.shape[0], most)]
        return torch.cat([self._run(x[chunk], ids[chunk], weights[chunk], layer) for chunk in chunks])

    def fix(self, share: float | None) -> None:
        """The same split for all layers and steps, from now on; None: as it is learnt."""
        if share is None:
            self._split.free()
        else:
            self._split.fix(share)
        self._share()
        self.prefill.follow()

    def may_bring(self, rows: int) -> bool:
        """Whether steps of so many rows can ever do without the CPU: all experts can come, and what a layer misses may
        have room in its window beside what it finds there."""
        pinned = self._pinned is not None and self._pinned.layers == self.pool.layers
        return pinned and rows <= BROUGHT and self._wanted(rows) <= min(WINDOW, self.residency.slots)

    def brings(self, rows: int) -> bool:
        """Whether the next step, of so many rows, had better do without, and can."""
        fixed = self._split.fixed
        pays = self._bringing.pays if fixed is None else fixed == 1
        return pays and self.may_bring(rows) and self._wanted(rows) <= self._limit

    def _wanted(self, rows: int) -> int:
        """Slots that so many rows take in a layer at the most."""
        return rows * self.executor.layout.ranks

    @contextmanager
    def bringing(self, brings: bool) -> Iterator[None]:
        """Calls of ``run`` and ``sums`` within bring all that they miss, and there is no request, wait or answer in
        what they do. What of it runs later, as a graph, may run only when ``brings`` says so."""
        before, self._brings = self._brings, brings
        try:
            yield
        finally:
            self._brings = before

    def report(self) -> None:
        """The last work of a step on the device: tells the host what was done where."""
        self._reported.copy_(self.residency.told, non_blocking=True)

    def after_step(self, *, graph: bool = False, brought: bool = False) -> None:
        """Raises ExecutorError when the CPU's part of the step failed or did not come: its results are void. A
        ``graph`` has brought nothing ahead; a step at once after one begins with ``prefill.settle``. ``brought``: it
        was within ``bringing``."""
        if not graph:
            self.prefill.settle()
        self._watchdog.check()
        if not self.prefill.learn() or graph:  # a graph after part of a prompt, which is over by now
            times, work, routed = self._learnt_from
            times[:], work[:], routed[:] = self._told
            self._brought = brought
            if brought and work[:, CPU].any():
                raise ExecutorError("a step that was to bring all experts that it missed left some to the CPU")

    def learn(self) -> None:
        """From the last step of few rows: how to split those after the one that runs, and which experts to keep."""
        times, work, routed = self._learnt_from
        if self._brought:
            self._bringing.brought(work)
        else:
            self._bringing.asked(times, work)
            if self._split.update(times, work):
                self._share()
        if self._chooser.step(routed):
            self.residency.follow(self._chooser.policy)

    def resize(self, limit: int) -> None:
        """Use only the first ``limit`` slots, as ``Residency.resize``: in the order of the stream."""
        self._limit = limit
        self.residency.resize(limit)
        self.prefill.resize(limit)
        self._chooser = Chooser(self.pool.layers, self.pool.experts, limit, self._chooser.policy)

    def add(self, base: Tensor, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        """base + ``run``, maybe in its memory."""
        if x.shape[0] <= self._most or not self.prefill.possible:
            return base + self.run(x.float(), ids, weights, layer)
        return self.prefill.run(x, ids, weights, layer, base)

    def sums(self, x: Tensor, routing: Routing, layer: int) -> Sums | None:
        """All of ``route`` and ``run`` but the sum; None for rows that are not decided on at once."""
        if x.shape[0] > self._most:
            return None
        ids, weights = route(routing.logits, routing.k, routing.renormalize)
        inner, decision = self._gate_up(x, ids, weights, layer)
        answer = None if self._brings else partial(self._answer, decision.counts)
        layout = self.pool.layout
        if mxfp4.finishes(layout):
            arrived = self._mailbox + self.executor.layout.arrived
            return Sums(inner, weights, decision, answer=answer, arrived=arrived, blobs=(self._slots, layout))
        return Sums(self._down(inner, decision), weights, decision, answer=answer)

    def _run(self, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        y = torch.empty_like(x)
        inner, decision = self._gate_up(x, ids, weights, layer)
        kernels.combine(self._down(inner, decision), weights, decision, y)
        if not self._brings:
            self._answer(decision.counts, y)
        return y

    def _gate_up(self, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> tuple[Tensor, Decision]:
        decision, layout = self._decisions[x.shape[0] - 1], self.pool.layout
        inner = x.new_empty(*decision.slot.shape, layout.inner)
        if self._brings:
            resolve(self._all, ids, layer, decision)
        else:
            resolve(self.residency, ids, layer, decision, Request(x, weights, self._mailbox, self.executor.layout))
        pool = self._pinned.pointer if self._pinned else self._mailbox  # not mapped: not read from
        kernels.fetch(pool, self.pool.stride, self._slots, decision, self.residency.part_bytes)
        kernels.gate_up(x, self._slots, decision, layout, inner)
        return inner, decision

    def _down(self, inner: Tensor, decision: Decision) -> Tensor:
        layout = self.pool.layout
        out = inner.new_empty(*decision.slot.shape, layout.hidden)
        kernels.down(inner, self._slots, decision, layout, out)
        if not self._brings:
            kernels.arrive(self._mailbox, self.executor.layout)
        return out

    def _answer(self, counts: Tensor, y: Tensor) -> None:
        """Wait for the CPU's part, and add it. In line: a graph's kernels that join a branch are not launched early,
        which costs as much as the wait does where there is nothing to wait for."""
        stream, box = self._stream(), self.executor.layout
        self._driver.wait64(stream, self._mailbox + box.done, 1)
        add_answer(y, counts, self._mailbox, box)

    def _measured(self) -> tuple[float, float]:
        """ns of a part on the CPU and over the link, each alone. Nothing is resident yet."""
        cpu, row = cpu_costs(self.executor)
        copied, times = [number % len(self.pool) for number in range(_COPIED)], []
        for _ in range(_COPIES):
            self._settle()
            start = time.perf_counter_ns()
            for expert in copied:
                self._slots[0].copy_(self.pool.slots[expert], non_blocking=True)
            self._settle()
            times.append(time.perf_counter_ns() - start)
        parts = self.pool.layout.parts
        return (cpu + row) / parts, max(1.0, min(times) / (_COPIED * parts))

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _share(self) -> None:
        """In the order of the stream. Should the last copy be still to come, it brings these: all are as right."""
        now = self._split.now
        if np.array_equal(now, self._shares.numpy()):
            return
        self._shares.copy_(torch.from_numpy(now))
        self.residency.share.copy_(self._shares, non_blocking=True)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0


def whole_pages(nbytes: int) -> int:
    """What is registered of a mapping that has so many bytes; mappings end on a page."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
