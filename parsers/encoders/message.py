"""What encoders read off chat messages, and what makes an encoder stand for a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from parsers.template import TemplateRefusal

Message = Mapping[str, Any]


class Encoder(Protocol):
    """Stands for the chat template of checkpoints that have none. ``source`` is the same while it writes the same."""

    @property
    def source(self) -> str: ...

    def render(self, messages: Sequence[Message], tools: Sequence[Message], variables: Mapping[str, object]) -> str:
        """The text with the generation prompt. Raises TemplateRefusal."""
        ...


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: Mapping[str, Any] | None
    text: str
    """The arguments as they came, where they are no JSON object; ``arguments`` is None then."""


def content_of(message: Message) -> str:
    return message.get("content") or ""


def reasoning_of(message: Message) -> str:
    return message.get("reasoning_content") or ""


def calls_of(message: Message) -> list[Call]:
    return [_call(call.get("id", ""), call["function"]) for call in message.get("tool_calls") or ()]


def _call(identity: str, function: Message) -> Call:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, Mapping):
        return Call(identity, function["name"], arguments, "")
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return Call(identity, function["name"], value if isinstance(value, dict) else None, arguments)


def mapping_of(call: Call) -> Mapping[str, Any]:
    """Raises TemplateRefusal where the arguments are no JSON object."""
    if call.arguments is None:
        raise TemplateRefusal(f"the arguments of a call of {call.name} are no JSON object")
    return call.arguments


def in_order(outputs: Iterable[Message], calls: Sequence[Call]) -> list[Message]:
    """Outputs in the order of their calls; an output of no known call stays before those of later calls."""
    order = {call.id: at for at, call in reversed(list(enumerate(calls)))}
    return sorted(outputs, key=lambda output: order.get(output.get("tool_call_id", ""), 0))


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


SPECIMEN: tuple[Message, ...] = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "r",
        "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": {"k": "v", "n": 1}}},
            {"id": "2", "function": {"name": "f", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "o"},
    {"role": "tool", "tool_call_id": "2", "content": "p"},
)
"""Shows everything that an encoder writes: its rendering is the encoder's ``source``."""
SPECIMEN_TOOLS: tuple[Message, ...] = ({"type": "function", "function": {"name": "f", "description": "d"}},)


def specimen(encoder: Encoder) -> str:
    variants = (({"thinking": False}, ()), ({"thinking": True}, SPECIMEN_TOOLS))
    return "\0".join(encoder.render(SPECIMEN, tools, variables) for variables, tools in variants)
