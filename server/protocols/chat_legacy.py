"""Chat Completions as it was before tools: ``functions``, of which an answer calls one at most, without an id."""

from __future__ import annotations

from typing import Any

from server.errors import ApiError
from server.generate import GenerationEvent, Usage
from server.protocols.base import Sse, Writer, invalid


def modern(body: object) -> tuple[object, bool]:
    """The request with tools in place of functions, and whether it had functions. What is malformed stays as it is, for
    the reader to complain of. Raises ApiError."""
    if not isinstance(body, dict):
        return body, False
    functions, choice = body.get("functions"), body.get("function_call")
    messages = body.get("messages")
    out = {name: value for name, value in body.items() if name not in ("functions", "function_call")}
    if isinstance(messages, list):
        out["messages"] = _messages(messages)
    if functions is None and choice is None:
        return out, False
    if body.get("tools") is not None or body.get("tool_choice") is not None:
        raise invalid("functions are what tools were called before: send one of the two", "functions")
    if not isinstance(functions, list) or not functions:
        raise invalid("functions: at least one function is required", "functions")
    out |= {"tools": [{"type": "function", "function": one} for one in functions], "parallel_tool_calls": False}
    if choice is not None:
        out["tool_choice"] = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
    return out, True


def _messages(messages: list[Any]) -> list[Any]:
    """Calls get an id each, which the next output names."""
    out: list[Any] = []
    latest = ""
    for at, message in enumerate(messages):
        call = message.get("function_call") if isinstance(message, dict) else None
        if call is not None and message.get("role") == "assistant":
            latest = f"call_{at}"
            message = {**message, "tool_calls": [{"id": latest, "type": "function", "function": call}]}
        elif isinstance(message, dict) and message.get("role") == "function":
            if not latest:
                raise invalid(f"messages.{at}: a function's message follows the call that it answers", f"messages.{at}")
            message = {**message, "role": "tool", "tool_call_id": latest}
        out.append(message)
    return out


class LegacyWriter:
    """Writes what another writer does, with the one call as a ``function_call``."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def begin(self, usage: Usage) -> list[Sse]:
        return [_legacy_event(event) for event in self._writer.begin(usage)]

    def write(self, event: GenerationEvent) -> list[Sse]:
        return [_legacy_event(one) for one in self._writer.write(event)]

    def failed(self, error: ApiError) -> list[Sse]:
        return self._writer.failed(error)

    def body(self) -> dict[str, Any]:
        return _legacy(self._writer.body(), "message")


def _legacy_event(event: Sse) -> Sse:
    name, payload = event
    return name, payload if isinstance(payload, str) else _legacy(dict(payload), "delta")


def _legacy(body: dict[str, Any], where: str) -> dict[str, Any]:
    choices = []
    for choice in body.get("choices", ()):
        said = dict(choice[where])
        if calls := said.pop("tool_calls", None):
            said["function_call"] = calls[0]["function"]
        reason = choice["finish_reason"]
        choices.append({**choice, where: said, "finish_reason": "function_call" if reason == "tool_calls" else reason})
    return {**body, "choices": choices}
