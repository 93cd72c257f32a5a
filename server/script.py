"""Scripted sampling: what the assistant says next, as a pure function of the conversation.

A script is a JSONL file of rules, one object a line; the first rule that matches is the one that speaks::

    {"when": {"kind": "main", "after_user": "(?i)fix the tests", "step": 0},
     "say": [{"thinking": "Look first."}, {"tool_call": {"name": "Bash", "args": {"command": "ls"}}}]}

``kind`` is the kind of request (main, side, compaction, subagent, raw), ``after_user`` a regular expression searched
for in the last real user text, ``step`` the number of assistant turns since that text. Whatever ``when`` leaves out
matches anything. Nothing is remembered between requests, so retries, side requests and restarts change nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from parsers.conversation import Conversation, Text, Thinking, ToolCall, ToolOutput, Turn
from parsers.load import Family
from parsers.render import Prompt

Kind = Literal["main", "side", "compaction", "subagent"]

REMINDER = re.compile(
    "<system-reminder>.*?</system-reminder>"
    "|<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>.*?<<<END_OPENCLAW_INTERNAL_CONTEXT>>>",
    re.DOTALL,
)
"""Text that harnesses put into user turns and no user wrote."""


class ScriptError(ValueError):
    """A script file that cannot be used; the message names the line and what is wrong with it."""


@dataclass(frozen=True)
class Raw:
    """The family's own text, control tokens recognised: for key orders and spellings that no block can express."""

    text: str


SayItem = Thinking | Text | ToolCall | Raw


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _When(_Strict):
    kind: Kind | None = None
    after_user: str | None = None
    step: Annotated[int, Field(ge=0)] | None = None


class _Call(_Strict):
    """``args`` is an object, or the text of a free-form tool's input."""

    name: Annotated[str, Field(min_length=1)]
    args: dict[str, Any] | str


class _Say(_Strict):
    thinking: str | None = None
    text: str | None = None
    tool_call: _Call | None = None
    raw: str | None = None


class _Line(_Strict):
    when: _When = _When()
    say: Annotated[list[_Say], Field(min_length=1)]


@dataclass(frozen=True)
class Rule:
    """One line of a script. None matches anything."""

    kind: str | None
    after_user: re.Pattern[str] | None
    step: int | None
    say: tuple[SayItem, ...]

    def matches(self, kind: str, user_text: str, step: int) -> bool:
        return (
            self.kind in (None, kind)
            and self.step in (None, step)
            and (self.after_user is None or self.after_user.search(user_text) is not None)
        )


@dataclass(frozen=True)
class Script:
    rules: tuple[Rule, ...]

    @classmethod
    def load(cls, path: Path) -> Script:
        """Read and check a script file. Raises ScriptError, with the line number."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ScriptError(f"cannot read the script {path}: {reason}") from error
        rules = []
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    rules.append(_rule(line))
                except ValueError as error:
                    raise ScriptError(f"{path}, line {number}: {error}") from error
        if not rules:
            raise ScriptError(f"{path} holds no rules: each line is a JSON object with `when` and `say`")
        return cls(tuple(rules))

    def say(self, kind: str, conversation: Conversation) -> list[SayItem] | None:
        """What the first matching rule says; None if no rule matches."""
        user_text, step = position(conversation)
        for rule in self.rules:
            if rule.matches(kind, user_text, step):
                return list(rule.say)
        return None

    def tokens(self, family: Family, prompt: Prompt, say: Sequence[SayItem]) -> tuple[int, ...]:
        """The ids to force for this assistant turn, end of turn included."""
        blocks = [item for item in say if not isinstance(item, Raw)]
        ids = family.encode_output(prompt, blocks) if blocks else ()
        raws = [item for item in say if isinstance(item, Raw)]
        if not raws:
            return ids
        if ids and ids[-1] in family.stop_tokens:
            ids = ids[:-1]
        ids += family.encode_raw("".join(raw.text for raw in raws))
        return ids if ids[-1] in family.stop_tokens else (*ids, family.stop_tokens[0])


def position(conversation: Conversation) -> tuple[str, int]:
    """The last real user text, and how many assistant turns came after it."""
    step = 0
    for turn in reversed(conversation.turns):
        if turn.role == "assistant":
            step += 1
        elif text := _user_text(turn):
            return text, step
    return "", step


def _user_text(turn: Turn) -> str:
    """What a user wrote in this turn: text that is no reminder and does not accompany tool outputs."""
    if turn.role != "user" or any(isinstance(block, ToolOutput) for block in turn.blocks):
        return ""
    return REMINDER.sub("", "\n".join(block.text for block in turn.blocks if isinstance(block, Text))).strip()


def _rule(line: str) -> Rule:
    """One line as a rule. Raises ValueError with a message for people."""
    try:
        parsed = _Line.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error
    when = parsed.when
    try:
        pattern = None if when.after_user is None else re.compile(when.after_user)
    except re.error as error:
        raise ValueError(f"when.after_user: {error}") from error
    say = tuple(_item(item) for item in parsed.say)
    if any(isinstance(item, Raw) for item in say[:-1]):
        raise ValueError("say: `raw` must be the last item, since it spells the rest of the turn")
    return Rule(when.kind, pattern, when.step, say)


def _item(item: _Say) -> SayItem:
    if len(item.model_fields_set) != 1:
        raise ValueError("say: each item holds exactly one of thinking, text, tool_call and raw")
    if item.thinking is not None:
        return Thinking(item.thinking)
    if item.text is not None:
        return Text(item.text)
    if item.raw:
        return Raw(item.raw)
    if item.tool_call is None:
        raise ValueError("say: an item is null or empty")
    name, args = item.tool_call.name, item.tool_call.args
    if isinstance(args, str):
        return ToolCall("", name, args, freeform=True)
    return ToolCall("", name, json.dumps(args, ensure_ascii=False))
