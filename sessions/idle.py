"""The prompt that the next message of the user is expected to begin with, where that is not what lies computed.

Many templates drop the thinking of a finished tool loop as soon as the user speaks again: all of the loop is then new
to the engine. What will stand before the user's words is known as soon as the turn ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from parsers.conversation import Conversation, Text, ToolCall, Turn
from parsers.format import Effort
from parsers.load import Family
from sessions.anchors import PRIORITIES, AnchorPoint, anchor_points
from sessions.causes import Asked
from sessions.digest import common_prefix, pack

WORTHWHILE = 16
"""Tokens: less than this is not computed ahead."""

_WORDS = Turn("user", (Text("-"),))
_TOLD = Turn("system", (Text("+"),))


@dataclass(frozen=True)
class Followup:
    """A finished turn of a branch. ``conversation`` ends with the answer; ``answered`` is what was computed for it."""

    session: str
    branch: str
    namespace: str
    conversation: Conversation
    thinking: bool
    effort: Effort | None
    answered: Asked

    @property
    def waits_for_user(self) -> bool:
        return not any(isinstance(block, ToolCall) for block in self.conversation.turns[-1].blocks)


@dataclass(frozen=True)
class Prediction:
    """``asked``: the expected prompt up to the user's message, of which the first ``known`` tokens are computed."""

    session: str
    branch: str
    namespace: str
    asked: Asked
    known: int
    tokens: tuple[int, ...]
    anchors: tuple[AnchorPoint, ...]

    @property
    def new(self) -> int:
        return len(self.tokens) - self.known


def predict(family: Family, followup: Followup, priorities: Mapping[str, float] = PRIORITIES) -> Prediction | None:
    """None where hardly anything would have to be computed. Renders a whole prompt. Raises RenderError."""
    if not followup.waits_for_user:
        return None
    conversation = replace(followup.conversation, turns=(*followup.conversation.turns, _WORDS))
    prompt = family.render(conversation, thinking=followup.thinking, effort=followup.effort)
    end = next((s.start for s in prompt.spans if s.kind == "user" and s.turn == len(conversation.turns) - 1), 0)
    tokens = prompt.ids[:end]
    asked = replace(followup.answered, tokens=pack(tokens))
    # The last token that was sampled was never fed.
    known = min(common_prefix(asked.tokens, followup.answered.tokens), max(followup.answered.length - 1, 0))
    if end - known < WORTHWHILE:
        return None
    spans = [span for span in prompt.spans if span.end <= end]
    inner = anchor_points(end, spans, family.probe, priorities)
    last = AnchorPoint(end, "user_start", priorities["user_start"], pinned=True)
    return Prediction(
        session=followup.session,
        branch=followup.branch,
        namespace=followup.namespace,
        asked=asked,
        known=known,
        tokens=tokens,
        anchors=(*(point for point in inner if point.position < end), last),
    )


@dataclass(frozen=True)
class Opening:
    """What a prompt will begin with, whatever comes next."""

    tokens: tuple[int, ...]
    anchors: tuple[AnchorPoint, ...]


def opening(family: Family, conversation: Conversation, thinking: bool, effort: Effort | None) -> Opening:
    """What all continuations share, found by rendering two: a user turn next, and a system turn next. Renders two whole
    prompts. Raises RenderError."""
    turns = conversation.turns
    spoken, told = (
        family.render(replace(conversation, turns=(*turns, *more)), thinking=thinking, effort=effort)
        for more in ((_WORDS,), (_TOLD, _WORDS))
    )
    end = common_prefix(spoken.packed, told.packed)
    inner = anchor_points(end, [span for span in spoken.spans if span.end <= end], family.probe)
    last = AnchorPoint(end, "head_end", PRIORITIES["head_end"], pinned=True)
    return Opening(spoken.ids[:end], (*(point for point in inner if point.position < end), last))


class IdleCounts:
    """What computing ahead was good for. A prediction is settled by the next request of its branch."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], tuple[Prediction, int]] = {}
        self._prefills = self._tokens = self._hits = self._waste = 0

    def done(self, prediction: Prediction, computed: int) -> None:
        place = prediction.session, prediction.branch
        self.wasted(*place)
        self._prefills += 1
        self._tokens += computed
        self._open[place] = prediction, computed

    def asked(self, session: str, branch: str, asked: Asked, resumed: int) -> None:
        """A hit resumes behind what was computed before."""
        prediction, computed = self._open.pop((session, branch), (None, 0))
        if prediction is None:
            return
        hit = min(resumed, common_prefix(prediction.asked.tokens, asked.tokens)) > prediction.known
        self._hits += hit
        self._waste += 0 if hit else computed

    def wasted(self, session: str, branch: str) -> None:
        _, computed = self._open.pop((session, branch), (None, 0))
        self._waste += computed

    def stats(self) -> dict[str, float]:
        """Tokens, but for the first and the third, which count predictions."""
        return {
            "idle_prefills": self._prefills,
            "idle_tokens": self._tokens,
            "idle_hits": self._hits,
            "idle_waste": self._waste,
        }
