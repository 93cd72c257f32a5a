"""Where the engine is asked to keep checkpoints, and how much each of them is worth.

Pinned are the places that future prompts are certain to share: the ends of system and tools, the last user messages,
the place before the assistant's header, and, where the template drops old thinking, the start of the loop since the
last user message (that is where the next user message will diverge), and the places where openings have parted before
(see ``partings``). Everything else competes by priority.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from parsers.events import BoundaryKind
from parsers.probe import Probe
from parsers.render import Span

LATTICE = 2048
"""Tokens between the coarse anchors of a long prompt."""
LIMIT = 64
"""Anchors per request, at most."""
LATTICE_SHARE = 16
"""So many of them may be coarse; a longer prompt gets a wider lattice."""
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


@dataclass(frozen=True)
class AnchorPoint:
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
    """``length`` of the prompt in tokens, its spans; anchors ascend by position, one per position. ``priorities`` by
    kind of anchor, ``partings`` the positions before which this opening may part from others."""
    named = _best_per_position(
        [
            *_pinned(spans, probe),
            *(_pin(position, "parting") for position in partings),
            _anchor(length, "prompt_end" if probe.prompt_end_survives else "prompt_end_in_loop"),
            *_inner(spans),
        ],
        length,
    )
    lattice = [anchor for anchor in _lattice(length) if anchor.position not in named]
    room = LIMIT - len(lattice)
    kept = sorted(named.values(), key=lambda anchor: (anchor.pinned, anchor.priority, anchor.position))[-room:]
    points = sorted([*kept, *lattice], key=lambda anchor: anchor.position)
    return tuple(replace(point, priority=priorities[point.kind]) for point in points)


def _pinned(spans: Sequence[Span], probe: Probe) -> list[AnchorPoint]:
    first = min((span.start for span in spans if span.kind not in ("tools", "system")), default=0)
    found = [_pin(first, "head_end")]
    parts = [span.end for span in spans if span.kind in ("tools", "system") and span.end < first]
    found += [_pin(end, "head_part") for end in parts[:PINNED_PARTS]]
    found += [_anchor(span.start, "turn_start") for span in spans if span.kind == "system" and span.start >= first]
    users = [span.start for span in spans if span.kind == "user"]
    found += [_pin(start, "user_start") for start in users[-PINNED_USERS:]]
    found += [_anchor(start, "user_start") for start in users[:-PINNED_USERS]]
    headers = [span.start for span in spans if span.kind == "assistant_header"]
    found += [_anchor(start, "turn_start") for start in headers]
    found += [_pin(span.start, "generation_prompt") for span in spans if span.kind == "generation_prompt"]
    if not probe.thinking_survives:
        found += [_pin(start, "loop_start") for start in _loop_starts(users[-PINNED_USERS:], headers)]
    return found


def _loop_starts(users: Sequence[int], headers: Sequence[int]) -> set[int]:
    """The first assistant header after each user message: which message the template takes for the last query is its
    own affair (a reminder beside tool outputs is none)."""
    return {start for user in users if (start := min((h for h in headers if h > user), default=0))}


def _inner(spans: Sequence[Span]) -> list[AnchorPoint]:
    """Ends of tool outputs, and both ends of thinking and calls."""
    found: list[AnchorPoint] = []
    for span in spans:
        if span.kind == "tool_output":
            found.append(_anchor(span.end, "tool_output_end"))
        elif span.kind in ("thinking", "tool_call"):
            found += [_anchor(span.start, f"{span.kind}_start"), _anchor(span.end, f"{span.kind}_end")]
    return found


def _lattice(length: int) -> list[AnchorPoint]:
    step = LATTICE * max(1, -(-length // (LATTICE * LATTICE_SHARE)))
    return [_anchor(position, "lattice") for position in range(step, length, step)]


def _best_per_position(anchors: Iterable[AnchorPoint], length: int) -> dict[int, AnchorPoint]:
    best: dict[int, AnchorPoint] = {}
    for anchor in anchors:
        known = best.get(anchor.position)
        if 0 < anchor.position <= length and (known is None or _rank(anchor) > _rank(known)):
            best[anchor.position] = anchor
    return best


def _rank(anchor: AnchorPoint) -> tuple[bool, float]:
    return anchor.pinned, anchor.priority


def _anchor(position: int, kind: str) -> AnchorPoint:
    return AnchorPoint(position, kind, PRIORITIES[kind])


def _pin(position: int, kind: str) -> AnchorPoint:
    return AnchorPoint(position, kind, PRIORITIES[kind], pinned=True)
