"""Chat Completions as it was before tools: ``functions``, of which an answer calls one at most, without an id."""

from __future__ import annotations

from typing import Any

from server.answers import GenerationEvent, Usage
from server.errors import ApiError
from server.protocols.base import Sse, Writer


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
