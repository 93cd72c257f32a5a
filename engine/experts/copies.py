"""Whole layers over the link before they are routed, by the device's copy engine: faster than a kernel, and without
taking anything from the products beside it. Where it copies from and to, the host has to say, and knows: in such a call
experts leave the ring only when their layer is computed, and beyond the ring those of a layer change places with each
other alone (``engine.experts.waves.keep``). So all that a call brings follows from the map at its beginning, and the
host waits for nothing that the call does. ``engine.experts.waves.place`` tells the device what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.device.driver import Driver
from engine.experts.pool import Pool
from engine.experts.residency import Residency
from engine.experts.waves import Waves, share_of
from engine.kernels import waves as kernels

Ints = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]
Came = dict[int, torch.Event | None]
"""When a layer's experts are there."""


@dataclass(frozen=True)
class Batch:
    """Experts of a layer, and the slots that they come to."""

    layer: int
    experts: Places
    slots: Places


class Copies:
    """Brings what layers miss, of calls that bring whole layers: ``before`` each of their layers. The ring has room for
    a layer, so that it misses nothing once it is computed."""

    def __init__(self, pool: Pool, driver: Driver, residency: Residency, waves: Waves, slots: Tensor) -> None:
        self._pool, self._driver, self._residency, self._waves = pool, driver, residency, waves
        self._slots, cuda = slots, slots.device.type == "cuda"
        self._side = Side(slots.device)
        self._map = torch.full((len(pool),), -1, dtype=torch.int32, pin_memory=cuda)
        # Batches of a call: of each layer one that is the last one, and before each layer one that is not.
        self._lists = torch.empty(2 * pool.layers, pool.experts, dtype=torch.int32, pin_memory=cuda)
        self._come = torch.empty_like(self._lists, device=slots.device, pin_memory=False)
        self._pieces: Sequence[int] = ()
        self._plan: Iterator[list[Batch]] = iter(())
        self._turn = 0
        self._settled = self._side.mark()
        self._events = [torch.Event(slots.device, enable_timing=True) for _ in range(2 * cuda)]
        self._timed = 0

    def start(self, pieces: Sequence[int]) -> None:
        """Where pieces of the pool begin that were pinned one by one: no copy may cross that."""
        self._pieces = pieces

    def settle(self) -> None:
        """After a step, or when slots were given or taken: the map is that of all before this."""
        self._settled = self._side.mark()

    def begin(self) -> Ints:
        """Before a call. -> where experts are, as ``Residency.slot_of``: the host waits for what was before the call,
        not for what it has computed so far."""
        read = self._side.run(lambda _: self._read(), after=self._settled)
        self._side.join(read)
        if read is not None:
            read.synchronize()
        found: Ints = self._map.numpy()
        return found

    def before(self, layer: int, ring: int, limit: int) -> Came:
        """What is copied from now on, in place of what is computed: before layer 0, and after each layer before the
        next one."""
        after = self._side.mark()
        if layer == 0:
            after = self._settled
            self._plan, self._turn = plan(self._map.numpy().copy(), self._pool.experts, ring, limit), 0
        return {batch.layer: self._bring(batch, after) for batch in next(self._plan, [])}

    def timed(self) -> tuple[float, int]:
        """ns of a call's largest batch alone, after the call, and how many experts that was."""
        count, self._timed = self._timed, 0
        if not count:
            return 0.0, 0
        begin, end = self._events
        return 1e6 * begin.elapsed_time(end), count

    def _read(self) -> None:
        self._residency.drop_partial()
        self._map.copy_(self._residency.slot_of, non_blocking=True)

    def _bring(self, batch: Batch, after: torch.Event | None) -> torch.Event | None:
        told, come = self._lists[self._turn], self._come[self._turn]
        self._turn += 1
        numbers: Ints = told.numpy()
        numbers.fill(-1)
        numbers[batch.experts] = batch.slots
        come.copy_(told, non_blocking=True)
        kernels.place(self._residency, self._waves, come, batch.layer)
        return self._side.run(lambda stream: self._time(batch, stream), after=after)

    def _time(self, batch: Batch, stream: int) -> None:
        timed = len(batch.slots) > self._timed and len(self._events) > 0
        if timed:
            self._timed = len(batch.slots)
            self._events[0].record()
        self._copy(batch, stream)
        if timed:
            self._events[1].record()

    def _copy(self, batch: Batch, stream: int) -> None:
        pool, stride, room = self._pool, self._pool.stride, self._slots.data_ptr()
        start, end = pool.address(batch.layer * pool.experts), pool.address((batch.layer + 1) * pool.experts)
        cut = next((piece for piece in self._pieces if start < piece < end), end)
        for expert, slot, count in runs(batch.experts, batch.slots):
            first, last, target = start + expert * stride, start + (expert + count) * stride, room + slot * stride
            middle = min(max(first, cut), last)
            for source, stop in ((first, middle), (middle, last)):
                if source < stop:
                    self._driver.copy(stream, target + source - first, source, stop - source)


def plan(found: Ints, experts: int, ring: int, limit: int) -> Iterator[list[Batch]]:
    """For each layer, before it is computed: what is brought then. ``found`` int32 [layers * experts]: slots as in
    ``Residency.slot_of``, of which ``limit`` are used, the first ``ring`` of them, not fewer than ``experts``, as the
    ring; it is changed.

    Layers come in order, each as soon as slots of the ring are free: of layers that are computed, then of those that
    are farthest ahead. Free slots beyond the ring are used as well, by each layer up to the same share of them all."""
    layers = len(found) // experts
    held = np.flatnonzero((found >= 0) & (found < limit))
    holds = np.full(limit, -1)
    holds[found[held]] = held
    beyond, share, coming = np.flatnonzero(holds[ring:] < 0) + ring, share_of(layers, experts, ring, limit), 0
    for layer in range(layers):
        batches = []
        while coming < layers:
            mine = found[coming * experts : (coming + 1) * experts]
            missing = np.flatnonzero(mine < 0)
            if not len(missing):
                coming += 1
                continue
            few = max(0, share - np.count_nonzero(mine >= ring))
            whose = holds[:ring] // experts
            whose[whose < layer] = layers
            order = np.argsort(-whose, kind="stable")
            free = np.concatenate((beyond[:few], order[whose[order] > coming]))[: len(missing)]
            beyond = beyond[min(few, len(free)) :]
            free.sort()
            lost = holds[free]
            found[lost[lost >= 0]] = -1
            mine[missing[: len(free)]] = free
            holds[free] = coming * experts + missing[: len(free)]
            if len(free):
                batches.append(Batch(coming, missing[: len(free)], free))
            if len(free) < len(missing):
                break
            coming += 1
        yield batches


def runs(experts: Places, slots: Places) -> Iterator[tuple[int, int, int]]:
    """First expert, first slot and length of what are neighbours in both."""
    cuts = np.flatnonzero((np.diff(experts) != 1) | (np.diff(slots) != 1)) + 1
    firsts, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(experts)]
    for first, end in zip(firsts, ends, strict=True):
        yield int(experts[first]), int(slots[first]), end - first


class Side:
    """A stream beside the current one, whose work goes first; without a GPU everything happens at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[int], object], *, after: torch.Event | None) -> torch.Event | None:
        """``work``, given the stream's handle. -> when it is done."""
        if self._stream is None:
            work(0)
            return None
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            work(self._stream.cuda_stream)
        event: torch.Event = self._stream.record_event()
        return event

    def mark(self) -> torch.Event | None:
        """All that the current stream has so far."""
        if self._stream is None:
            return None
        event: torch.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def join(self, event: torch.Event | None) -> None:
        """What the current stream gets from now on is done after it."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def current(self) -> int:
        return 0 if self._stream is None else torch.cuda.current_stream(self._device).cuda_stream


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
