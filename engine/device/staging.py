"""Pages and states between a device and host memory, beside what is computed.

Three lanes of work. What leaves is gathered on the device, in order with what is computed, so that pages and slots may
be used again at once; the gathered bytes are then copied to host memory in a lane of their own, by a copy engine. What
comes is read from host memory by a kernel in a third lane, which writes many pages in one launch; a layer's forward is
held, on the device, until its part is there. The host waits for none of it unless it is asked for what is not there
yet. Rings of fixed size bound both ways; where one is full, things wait.

The lane of what comes has priority over others, and what a restore brings is submitted before the forward that fetches
experts: it begins first. It does not have the link for itself after that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, cast

import numpy as np
from torch import Tensor

from engine.api import PAGE
from engine.device.room import Block, Event, Region, Ring, Room, Rows, Shape, starts
from engine.memory.mover import ALL, Landing
from engine.memory.store import Buffers, Staged
from engine.models.model import Cache

_PIECE = 1 << 16
_KNOWN = 1024
"""Components at most whose pieces are remembered."""

Lane = Literal["main", "out", "in"]


class Lanes(Protocol):
    """Orders of work on a device. ``main`` is what is computed."""

    def move(self, lane: Lane, rows: Rows, flags: int, *, copy: bool = True) -> None: ...

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        """From the device to host memory, in the lane ``out``."""

    def record(self, lane: Lane) -> Event: ...

    def wait(self, lane: Lane, event: Event) -> None:
        """What is submitted to a lane from now on comes after the event."""


class HostStaged(Staged):
    """In a block of a room."""

    def __init__(self, room: Room, block: Block, lengths: Rows) -> None:
        super().__init__(room.views(block.offset, lengths))
        self.block = block
        self.address = room.device + block.offset
        """As the device sees it."""
        self.event: Event | None = None
        self._room = room

    def ready(self) -> bool:
        return self.event is not None and self.event.query()

    def wait(self) -> bool:
        if self.event is not None:
            self.event.synchronize()
        return not self._room.flags[self.block.flag]

    def drop(self) -> None:
        self._room.give(self.block, self.event)


@dataclass(frozen=True)
class Place:
    """Implements ``engine.memory.mover.Landing``. ``rows``: what brings it to the device. ``state``: or a page."""

    data: Buffers
    rest: slice | None
    rows: tuple[Rows, Rows, Rows]
    """Where components are, where they go, bytes of each."""
    state: bool
    region: Region | None = None

    def drop(self) -> None:
        if self.region is not None:
            self.region.release()


class Arrival:
    """Implements ``engine.memory.mover.Arrival``."""

    def __init__(self, lanes: Lanes, room: Room, event: Event, flag: int | None) -> None:
        self._lanes, self._room, self._event, self._flag = lanes, room, event, flag
        self._finite = True

    def join(self) -> None:
        self._lanes.wait("main", self._event)

    def done(self) -> bool:
        return self._event.query()

    def finite(self) -> bool:
        self._event.synchronize()
        if self._flag is not None:
            self._finite, self._flag = self._room.read_flag(self._flag), None
        return self._finite


class Staging:
    """Implements ``engine.memory.mover.Mover`` for a device. ``ring`` uint8: memory of the device in which is gathered
    what leaves; at least the largest component."""

    def __init__(self, cache: Cache, lanes: Lanes, room: Room, ring: Tensor) -> None:
        self._lanes, self._room, self._gathered = lanes, room, ring
        self._pages, self._states = shapes(cache)
        self._ring = Ring(ring.numel())
        largest = max(int(one.sizes.max(initial=0)) for one in (self._pages, self._states))
        if min(ring.numel(), room.ring.capacity) < largest:
            raise ValueError(f"rings of {ring.numel()} and {room.ring.capacity} bytes for components of {largest}")
        self._flags = room.device
        self._looked: dict[int, tuple[Event, int]] = {}
        """States that are being looked at, with the word that tells."""
        self._rows: list[Rows] = []
        """Of what is to be gathered next, and what to copy out then."""
        self._copies: list[tuple[Region, HostStaged, int]] = []

    # ── within the device ───────────────────────────────────────────────────────────────────────────────────────

    def copy_page(self, source: int, target: int) -> None:
        pages = self._pages
        moves = rows(pages.places(source, ALL), pages.places(target, ALL), pages.sizes)
        self._lanes.move("main", moves, self._flags)

    def copy_state(self, source: int, target: int, parts: slice = ALL) -> None:
        self._forget(target)
        states = self._states
        moves = rows(states.places(source, parts), states.places(target, parts), states.sizes[parts])
        self._lanes.move("main", moves, self._flags)

    def captured(self, slots: Sequence[int]) -> None:
        """Their numbers are looked at beside what the host does next."""
        for slot in slots:
            self._forget(slot)
            if (flag := self._room.flag()) is not None:
                self._look(self._states, slot, 1, flag)
                self._looked[slot] = self._lanes.record("main"), flag

    def page_finite(self, page: int, tokens: int) -> bool:
        return self._finite(self._pages, page, tokens)

    def state_finite(self, slot: int) -> bool:
        if slot not in self._looked:
            return self._finite(self._states, slot, 1)
        event, flag = self._looked.pop(slot)
        event.synchronize()
        return self._room.read_flag(flag)

    def _finite(self, shape: Shape, number: int, tokens: int) -> bool:
        flag = self._word()
        self._look(shape, number, tokens, flag)
        self._lanes.record("main").synchronize()
        return self._room.read_flag(flag)

    def _look(self, shape: Shape, number: int, tokens: int, flag: int) -> None:
        places = shape.places(number, ALL)
        looks = rows(places, places, shape.lengths(tokens), 2 * flag + shape.half)
        self._lanes.move("main", looks, self._flags, copy=False)

    def _word(self) -> int:
        while (flag := self._room.flag()) is None:
            self._forget(next(iter(self._looked)))
        return flag

    def _forget(self, slot: int) -> None:
        if slot in self._looked:
            self.state_finite(slot)

    # ── out of it ───────────────────────────────────────────────────────────────────────────────────────────────

    def stage_pages(self, pages: Sequence[tuple[int, int]], *, wait: bool = False) -> list[Staged]:
        return self._stage(self._pages, pages, wait)

    def stage_state(self, slot: int, *, wait: bool = False) -> Staged | None:
        return next(iter(self._stage(self._states, [(slot, 1)], wait)), None)

    def _stage(self, shape: Shape, items: Sequence[tuple[int, int]], wait: bool) -> list[Staged]:
        staged: list[Staged] = []
        for number, tokens in items:
            one = self._stage_one(shape, number, tokens, wait)
            if one is None:
                break
            staged.append(one)
        self._launch()
        return staged

    def _stage_one(self, shape: Shape, number: int, tokens: int, wait: bool) -> HostStaged | None:
        """What is larger than the ring takes turns there, and then what is computed has to wait."""
        lengths = shape.lengths(tokens)
        chunks = [(parts, int(lengths[parts].sum())) for parts in _chunks(lengths, self._ring.capacity)]
        wait = wait or len(chunks) > 1
        if not wait and chunks[0][1] > self._ring.most:
            return None
        block = self._room.take(shape is self._states, wait=wait)
        if block is None:
            return None
        staged = HostStaged(self._room, block, lengths)
        gathered, offset = self._gathered.data_ptr(), 0
        for parts, size in chunks:
            region = self._region(size)
            packed = gathered + region.start + starts(lengths[parts])
            flag = 2 * block.flag + shape.half
            self._rows.append(rows(shape.places(number, parts), packed, lengths[parts], flag))
            self._copies.append((region, staged, offset))
            offset += size
        return staged

    def _region(self, size: int) -> Region:
        """What is computed from now on waits, on the device, until there is room."""
        while (region := self._ring.take(size)) is None:
            self._launch()
            oldest = self._ring.oldest()
            if oldest.event is not None:
                self._lanes.wait("main", oldest.event)
        return region

    def _launch(self) -> None:
        """Gather, then copy out."""
        if not self._copies:
            return
        self._lanes.move("main", np.concatenate(self._rows), self._flags)
        self._lanes.wait("out", self._lanes.record("main"))
        for region, staged, offset in self._copies:
            at = staged.block.offset + offset
            source = self._gathered[region.start : region.start + region.size]
            self._lanes.copy_out(self._room.memory[at : at + region.size], source)
        event = self._lanes.record("out")
        for region, staged, _ in self._copies:
            region.release(event)
            staged.event = event
        self._rows, self._copies = [], []

    # ── into it ─────────────────────────────────────────────────────────────────────────────────────────────────

    def page_in(self, page: int, tokens: int, parts: slice, source: Staged | None = None) -> Place | None:
        return self._in(self._pages, page, tokens, parts, source)

    def state_in(self, slot: int, parts: slice, source: Staged | None = None) -> Place | None:
        self._forget(slot)
        return self._in(self._states, slot, 1, parts, source)

    def _in(self, shape: Shape, number: int, tokens: int, parts: slice, source: Staged | None) -> Place | None:
        state, lengths = shape is self._states, shape.lengths(tokens)[parts]
        places = shape.places(number, parts)
        if isinstance(source, HostStaged):
            return Place((), None, (source.address + starts(shape.lengths(tokens))[parts], places, lengths), state)
        count = next(_chunks(lengths, self._room.ring.capacity)).stop
        region = self._room.ring.take(int(lengths[:count].sum()))
        if region is None:
            return None
        first, stop, _ = parts.indices(len(shape.sizes))
        rest = slice(first + count, stop) if count < len(lengths) else None
        at, places, lengths = self._room.region(region), places[:count], lengths[:count]
        data, sources = self._room.views(at, lengths), self._room.device + at + starts(lengths)
        return Place(data, rest, (sources, places, lengths), state, region)

    def pages_in(self, pages: Sequence[int], parts: slice, sources: Sequence[Staged]) -> Place:
        shape, sizes = self._pages, self._pages.sizes[parts]
        blocks = np.array([one.address for one in sources if isinstance(one, HostStaged)], np.int64)[:, None]
        targets = shape.bases[parts] + np.array(pages, np.int64)[:, None] * sizes
        lengths = np.broadcast_to(sizes, targets.shape)
        return Place(
            (), None, ((blocks + starts(shape.sizes)[parts]).ravel(), targets.ravel(), lengths.ravel()), state=False
        )

    def mark(self) -> Event:
        return self._lanes.record("main")

    def land(self, landings: Sequence[Landing], after: object) -> Arrival:
        """All in one launch."""
        landed = [one for one in landings if isinstance(one, Place)]
        flag = self._word() if any(one.state for one in landed) else None
        moves: list[Rows] = []
        for one in landed:
            moves.append(rows(*one.rows, -1 if flag is None or not one.state else 2 * flag))
        self._lanes.wait("in", cast(Event, after))
        self._lanes.move("in", np.concatenate(moves), self._flags)
        event = self._lanes.record("in")
        for one in landed:
            if one.region is not None:
                one.region.release(event)
        return Arrival(self._lanes, self._room, event, flag)


def shapes(cache: Cache) -> tuple[Shape, Shape]:
    """Of pages and of states."""
    layers = zip(cache.keys, cache.values, strict=True)
    return Shape.of([tensor for layer in layers for tensor in layer], PAGE), Shape.of(cache.states)


def rows(sources: Rows, targets: Rows, lengths: Rows, flag: int = -1) -> Rows:
    """What moves each of ``lengths`` bytes, cut into pieces that programs can share."""
    of, done, sizes = _cut(lengths) if len(lengths) > _KNOWN else _known(lengths.tobytes())
    pieces = np.empty((len(of), 4), np.int64)
    np.add(sources[of], done, out=pieces[:, 0])
    np.add(targets[of], done, out=pieces[:, 1])
    pieces[:, 2], pieces[:, 3] = sizes, flag
    return pieces


def _cut(lengths: Rows) -> tuple[Rows, Rows, Rows]:
    """Of each piece: which of ``lengths`` it is of, how many bytes come before it there, its own bytes."""
    counts = -(-lengths // _PIECE)
    of = np.repeat(np.arange(len(lengths)), counts)
    done = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * _PIECE
    return of, done, np.minimum(lengths[of] - done, _PIECE)


@lru_cache(maxsize=256)
def _known(lengths: bytes) -> tuple[Rows, Rows, Rows]:
    """Those of a page or a state are asked for between two steps, over and over."""
    return _cut(np.frombuffer(lengths, np.int64))


def _chunks(lengths: Rows, most: int) -> Iterator[slice]:
    """Runs of components of ``most`` bytes together, or half as many where not all fit."""
    if lengths.sum() <= most:
        yield slice(0, len(lengths))
        return
    first = size = 0
    for at, length in enumerate(lengths.tolist()):
        if at > first and size + length > most // 2:
            yield slice(first, at)
            first, size = at, 0
        size += length
    yield slice(first, len(lengths))
