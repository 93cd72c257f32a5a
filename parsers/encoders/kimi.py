"""Kimi K3, whose checkpoints come with Python instead of a template.

Every message is an element. Tools and the effort are system messages of their own in front of the conversation; an
assistant message has channels for thinking (while thinking is on, in every one) and for its answer, and its calls.
Outputs name their tool and are numbered, in the order of the calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from parsers.codecs.writers import Written, spelled
from parsers.encoders.message import Message, calls_of, content_of, in_order, reasoning_of, specimen
from parsers.families.kimi import K3
from parsers.template import TemplateRefusal
from parsers.write import calls_text

_EFFORTS = ("low", "high", "max")
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"


class KimiK3:
    """Variables: ``thinking`` and ``thinking_effort`` ("max" unless given)."""

    @cached_property
    def source(self) -> str:
        return specimen(self)

    def render(self, messages: Sequence[Message], tools: Sequence[Message], variables: Mapping[str, object]) -> str:
        thinking = bool(variables.get("thinking", True))
        effort = variables.get("thinking_effort", "max")
        if effort not in _EFFORTS:
            raise TemplateRefusal(f"there is no thinking_effort {effort!r}")
        parts: list[str] = []
        if tools:
            declared = json.dumps(_sorted(tools), ensure_ascii=False, separators=(",", ":"))
            parts.append(_message(_TOOLS.replace("{}", declared), role="system", type="tool-declare"))
        if thinking:
            parts.append(_message(_EFFORT.format(effort), role="system", type="thinking-effort"))
        calls: list[Written] = []
        for role, group in groupby(messages, lambda message: message["role"]):
            if role == "tool":
                parts.extend(_outputs(list(group), calls))
                continue
            for message in group:
                calls = calls_of(message)
                body = _assistant(message, calls, thinking) if role == "assistant" else content_of(message)
                parts.append(_message(body, role=role))
        channel = "think" if thinking else "response"
        return "".join((*parts, _open("message", role="assistant"), _open(channel)))


def _open(tag: str, **attributes: object) -> str:
    written = (f' {key}="{spelled(K3.call.codec, str(value))}"' for key, value in attributes.items())
    return f"<|open|>{tag}{''.join(written)}<|sep|>"


def _element(tag: str, body: str, **attributes: object) -> str:
    return f"{_open(tag, **attributes)}{body}<|close|>{tag}<|sep|>"


def _message(body: str, **attributes: object) -> str:
    return _element("message", body, **attributes) + "<|end_of_msg|>"


def _assistant(message: Message, calls: Sequence[Written], thinking: bool) -> str:
    reasoning = reasoning_of(message)
    channel = _element("think", reasoning if reasoning.strip() else "") if thinking else ""
    written = calls_text(K3.call, calls, behind_text=True) if calls else ""
    return channel + _element("response", content_of(message)) + written


def _outputs(outputs: Sequence[Message], calls: Sequence[Written]) -> Iterator[str]:
    """The calls' order only counts when every output has its call; the number of an output is its place."""
    names = {call.id: call.name for call in reversed(calls)}
    known = all(output.get("tool_call_id") in names for output in outputs)
    for number, output in enumerate(in_order(outputs, calls) if known else outputs, 1):
        place = calls[number - 1].name if number <= len(calls) else None
        name = names[output["tool_call_id"]] if known else output.get("name") or place
        if name is None:
            raise TemplateRefusal("a tool output must follow the call that it belongs to")
        yield _message(content_of(output), role="tool", tool=name, index=number)


def _sorted(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _sorted(value[key]) for key in sorted(value)}
        case list() | tuple():
            return [_sorted(item) for item in value]
    return value
