"""Write-behind: hands to the store what was computed, when it is worth it. Nothing of side requests ever goes there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypedDict

from engine.api import PAGE
from engine.memory.host import HostTier
from engine.memory.index import Node
from engine.memory.keys import PAGE_BYTES
from engine.memory.mover import Mover
from engine.memory.states import Checkpoint, Want
from engine.memory.store import Staged, StateStore

SETTLE_SECONDS = 5.0
"""A checkpoint that is not certain to be wanted again is handed over when it has survived as long."""
RETRY_SECONDS = 60.0
"""When one that the store did not take is offered again."""
LATE = 64
"""So many pages that found no room are tried again in a step."""


class _Wanted(TypedDict):
    kind: str
    priority: float
    pinned: bool


class WriteBehind:
    """``store`` None: everything here does nothing. ``now`` is the time of the last ``tick``. ``not_finite`` counts
    pages that were not handed over because some of their numbers are not finite.

    A store that begins with a host tier gets what leaves the device, whatever it is worth; there is room for only so
    much on the way, and what finds none is handed over in a later ``tick``."""

    def __init__(self, mover: Mover, store: StateStore | None = None) -> None:
        self.store = store
        self.now = 0.0
        self._not_finite = 0
        self._mover = mover
        self._host = store if isinstance(store, HostTier) else None
        self._due: dict[Checkpoint, float] = {}
        self._late: dict[Node, None] = {}

    @property
    def not_finite(self) -> int:
        return self._not_finite + (self._host.not_finite if self._host is not None else 0)

    @property
    def busy(self) -> bool:
        """Whether ``tick`` has something to hand over now."""
        flying = self._host is not None and self._host.busy
        return flying or bool(self._late) or any(due <= self.now for due in self._due.values())

    def tick(self, now: float) -> None:
        """Hand over one checkpoint that is due, and the pages that found no room: that is a step's share."""
        self.now = now
        if self.store is None:
            return
        if self._host is not None:
            self._host.tick(now)
        late = list(islice(self._late, LATE))
        for node in late:
            del self._late[node]
        self.pages([node for node in late if node.parent is not None and node in node.parent.children])
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
        self._leave(checkpoint)
        self._due.pop(checkpoint, None)

    def cancel(self, checkpoints: Iterable[Checkpoint]) -> None:
        """These are not to be handed over any more."""
        for checkpoint in checkpoints:
            self._due.pop(checkpoint, None)

    def pages(self, nodes: Sequence[Node], *, wait: bool = False) -> None:
        """Hand over those that the store does not have. ``wait``: for room; else what finds none is late."""
        fresh = [node for node in nodes if self._lacks(node, leaves=wait)]
        if not fresh:
            return
        staged = self._mover.stage_pages([(node.page, len(node.tokens) // 4) for node in fresh], wait=wait)
        for node, data in zip(fresh, staged, strict=False):
            self._page(node, data)
        self._late.update(dict.fromkeys(fresh[len(staged) :]))

    def forget(self, session: str | None, checkpoints: Iterable[Checkpoint]) -> None:
        """These are of a session that is to be forgotten, or of all; what it left in host memory is dropped."""
        self.cancel(checkpoints)
        if self._host is not None:
            self._host.drop(session)

    def leave(self, node: Node) -> None:
        """A page is about to leave the device, with the checkpoints on it."""
        self._late.pop(node, None)
        self.pages([node], wait=True)
        for checkpoint in list(node.checkpoints.values()):
            self._leave(checkpoint)
        if self._host is not None and node.parent is not None and node.parent.key is not None:
            self._host.left(node.parent.key, node.tokens, state=False)

    def _leave(self, checkpoint: Checkpoint) -> None:
        """A host tier takes what the disk already has, too: it comes back faster from there."""
        if self._host is None:
            if checkpoint in self._due and checkpoint.must_keep:
                self.state(checkpoint, wait=True)
            return
        parent, tail = place(checkpoint.node, checkpoint.position)
        if not (checkpoint.superseded or self._host.has_state(parent, tail)):
            self.state(checkpoint, wait=True)
        self._host.left(parent, tail, state=True)

    def _lacks(self, node: Node, *, leaves: bool) -> bool:
        """Whether a page is for the store, and not there; or not in the host tier, if it ``leaves`` the device."""
        parent = node.parent
        if self.store is None or node.side or parent is None or parent.key is None:
            return False
        node.saved = self._has(parent.key, node)
        if leaves and self._host is not None:
            return not self._host.has_page(parent.key, node.tokens)
        return not node.saved

    def _page(self, node: Node, data: Staged) -> None:
        parent = node.parent
        if self.store is None or parent is None or parent.key is None:
            return
        if data.ready() and not data.wait():
            self._not_finite += 1
            data.drop()
            return
        position = node.start + len(node.tokens) // 4
        self.store.put_page(parent.key, node.key, node.tokens, data, position=position, session=node.session)
        node.saved = self._has(parent.key, node)

    def _has(self, parent: bytes, node: Node) -> bool:
        if self.store is None:
            return False
        if node.key is not None:
            return self.store.page(parent, node.key, node.tokens) is not None
        return any(one.tokens.startswith(node.tokens) for one in self.store.partial(parent, node.tokens))

    def state(self, checkpoint: Checkpoint, *, wait: bool = False) -> None:
        """Hand over a checkpoint, and the page it lies in."""
        if self.store is None or checkpoint.side:
            return
        self.pages([checkpoint.node], wait=wait)
        parent, tail = place(checkpoint.node, checkpoint.position)
        if self._renewed(parent, tail, checkpoint.want, checkpoint.session):
            self._due.pop(checkpoint, None)
            return
        data = self._mover.stage_state(checkpoint.slot, wait=wait)
        if data is None:
            self._due[checkpoint] = self.now
        elif self._state(parent, tail, data, checkpoint.position, checkpoint.want, checkpoint.session):
            self._due.pop(checkpoint, None)
        else:
            self._due[checkpoint] = self.now + RETRY_SECONDS

    def must_keep(self, node: Node) -> None:
        """Hand over what is certain to be wanted again on this page, without waiting."""
        for checkpoint in node.checkpoints.values():
            if checkpoint.must_keep and checkpoint in self._due:
                self.state(checkpoint)

    def live(self, parent: bytes, tail: bytes, slot: int, position: int, want: Want, session: str) -> bool:
        """Hand over a state that is in ``slot`` and soon will not be; False if the store did not take it."""
        if self.store is None:
            return False
        kept = self._renewed(parent, tail, want, session)
        if not kept and (data := self._mover.stage_state(slot, wait=True)) is not None:
            kept = self._state(parent, tail, data, position, want, session)
        if self._host is not None:
            self._host.left(parent, tail, state=True)
        return kept

    def _renewed(self, parent: bytes, tail: bytes, want: Want, session: str) -> bool:
        """Whether host memory has it, which need not be brought there again."""
        return self._host is not None and self._host.renew(parent, tail, **_wanted(want), session=session)

    def _state(self, parent: bytes, tail: bytes, data: Staged, position: int, want: Want, session: str) -> bool:
        if self.store is None:
            return False
        self.store.put_state(parent, tail, data, position=position, **_wanted(want), session=session)
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
            self.state(checkpoint, wait=True)
            if checkpoint in self._due and time.monotonic() < until:
                self.store.flush(until - time.monotonic())
                self.state(checkpoint, wait=True)
        self._due.clear()
        self.pages(list(self._late), wait=True)
        self.store.flush(max(0.0, until - time.monotonic()))


def _wanted(want: Want) -> _Wanted:
    return {"kind": want.kind, "priority": want.priority, "pinned": want.pinned or want.tip}


def place(node: Node, position: int) -> tuple[bytes, bytes]:
    """(key of the last whole page before a position in a page, the tokens between)."""
    if position % PAGE == 0 and node.key is not None:
        return node.key, b""
    parent = node.parent
    if parent is None or parent.key is None:
        raise RuntimeError("a page that is on no chain")
    return parent.key, node.tokens[: 4 * position % PAGE_BYTES]
