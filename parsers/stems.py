"""Stems of prompts: everything before the last answer, as it was rendered.

The next prompt of a conversation has the same turns up to there, and is written from there on. Both the turns and the
template's text are compared first: a template may write earlier turns in another way when others follow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from threading import Lock

from parsers.conversation import Conversation, Tool, ToolCall, Turn, same_tools
from parsers.format import Effort
from parsers.messages import Plan, Traits, has_content
from parsers.prompt import Written
from parsers.rope import Rope

_KEPT = 16
_LITTLE = 4096
"""Characters that are tokenized in a millisecond or two."""
_MANY_TURNS = 4000
"""A template may go through all turns again, some microseconds each."""
_BYTES = 32 << 20
"""Of stems that are kept, about."""
_TURN = 1024
"""Bytes of a turn, beside its text and tokens: short ones take far more than those."""


@dataclass(frozen=True)
class Mark:
    """Where in the text a block begins from which on blocks are looked for, and where the stem ends; what was written
    up to there, and whether the tools were told of."""

    block: int
    end: int
    written: Written
    moved: str
    tools_found: bool

    def of(self, packed: bytes) -> Mark:
        """``packed``: the prompt that it is a mark of."""
        return self if self.written.packed else replace(self, written=replace(self.written, packed=packed))


@dataclass(frozen=True)
class Stem:
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...]
    thinking: bool
    effort: Effort | None
    plan: Plan
    text: Rope
    mark: Mark

    @property
    def size(self) -> int:
        """About its bytes."""
        return len(self.text) + len(self.mark.written.packed) + _TURN * len(self.turns)

    def begins(self, conversation: Conversation, traits: Traits) -> bool:
        """Has the conversation these turns, and then an answer?"""
        size, turns = len(self.turns), conversation.turns
        return (
            len(turns) > size
            and turns[size].role == "assistant"
            and has_content(turns[size], traits)
            and same_tools(self.tools, conversation.tools)
            and turns[size - 1] == self.turns[-1]
            and turns[:size] == self.turns
        )

    def has_most(self, conversation: Conversation) -> bool:
        """Is there little of a conversation that begins with it behind it?"""
        new = (block for turn in conversation.turns[len(self.turns) :] for block in turn.blocks)
        sizes = (len(block.arguments if isinstance(block, ToolCall) else block.text) for block in new)
        return len(self.turns) <= _MANY_TURNS and sum(sizes) <= _LITTLE


@dataclass(frozen=True)
class Draft:
    """A conversation as the template writes it. ``stem``: what it begins with, where that was rendered before."""

    conversation: Conversation
    thinking: bool
    effort: Effort | None
    plan: Plan
    text: Rope
    stem: Stem | None

    def stem_up_to(self, plan: Plan, mark: Mark) -> Stem:
        """What the next prompt of the conversation will begin with."""
        conversation = self.conversation
        told = (conversation.turns[: plan.turn], conversation.tools, self.thinking, self.effort)
        return Stem(*told, plan, self.text.upto(mark.end), mark)


class Stems:
    """The latest stems. Safe to share between threads."""

    def __init__(self, traits: Traits) -> None:
        self._traits = traits
        self._known: deque[Stem] = deque()
        self._size = 0
        self._lock = Lock()

    def turns(self, conversation: Conversation) -> int:
        """How many turns of the conversation were rendered before, whatever the thinking."""
        with self._lock:
            known = [*self._known]
        return max((len(stem.turns) for stem in known if stem.begins(conversation, self._traits)), default=0)

    def find(self, conversation: Conversation, thinking: bool, effort: Effort | None) -> Stem | None:
        """The longest of those that fit."""
        with self._lock:
            known = [stem for stem in self._known if (stem.thinking, stem.effort) == (thinking, effort)]
        fitting = (
            stem for stem in sorted(known, key=lambda stem: -len(stem.turns)) if stem.begins(conversation, self._traits)
        )
        return next(fitting, None)

    def keep(self, stem: Stem) -> None:
        with self._lock:
            self._known.append(stem)
            self._size += stem.size
            while len(self._known) > _KEPT or self._size > _BYTES:
                self._size -= self._known.popleft().size

    def forget(self) -> None:
        with self._lock:
            self._known.clear()
            self._size = 0
