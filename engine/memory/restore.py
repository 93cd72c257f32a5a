"""Reads on their way into one sequence's pages and state slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.api import PAGE
from engine.memory.behind import Source
from engine.memory.index import Node
from engine.memory.resume import Plan
from engine.memory.states import Checkpoint
from engine.memory.store import PageRef, Reading, StateRef, StateStore


class Restore:
    """What a plan wants of the store, held there from the start until it was read. All or nothing: the sequence may go
    on at ``position`` when everything is there and right. What is not right lowers ``limit``, the position up to which
    the next plan may reach."""

    def __init__(self, store: StateStore, plan: Plan) -> None:
        self.position = plan.position
        self.limit = plan.position
        self.state = None if isinstance(plan.checkpoint, Checkpoint) else plan.checkpoint
        self._store = store
        self._first = len(plan.pages)
        self._pages = list(plan.stored)
        if plan.partial is not None and not isinstance(plan.partial, Node):
            self._pages.append(plan.partial)
        self._refs: list[PageRef | StateRef] = [*self._pages]
        if self.state is not None:
            self._refs.append(self.state)
        self.size = sum(ref.size for ref in self._refs)
        self._pending: deque[tuple[int, Reading]] = deque()
        store.hold(self._refs)

    @property
    def complete(self) -> bool:
        return self.limit == self.position

    def begin(self, target: Source, slot: int, table: Sequence[int]) -> None:
        """Ask for everything, the state first, then page by page. Without one of them, a plan can reach as far as what
        lies before it."""
        if self.state is not None:
            self._pending.append((self.position - 1, self._store.read(self.state, target.state_bytes(slot))))
        for at, ref in enumerate(self._pages, self._first):
            into = target.page_bytes(table[at], len(ref.tokens) // 4)
            self._pending.append((PAGE * at, self._store.read(ref, into)))

    def poll(self) -> bool:
        """Whether nothing is on its way any more."""
        while self._pending and self._pending[0][1].done():
            self._take()
        return not self._pending

    def wait(self) -> None:
        """Until the next read has ended."""
        if self._pending:
            self._take()

    def _take(self) -> None:
        limit, reading = self._pending.popleft()
        if not reading.wait():
            self.limit = min(self.limit, limit)
        if not self._pending:
            self._store.release(self._refs)
