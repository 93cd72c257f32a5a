"""A format read the other way: blocks to the text a model of the family would generate.

The text is trusted: its control tokens are the format's own, because every string of a block went through the guard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from parsers.codecs.writers import Written, spelled
from parsers.codecs.writers import arguments_text as codec_text
from parsers.conversation import Block, Text, Thinking, Tool, ToolCall
from parsers.format import Answer, Call, Format, Frames, JsonCall, PythonCalls, Tagged, Think, ToolsText
from parsers.guard import Guard
from parsers.schema import FREEFORM_SCHEMA, too_deep

ThinkingState = Literal["open", "unopened", "closed"]
"""What the prompt already holds: the opener of the thinking, nothing of it, or all of it (no thinking is wanted)."""


def assistant_text(
    wire_format: Format, guard: Guard, blocks: Sequence[Block], state: ThinkingState, first_call: int = 0
) -> str:
    """The text of an assistant turn without header and end. All thinking comes first, as models write it.
    ``first_call`` is how many calls the conversation has before this turn."""
    thinking = guard.text(thinking_of(blocks)) if state != "closed" else ""
    groups = _groups(blocks, guard, first_call)
    if wire_format.frames:
        return _framed(wire_format, wire_format.frames, thinking, groups)
    parts = [_thinking(wire_format.think, thinking, state)] if wire_format.think else []
    if wire_format.answer and wire_format.answer.always and not any(isinstance(group, str) for group in groups):
        parts.append(_wrapped(wire_format.answer, ""))
    written = False
    for group in groups:
        if isinstance(group, str):
            parts.append(_wrapped(wire_format.answer, group))
        else:
            parts.append(calls_text(wire_format.call, group, written))
        written = True
    return "".join(parts)


def _groups(blocks: Sequence[Block], guard: Guard, first_call: int) -> list[str | list[Written]]:
    """Text, and runs of calls, in order."""
    found: list[str | list[Written]] = []
    run: list[Written] = []
    calls = 0
    for block in blocks:
        if isinstance(block, Text) and block.text:
            found.append(guard.text(block.text))
            run = []
        elif isinstance(block, ToolCall):
            if not run:
                found.append(run)
            arguments = {guard.text(key): guard.value(value) for key, value in arguments_mapping(block).items()}
            name, identity, verbatim = map(guard.text, (block.name, block.id, arguments_text(block)))
            run.append(Written(name, identity, arguments, verbatim, first_call + calls, calls + 1))
            calls += 1
    return found


def _thinking(think: Think, text: str, state: ThinkingState) -> str:
    if state == "closed" or (state == "unopened" and not text):
        return ""
    opener = "" if state == "open" else think.open + think.inner
    return f"{opener}{text}{think.inner}{think.close}{think.after}"


def _wrapped(answer: Answer | None, text: str) -> str:
    return f"{answer.open}{answer.inner}{text}{answer.inner}{answer.close}" if answer else text


def calls_text(call: Call, calls: Sequence[Written], behind_text: bool) -> str:
    """Calls that follow each other."""
    inside = call.between.join(_call(call, one) for one in calls)
    if isinstance(call.codec, JsonCall | PythonCalls) and call.codec.many:
        inside = f"[{inside}]"
    if call.section and not (call.bare and not behind_text):
        inside = f"{call.section.open}{call.around}{inside}{call.around}{call.section.close}"
    return call.first + inside if behind_text or call.first_alone else inside


def _call(call: Call, one: Written) -> str:
    """One call with its own wrapper."""
    name, header = spelled(call.codec, one.name), call.header
    for hole, value in (("{n}", str(one.number)), ("{n1}", str(one.ordinal)), ("{id}", one.id), ("{name}", name)):
        header = header.replace(hole, value)
    body = codec_text(call.codec, one)
    if isinstance(call.codec, Tagged) and header.endswith(call.codec.between):
        body = body.removeprefix(call.codec.between)
    return f"{call.open}{call.inner}{header}{body}{call.tail}{call.inner}{call.close}"


def _framed(wire_format: Format, frames: Frames, thinking: str, groups: Sequence[str | list[Written]]) -> str:
    """Messages; the first has its start in the prompt, and the last ends with the turn unless its call ends that."""
    messages = [(frames.thinking, thinking, frames.ends[0])] if thinking else []
    for number, group in enumerate(groups):
        if isinstance(group, str):
            before_call = any(not isinstance(later, str) for later in groups[number:])
            header = frames.preamble if before_call and frames.preamble else frames.text
            messages.append((header, group, frames.ends[0]))
            continue
        for one in group:
            header = frames.call.replace("{name}", one.name)
            messages.append((header, calls_text(wire_format.call, [one], behind_text=False), frames.ends[0]))
    if groups and not isinstance(groups[-1], str) and frames.call_end in wire_format.ends:
        messages[-1] = (*messages[-1][:2], frames.call_end)
    elif messages:
        messages[-1] = (*messages[-1][:2], "")
    return frames.start.join(f"{header}{frames.message}{body}{end}" for header, body, end in messages)


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
        value = json.loads(text, parse_float=_finite, parse_int=_counted)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) and not too_deep(value) else {"input": block.arguments}


def _finite(text: str) -> float | str:
    """A number too large for a float keeps its spelling, as text."""
    value = float(text)
    return text if value in (float("inf"), float("-inf")) else value


def _counted(text: str) -> int | str:
    """The same for an integer of more digits than Python reads or writes."""
    return int(text) if len(text) <= 4000 else text


def tool_descriptions(guard: Guard, tools: Sequence[Tool]) -> list[dict[str, object]]:
    """Tools in the shape that chat templates expect."""
    return [
        {
            "type": "function",
            "function": {
                "name": guard.text(tool.name),
                "description": guard.text(tool.description),
                "parameters": guard.value(dict(FREEFORM_SCHEMA if tool.freeform else tool.parameters)),
            },
        }
        for tool in tools
    ]


def tools_text(text: ToolsText, descriptions: Sequence[Mapping[str, object]]) -> str:
    """The declaration of tools where the template has none."""
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in descriptions)
    return text.before + lines + text.after
