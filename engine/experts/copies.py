"""Whole layers over the link before they are routed, by the device's copy engine: faster than a kernel, and without
taking anything from the products beside it. Where it copies from and to, the host has to say. So it chooses the slots,
by the map as the device left it one layer ago: it waits for that, while the device has the work between two layers'
experts to do. ``engine.experts.waves.place`` tells the device what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.device.driver import Driver
from engine.experts.pool import Pool
from engine.experts.residency import Residency
from engine.experts.waves import Waves
from engine.kernels import waves as kernels

_LISTS = 4
"""Of slots, for the device to read. One layer makes three at most, and those of the layers before it were read."""

Ints = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]
Came = dict[int, torch.Event | None]
"""When a layer's experts are there."""


class Copies:
    """Brings what layers miss into the ring. ``begin`` and ``end`` come around each layer of a call that does so; then
    a layer misses nothing once it is computed, if the ring has room for one."""

    def __init__(self, pool: Pool, driver: Driver, residency: Residency, waves: Waves, slots: Tensor) -> None:
        self._pool, self._driver, self._residency, self._waves = pool, driver, residency, waves
        self._slots, cuda = slots, slots.device.type == "cuda"
        self._side = Side(slots.device)
        self._map = torch.empty(len(pool), dtype=torch.int32, pin_memory=cuda)
        self._lists = torch.empty(_LISTS, pool.experts, dtype=torch.int32, pin_memory=cuda)
        self._come = torch.empty(pool.experts, dtype=torch.int32, device=slots.device)
        self._pieces: Sequence[int] = ()
        self._found = np.empty(0, np.int32)  # the map, with what was chosen since
        self._turn = 0
        self._read: torch.Event | None = None
        self._settled = self._side.mark()

    def start(self, pieces: Sequence[int]) -> None:
        """Where pieces of the pool begin that were pinned one by one: no copy may cross that."""
        self._pieces = pieces

    def settle(self) -> None:
        """After a step, or when slots were given or taken: the map is that of all before this."""
        self._settled, self._read = self._side.mark(), None

    def begin(self, layer: int, ring: int) -> Came:
        """Before a layer's experts: those that are missing, and of the next one what has room beside them. Waits for
        the layer before it, and in the first one of a call for the step before it."""
        if self._read is None or layer == 0:
            after = self._settled if layer == 0 else self._side.mark()
            self._read = self._side.run(lambda _: self._tell(), after=after)
        read, self._read = self._read, None
        if read is not None:
            read.synchronize()
        self._found = self._map.numpy().copy()
        came = self._bring(layer, ring, kept=(), after=read)
        return came | self._bring(layer + 1, ring, kept=(layer,), after=read)

    def end(self, layer: int, ring: int) -> Came:
        """After a layer is computed: the others of the next one, in place of its experts."""
        came = self._bring(layer + 1, ring, kept=(), after=self._side.mark())
        self._tell()
        self._read = self._side.mark()
        return came

    def _tell(self) -> None:
        self._map.copy_(self._residency.slot_of, non_blocking=True)

    def _bring(self, layer: int, ring: int, *, kept: Sequence[int], after: torch.Event | None) -> Came:
        if layer == self._pool.layers:
            return {}
        experts, slots = choose(self._found, self._pool.experts, layer, ring, kept)
        if not len(experts):
            return {}
        self._turn += 1
        come = self._lists[self._turn % _LISTS]
        numbers: Ints = come.numpy()
        numbers.fill(-1)
        numbers[experts] = slots
        self._come.copy_(come, non_blocking=True)
        kernels.place(self._residency, self._waves, self._come, layer)
        return {layer: self._side.run(lambda stream: self._copy(layer, experts, slots, stream), after=after)}

    def _copy(self, layer: int, experts: Places, slots: Places, stream: int) -> None:
        pool, stride, room = self._pool, self._pool.stride, self._slots.data_ptr()
        start, end = pool.address(layer * pool.experts), pool.address((layer + 1) * pool.experts)
        cut = next((piece for piece in self._pieces if start < piece < end), end)
        for expert, slot, count in runs(experts, slots):
            first, last, target = start + expert * stride, start + (expert + count) * stride, room + slot * stride
            middle = min(max(first, cut), last)
            for source, stop in ((first, middle), (middle, last)):
                if source < stop:
                    self._driver.copy(stream, target + source - first, source, stop - source)


def choose(found: Ints, experts: int, layer: int, ring: int, kept: Sequence[int]) -> tuple[Places, Places]:
    """Experts of a layer that are missing, and slots of the ring for them, as many as hold nothing of the layer and of
    the layers that are ``kept``. ``found`` int32 [layers * experts]: slots as in ``Residency.slot_of``; changed to what
    it is then."""
    mine = found[layer * experts : (layer + 1) * experts]
    free = np.ones(ring, bool)
    for at in (mine, *(found[one * experts : (one + 1) * experts] for one in kept)):
        free[at[(at >= 0) & (at < ring)]] = False
    missing, slots = np.flatnonzero(mine < 0), np.flatnonzero(free)
    count = min(len(missing), len(slots))
    missing, slots = missing[:count], slots[:count]
    found[np.isin(found, slots)] = -1
    mine[missing] = slots
    return missing, slots


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
