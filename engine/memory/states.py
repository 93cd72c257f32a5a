"""Recurrent-state slots, checkpoints and which of them give way. Numbers only; the bytes are the runner's.

Slot 0 is all zeros for ever (the state before the first token), the next ``live`` slots belong to running sequences,
the rest hold checkpoints.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.memory.queue import LeastFirst

if TYPE_CHECKING:
    from engine.memory.index import Node

ZERO_SLOT = 0
LIVE_SESSIONS = 16
"""As many of the most recently active sessions count as alive."""
FRESH = 64
"""A checkpoint that nobody wanted or used for as many admissions counts as left behind, whatever its session."""
_SESSIONS = 4096


@dataclass(frozen=True)
class Want:
    """What a checkpoint is for. ``tip``: where a turn ended; one per session stays pinned until the next."""

    kind: str
    priority: float
    pinned: bool = False
    tip: bool = False


@dataclass(eq=False, slots=True)
class Checkpoint:
    """The recurrent state after ``position`` tokens, in ``slot``, attached to the page that holds the last of them."""

    position: int
    slot: int
    want: Want
    session: str
    side: bool
    used: int
    node: Node = field(repr=False)
    superseded: bool = False

    @property
    def must_keep(self) -> bool:
        return self.want.pinned or self.want.tip


class Checkpoints:
    """The checkpoint slots. ``evicted`` counts those that gave way to others."""

    def __init__(self, live: int, total: int, on_evict: Callable[[Checkpoint], None]) -> None:
        self.total = total
        self.evicted = 0
        self.first = live + 1
        self.all: set[Checkpoint] = set()
        self._on_evict = on_evict
        self._free = list(range(live + total, live, -1))
        self._sessions: OrderedDict[str, Checkpoint | None] = OrderedDict()
        """Sessions by activity, oldest first, with their latest tip."""
        self._alive: OrderedDict[str, None] = OrderedDict()
        self._fresh: OrderedDict[Checkpoint, None] = OrderedDict()
        """Those not left behind, by when they were last wanted or used."""
        self._peers: dict[str, list[tuple[int, int, Checkpoint]]] = {}
        """Each session's, as (position, slot, checkpoint), sorted."""
        self._least = LeastFirst(self._value)
        self._least_side = LeastFirst(self._value)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def pending(self) -> set[int]:
        """Slots that were taken, and hold no checkpoint yet."""
        slots = set(range(self.first, self.first + self.total))
        return slots.difference(self._free, (one.slot for one in self.all))

    def resize(self, total: int, move: Callable[[int, int], None]) -> None:
        """Have so many slots from now on. The least valuable checkpoints give way; of the others, those beyond go to a
        free slot below: ``move`` is told (from, to). The caller has checked that no slot beyond is pending."""
        for _ in range(self.total - self.free - total):
            victim = self._least.pop()
            if victim is None:
                raise RuntimeError(f"checkpoints cannot be {total} slots")
            self._give_way(victim)
        end = self.first + total
        self._free = [*range(end - 1, self.first + self.total - 1, -1), *(slot for slot in self._free if slot < end)]
        self.total = total
        for one in [one for one in self.all if one.slot >= end]:
            slot = self._free.pop()
            move(one.slot, slot)
            self._leave(one)
            one.slot = slot
            self._join(one)

    def take(self, want: Want, now: int, *, side: bool, background: bool = False) -> int | None:
        """A slot for a new checkpoint, at the cost of the least valuable one; None if all are worth more.

        ``now`` counts admissions. Side requests displace nothing but what side requests left, background requests
        nothing that is alive, unless it was superseded."""
        if self._free:
            return self._free.pop()
        while self._fresh and now - next(iter(self._fresh)).used > FRESH:
            self._least.push(self._fresh.popitem(last=False)[0])
        victim = (self._least_side if side else self._least).pop()
        if victim is None:
            return None
        pinned = want.pinned or want.tip
        worth = (pinned, True, True, 0.0 if pinned else want.priority)
        if not side and self._value(victim)[:4] > ((False, True, False, 0.0) if background else worth):
            self._least.push(victim)
            return None
        self._give_way(victim)
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Return a slot that was taken and not used."""
        self._free.append(slot)

    def add(self, checkpoint: Checkpoint) -> None:
        """A new checkpoint."""
        self.all.add(checkpoint)
        self._fresh[checkpoint] = None
        self._join(checkpoint)
        if checkpoint.side:
            self._least_side.push(checkpoint)

    def tip(self, checkpoint: Checkpoint, supersedes: Callable[[Checkpoint], bool]) -> Checkpoint | None:
        """A session's turn ended at this checkpoint. Returns its tip so far, if that is none any more.

        ``supersedes``: whether the new one lies further along the same branch than an older tip."""
        old = self._sessions.get(checkpoint.session)
        self._sessions[checkpoint.session] = checkpoint
        self.touch(checkpoint.session)
        if old is None or old not in self.all or old is checkpoint:
            return None
        old.superseded = supersedes(old)
        self.release(old, replace(old.want, tip=False))
        return old

    def use(self, checkpoint: Checkpoint, now: int) -> None:
        """A sequence went on from a checkpoint, or wants it once more."""
        checkpoint.used = now
        self._fresh[checkpoint] = None
        self._fresh.move_to_end(checkpoint)

    def renew(self, checkpoint: Checkpoint, session: str, want: Want, now: int) -> None:
        """Wanted once more: the stronger of both wishes holds, and it belongs to the session that wants it now."""
        old = checkpoint.want
        self._leave(checkpoint)
        self._least_side.discard(checkpoint)
        checkpoint.session, checkpoint.side, checkpoint.superseded = session, False, False
        stronger = want if want.priority >= old.priority else old
        checkpoint.want = Want(stronger.kind, stronger.priority, old.pinned or want.pinned, old.tip or want.tip)
        self.use(checkpoint, now)
        self._join(checkpoint)

    def release(self, checkpoint: Checkpoint, want: Want) -> None:
        """No longer wanted as much."""
        checkpoint.want = want
        self._least.push(checkpoint)

    def touch(self, session: str) -> None:
        """Note that a session is active."""
        self._sessions.setdefault(session, None)
        self._sessions.move_to_end(session)
        while len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)
        self._alive[session] = None
        self._alive.move_to_end(session)
        if len(self._alive) > LIVE_SESSIONS:
            fallen, _ = self._alive.popitem(last=False)
            for _, _, one in self._peers.get(fallen, ()):
                self._least.push(one)

    def remove(self, checkpoint: Checkpoint) -> None:
        self.all.discard(checkpoint)
        self._fresh.pop(checkpoint, None)
        self._leave(checkpoint)
        self._least.discard(checkpoint)
        self._least_side.discard(checkpoint)
        self._free.append(checkpoint.slot)

    def _give_way(self, victim: Checkpoint) -> None:
        self._on_evict(victim)
        self.remove(victim)
        self.evicted += 1

    def _join(self, one: Checkpoint) -> None:
        """Among its session's."""
        insort(self._peers.setdefault(one.session, []), (one.position, one.slot, one))
        self._respan(one.session, self._place(one))

    def _leave(self, one: Checkpoint) -> None:
        at, peers = self._place(one), self._peers[one.session]
        del peers[at]
        if peers:
            self._respan(one.session, at)
        else:
            del self._peers[one.session]

    def _respan(self, session: str, at: int) -> None:
        """What lies around a place in a session has other neighbours now."""
        for _, _, one in self._peers[session][max(0, at - 1) : at + 2]:
            self._least.push(one)

    def _place(self, one: Checkpoint) -> int:
        return bisect_left(self._peers[one.session], (one.position, one.slot))

    def _span(self, one: Checkpoint) -> int:
        """How far apart its session's checkpoints around it are: where they are dense, one more is worth least."""
        at, peers = self._place(one), self._peers[one.session]
        before = peers[at - 1][0] if at else 0
        after = peers[at + 1][0] if at + 1 < len(peers) else one.position
        return after - before

    def _value(self, one: Checkpoint) -> tuple[bool, bool, bool, float, int, int, int]:
        """Lowest goes first: what side requests and ended sessions left, superseded tips, then by priority and age.
        What is pinned goes last, by age alone: each request says anew what its session needs."""
        lives = one.session in self._alive and not one.side and one in self._fresh
        pinned = lives and (one.want.pinned or one.want.tip)
        priority = 0.0 if pinned else one.want.priority
        return pinned, lives, not one.superseded, priority, one.used, self._span(one), one.position
