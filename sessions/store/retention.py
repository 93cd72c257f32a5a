"""What to keep: pure functions over numbers. Used by the writer thread for the disk and by the store for sessions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import IntEnum

from sessions.store.config import DAY
from sessions.store.format import Shape
from sessions.store.mirror import Entry

HALF_LIFE = DAY
"""Seconds after which something unused is half as likely to be used again."""
ACTIVE = 600.0
"""Seconds for which a pinned checkpoint is kept at any price."""
LONG = 8192
"""Tokens; a session of at least this many is worth writing on a yellow budget."""
_PINNED, _SUPERSEDED, _USELESS = 4.0, 0.1, 0.05
_UNIFORM, _RECENT, _SEMANTIC = 0.15, 0.35, 0.5
"""Where the next prompt diverges: anywhere, near the end, or right after a checkpoint in proportion to its priority.
What is known of a harness is in the priorities."""
_SCALE = 8192.0
"""Tokens over which nearness to the end decays."""


@dataclass(frozen=True, slots=True)
class Item:
    """``value`` per byte. ``before``: the index of the item this one needs, -1 for none. ``keep``: never a victim."""

    size: int
    value: float
    before: int
    keep: bool


def victims(items: Sequence[Item], need: int) -> list[int]:
    """Indices to give up, least value first and never before what needs them, until ``need`` bytes are free or only
    what is kept is left."""
    dependants = [0] * len(items)
    for item in items:
        if item.before >= 0:
            dependants[item.before] += 1
    heap = [(item.value, at) for at, item in enumerate(items) if not dependants[at] and not item.keep]
    heapq.heapify(heap)
    chosen: list[int] = []
    while heap and need > 0:
        _, at = heapq.heappop(heap)
        chosen.append(at)
        need -= items[at].size
        before = items[at].before
        if before >= 0:
            dependants[before] -= 1
            if not dependants[before] and not items[before].keep:
                heapq.heappush(heap, (items[before].value, before))
    return chosen


def weigh(entries: Sequence[Entry], now: float, *, recurrent: bool, kept: Set[Entry] = frozenset()) -> list[Item]:
    """The entries as items. A page needs its parent; a checkpoint, or where a session ends, needs the page that holds
    its last token; an end goes with its page. ``kept`` stay."""
    number = {entry.key: at for at, entry in enumerate(entries) if entry.key is not None}
    pages: dict[bytes, list[int]] = {}
    sessions: dict[str, list[Entry]] = {}
    for at, entry in enumerate(entries):
        if entry.shape is Shape.STATE:
            sessions.setdefault(entry.session, []).append(entry)
        else:
            pages.setdefault(entry.parent, []).append(at)
    gaps: dict[Entry, int] = {}
    for states in sessions.values():
        states.sort(key=lambda one: one.position)
        for previous, state in zip([None, *states], states, strict=False):
            gaps[state] = max(state.position - (previous.position if previous else 0), 1)
    needs: list[int] = []
    anchored: set[int] = set()
    for entry in entries:
        before = number.get(entry.parent, -1)
        if entry.shape is Shape.STATE:
            if entry.tokens:
                holding = (at for at in pages.get(entry.parent, ()) if entries[at].tokens.startswith(entry.tokens))
                before = next(holding, before)
            anchored.add(before)
        needs.append(before)
    used_by_child = set(needs)
    values = [
        value(
            entry,
            now,
            gaps.get(entry, len(entry.tokens) // 4),
            useless=recurrent and entry.shape is not Shape.STATE and at not in used_by_child,
        )
        for at, entry in enumerate(entries)
    ]
    return [
        Item(
            size=entry.length,
            value=values[at] if not entry.end else values[needs[at]] if needs[at] >= 0 else 0.0,
            before=needs[at],
            keep=entry in kept or entry.holds > 0 or (entry.pinned and now - entry.used < ACTIVE),
        )
        for at, entry in enumerate(entries)
    ]


def value(entry: Entry, now: float, saved: int, *, useless: bool = False) -> float:
    """Tokens of replay saved per byte, times the chance that they are asked for."""
    chance: float = 0.5 ** (max(now - entry.used, 0.0) / HALF_LIFE) * (1 + math.log1p(entry.hits))
    chance *= _PINNED if entry.pinned else 1.0
    chance *= _SUPERSEDED if entry.superseded else 1.0
    chance *= _USELESS if useless else 1.0
    return chance * saved / max(entry.size, 1)


@dataclass(frozen=True, slots=True)
class Point:
    """A checkpoint for thinning. ``keep``: pinned or in use."""

    position: int
    priority: float
    keep: bool


def thin(points: Sequence[Point]) -> int | None:
    """The index of the checkpoint whose loss adds the least expected replay: P(divergence after it and before the next)
    times the way back to the one before. ``points`` ascend by position; None if all are to be kept."""
    if not points:
        return None
    end = max(points[-1].position, 1)
    priorities = sum(max(point.priority, 0.0) for point in points) or 1.0
    best: tuple[float, int] | None = None
    for at, point in enumerate(points):
        if point.keep:
            continue
        until = points[at + 1].position if at + 1 < len(points) else end
        near = math.exp((until - end) / _SCALE) - math.exp((point.position - end) / _SCALE)
        chance = _UNIFORM * (until - point.position) / end + _RECENT * near
        chance += _SEMANTIC * max(point.priority, 0.0) / priorities
        if at + 1 == len(points):
            chance += _RECENT
        back = point.position - (points[at - 1].position if at else 0)
        cost = chance * back
        if best is None or cost < best[0]:
            best = cost, at
    return None if best is None else best[1]


class Level(IntEnum):
    """How much may be written: everything, what matters, nothing."""

    GREEN = 0
    YELLOW = 1
    RED = 2


class Budget:
    """A leaky bucket of written bytes: a day's worth at once, then what drains."""

    def __init__(self, daily_bytes: int, now: float, filled: float = 0.0) -> None:
        self._daily = max(daily_bytes, 1)
        self._filled = filled
        self._at = now

    def write(self, count: int, now: float) -> None:
        self._filled = self.filled(now) + count

    def filled(self, now: float) -> float:
        """Bytes that have not drained yet."""
        self._filled = max(self._filled - max(now - self._at, 0.0) * self._daily / DAY, 0.0)
        self._at = now
        return self._filled

    def level(self, now: float) -> Level:
        share = self.filled(now) / self._daily
        return Level.GREEN if share < 0.5 else Level.YELLOW if share < 1.0 else Level.RED


def worth_writing(entry: Entry, level: Level) -> bool:
    if level is Level.YELLOW:
        return entry.pinned or entry.hits > 0 or (entry.shape is Shape.PAGE and entry.position >= LONG)
    return level is Level.GREEN
