"""Reads on their way into one sequence's pages and state slot, in the order in which a forward needs them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter

from engine.api import PAGE
from engine.memory.host import Held
from engine.memory.mover import ALL, Arrival, Landing, Mover
from engine.memory.resume import Plan
from engine.memory.store import PageRef, Reading, Staged, StateRef, StateStore

AFTER = 1 << 30
"""The layer after all others: everything is on its way, and what came has to be right."""
LAYER_GROUPS = 4
"""A restore that a forward waits for is read in as many parts."""


class RestoreFailed(Exception):
    """Something of a restore was not right: the forward that waited for it is of no use."""


@dataclass(frozen=True)
class Group:
    """Components of pages and of states that layers from ``layer`` on need, up to the next group's."""

    layer: int
    pages: slice
    states: slice


WHOLE = (Group(0, ALL, ALL),)


def layer_groups(pages: Sequence[int], states: Sequence[int], most: int = LAYER_GROUPS) -> tuple[Group, ...]:
    """``pages`` and ``states``: of which layer each component is, in order. At most ``most`` groups of about as many
    layers; every component is in exactly one."""
    layers = max((*pages, *states), default=-1) + 1
    bounds = [layers * number // most for number in range(most + 1)]
    groups: list[Group] = []
    for low, high in pairwise(bounds):
        each = [slice(bisect_left(of, low), bisect_left(of, high)) for of in (pages, states)]
        if any(one.start < one.stop for one in each):
            groups.append(Group(low, *each))
    return tuple(groups)


Stage = Callable[[slice], Landing | None]
_Numbered = tuple[int, PageRef]
"""A page, and how many are before it."""


@dataclass(slots=True)
class _Piece:
    """What one group needs of a page or of the state, to be read yet. Without it, a plan can reach to ``limit``."""

    group: int
    limit: int
    ref: PageRef | StateRef
    parts: slice
    stage: Stage


@dataclass(frozen=True, slots=True)
class _Pending:
    """``reading`` None: it was in host memory already."""

    group: int
    limit: int
    reading: Reading | None
    landing: Landing


class Restore:
    """What a plan wants of the store, held there from the start until it is on the device. All or nothing: the sequence
    may go on at ``position`` when everything is there and right. What is not right lowers ``limit``, the position up to
    which the next plan may reach. ``finite``: the state has shown no number that is not. ``keep``: a slot for a copy of
    the state as it was read, which the sequence itself then changes. ``layered``: in parts; ``seconds`` it took.

    ``others``: restores that may have what this one needs room for."""

    def __init__(
        self,
        store: StateStore,
        plan: Plan,
        groups: Sequence[Group] = WHOLE,
        others: Callable[[], Sequence[Restore]] = tuple,
    ) -> None:
        self.position = plan.position
        self.limit = plan.position
        self.state = plan.state_read
        self.finite = True
        self.keep: int | None = None
        self._store = store
        self._groups = groups
        self._others = others
        self._arrived = 0
        self._first = len(plan.pages)
        self._pages = list(plan.stored)
        if plan.partial_read is not None:
            self._pages.append(plan.partial_read)
        self._refs: list[PageRef | StateRef] = [*self._pages]
        if self.state is not None:
            self._refs.append(self.state)
        self.size = sum(ref.size for ref in self._refs)
        self.disk_bytes = plan.disk_bytes
        self.seconds = 0.0
        self.layered = len(groups) > 1
        self._todo: deque[_Piece] = deque()
        self._pending: deque[_Pending] = deque()
        self._landed: list[tuple[int, Landing]] = []
        self._arriving: list[tuple[int, Arrival]] = []
        """By group."""
        self._held = True
        store.hold(self._refs)

    @property
    def right(self) -> bool:
        """Whether nothing has been found wrong so far."""
        return self.limit == self.position and self.finite

    def begin(self, mover: Mover, slot: int, table: Sequence[int]) -> None:
        """Ask for everything, as far as there is room for it, group by group, in each the state first. Without one
        page, a plan can reach as far as what lies before it."""
        self._mover, self._slot, self._begun, self._mark = mover, slot, time.perf_counter(), mover.mark()
        self._todo.extend(self._pieces(mover, slot, table, *self._sorted()))
        self._ask()
        while self._pending and self._pending[0].reading is None:
            self._take()
        self._land()

    def poll(self) -> bool:
        """Whether nothing is on its way any more."""
        while self._pending and self._is_read(self._pending[0]):
            self._take()
        self._ask()
        self._land()
        self._look(wait=False)
        if not (self._todo or self._pending or self._arriving):
            self._end()
        return not self._held

    def wait(self) -> None:
        """Until the next read has ended."""
        if self._pending:
            self._take()
            self._ask()
        elif self._arriving:
            self._look(wait=True)

    def stop(self) -> None:
        """Nobody needs what has not been asked for yet."""
        self._todo.clear()

    def wait_layer(self, layer: int) -> None:
        """Until everything that layers up to this one need is there, or will be before they are computed. Raises
        RestoreFailed if something is not right; after ``AFTER`` everything is."""
        while self._arrived < len(self._groups) and self._groups[self._arrived].layer <= layer:
            self._wait_group()
        if layer >= AFTER:
            self._look(wait=True)
            if not self.right:
                raise RestoreFailed

    def finish(self) -> bool:
        """Whether everything was right, after waiting for what is still on its way."""
        try:
            self.wait_layer(AFTER)
        except RestoreFailed:
            return False
        self.poll()
        return True

    def give_room(self) -> bool:
        """Another needs room: end the oldest thing that is on its way. False if nothing is."""
        if self._pending:
            self._take()
        elif not self._landed and not self._arriving:
            return False
        self._land()
        self._look(wait=True)
        return True

    def _sorted(self) -> tuple[list[_Numbered], list[_Numbered]]:
        """Whole pages that are in host memory, and all others. What turned out to be no numbers there is lost."""
        here: list[_Numbered] = []
        others: list[_Numbered] = []
        for at, ref in enumerate(self._pages, self._first):
            if isinstance(ref, Held) and not ref.wait():
                self.limit = min(self.limit, PAGE * at)
            else:
                (here if isinstance(ref, Held) and ref.key is not None else others).append((at, ref))
        return here, others

    def _pieces(
        self, mover: Mover, slot: int, table: Sequence[int], here: list[_Numbered], others: list[_Numbered]
    ) -> Iterator[_Piece]:
        """What is in host memory comes at once, all pages together."""
        state = self.state
        if isinstance(state, Held) and not state.wait():
            self.limit = min(self.limit, self.position - 1)
            state = None
        pages, sources = [table[at] for at, _ in here], [ref.data for _, ref in here if isinstance(ref, Held)]
        for number, group in enumerate(self._groups):
            if state is not None and not _empty(group.states):
                stage: Stage = partial(mover.state_in, slot, source=_data(state))
                yield _Piece(number, self.position - 1, state, group.states, stage)
            if here and not _empty(group.pages):
                stage = partial(mover.pages_in, pages, sources=sources)
                yield _Piece(number, self.position, here[0][1], group.pages, stage)
            for at, ref in () if _empty(group.pages) else others:
                stage = partial(mover.page_in, table[at], len(ref.tokens) // 4, source=_data(ref))
                yield _Piece(number, PAGE * at, ref, group.pages, stage)

    def _ask(self) -> None:
        """Begin to read as much as there is room for."""
        read: list[tuple[_Piece, Landing, int]] = []
        pending: list[tuple[_Piece, Landing]] = []
        while self._todo:
            piece = self._todo[0]
            first = piece.parts.start or 0
            landing = piece.stage(piece.parts)
            if landing is None:
                break
            if landing.rest is None:
                self._todo.popleft()
            else:
                piece.parts = landing.rest
            pending.append((piece, landing))
            if landing.data:
                read.append((piece, landing, first))
        if not pending:
            return
        readings = iter(self._store.read_parts([(piece.ref, landing.data, first) for piece, landing, first in read]))
        for piece, landing in pending:
            reading = next(readings) if landing.data else None
            self._pending.append(_Pending(piece.group, piece.limit, reading, landing))

    def _is_read(self, one: _Pending) -> bool:
        return one.reading is None or one.reading.done()

    def _take(self) -> None:
        one = self._pending.popleft()
        if one.reading is None or one.reading.wait():
            self._landed.append((one.group, one.landing))
        else:
            self.limit = min(self.limit, one.limit)
            one.landing.drop()
        if not (self._pending or self._todo):
            self.seconds = time.perf_counter() - self._begun

    def _land(self) -> None:
        """What was read goes to the device, each group's by itself: its layers wait for no more than that."""
        for group, landed in groupby(self._landed, itemgetter(0)):
            self._arriving.append((group, self._mover.land([one for _, one in landed], self._mark)))
        self._landed = []

    def _look(self, *, wait: bool) -> None:
        """At what has arrived."""
        on_the_way: list[tuple[int, Arrival]] = []
        for group, arrival in self._arriving:
            if wait or arrival.done():
                self.finite = arrival.finite() and self.finite
            else:
                on_the_way.append((group, arrival))
        self._arriving = on_the_way

    def _wait_group(self) -> None:
        """The next one. Its part of the state is copied before anything goes on from it."""
        while self._waits_for(self._pending) or self._waits_for(self._todo):
            self._go_on()
        self._land()
        for group, arrival in self._arriving:
            if group <= self._arrived:
                arrival.join()
        self._look(wait=False)
        if not self.right:
            raise RestoreFailed
        if self.state is not None and self.keep is not None:
            self._mover.copy_state(self._slot, self.keep, self._groups[self._arrived].states)
        self._arrived += 1

    def _waits_for(self, line: Sequence[_Piece | _Pending]) -> bool:
        return bool(line) and line[0].group == self._arrived

    def _go_on(self) -> None:
        """Wait for something that brings this forward."""
        self._ask()
        if self._pending:
            self._take()
        elif not self.give_room() and not any([one.give_room() for one in self._others() if one is not self]):
            raise RuntimeError("there is no room to read into, though nothing is being read")

    def _end(self) -> None:
        if self._held:
            self._held = False
            self._store.release(self._refs)


def _data(ref: PageRef | StateRef) -> Staged | None:
    return ref.data if isinstance(ref, Held) else None


def _empty(parts: slice) -> bool:
    return parts.start is not None and bool(parts.start >= parts.stop)
