"""Why was this prompt not simply a continuation? A table of rules over plain facts; the first that speaks is the cause.

Divergence is judged on tokens, because they are what the engine has; its name is found by comparing conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from parsers.render import Span
from sessions.digest import TurnDigest, common_prefix
from sessions.harness import Kind

Cause = Literal[
    "none",
    "first_request",
    "system_changed",
    "tools_changed",
    "effort_changed",
    "thinking_stripped",
    "tool_args_changed",
    "text_changed",
    "history_edited",
    "compacted",
    "side_request",
    "subagent",
    "no_anchor",
    "evicted",
    "worker_restart",
    "fingerprint",
    "corrupt",
    "unreported",
]

GRAIN = 64
"""Tokens of a page: an engine that forgot less than this did not lose anything, it looked at whole pages."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and the conversation it was rendered from. ``tokens``: packed ids. ``exact``: per turn, whether its
    sampled tokens were put in. ``incarnation``: the engine worker that it was sent to, ``fingerprint``: what its states
    are good for (the weights and the arithmetic); empty where that is not known. ``effort``: how much
    thinking was wanted, which some templates write in front of everything."""

    tokens: bytes
    tools: bytes
    system: bytes
    head: int
    turns: tuple[TurnDigest, ...]
    exact: tuple[bool, ...]
    kind: Kind
    incarnation: str
    fingerprint: str = ""
    effort: str = ""

    @property
    def length(self) -> int:
        return len(self.tokens) // 4


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens of a prompt by origin: ``resumed`` were restored, ``replayed`` computed before and again now, ``new`` were
    never computed before. Of what was resumed, ``host`` tokens came from the host's memory, ``disk`` from disk,
    ``remote`` from a tier that a remote engine does not name, and the others from the ``device``."""

    resumed: int
    replayed: int
    new: int
    host: int = 0
    disk: int = 0
    remote: int = 0

    @property
    def prompt(self) -> int:
        return self.resumed + self.replayed + self.new

    @property
    def device(self) -> int:
        return self.resumed - self.host - self.disk - self.remote


@dataclass(frozen=True, slots=True)
class Facts:
    """``past`` is the earlier request of the branch, with its answer, that this one continues or else shares most with;
    ``last`` is the most recent one. ``common`` tokens are shared with ``past``, ``known`` of the prompt were computed
    before. ``turn`` is the first turn whose content differs, None where one conversation only continues the other.
    ``elsewhere``: there is no past because this session's tokens are another tokenizer's or template's."""

    now: Asked
    spans: Sequence[Span]
    past: Asked | None
    last: Asked | None
    common: int
    known: int
    turn: int | None
    reuse: Reuse
    worker_cause: str
    elsewhere: bool = False

    @property
    def append(self) -> bool:
        """The last sampled token was never fed: a prompt with another one there (the regular end of turn, say) still
        continues everything that was computed."""
        return self.past is not None and self.common >= min(self.past.length - 1, self.now.length)

    @property
    def forgotten(self) -> int:
        """Tokens the branch knows to be computed and the worker does not."""
        return self.known - self.reuse.resumed - self.reuse.replayed

    def matters(self, lost: int) -> bool:
        """Whether these tokens are the cause. The rest of a page is no reason to hide what else happened."""
        return lost > (0 if self.append else GRAIN)


def facts(
    now: Asked,
    spans: Sequence[Span],
    pasts: Sequence[Asked],
    reuse: Reuse,
    worker_cause: str,
    *,
    elsewhere: bool = False,
) -> Facts:
    """``pasts`` in the order of time."""
    if not pasts:
        return Facts(now, spans, None, None, 0, 0, None, reuse, worker_cause, elsewhere)
    shared = [common_prefix(past.tokens, now.tokens) for past in pasts]
    best = max(range(len(pasts)), key=lambda index: (shared[index] >= pasts[index].length - 1, shared[index], index))
    past = pasts[best]
    # The last token of a prompt is always fed anew.
    computed = max(min(common, past.length - 1) for past, common in zip(pasts, shared, strict=True))
    known = max(min(computed, now.length - 1), 0)
    return Facts(now, spans, past, pasts[-1], shared[best], known, _first_change(past, now), reuse, worker_cause)


def counted(seen: Facts) -> Reuse:
    """The worker's numbers, with what the branch knows to be computed before counted as replayed instead of new; where
    a remote engine tells no numbers, there is nothing to count."""
    missing = 0 if seen.worker_cause == "unreported" else max(seen.forgotten, 0)
    return replace(seen.reuse, replayed=seen.reuse.replayed + missing, new=seen.reuse.new - missing)


def explain(seen: Facts) -> Cause | None:
    """None if no rule speaks; that is an error of the table, to be counted."""
    return next((cause for rule in RULES if (cause := rule(seen)) is not None), None)


def _corrupt(seen: Facts) -> Cause | None:
    return "corrupt" if seen.worker_cause == "corrupt" else None


def _unreported(seen: Facts) -> Cause | None:
    """Only the remote engine knows what it reused."""
    return "unreported" if seen.worker_cause == "unreported" else None


def _side(seen: Facts) -> Cause | None:
    return "side_request" if seen.now.kind == "side" else None


def _first(seen: Facts) -> Cause | None:
    if seen.past is not None:
        return None
    if seen.elsewhere:
        return "fingerprint"
    return "subagent" if seen.now.kind == "subagent" else "first_request"


def _fingerprint(seen: Facts) -> Cause | None:
    """What was computed with other weights or another arithmetic is of no use here. An unknown fingerprint is never
    taken for another one."""
    if seen.past is None or seen.past.fingerprint in ("", seen.now.fingerprint):
        return None
    lost = seen.matters(seen.forgotten) and seen.forgotten > seen.reuse.replayed
    return "fingerprint" if lost else None


def _restarted(seen: Facts) -> Cause | None:
    """A new worker is to blame for what the one before it knew and no store kept: all of it, or the checkpoints, where
    it finds nothing but pages."""
    if seen.past is None or seen.past.incarnation == seen.now.incarnation:
        return None
    inherited = seen.worker_cause == "worker_restart"
    mine = 0 if inherited else seen.reuse.replayed
    lost = max(seen.forgotten, 0) + seen.reuse.replayed - mine
    return "worker_restart" if seen.matters(lost) and lost > mine else None


def _appended(seen: Facts) -> Cause | None:
    if not seen.append:
        return None
    if seen.reuse.replayed > 0 or seen.forgotten > 0:
        evicted = seen.worker_cause == "evicted" or seen.forgotten >= GRAIN
        return "evicted" if evicted else "no_anchor"
    return "none"


def _tools(seen: Facts) -> Cause | None:
    return "tools_changed" if seen.past and seen.past.tools != seen.now.tools else None


def _system(seen: Facts) -> Cause | None:
    return "system_changed" if seen.past and seen.past.system != seen.now.system else None


def _effort(seen: Facts) -> Cause | None:
    """Another effort, and the conversation says the same up to the divergence. How much thinking is wanted is said in
    front of the conversation; only whether it is wanted at all may show in answers."""
    if seen.past is None or seen.past.effort == seen.now.effort:
        return None
    span = _turn_span(seen)
    if span is None:
        return "effort_changed"
    edited = seen.turn is not None and seen.turn <= span.turn
    level = "none" not in (seen.past.effort, seen.now.effort)
    return None if edited or (level and span.turn >= seen.now.head) else "effort_changed"


def _another(seen: Facts) -> Cause | None:
    """A prompt that is no conversation, and continues none that is known."""
    return "text_changed" if seen.now.kind == "raw" else None


def _compacted(seen: Facts) -> Cause | None:
    """After a request for a summary everything may be new, the head as well."""
    asked = seen.last is not None and seen.last.kind == "compaction" and seen.now.kind != "compaction"
    return "compacted" if asked else None


def _shrunk(seen: Facts) -> Cause | None:
    """A client that asks for its summary in another way: a shorter conversation begins with another message."""
    if seen.past is None or seen.turn != seen.now.head:
        return None
    fewer = len(seen.now.turns) < len(seen.past.turns) and seen.now.length < seen.past.length
    return "compacted" if fewer else None


def _rerendered(seen: Facts) -> Cause | None:
    """The conversation says the same up to the divergence and beyond it; the template wrote it in another way."""
    span = _turn_span(seen)
    if span is None or (seen.turn is not None and seen.turn <= span.turn):
        return None
    if span.kind != "assistant":
        return "system_changed" if span.turn < seen.now.head else None
    if not seen.now.exact[span.turn]:
        inner = _inner_kind(seen)
        if inner == "tool_call":
            return "tool_args_changed"
        if inner == "text" and seen.common > _content_start(seen, span):
            return "text_changed"
    return "thinking_stripped"


def _changed(seen: Facts) -> Cause | None:
    """Judges the first turn that differs."""
    if seen.past is None or seen.turn is None:
        return None
    if seen.turn >= min(len(seen.past.turns), len(seen.now.turns)):
        return "history_edited" if len(seen.now.turns) < len(seen.past.turns) else None
    before, after = seen.past.turns[seen.turn], seen.now.turns[seen.turn]
    if before.role != after.role or after.parts[: len(before.parts)] == before.parts:
        return "history_edited"  # another turn stands here, or this one grew where the next one was taken out
    if before.of_kind("call") != after.of_kind("call"):
        return "tool_args_changed" if _ids(before) == _ids(after) else "history_edited"
    if before.of_kind("output") != after.of_kind("output"):
        return "history_edited"
    if before.of_kind("text") != after.of_kind("text"):
        return "text_changed"
    return "thinking_stripped" if len(after.of_kind("thinking")) < len(before.of_kind("thinking")) else "history_edited"


RULES: tuple[Callable[[Facts], Cause | None], ...] = (
    _corrupt,
    _unreported,
    _side,
    _first,
    _fingerprint,
    _restarted,
    _appended,
    _another,
    _compacted,
    _tools,
    _system,
    _effort,
    _shrunk,
    _rerendered,
    _changed,
)


def _first_change(past: Asked, now: Asked) -> int | None:
    for index, (before, after) in enumerate(zip(past.turns, now.turns, strict=False)):
        if before.role != after.role or before.parts != after.parts:
            return index
    return len(now.turns) if len(now.turns) < len(past.turns) else None


def _turn_span(seen: Facts) -> Span | None:
    """The turn of the prompt in which the divergence lies."""
    whole = ("system", "user", "assistant", "tool_output")
    covering = (span for span in seen.spans if span.start <= seen.common < span.end)
    return next((span for span in covering if span.kind in whole and span.turn >= 0), None)


def _inner_kind(seen: Facts) -> str:
    covering = [span for span in seen.spans if span.start <= seen.common < span.end]
    return min(covering, key=lambda span: span.end - span.start).kind if covering else ""


def _content_start(seen: Facts, turn: Span) -> int:
    headers = (span.end for span in seen.spans if span.kind == "assistant_header" and span.turn == turn.turn)
    return next(headers, turn.start)


def _ids(turn: TurnDigest) -> list[str]:
    return [part.id for part in turn.of_kind("call")]
