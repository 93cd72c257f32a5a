"""Recurrent-state slots, checkpoints and which of them give way. Numbers only; the bytes are the runner's.

Slot 0 is all zeros for ever (the state before the first token), the next ``live`` slots belong to running sequences,
the rest hold checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

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
        self.all: set[Checkpoint] = set()
        self._on_evict = on_evict
        self._free = list(range(live + total, live, -1))
        self._sessions: OrderedDict[str, Checkpoint | None] = OrderedDict()
        """Sessions by activity, oldest first, with their latest tip."""

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, want: Want, now: int, *, side: bool, background: bool = False) -> int | None:
        """A slot for a new checkpoint, at the cost of the least valuable one; None if all are worth more.

        ``now`` counts admissions. Side requests displace nothing but what side requests left, background requests
        nothing that is alive."""
        if self._free:
            return self._free.pop()
        candidates = [one for one in self.all if one.side] if side else list(self.all)
        if not candidates:
            return None
        alive = self._alive()
        least = min(_value(one, alive, now) for one in candidates)
        pinned = want.pinned or want.tip
        worth = (pinned, True, True, 0.0 if pinned else want.priority)
        if background:
            worth = (False, True, False, 0.0)
        if not side and least[:4] > worth:
            return None
        victim = min(
            (one for one in candidates if _value(one, alive, now) == least),
            key=lambda one: (self._span(one), one.position),
        )
        self._on_evict(victim)
        self.remove(victim)
        self.evicted += 1
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Return a slot that was taken and not used."""
        self._free.append(slot)

    def add(self, checkpoint: Checkpoint, supersedes: Callable[[Checkpoint], bool]) -> Checkpoint | None:
        """``supersedes``: whether the new one lies further along the same branch than an older tip. Returns the
        session's tip so far, if it is none any more."""
        self.all.add(checkpoint)
        if not checkpoint.want.tip or checkpoint.side:
            return None
        old = self._sessions.get(checkpoint.session)
        self._sessions[checkpoint.session] = checkpoint
        self.touch(checkpoint.session)
        if old is None or old not in self.all or old is checkpoint:
            return None
        old.want = replace(old.want, tip=False)
        old.superseded = supersedes(old)
        return old

    def touch(self, session: str) -> None:
        """Note that a session is active."""
        self._sessions.setdefault(session, None)
        self._sessions.move_to_end(session)
        while len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)

    def remove(self, checkpoint: Checkpoint) -> None:
        self.all.discard(checkpoint)
        self._free.append(checkpoint.slot)

    def _span(self, one: Checkpoint) -> int:
        """How far apart its session's checkpoints around it are: where they are dense, one more is worth least."""
        others = [other.position for other in self.all if other.session == one.session]
        before = max((position for position in others if position < one.position), default=0)
        after = min((position for position in others if position > one.position), default=one.position)
        return after - before

    def _alive(self) -> set[str]:
        alive: set[str] = set()
        for session in reversed(self._sessions):
            alive.add(session)
            if len(alive) == LIVE_SESSIONS:
                break
        return alive


def _value(one: Checkpoint, alive: set[str], now: int) -> tuple[bool, bool, bool, float, int]:
    """Lowest goes first: what side requests and ended sessions left, superseded tips, then by priority and age. What
    is pinned goes last, by age alone: each request says anew what its session needs."""
    lives = one.session in alive and not one.side and now - one.used <= FRESH
    pinned = lives and (one.want.pinned or one.want.tip)
    return pinned, lives, not one.superseded, 0.0 if pinned else one.want.priority, one.used
