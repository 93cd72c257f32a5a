"""Anthropic Messages: answers out."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

from pydantic_core import from_json

from server import errors
from server.answers import Finished, GenerationEvent, Progress, Reason, Usage
from server.blocks import BlockDelta, BlockEnd, BlockStart
from server.errors import ApiError
from server.protocols.base import Sse

_STOP_REASONS: dict[Reason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "stop_sequence": "stop_sequence",
}
_PING: Sse = ("ping", {"type": "ping"})


class AnthropicWriter:
    def __init__(self, model: str) -> None:
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._content: list[dict[str, Any]] = []

    def begin(self, usage: Usage) -> list[Sse]:
        message = {**self._message, "usage": _usage(usage)}
        return [("message_start", {"type": "message_start", "message": message}), _PING]

    def write(self, event: GenerationEvent) -> list[Sse]:
        match event:
            case BlockStart():
                return [_event("content_block_start", index=event.index, content_block=_empty_block(event))]
            case BlockDelta():
                return [_event("content_block_delta", index=event.index, delta=_delta(event))]
            case BlockEnd():
                return self._end(event)
            case Progress():
                return [_PING]
            case Finished():
                return self._finish(event)

    def failed(self, error: ApiError) -> list[Sse]:
        return [("error", errors.body(error, "anthropic"))]

    def body(self) -> dict[str, Any]:
        return self._message

    def _end(self, event: BlockEnd) -> list[Sse]:
        self._content.append(_whole_block(event))
        stop = _event("content_block_stop", index=event.index)
        if event.kind != "thinking":
            return [stop]
        signature = {"type": "signature_delta", "signature": event.id}
        return [_event("content_block_delta", index=event.index, delta=signature), stop]

    def _finish(self, event: Finished) -> list[Sse]:
        delta = {"stop_reason": _STOP_REASONS[event.reason], "stop_sequence": event.stop_string or None}
        usage = _usage(event.usage)
        self._message |= {"content": self._content, **delta, "usage": usage}
        return [_event("message_delta", delta=delta, usage=usage), _event("message_stop")]


def _event(name: str, /, **fields: Any) -> Sse:
    return name, {"type": name, **fields}


def _usage(usage: Usage) -> dict[str, Any]:
    """The three input counts add up to the prompt."""
    return {
        "input_tokens": usage.prompt - usage.cached - usage.written,
        "cache_creation_input_tokens": usage.written,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }


def _empty_block(start: BlockStart) -> dict[str, Any]:
    match start.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "tool_call":
            return {"type": "tool_use", "id": start.id, "name": start.name, "input": {}}


def _delta(delta: BlockDelta) -> dict[str, Any]:
    match delta.kind:
        case "text":
            return {"type": "text_delta", "text": delta.text}
        case "thinking":
            return {"type": "thinking_delta", "thinking": delta.text}
        case "tool_call":
            return {"type": "input_json_delta", "partial_json": delta.text}


def _whole_block(end: BlockEnd) -> dict[str, Any]:
    match end.kind:
        case "text":
            return {"type": "text", "text": end.text}
        case "thinking":
            return {"type": "thinking", "thinking": end.text, "signature": end.id}
        case "tool_call":
            return {"type": "tool_use", "id": end.id, "name": end.name, "input": _input(end.text)}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as the object that this protocol demands; what is none becomes one that no tool accepts, so
    that the harness tells the model about it."""
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False)
        json.dumps(value, allow_nan=False)  # numbers too large for a double were read as infinite
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"invalid_json": arguments}
