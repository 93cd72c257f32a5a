"""All cached state behind one face: plans, leases of running sequences, checkpoints, eviction, restores.

Free of torch: what must move is moved by a ``Mover``, which owns the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from engine.api import PAGE
from engine.memory import resume
from engine.memory.behind import WriteBehind, place
from engine.memory.history import History
from engine.memory.index import Node, PageIndex
from engine.memory.keys import encode, root_key
from engine.memory.mover import Mover
from engine.memory.pages import PagePool
from engine.memory.restore import WHOLE, Group, Restore
from engine.memory.resume import Plan
from engine.memory.states import ZERO_SLOT, Checkpoint, Checkpoints, Want
from engine.memory.store import StateRef, StateStore

HISTORY = 1 << 16
"""Pages and checkpoints remembered beyond their eviction; 64 Ki pages are 4 Mi tokens and about 40 MB."""


_COUNTERS = (
    "pages_evicted_for_side", "background_hit_tokens", "background_wasted_tokens", "restored_bytes",
    "states_not_finite",
)  # fmt: skip


@dataclass(eq=False, slots=True)
class Lease:
    """What a running sequence has: ``table`` of physical pages, ``nodes`` of the leading full ones that are cached
    (``sealed`` False: no more can be), and the live state ``slot``. ``last_resort``: a side request that cannot run at
    all unless it evicts what others left. ``restore``: what is still being read into it."""

    root: bytes
    session: str
    side: bool
    background: bool
    slot: int
    restore: Restore | None = None
    table: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    sealed: bool = True
    last_resort: bool = False

    @property
    def layered(self) -> bool:
        """Whether it is read in parts, for a forward to go along."""
        return self.restore is not None and self.restore.layered

    @property
    def right(self) -> bool:
        """Whether nothing that was read into it has been found wrong so far."""
        return self.restore is None or self.restore.right


class Memory:
    """``pages``, ``live`` sequences and ``checkpoints`` bound everything. ``reserve`` pages stay free of cached state
    that is not a side request's, so that side requests need not evict. ``groups``: in which parts a restore is read
    that a forward waits for layer by layer."""

    def __init__(
        self,
        mover: Mover,
        fingerprint: str,
        *,
        pages: int,
        live: int,
        checkpoints: int,
        recurrent: bool,
        store: StateStore | None = None,
        groups: Sequence[Group] = WHOLE,
    ) -> None:
        self.recurrent = recurrent
        self.reserve = pages // 8
        self.pool = PagePool(pages)
        self.index = PageIndex(self.pool, recurrent, self._evicting, self._drop)
        self.checkpoints = Checkpoints(live, checkpoints if recurrent else 0, self._detach)
        self.behind = WriteBehind(mover, store)
        self.history = History(HISTORY)
        self.free_live = list(range(live, ZERO_SLOT, -1))
        self.leases: set[Lease] = set()
        """All that are open."""
        self.enlarge: Callable[[int], bool] = lambda pages: False
        """Makes so many pages more at the cost of other things, if it can."""
        self.draining: list[Lease] = []
        """Leases given up while something was still being read into them."""
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self.mover = mover
        self._groups = groups
        self._fingerprint = fingerprint

    @property
    def busy(self) -> bool:
        """Whether ``tick`` has something to do."""
        return bool(self.draining) or self.behind.busy

    def tick(self, now: float) -> None:
        """Between steps: a share of the write-behind, and the end of reads that nobody waits for."""
        self.behind.tick(now)
        for lease in [one for one in self.draining if one.restore is None or one.restore.poll()]:
            self.draining.remove(lease)
            self._let_go(lease)

    def plan(self, tokens: bytes, namespace: str, limit: int | None = None) -> Plan:
        """Where a sequence of these encoded tokens can start, at ``limit`` at most; at least the last one is left to
        feed."""
        root, store = root_key(self._fingerprint, namespace), self.behind.store
        return resume.plan(self.index, store, self.history, root, tokens, recurrent=self.recurrent, limit=limit)

    def fits(self, plan: Plan, tokens: int, *, modest: bool) -> bool:
        """Whether a sequence of ``tokens`` can be held now, besides those that run, in more pages if need be.
        ``modest``: a side or background request, which evicts nothing but what side requests left."""
        if not self.free_live:
            return False
        needed = -(-tokens // PAGE) - len(plan.pages)
        nodes = [*plan.pages, plan.partial] if isinstance(plan.partial, Node) else plan.pages
        if modest:
            borrowed = sum(1 for node in nodes if node.side and not self.pool.held(node.page))
            return self.pool.free >= needed or self.pool.free + self.index.side_pages() - borrowed >= needed
        held = self.pool.held_pages + sum(not self.pool.held(node.page) for node in nodes)
        missing = held + needed - self.pool.total
        return missing <= 0 or self.enlarge(missing)

    def open(
        self,
        plan: Plan,
        session: str,
        *,
        side: bool,
        background: bool = False,
        last_resort: bool = False,
        layered: bool = False,
    ) -> Lease:
        """Take what a plan needs; ``fits`` said yes, with ``modest`` False for a last resort. Ready to go on at
        ``plan.position`` if nothing has to be read; else when ``restore`` says so and ``restored`` was called.
        ``layered``: a forward is likely to ``overlap`` with the reads."""
        self.index.clock += 1
        if not (side or background):
            self.checkpoints.touch(session)
        lease = Lease(plan.root, session, side, background, self.free_live.pop(), last_resort=last_resort)
        self.leases.add(lease)
        for node in plan.pages:
            self.pool.hold(node.page)
            self._use(node, lease)
            lease.table.append(node.page)
            lease.nodes.append(node)
        if isinstance(plan.checkpoint, Checkpoint):
            self.checkpoints.use(plan.checkpoint, self.index.clock)
            self.mover.copy_state(plan.checkpoint.slot, lease.slot)
        elif self.recurrent and plan.checkpoint is None:
            self.mover.copy_state(ZERO_SLOT, lease.slot)
        copied = plan.partial if isinstance(plan.partial, Node) else None
        if copied is not None:
            self.pool.hold(copied.page)
            self._use(copied, lease, copied=True)
        if self.behind.store is not None and plan.reads:
            lease.restore = Restore(self.behind.store, plan, self._groups if layered else WHOLE, self._restores)
        if not self.grow(lease, plan.position):
            raise RuntimeError("a lease was opened that does not fit")
        if copied is not None:
            self.mover.copy_page(copied.page, lease.table[-1])
            self.pool.release(copied.page)
        if lease.restore is not None:
            lease.restore.begin(self.mover, lease.slot, lease.table)
        return lease

    def overlap(self, lease: Lease) -> Callable[[int], None]:
        """For a forward that begins while something is still being read: what each layer is to call first. It raises
        RestoreFailed where something is not right. ``restored`` comes after the forward, and is told of either."""
        restore = _restore(lease)
        self._reserve_keep(lease, restore)
        return restore.wait_layer

    def restored(self, lease: Lease, tokens: Sequence[int]) -> int | None:
        """Take in what was read, as if it had been computed. None if all of it was right; else the lease is over, and
        the next plan may reach as far as what is returned."""
        restore = _restore(lease)
        self.advance(lease, tokens, restore.limit)
        if restore.limit < restore.position:
            self.history.add_chain(lease.root, encode(tokens[: restore.position]))
            self._let_go(lease)
            return restore.limit
        self._reserve_keep(lease, restore)
        if not restore.finish():
            self._counts["states_not_finite"] += 1
            self._let_go(lease)
            return restore.position - 1
        lease.restore = None
        self._counts["restored_bytes"] += restore.size
        if restore.state is not None and restore.keep is not None:
            want = self._wanted_still(lease, restore.state)
            self.capture(lease, tokens, restore.position, restore.keep, want, restore.state)
        return None

    def _reserve_keep(self, lease: Lease, restore: Restore) -> None:
        """Others may go on from a checkpoint that was read, too."""
        if restore.state is not None and restore.keep is None:
            restore.keep = self.reserve_slot(lease, self._wanted_still(lease, restore.state))

    def _wanted_still(self, lease: Lease, state: StateRef) -> Want:
        if lease.background or lease.side:
            return Want(state.kind, state.priority)
        mine = state.session == lease.session
        tip = mine and state.kind == "tip"
        return Want(state.kind, state.priority, pinned=mine and state.pinned and not tip, tip=tip)

    def abandon(self, lease: Lease) -> None:
        """End a lease into which something is being read."""
        _restore(lease).stop()
        self.draining.append(lease)

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Have pages for ``tokens`` tokens, evicting what is cached as far as this request may."""
        while len(lease.table) * PAGE < tokens:
            if lease.side or lease.background:
                if self.pool.free == 0 and not (self.index.evict(side=True) or self._evict_for_side(lease)):
                    return False
            else:
                while self.pool.free <= self.reserve and self._evict():
                    pass
                if self.pool.free == 0 and not self.enlarge(1):
                    return False
            lease.table.append(self.pool.take())
        return True

    def _evict(self) -> bool:
        """Rather have more pages than evict what is pinned."""
        evicted = self.index.evict(side=False, pinned=False)
        return evicted or self.enlarge(1) or self.index.evict(side=False)

    def _evict_for_side(self, lease: Lease) -> bool:
        """What is pinned, or where a turn ended, goes last, and the oldest first."""
        evicted = lease.last_resort and self.index.evict(side=False)
        self._counts["pages_evicted_for_side"] += evicted
        return evicted

    def advance(self, lease: Lease, tokens: Sequence[int], fed: int) -> None:
        """Cache the pages that the first ``fed`` tokens have filled. Where one is cached already, its twin is used:
        their bits are equal."""
        fresh: list[Node] = []
        while lease.sealed and PAGE * (len(lease.nodes) + 1) <= fed:
            at = len(lease.nodes)
            parent = self._parent(lease, at)
            page = encode(tokens[PAGE * at : PAGE * (at + 1)])
            node = self.index.put(parent, page, lease.table[at], lease.side, lease.session)
            if node is None:
                lease.sealed = False
                break
            self._remember_page(parent, page)
            if lease.background and lease.restore is None and node.page == lease.table[at]:
                node.background = True
            if not lease.side:
                fresh.append(node)
            if node.page != lease.table[at]:
                self.pool.hold(node.page)
                self.pool.release(lease.table[at])
                lease.table[at] = node.page
            lease.nodes.append(node)
        if fresh:
            self.behind.pages(fresh)

    def reserve_slot(self, lease: Lease, want: Want) -> int | None:
        """A slot to copy the recurrent state into; to be passed to ``capture`` or ``give_back``."""
        if not self.recurrent:
            return None
        return self.checkpoints.take(want, self.index.clock, side=lease.side, background=lease.background)

    def give_back(self, slot: int) -> None:
        self.checkpoints.give_back(slot)

    def capture(
        self, lease: Lease, tokens: Sequence[int], position: int, slot: int, want: Want, stored: StateRef | None = None
    ) -> bool:
        """Make the state after ``position`` tokens, copied to ``slot``, a checkpoint. ``stored``: the store has it.
        False, and the slot given back, if it is none to go on from."""
        node = self._node_at(lease, tokens, position) if stored is not None or self._finite(slot) else None
        if node is None:
            self.give_back(slot)
            return False
        checkpoint = self._checkpoint_at(lease, tokens, position)
        if checkpoint is None:
            session = lease.session if stored is None else stored.session
            checkpoint = Checkpoint(position, slot, want, session, lease.side, self.index.clock, node)
            self.index.attach(checkpoint)
            self.checkpoints.add(checkpoint)
            if stored is None:
                self.behind.add(checkpoint)
        else:
            self.give_back(slot)
            self._renew(checkpoint, lease, want)

        def behind(old: Checkpoint) -> bool:
            return old.position < position and self._checkpoint_at(lease, tokens, old.position) is old

        if checkpoint.want.tip and not checkpoint.side:
            old = self.checkpoints.tip(checkpoint, behind)
            if old is not None:
                self.index.fell(old.node)
                self.behind.demote(old)
        return True

    def unpin(self, lease: Lease, tokens: Sequence[int]) -> list[Checkpoint]:
        """Release this session's pins on the way of a prompt; its request then says which still hold, and the rest is
        to be ``demote``d."""
        released: list[Checkpoint] = []
        for at in range(0 if lease.side or lease.background else len(lease.nodes) + 1):
            page = encode(tokens[PAGE * at : PAGE * (at + 1)])
            for one in self.index.checkpoints(self._parent(lease, at), page):
                if one.want.pinned and one.session == lease.session:
                    self.checkpoints.release(one, replace(one.want, pinned=False))
                    self.index.fell(one.node)
                    released.append(one)
        return released

    def renew(self, lease: Lease, tokens: Sequence[int], position: int, want: Want) -> None:
        """A checkpoint on the way of this sequence is wanted once more, if there is one."""
        checkpoint = self._checkpoint_at(lease, tokens, position)
        if checkpoint is not None:
            self._renew(checkpoint, lease, want)

    def demote(self, released: Iterable[Checkpoint]) -> None:
        """Tell the store of those that are not pinned again."""
        for one in released:
            if not one.must_keep:
                self.behind.demote(one)

    def close(self, lease: Lease, tokens: Sequence[int], fed: int, tip: Want | None) -> bool:
        """End a lease and keep what it computed, the state after ``fed`` tokens included; True if that is kept.
        ``tip`` None: that state is of no use."""
        kept = False
        node = self._node_at(lease, tokens, fed) if fed > 0 and tip is not None else None
        if node is not None and not self.recurrent:
            kept = True
        elif node is not None and tip is not None:
            slot = self.reserve_slot(lease, tip)
            if slot is not None:
                self.mover.copy_state(lease.slot, slot)
                kept = self.capture(lease, tokens, fed, slot, tip)
            elif not lease.side and self._finite(lease.slot):
                self.behind.pages([node])
                parent, tail = place(node, fed)
                kept = self.behind.live(parent, tail, lease.slot, fed, tip, lease.session)
        at = len(lease.nodes)
        if lease.sealed and fed > PAGE * at:
            self._remember_page(self._parent(lease, at), encode(tokens[PAGE * at : fed]))
        if not lease.side and tip is not None:
            for one in lease.nodes if node is None else (*lease.nodes, node):
                if not one.saved:
                    self.behind.pages([one])
                self.behind.must_keep(one)
            if node is not None and not self.recurrent:
                self.behind.end(node, fed, lease.session)
        nodes = [*lease.nodes]
        self._let_go(lease)
        if tip is None:
            self._drop_broken(nodes)
        return kept

    def _restores(self) -> list[Restore]:
        return [lease.restore for lease in self.leases if lease.restore is not None]

    def _finite(self, slot: int) -> bool:
        """Whether a state may be kept; one that may not is counted."""
        finite = self.mover.state_finite(slot)
        self._counts["states_not_finite"] += not finite
        return finite

    def _drop_broken(self, nodes: Sequence[Node]) -> None:
        """Of the pages of a request that failed, drop those at the end whose numbers are not finite."""
        for node in reversed(nodes):
            if node.children or self.pool.held(node.page) or self.mover.page_finite(node.page, len(node.tokens) // 4):
                return
            self.index.remove(node)

    def _let_go(self, lease: Lease) -> None:
        if lease.restore is not None and lease.restore.keep is not None:
            self.give_back(lease.restore.keep)
        for page in lease.table:
            self.pool.release(page)
        lease.table.clear()
        lease.nodes.clear()
        self.leases.discard(lease)
        self.free_live.append(lease.slot)
        if lease.side:
            while self.pool.free < self.reserve and self.index.evict(side=True):
                pass

    def forget(self, session: str | None) -> None:
        """Drop what is on the device and of no running sequence: all of it, or a session's checkpoints and pages and,
        on a recurrent model, all pages that nothing can be resumed from without them."""
        forgotten = [one for one in self.checkpoints.all if session in (None, one.session)]
        self.behind.forget(session, forgotten)
        if session is None:
            self.index.clear()
            self.history = History(HISTORY)
            return
        for checkpoint in forgotten:
            self.index.detach(checkpoint)
            self.checkpoints.remove(checkpoint)
        if self.recurrent:
            self.index.clear(useless=True)
        else:
            self.index.clear(session=session)

    def gauges(self) -> dict[str, float]:
        return {
            **self._counts,
            "pages_not_finite": self.behind.not_finite,
            "pages_total": self.pool.total,
            "pages_free": self.pool.free,
            "pages_held": self.pool.held_pages,
            "pages_cached": self.index.pages,
            "pages_evicted": self.index.evicted,
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
            page = encode(tokens[PAGE * at : position])
            found = self.index.put(parent, page, lease.table[at], lease.side, lease.session)
            if found is None:
                return None
            node = found
        else:
            return None
        if self.recurrent:
            self._remember_checkpoint(lease, tokens, position)
        return node

    def _use(self, node: Node, lease: Lease, *, copied: bool = False) -> None:
        """A sequence goes on from a page, or from a copy of its beginning."""
        self.index.touch(node, lease.side, None if copied else lease.session)
        if node.background and not lease.background:
            node.background = False
            self._counts["background_hit_tokens"] += len(node.tokens) // 4

    def _evicting(self, node: Node) -> None:
        """A page is about to leave the device."""
        self.behind.leave(node)
        if node.background:
            self._counts["background_wasted_tokens"] += len(node.tokens) // 4

    def _drop(self, checkpoint: Checkpoint) -> None:
        """A checkpoint went with its page."""
        self.behind.cancel([checkpoint])
        self.checkpoints.remove(checkpoint)

    def _detach(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint that gives way to another off its page."""
        self.behind.drop(checkpoint)
        self.index.detach(checkpoint)

    def _remember_page(self, parent: Node, tokens: bytes) -> None:
        if parent.key is not None:
            self.history.add_page(parent.key, tokens)

    def _remember_checkpoint(self, lease: Lease, tokens: Sequence[int], position: int) -> None:
        at = position // PAGE
        parent = self._parent(lease, at)
        if parent.key is not None:
            self.history.add_checkpoint(parent.key, encode(tokens[PAGE * at : position]))

    def _renew(self, checkpoint: Checkpoint, lease: Lease, want: Want) -> None:
        if lease.side or lease.background:
            return
        before = checkpoint.want, checkpoint.session
        self.checkpoints.renew(checkpoint, lease.session, want, self.index.clock)
        if before != (checkpoint.want, checkpoint.session):
            self.behind.renew(checkpoint)


def _restore(lease: Lease) -> Restore:
    if lease.restore is None:
        raise RuntimeError("nothing is being read into this lease")
    return lease.restore
