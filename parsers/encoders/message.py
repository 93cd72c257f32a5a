"""What encoders read off chat messages, and what makes an encoder stand for a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from parsers.codecs.writers import Written
from parsers.template import TemplateRefusal

Message = Mapping[str, Any]


class Encoder(Protocol):
    """Stands for the chat template of checkpoints that have none. ``source`` is the same while it writes the same."""

    @property
    def source(self) -> str: ...

    def render(self, messages: Sequence[Message], tools: Sequence[Message], variables: Mapping[str, object]) -> str:
        """The text with the generation prompt. Raises TemplateRefusal."""
        ...


def content_of(message: Message) -> str:
    return message.get("content") or ""


def reasoning_of(message: Message) -> str:
    return message.get("reasoning_content") or ""


def calls_of(message: Message) -> list[Written]:
    """Raises TemplateRefusal where arguments are no object."""
    found = []
    for ordinal, call in enumerate(message.get("tool_calls") or (), 1):
        name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
        if not isinstance(arguments, Mapping):
            raise TemplateRefusal(f"the arguments of a call of {name} are no object")
        found.append(Written(name, call.get("id", ""), arguments, ordinal=ordinal))
    return found


def in_order(outputs: Iterable[Message], calls: Sequence[Written]) -> list[Message]:
    """Outputs in the order of their calls; an output of no known call stays before those of later calls."""
    order = {call.id: at for at, call in reversed(list(enumerate(calls)))}
    return sorted(outputs, key=lambda output: order.get(output.get("tool_call_id", ""), 0))


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
