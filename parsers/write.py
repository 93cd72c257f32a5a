"""A format read the other way: blocks to the text a model of the family would generate.

The text is trusted: its control tokens are the format's own, because every string of a block went through the guard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from parsers.conversation import Block, Text, Thinking, Tool, ToolCall
from parsers.format import Format, JsonCall, Tagged, ToolsText
from parsers.guard import Guard
from parsers.schema import too_deep
from parsers.stream import FREEFORM_SCHEMA

ThinkingState = Literal["open", "unopened", "closed"]
"""What the prompt already holds: the opener of the thinking, nothing of it, or all of it (no thinking is wanted)."""


def assistant_text(wire_format: Format, guard: Guard, blocks: Sequence[Block], state: ThinkingState) -> str:
    """The text of an assistant turn without header and end. All thinking comes first, as models write it."""
    parts: list[str] = []
    think = wire_format.think
    thinking = thinking_of(blocks)
    if think and state != "closed" and (thinking or state == "open"):
        opener = "" if state == "open" else think.open + think.inner
        parts.append(f"{opener}{guard.text(thinking)}{think.inner}{think.close}{think.after}")
    written, calls = False, 0
    for block in blocks:
        if isinstance(block, Text) and block.text:
            parts.append(guard.text(block.text))
            written = True
        elif isinstance(block, ToolCall):
            if written:
                parts.append(wire_format.call.between if calls else wire_format.call.first)
            parts.append(call_text(wire_format, guard, block))
            written, calls = True, calls + 1
    return "".join(parts)


def call_text(wire_format: Format, guard: Guard, block: ToolCall) -> str:
    """One call with its wrapper."""
    call = wire_format.call
    match call.codec:
        case JsonCall(names, arguments):
            name = json.dumps(guard.text(block.name), ensure_ascii=False)
            body = f'{{"{names[0]}": {name}, "{arguments[0]}": {guard.text(arguments_text(block))}}}'
        case Tagged() as codec:
            edge = "\n" if codec.trim == "newline" else ""
            body = f"{codec.head}{guard.text(block.name)}{codec.head_end}\n"
            for key, value in arguments_mapping(block).items():
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                key_text, value_text = guard.text(key), guard.text(text)
                body += f"{codec.open}{key_text}{codec.open_end}{edge}{value_text}{edge}{codec.close}\n"
            body += codec.tail
    return f"{call.open}{call.inner}{body}{call.inner}{call.close}"


def thinking_of(blocks: Sequence[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, Thinking) and block.text)


def arguments_text(block: ToolCall) -> str:
    """The arguments as JSON text, verbatim; a free-form tool's input as the one string ``input``."""
    if block.freeform:
        return json.dumps({"input": block.arguments}, ensure_ascii=False)
    return block.arguments.strip() or "{}"


def arguments_mapping(block: ToolCall) -> dict[str, Any]:
    """The arguments decoded once, order kept. Text that is no JSON object, or one that is nested too deeply to be
    written again, becomes the one string ``input``."""
    text = arguments_text(block)
    try:
        value = json.loads(text, parse_float=_finite)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) and not too_deep(value) else {"input": block.arguments}


def _finite(text: str) -> float | str:
    """A number too large for a float keeps its spelling, as text."""
    value = float(text)
    return text if value in (float("inf"), float("-inf")) else value


def tool_descriptions(guard: Guard, tools: Sequence[Tool]) -> list[dict[str, object]]:
    """Tools in the shape that chat templates expect."""
    return [
        {
            "type": "function",
            "function": {
                "name": guard.text(tool.name),
                "description": guard.text(tool.description),
                "parameters": guard.value(_plain(FREEFORM_SCHEMA if tool.freeform else tool.parameters)),
            },
        }
        for tool in tools
    ]


def tools_text(text: ToolsText, descriptions: Sequence[Mapping[str, object]]) -> str:
    """The declaration of tools where the template has none."""
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in descriptions)
    return text.before + lines + text.after


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return dict(parameters)
