"""DeepSeek V3.2, V4 and V4.1, whose checkpoints come with Python instead of a template.

Tools are declared behind the system text, and calls are DSML elements, which spell their types. In V3.2 the outputs of
tools stand behind the end of the assistant turn and the model goes on from there without a header; from V4 on, outputs
and user texts that follow each other are one user turn. Thinking outlives the next user turn only from V4 on, and
there only while tools are declared (or ``drop_thinking`` is False).

System texts after the first have a place of their own in V4.1 only. Before, they are written as if the user had said
them, but end no thinking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from parsers.codecs.writers import Written
from parsers.encoders import deepseek_texts as texts
from parsers.encoders.message import Message, calls_of, content_of, in_order, reasoning_of, specimen
from parsers.families import deepseek as families
from parsers.format import Format
from parsers.template import TemplateRefusal
from parsers.write import calls_text

_BEGIN = "<｜begin▁of▁sentence｜>"
_END = "<｜end▁of▁sentence｜>"
_SYSTEM = "<｜System｜>"
_USER = "<｜User｜>"
_ASSISTANT = "<｜Assistant｜>"


@dataclass(frozen=True)
class _Turn:
    """Messages that are one turn: outputs (and user texts, from V4 on) that follow each other. ``calls`` are those of
    the assistant turn before."""

    role: str
    messages: tuple[Message, ...]
    calls: tuple[Written, ...]


def _turns(messages: Sequence[Message], roles: Mapping[str, str], joined: str) -> Iterator[_Turn]:
    """``roles``: of a turn, by that of its messages; turns of the role ``joined`` are put together. Raises
    TemplateRefusal where there can be no message of a role."""
    calls: tuple[Written, ...] = ()

    def turn_of(numbered: tuple[int, Message]) -> tuple[str, int]:
        at, message = numbered
        role = roles.get(message["role"])
        if role is None:
            raise TemplateRefusal(f"there can be no {message['role']} message after the first")
        return role, -1 if role == joined else at

    for (role, _), group in groupby(enumerate(messages), turn_of):
        turn = _Turn(role, tuple(message for _, message in group), calls)
        yield turn
        if role == "assistant":
            calls = tuple(calls_of(turn.messages[0]))


def _head(messages: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    """(system text or None, the other messages)."""
    if messages and messages[0]["role"] == "system":
        return content_of(messages[0]), messages[1:]
    return None, messages


def _assistant(family: Format, message: Message, thinks: bool) -> str:
    """An assistant turn without its header."""
    thinking = f"<think>{reasoning_of(message)}</think>" if thinks else "</think>"
    calls = calls_of(message)
    written = calls_text(family.call, calls, behind_text=True) if calls else ""
    return f"{thinking}{content_of(message)}{written}{_END}"


class DeepseekV32:
    """Variables: ``thinking``."""

    _family = families.V32
    _roles: Mapping[str, str] = {"user": "user", "assistant": "assistant", "tool": "tool", "system": "system"}

    @cached_property
    def source(self) -> str:
        return specimen(self)

    def render(self, messages: Sequence[Message], tools: Sequence[Message], variables: Mapping[str, object]) -> str:
        thinking = bool(variables.get("thinking", True))
        system, messages = _head(messages)
        turns = list(_turns(messages, self._roles, joined="tool"))
        last = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
        parts = [_BEGIN, system or "", texts.declared(texts.V32, self._family.call, tools)]
        header = _ASSISTANT
        for at, turn in enumerate(turns):
            match turn.role:
                case "user" | "system":
                    parts.append(_USER + content_of(turn.messages[0]))
                case "tool":
                    parts.append(self._outputs(turn))
                case "assistant":
                    parts.append(header + _assistant(self._family, turn.messages[0], thinking and at > last))
            header = "\n\n" if turn.role == "tool" else _ASSISTANT
        return "".join((*parts, header, "<think>" if thinking else "</think>"))

    def _outputs(self, turn: _Turn) -> str:
        outputs = (f"\n<result>{content_of(output)}</result>" for output in in_order(turn.messages, turn.calls))
        return f"\n\n<function_results>{''.join(outputs)}\n</function_results>"


class DeepseekV4:
    """Variables: ``thinking``, ``reasoning_effort`` ("low", "high", "max") and ``drop_thinking``."""

    _family = families.V4
    _roles: Mapping[str, str] = {"user": "user", "assistant": "assistant", "tool": "user", "system": "user"}

    @cached_property
    def source(self) -> str:
        return specimen(self)

    def render(self, messages: Sequence[Message], tools: Sequence[Message], variables: Mapping[str, object]) -> str:
        thinking = bool(variables.get("thinking", True))
        system, messages = _head(messages)
        turns = list(_turns(messages, self._roles, joined="user"))
        keeps = bool(tools) or variables.get("drop_thinking") is False
        last = -1 if keeps else max((at for at, turn in enumerate(turns) if self._asks(turn)), default=-1)
        effort = self._effort(variables.get("reasoning_effort")) if thinking else ""
        declared = texts.declared(texts.V4, self._family.call, tools)
        parts = [_BEGIN, self._first(system, effort, declared)]
        for at, turn in enumerate(turns):
            match turn.role:
                case "assistant":
                    parts.append(_ASSISTANT + _assistant(self._family, turn.messages[0], thinking and at > last))
                case "system":
                    parts.append(_SYSTEM + content_of(turn.messages[0]))
                case "user":
                    parts.append(_USER + self._inputs(turn))
        return "".join((*parts, _ASSISTANT, "<think>" if thinking else "</think>"))

    def _asks(self, turn: _Turn) -> bool:
        """Does the thinking before this turn end with it?"""
        return turn.role == "user" and any(message["role"] != "system" for message in turn.messages)

    def _effort(self, effort: object) -> str:
        text = texts.EFFORTS_V4.get(effort)
        if text is None:
            raise TemplateRefusal(f"there is no reasoning_effort {effort!r}")
        return text

    def _first(self, system: str | None, effort: str, declared: str) -> str:
        """What stands in front of all turns."""
        return effort + (system or "") + declared

    def _inputs(self, turn: _Turn) -> str:
        """User texts keep their places among the outputs."""
        outputs: Iterator[Any] = iter(
            in_order((message for message in turn.messages if message["role"] == "tool"), turn.calls)
        )
        return "\n\n".join(
            f"<tool_result>{content_of(next(outputs))}</tool_result>"
            if message["role"] == "tool"
            else content_of(message)
            for message in turn.messages
        )


class DeepseekV41(DeepseekV4):
    """Variables: ``thinking``, ``reasoning_effort`` (1 to 100) and ``drop_thinking``. System messages may stand
    anywhere."""

    _family = families.V41
    _roles: Mapping[str, str] = {"user": "user", "assistant": "assistant", "tool": "user", "system": "system"}

    def _asks(self, turn: _Turn) -> bool:
        return turn.role != "assistant" and any(message["role"] != "tool" for message in turn.messages)

    def _effort(self, effort: object) -> str:
        return texts.EFFORT_V41.format(texts.USUAL_EFFORT_V41 if effort is None else effort)

    def _first(self, system: str | None, effort: str, declared: str) -> str:
        said = effort + (system or "") + declared
        return _SYSTEM + said if said or system is not None else ""
