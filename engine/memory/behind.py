"""Write-behind: hands to the store what was computed, when it is worth it. Nothing of side requests ever goes there."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from engine.api import PAGE
from engine.memory.index import Node
from engine.memory.keys import PAGE_BYTES
from engine.memory.states import Checkpoint, Want
from engine.memory.store import Buffers, StateStore

SETTLE_SECONDS = 5.0
"""A checkpoint that is not certain to be wanted again is handed over when it has survived as long."""
RETRY_SECONDS = 60.0
"""When one that the store did not take is offered again."""


class Source(Protocol):
    """Where the bytes are."""

    def page_bytes(self, page: int, tokens: int) -> Buffers:
        """The first ``tokens`` tokens of a page."""

    def state_bytes(self, slot: int) -> Buffers: ...

    def page_finite(self, page: int, tokens: int) -> bool:
        """Whether all numbers in them are finite."""


class WriteBehind:
    """``store`` None: everything here does nothing. ``now`` is the time of the last ``tick``. ``not_finite`` counts
    pages that were not handed over because some of their numbers are not finite."""

    def __init__(self, source: Source, store: StateStore | None = None) -> None:
        self.store = store
        self.now = 0.0
        self.not_finite = 0
        self._source = source
        self._due: dict[Checkpoint, float] = {}

    @property
    def busy(self) -> bool:
        """Whether ``tick`` has something to hand over now."""
        return any(due <= self.now for due in self._due.values())

    def tick(self, now: float) -> None:
        """Hand over one checkpoint that is due: one is a step's share."""
        self.now = now
        if self.store is None:
            return
        for checkpoint, due in self._due.items():
            if due <= now:
                self.state(checkpoint)
                break

    def add(self, checkpoint: Checkpoint) -> None:
        """A new checkpoint, to be handed over when it has settled."""
        if self.store is not None and not checkpoint.side:
            self._due[checkpoint] = self.now + SETTLE_SECONDS

    def drop(self, checkpoint: Checkpoint) -> None:
        """A checkpoint that is about to leave the device: what must be kept is handed over first."""
        if checkpoint in self._due and checkpoint.must_keep:
            self.state(checkpoint)
        self._due.pop(checkpoint, None)

    def cancel(self, checkpoints: Iterable[Checkpoint]) -> None:
        """These are not to be handed over any more."""
        for checkpoint in checkpoints:
            self._due.pop(checkpoint, None)

    def page(self, node: Node) -> None:
        """Hand over a page that the store does not have."""
        store, parent = self.store, node.parent
        if store is None or node.side or parent is None or parent.key is None:
            return
        known = self._has(parent.key, node)
        if not known:
            count = len(node.tokens) // 4
            if not self._source.page_finite(node.page, count):
                self.not_finite += 1
                return
            data = self._source.page_bytes(node.page, count)
            store.put_page(parent.key, node.key, node.tokens, data, position=node.start + count, session=node.session)
            known = self._has(parent.key, node)
        node.saved = known

    def _has(self, parent: bytes, node: Node) -> bool:
        if self.store is None:
            return False
        if node.key is not None:
            return self.store.page(parent, node.key, node.tokens) is not None
        return any(one.tokens.startswith(node.tokens) for one in self.store.partial(parent, node.tokens))

    def state(self, checkpoint: Checkpoint) -> None:
        """Hand over a checkpoint, and the page it lies in."""
        if self.store is None or checkpoint.side:
            return
        self.page(checkpoint.node)
        parent, tail = place(checkpoint.node, checkpoint.position)
        if self.live(parent, tail, checkpoint.slot, checkpoint.position, checkpoint.want, checkpoint.session):
            self._due.pop(checkpoint, None)
        else:
            self._due[checkpoint] = self.now + RETRY_SECONDS

    def must_keep(self, node: Node) -> None:
        """Hand over what is certain to be wanted again on this page, without waiting."""
        for checkpoint in node.checkpoints.values():
            if checkpoint.must_keep and checkpoint in self._due:
                self.state(checkpoint)

    def live(self, parent: bytes, tail: bytes, slot: int, position: int, want: Want, session: str) -> bool:
        """Hand over a state that is in ``slot``; False if the store did not take it."""
        if self.store is None:
            return False
        self.store.put_state(
            parent, tail, self._source.state_bytes(slot),
            position=position, kind=want.kind, priority=want.priority, pinned=want.pinned or want.tip, session=session,
        )  # fmt: skip
        return any(one.tail == tail for one in self.store.states(parent, tail))

    def end(self, node: Node, position: int, session: str) -> None:
        """A session ends in this page for now."""
        if self.store is not None:
            parent, tail = place(node, position)
            self.store.put_end(parent, tail, position=position, session=session)

    def renew(self, checkpoint: Checkpoint) -> None:
        """Tell the store what a checkpoint that it has is now wanted for."""
        if self.store is not None and not checkpoint.side and checkpoint not in self._due:
            self.state(checkpoint)

    def demote(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is no longer pinned."""
        if self.store is not None and not checkpoint.side and checkpoint not in self._due:
            self.store.demote(*place(checkpoint.node, checkpoint.position))

    def finish(self, timeout: float) -> None:
        """Hand over all that is left, what must be kept first, and have it written; where the store has no room, wait
        for it. What is not done in about ``timeout`` seconds is given up."""
        if self.store is None:
            return
        until = time.monotonic() + timeout
        for checkpoint in sorted(self._due, key=lambda one: (not one.must_keep, -one.want.priority)):
            self.state(checkpoint)
            if checkpoint in self._due and time.monotonic() < until:
                self.store.flush(until - time.monotonic())
                self.state(checkpoint)
        self._due.clear()
        self.store.flush(max(0.0, until - time.monotonic()))


def place(node: Node, position: int) -> tuple[bytes, bytes]:
    """(key of the last whole page before a position in a page, the tokens between)."""
    if position % PAGE == 0 and node.key is not None:
        return node.key, b""
    parent = node.parent
    if parent is None or parent.key is None:
        raise RuntimeError("a page that is on no chain")
    return parent.key, node.tokens[: 4 * position % PAGE_BYTES]
