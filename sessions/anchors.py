"""Where the engine is asked to keep checkpoints, and how much each of them is worth.

Pinned are the places that future prompts are certain to share: the ends of system and tools, the last user messages,
the place before the assistant's header, and, where the template drops old thinking, the start of the loop since the
last user message (that is where the next user message will diverge), and the places where openings have parted before
(see ``partings``). Everything else competes by priority.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

from parsers.events import BoundaryKind
from parsers.probe import Probe
from parsers.render import Span

LATTICE = 2048
"""Tokens between the coarse anchors of a long prompt."""
LIMIT = 64
"""Anchors per request, at most."""
LATTICE_SHARE = 16
"""How many of them may be coarse; a longer prompt gets a wider lattice."""
PINNED_USERS = 3
PINNED_PARTS = 6
"""Parts of system and tools; harnesses change the later ones when they compact, and keep the first."""

PRIORITIES = {
    "head_end": 100.0,
    "generation_prompt": 95.0,
    "head_part": 90.0,
    "parting": 90.0,
    "loop_start": 90.0,
    "user_start": 80.0,
    "prompt_end": 60.0,
    "prompt_end_in_loop": 25.0,
    "tool_output_end": 50.0,
    "turn_start": 45.0,
    "thinking_end": 40.0,
    "tool_call_end": 35.0,
    "tool_call_start": 30.0,
    "thinking_start": 20.0,
    "lattice": 10.0,
}

WATCH_PRIORITIES: dict[BoundaryKind, float] = {
    "turn_end": 70.0,
    "tool_call_end": 50.0,
    "thinking_end": 45.0,
    "tool_call_start": 40.0,
    "thinking_start": 20.0,
}


_Found = tuple[str, bool, Iterable[int]]
"""Kind, whether it is pinned, and positions, the last one first, which are only looked for while there is room."""


class AnchorPoint(NamedTuple):
    """``position`` tokens lie before the checkpoint. Higher ``priority`` is kept longer, ``pinned`` always."""

    position: int
    kind: str
    priority: float
    pinned: bool = False


@dataclass(frozen=True)
class WatchPoint:
    """A checkpoint is wanted before the first of ``tokens`` when they are sampled."""

    tokens: tuple[int, ...]
    kind: str
    priority: float


def watch_points(watches: Iterable[tuple[tuple[int, ...], BoundaryKind]]) -> tuple[WatchPoint, ...]:
    return tuple(WatchPoint(tokens, kind, WATCH_PRIORITIES[kind]) for tokens, kind in watches)


def anchor_points(
    length: int,
    spans: Sequence[Span],
    probe: Probe,
    priorities: Mapping[str, float] = PRIORITIES,
    partings: Iterable[int] = (),
) -> tuple[AnchorPoint, ...]:
    """``length`` of the prompt in tokens, its spans by start; anchors ascend by position, one per position.
    ``priorities`` by kind of anchor, ``partings`` the positions before which this opening may part from others."""
    by_kind: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_kind[span.kind].append(span)
    lattice = _lattice(length)
    end = "prompt_end" if probe.prompt_end_survives else "prompt_end_in_loop"
    parted = sorted(partings, reverse=True)
    found = [*_pinned(by_kind, probe), ("parting", True, parted), (end, False, [length]), *_others(by_kind)]
    found.sort(key=lambda one: (one[1], PRIORITIES[one[0]]), reverse=True)
    best: dict[int, tuple[str, bool]] = {}
    room = LIMIT - len(lattice)
    for kind, pinned, positions in found:
        for position in takewhile(lambda _: len(best) < room, positions):
            if 0 < position <= length:
                best.setdefault(position, (kind, pinned))
    for position in lattice:
        best.setdefault(position, ("lattice", False))
    return tuple(
        AnchorPoint(position, kind, priorities[kind], pinned) for position, (kind, pinned) in sorted(best.items())
    )


def _pinned(by_kind: Mapping[str, Sequence[Span]], probe: Probe) -> list[_Found]:
    first, systems = _first(by_kind), by_kind.get("system", ())
    parts = sorted(span.end for span in (*by_kind.get("tools", ()), *systems) if span.end < first)
    users = [span.start for span in by_kind.get("user", ())[: -PINNED_USERS - 1 : -1]]
    found: list[_Found] = [
        ("head_end", True, [first]),
        ("head_part", True, parts[:PINNED_PARTS][::-1]),
        ("user_start", True, users),
        ("generation_prompt", True, _starts(by_kind.get("generation_prompt", ()))),
    ]
    if not probe.thinking_survives:
        loops = _loop_starts(users, by_kind.get("assistant_header", ()))
        found.append(("loop_start", True, sorted(loops, reverse=True)))
    return found


def _starts(spans: Sequence[Span]) -> Iterator[int]:
    return (span.start for span in reversed(spans))


def _ends(spans: Sequence[Span]) -> Iterator[int]:
    return (span.end for span in reversed(spans))


def _first(by_kind: Mapping[str, Sequence[Span]]) -> int:
    """Where system and tools end."""
    return min((some[0].start for kind, some in by_kind.items() if kind not in ("tools", "system")), default=0)


def _loop_starts(users: Sequence[int], headers: Sequence[Span]) -> set[int]:
    """The first assistant header after each user message: which message the template takes for the last query is its
    own affair (a reminder beside tool outputs is none)."""
    at = (bisect_right(headers, user, key=attrgetter("start")) for user in users)
    return {headers[one].start for one in at if one < len(headers)}


def _others(by_kind: Mapping[str, Sequence[Span]]) -> list[_Found]:
    """Beginnings of turns, ends of tool outputs, and both ends of thinking and calls."""
    first = _first(by_kind)
    users, headers, systems = (by_kind.get(kind, ()) for kind in ("user", "assistant_header", "system"))
    later = (position for position in _starts(systems) if position >= first)
    found: list[_Found] = [
        ("user_start", False, _starts(users[:-PINNED_USERS])),
        ("turn_start", False, merge(later, _starts(headers), reverse=True)),
        ("tool_output_end", False, _ends(by_kind.get("tool_output", ()))),
    ]
    for kind in ("thinking", "tool_call"):
        found.append((f"{kind}_start", False, _starts(by_kind.get(kind, ()))))
        found.append((f"{kind}_end", False, _ends(by_kind.get(kind, ()))))
    return found


def _lattice(length: int) -> range:
    step = LATTICE * max(1, -(-length // (LATTICE * LATTICE_SHARE)))
    return range(step, length, step)
