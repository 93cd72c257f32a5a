"""What Chat Completions and Completions write alike: chunks of several answers, and their usage."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from server import errors
from server.answers import Finished, Usage
from server.errors import ApiError
from server.protocols.base import Sse


class ChunkWriter:
    """``answers`` to one request, ``n`` to each prompt. ``include_usage`` adds the chunk with usage that ends a
    stream."""

    def __init__(self, prefix: str, kind: str, model: str, *, n: int, answers: int, include_usage: bool) -> None:
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._n = n
        self._answers = answers
        self._include_usage = include_usage
        self._usages: dict[int, Usage] = {}

    def failed(self, error: ApiError) -> list[Sse]:
        return [("", errors.body(error, "openai"))]

    def _chunk_of(self, choice: Mapping[str, Any]) -> Sse:
        chunk = {**self._head, "choices": [choice]}
        return "", {**chunk, "usage": None} if self._include_usage else chunk

    def _ended(self, event: Finished) -> list[Sse]:
        """What follows the last chunk of an answer: the end of the stream, if it was the last answer."""
        self._usages[event.choice] = event.usage
        if len(self._usages) < self._answers:
            return []
        usage = [("", {**self._head, "choices": [], "usage": self._usage()})] if self._include_usage else []
        return [*usage, ("", "[DONE]")]

    def _usage(self) -> dict[str, Any]:
        """Of all answers. Each prompt counts once, whatever the number of its answers."""
        firsts = [usage for choice, usage in self._usages.items() if choice % self._n == 0]
        prompt = sum(usage.prompt for usage in firsts)
        cached, written = sum(usage.cached for usage in firsts), sum(usage.written for usage in firsts)
        output = sum(usage.output for usage in self._usages.values())
        reasoning = sum(usage.reasoning for usage in self._usages.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }
