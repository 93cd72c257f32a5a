"""Reads on their way into one sequence's pages and state slot, in the order in which a forward needs them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from engine.api import PAGE
from engine.memory.behind import Source
from engine.memory.resume import Plan
from engine.memory.store import PageRef, Part, Reading, StateRef, StateStore

ALL = slice(None)
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


class Mover(Source, Protocol):
    """``parts``: components of a state."""

    def copy_page(self, source: int, target: int) -> None: ...
    def copy_state(self, source: int, target: int, parts: slice = ALL) -> None: ...

    def state_finite(self, slot: int, parts: slice = ALL) -> bool:
        """Whether all numbers of a state are finite."""


class Restore:
    """What a plan wants of the store, held there from the start until it was read. All or nothing: the sequence may go
    on at ``position`` when everything is there and right. What is not right lowers ``limit``, the position up to which
    the next plan may reach. ``finite``: the state has shown no number that is not. ``keep``: a slot for a copy of the
    state as it was read, which the sequence itself then changes. ``layered``: in parts; ``seconds`` it took."""

    def __init__(self, store: StateStore, plan: Plan, groups: Sequence[Group] = WHOLE) -> None:
        self.position = plan.position
        self.limit = plan.position
        self.state = plan.state_read
        self.finite = True
        self.keep: int | None = None
        self._store = store
        self._groups = groups
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
        self._pending: deque[tuple[int, int, Reading]] = deque()
        store.hold(self._refs)

    @property
    def right(self) -> bool:
        """Whether nothing has been found wrong so far."""
        return self.limit == self.position and self.finite

    def begin(self, mover: Mover, slot: int, table: Sequence[int]) -> None:
        """Ask for everything, group by group, in each the state first. Without one page, a plan can reach as far as
        what lies before it."""
        self._mover, self._slot, self._begun = mover, slot, time.perf_counter()
        state = mover.state_bytes(slot) if self.state is not None else ()
        pages = [
            (PAGE * at, ref, mover.page_bytes(table[at], len(ref.tokens) // 4))
            for at, ref in enumerate(self._pages, self._first)
        ]
        parts: list[Part] = []
        of: list[tuple[int, int]] = []
        for number, group in enumerate(self._groups):
            if self.state is not None and state[group.states]:
                parts.append((self.state, state[group.states], group.states.start or 0))
                of.append((number, self.position - 1))
            for limit, ref, data in pages if pages and pages[0][2][group.pages] else ():
                parts.append((ref, data[group.pages], group.pages.start or 0))
                of.append((number, limit))
        readings = self._store.read_parts(parts)
        self._pending.extend((*one, reading) for one, reading in zip(of, readings, strict=True))

    def poll(self) -> bool:
        """Whether nothing is on its way any more."""
        while self._pending and self._pending[0][2].done():
            self._take()
        return not self._pending

    def wait(self) -> None:
        """Until the next read has ended."""
        if self._pending:
            self._take()

    def wait_layer(self, layer: int) -> None:
        """Until everything that layers up to this one need is there, and right. Raises RestoreFailed."""
        while self._arrived < len(self._groups) and self._groups[self._arrived].layer <= layer:
            self._wait_group()

    def finish(self) -> bool:
        """Whether everything was right, after waiting for what is still on its way."""
        try:
            while self._arrived < len(self._groups):
                self._wait_group()
        except RestoreFailed:
            return False
        return True

    def _wait_group(self) -> None:
        """The next one. Its part of the state is looked at and copied before anything goes on from it."""
        while self._pending and self._pending[0][0] == self._arrived:
            self._take()
        states = self._groups[self._arrived].states
        if self.right and self.state is not None:
            self.finite = self._mover.state_finite(self._slot, states)
        if not self.right:
            raise RestoreFailed
        if self.state is not None and self.keep is not None:
            self._mover.copy_state(self._slot, self.keep, states)
        self._arrived += 1

    def _take(self) -> None:
        _, limit, reading = self._pending.popleft()
        if not reading.wait():
            self.limit = min(self.limit, limit)
        if not self._pending:
            self.seconds = time.perf_counter() - self._begun
            self._store.release(self._refs)
