"""What ``ft bench api`` asks: a conversation of one tool call after the other, as each protocol has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from parsers.load import Family

MODEL = "local-moe"
_LINE = 'def step_{n}(state: dict[str, int]) -> int:\n    return state["n"] + {n}  # {hash:x}\n'


def anthropic(steps: int, news: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look at all files."}]
    for step in range(steps):
        use = {"type": "tool_use", "id": f"toolu_{step:05}", "name": "read", "input": {"path": f"src/module_{step}.py"}}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": f"File {step} is next."}, use]})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": file(step)}
        messages.append({"role": "user", "content": [result]})
    for number in range(news):
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "Done."}]})
        messages.append({"role": "user", "content": f"And number {number}, please."})
    tool = {"name": "read", "description": "Reads a file", "input_schema": _SCHEMA}
    return {"model": MODEL, "max_tokens": 100, "stream": True, "tools": [tool], "messages": messages}


def responses(steps: int, news: int) -> dict[str, Any]:
    items: list[dict[str, Any]] = [_item("user", "Look at all files.")]
    for step in range(steps):
        call = {"call_id": f"call_{step:05}"}
        path = json.dumps({"path": f"src/module_{step}.py"})
        items.append(_item("assistant", f"File {step} is next."))
        items.append({"type": "function_call", "name": "read", "arguments": path, **call})
        items.append({"type": "function_call_output", "output": file(step), **call})
    for number in range(news):
        items += [_item("assistant", "Done."), _item("user", f"And number {number}, please.")]
    tool = {"type": "function", "name": "read", "description": "Reads a file", "strict": False, "parameters": _SCHEMA}
    return {"model": MODEL, "stream": True, "tools": [tool], "input": items, "prompt_cache_key": "bench"}


def chat(steps: int, news: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look at all files."}]
    for step in range(steps):
        name, arguments = f"call_{step:05}", json.dumps({"path": f"src/module_{step}.py"})
        call = {"id": name, "type": "function", "function": {"name": "read", "arguments": arguments}}
        messages.append({"role": "assistant", "content": f"File {step} is next.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": name, "content": file(step)})
    for number in range(news):
        messages.append({"role": "assistant", "content": "Done."})
        messages.append({"role": "user", "content": f"And number {number}, please."})
    tool = {"name": "read", "description": "Reads a file", "parameters": _SCHEMA}
    tools = [{"type": "function", "function": tool}]
    return {"model": MODEL, "stream": True, "tools": tools, "messages": messages, "session_id": "bench"}


_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
PROTOCOLS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "/v1/messages": anthropic,
    "/v1/responses": responses,
    "/v1/chat/completions": chat,
}


def _item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def file(step: int) -> str:
    """About 800 tokens of code."""
    return "".join(_LINE.format(n=step * 100 + line, hash=hash((step, line)) & 0xFFFF) for line in range(25))


def steps_of(family: Family, tokens: int) -> tuple[int, int]:
    """How many steps make a conversation of so many tokens, and how many they really are, about."""
    each = len(family.encode_raw(file(0))) + 60
    steps = max(1, tokens // each)
    return steps, steps * each
