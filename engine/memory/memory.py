"""All cached state behind one face: plans, leases of running sequences, checkpoints, eviction.

Free of torch: what must move is moved by a ``Mover``, which owns the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.api import PAGE
from engine.memory import resume
from engine.memory.history import History
from engine.memory.index import Node, PageIndex
from engine.memory.keys import encode, root_key
from engine.memory.pages import PagePool
from engine.memory.resume import Plan
from engine.memory.states import ZERO_SLOT, Checkpoint, Checkpoints, Want

HISTORY = 1 << 16
"""Pages and checkpoints remembered beyond their eviction; 64 Ki pages are 4 Mi tokens and about 40 MB."""


class Mover(Protocol):
    def copy_page(self, source: int, target: int) -> None: ...
    def copy_state(self, source: int, target: int) -> None: ...


@dataclass(eq=False, slots=True)
class Lease:
    """What a running sequence has: ``table`` of physical pages, ``nodes`` of the leading full ones that are cached
    (``sealed`` False: no more can be), and the live state ``slot``. ``last_resort``: a side request that cannot run at
    all unless it evicts what others left."""

    root: bytes
    session: str
    side: bool
    slot: int
    table: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    sealed: bool = True
    last_resort: bool = False


class Memory:
    """``pages``, ``live`` sequences and ``checkpoints`` bound everything. ``reserve`` pages stay free of cached state
    that is not a side request's, so that side requests need not evict."""

    def __init__(
        self, mover: Mover, fingerprint: str, *, pages: int, live: int, checkpoints: int, recurrent: bool
    ) -> None:
        self.recurrent = recurrent
        self.reserve = pages // 8
        self.pool = PagePool(pages)
        self.index = PageIndex(self.pool, recurrent, lambda one: self.checkpoints.remove(one))
        self.checkpoints = Checkpoints(live, checkpoints if recurrent else 0, self.index.detach)
        self.history = History(HISTORY)
        self.free_live = list(range(live, ZERO_SLOT, -1))
        self._evicted_for_side = 0
        self._mover = mover
        self._fingerprint = fingerprint

    def plan(self, tokens: bytes, namespace: str) -> Plan:
        """Where a sequence of these encoded tokens can start; at least the last one is left to feed."""
        root = root_key(self._fingerprint, namespace)
        return resume.plan(self.index, self.history, root, tokens, recurrent=self.recurrent)

    def fits(self, plan: Plan, tokens: int, *, side: bool) -> bool:
        """Whether a sequence of ``tokens`` can be held now, besides those that run."""
        if not self.free_live:
            return False
        needed = -(-tokens // PAGE) - len(plan.pages)
        nodes = [*plan.pages, plan.partial] if plan.partial else plan.pages
        if side:
            borrowed = sum(1 for node in nodes if node.side and not self.pool.held(node.page))
            return self.pool.free >= needed or self.pool.free + self.index.side_pages() - borrowed >= needed
        return self.pool.total - self.pool.held_pages - sum(not self.pool.held(node.page) for node in nodes) >= needed

    def open(self, plan: Plan, session: str, *, side: bool, last_resort: bool = False) -> Lease:
        """Take what a plan needs, restored and ready to go on at ``plan.position``; ``fits`` said yes, with ``side``
        False for a last resort."""
        self.index.clock += 1
        if not side:
            self.checkpoints.touch(session)
        lease = Lease(plan.root, session, side, self.free_live.pop(), last_resort=last_resort)
        for node in plan.pages:
            self.pool.hold(node.page)
            self.index.touch(node, side)
            lease.table.append(node.page)
            lease.nodes.append(node)
        if self.recurrent:
            self._mover.copy_state(plan.checkpoint.slot if plan.checkpoint else ZERO_SLOT, lease.slot)
        if plan.checkpoint is not None:
            self.checkpoints.use(plan.checkpoint, self.index.clock)
        if plan.partial is not None:
            self.index.touch(plan.partial, side)
            self.pool.hold(plan.partial.page)
            if not self.grow(lease, plan.position):
                raise RuntimeError("a lease was opened that does not fit")
            self._mover.copy_page(plan.partial.page, lease.table[-1])
            self.pool.release(plan.partial.page)
        return lease

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Have pages for ``tokens`` tokens, evicting what is cached as far as this request may."""
        while len(lease.table) * PAGE < tokens:
            if lease.side:
                if self.pool.free == 0 and not (self.index.evict(side=True) or self._evict_for_side(lease)):
                    return False
            else:
                while self.pool.free <= self.reserve and self.index.evict(side=False):
                    pass
                if self.pool.free == 0:
                    return False
            lease.table.append(self.pool.take())
        return True

    def _evict_for_side(self, lease: Lease) -> bool:
        """What is pinned, or where a turn ended, goes last, and the oldest first."""
        evicted = lease.last_resort and self.index.evict(side=False)
        self._evicted_for_side += evicted
        return evicted

    def advance(self, lease: Lease, tokens: Sequence[int], fed: int) -> None:
        """Cache the pages that the first ``fed`` tokens have filled. Where one is cached already, its twin is used:
        their bits are equal."""
        while lease.sealed and PAGE * (len(lease.nodes) + 1) <= fed:
            at = len(lease.nodes)
            parent = self._parent(lease, at)
            page = encode(tokens[PAGE * at : PAGE * (at + 1)])
            node = self.index.put(parent, page, lease.table[at], lease.side)
            if node is None:
                lease.sealed = False
                return
            self._remember_page(parent, page)
            if node.page != lease.table[at]:
                self.pool.hold(node.page)
                self.pool.release(lease.table[at])
                lease.table[at] = node.page
            lease.nodes.append(node)

    def reserve_slot(self, lease: Lease, want: Want) -> int | None:
        """A slot to copy the recurrent state into; to be passed to ``capture`` or ``give_back``."""
        return self.checkpoints.take(want, self.index.clock, side=lease.side) if self.recurrent else None

    def give_back(self, slot: int) -> None:
        self.checkpoints.give_back(slot)

    def capture(self, lease: Lease, tokens: Sequence[int], position: int, slot: int, want: Want) -> bool:
        """Make the state after ``position`` tokens, copied to ``slot``, a checkpoint."""
        node = self._node_at(lease, tokens, position)
        if node is None:
            self.give_back(slot)
            return False
        checkpoint = self._checkpoint_at(lease, tokens, position)
        if checkpoint is None:
            checkpoint = Checkpoint(position, slot, want, lease.session, lease.side, self.index.clock, node)
            self.index.attach(checkpoint)
            self.checkpoints.add(checkpoint)
        else:
            self.give_back(slot)
            self._renew(checkpoint, lease, want)

        def behind(old: Checkpoint) -> bool:
            return old.position < position and self._checkpoint_at(lease, tokens, old.position) is old

        if checkpoint.want.tip and not checkpoint.side:
            old = self.checkpoints.tip(checkpoint, behind)
            if old is not None:
                self.index.fell(old.node)
        return True

    def unpin(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Release this session's pins on the way of a prompt; its request then says which still hold."""
        for at in range(0 if lease.side else len(lease.nodes) + 1):
            page = encode(tokens[PAGE * at : PAGE * (at + 1)])
            for one in self.index.checkpoints(self._parent(lease, at), page):
                if one.want.pinned and one.session == lease.session:
                    self.checkpoints.release(one, replace(one.want, pinned=False))
                    self.index.fell(one.node)

    def renew(self, lease: Lease, tokens: Sequence[int], position: int, want: Want) -> None:
        """A checkpoint on the way of this sequence is wanted once more, if there is one."""
        checkpoint = self._checkpoint_at(lease, tokens, position)
        if checkpoint is not None:
            self._renew(checkpoint, lease, want)

    def close(self, lease: Lease, tokens: Sequence[int], fed: int, tip: Want | None) -> bool:
        """End a lease and keep what it computed, the state after ``fed`` tokens included; True if that is kept.
        ``tip`` None: that state is of no use."""
        kept = False
        if tip is None:
            pass
        elif fed > 0 and self.recurrent:
            slot = self.reserve_slot(lease, tip)
            if slot is not None:
                self._mover.copy_state(lease.slot, slot)
                kept = self.capture(lease, tokens, fed, slot, tip)
        elif fed > 0:
            kept = self._node_at(lease, tokens, fed) is not None
        at = len(lease.nodes)
        if lease.sealed and fed > PAGE * at:
            self._remember_page(self._parent(lease, at), encode(tokens[PAGE * at : fed]))
        for page in lease.table:
            self.pool.release(page)
        lease.table.clear()
        lease.nodes.clear()
        self.free_live.append(lease.slot)
        if lease.side:
            while self.pool.free < self.reserve and self.index.evict(side=True):
                pass
        return kept

    def gauges(self) -> dict[str, float]:
        return {
            "pages_total": self.pool.total,
            "pages_free": self.pool.free,
            "pages_held": self.pool.held_pages,
            "pages_cached": self.index.pages,
            "pages_evicted": self.index.evicted,
            "pages_evicted_for_side": self._evicted_for_side,
            "checkpoints_total": self.checkpoints.total,
            "checkpoints_kept": len(self.checkpoints.all),
            "checkpoints_evicted": self.checkpoints.evicted,
        }

    def _parent(self, lease: Lease, at: int) -> Node:
        return lease.nodes[at - 1] if at else self.index.root(lease.root)

    def _checkpoint_at(self, lease: Lease, tokens: Sequence[int], position: int) -> Checkpoint | None:
        """The checkpoint after ``position`` of these tokens, whichever branch left it."""
        at = (position - 1) // PAGE
        if not 0 <= at <= len(lease.nodes):
            return None
        return self._parent(lease, at).tails.get(encode(tokens[PAGE * at : position]))

    def _node_at(self, lease: Lease, tokens: Sequence[int], position: int) -> Node | None:
        """The cached page that holds token ``position - 1``; the open page is cached as far as ``position``."""
        at = (position - 1) // PAGE
        if at < len(lease.nodes):
            node = lease.nodes[at]
        elif lease.sealed and at == len(lease.nodes):
            parent = self._parent(lease, at)
            found = self.index.put(parent, encode(tokens[PAGE * at : position]), lease.table[at], lease.side)
            if found is None:
                return None
            node = found
        else:
            return None
        if self.recurrent:
            self._remember_checkpoint(lease, tokens, position)
        return node

    def _remember_page(self, parent: Node, tokens: bytes) -> None:
        if parent.key is not None:
            self.history.add_page(parent.key, tokens)

    def _remember_checkpoint(self, lease: Lease, tokens: Sequence[int], position: int) -> None:
        at = position // PAGE
        parent = self._parent(lease, at)
        if parent.key is not None:
            self.history.add_checkpoint(parent.key, encode(tokens[PAGE * at : position]))

    def _renew(self, checkpoint: Checkpoint, lease: Lease, want: Want) -> None:
        if not lease.side:
            self.checkpoints.renew(checkpoint, lease.session, want, self.index.clock)
