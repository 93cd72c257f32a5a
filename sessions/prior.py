"""Where do the prompts of a harness leave what was computed before? Counted, and turned into what anchors are worth."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, get_args

from sessions.anchors import PRIORITIES
from sessions.causes import Facts

Divergence = Literal[
    "append", "think_strip", "user_rollback", "step_retry", "output_cleared", "call_changed", "head_changed"
]
"""``think_strip``: just behind the header of an answer, whose thinking is gone. ``user_rollback``: at or in a user's
message. ``step_retry``: at the beginning of an answer. ``output_cleared``, ``call_changed``: in a tool output, in an
answer. ``head_changed``: in system or tools, or just behind them, as after a compaction."""

KINDS: tuple[Divergence, ...] = get_args(Divergence)
Counts = Mapping[Divergence, int]

_EXPECTED: Mapping[Divergence, float] = {
    "think_strip": 0.3,
    "user_rollback": 0.27,
    "step_retry": 0.15,
    "output_cleared": 0.15,
    "call_changed": 0.03,
    "head_changed": 0.1,
}
"""Shares before anything is known, of all that is no append."""
_SERVES: Mapping[Divergence, tuple[str, ...]] = {
    "think_strip": ("loop_start",),
    "user_rollback": ("user_start",),
    "step_retry": ("turn_start", "tool_output_end"),
    "output_cleared": ("tool_call_end",),
    "call_changed": ("thinking_start", "thinking_end", "tool_call_start"),
    "head_changed": ("head_part",),
}
"""The anchors that lie before it."""
_CONFIDENCE = 20.0
"""How many divergences weigh as much as the expected shares."""
_REACH = 2.0
"""What is learned doubles or halves a priority at most."""
REMEMBERED = 1000
"""Divergences after which the counts are halved, so that habits may change."""


def divergence(seen: Facts) -> Divergence:
    if seen.append or seen.past is None:
        return "append"
    covering = {span.kind for span in seen.spans if span.start <= seen.common < span.end}
    if "tool_output" in covering:
        return "output_cleared"
    if "assistant" in covering and "assistant_header" not in covering:
        behind_header = any(span.kind == "assistant_header" and span.end == seen.common for span in seen.spans)
        return "think_strip" if behind_header else "call_changed"
    if "assistant" in covering or "generation_prompt" in covering:
        return "step_retry"
    first = next((span.start for span in seen.spans if span.kind == "user"), 0)
    return "user_rollback" if seen.common > first else "head_changed"


def counted(counts: Counts, kind: Divergence) -> dict[Divergence, int]:
    """The counts with one more."""
    more = {**counts, kind: counts.get(kind, 0) + 1}
    if sum(more.values()) - more.get("append", 0) > REMEMBERED:
        more = {name: count // 2 for name, count in more.items()}
    return more


def priorities(counts: Counts) -> Mapping[str, float]:
    """What each kind of anchor is worth to a harness that has diverged so often in each way."""
    return _priorities(tuple(counts.get(kind, 0) for kind in _EXPECTED))


@lru_cache(64)
def _priorities(seen: tuple[int, ...]) -> Mapping[str, float]:
    """``seen`` in the order of what is expected."""
    learned = dict(PRIORITIES)
    for (kind, expected), count in zip(_EXPECTED.items(), seen, strict=True):
        share = (count + _CONFIDENCE * expected) / (sum(seen) + _CONFIDENCE)
        factor = min(max(share / expected, 1 / _REACH), _REACH)
        learned.update({name: PRIORITIES[name] * factor for name in _SERVES[kind]})
    return MappingProxyType(learned)
