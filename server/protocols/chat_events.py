"""OpenAI Chat Completions: answers out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from engine.api import TokenLogprob
from server import errors
from server.blocks import BlockDelta, BlockEnd, BlockStart
from server.errors import ApiError
from server.generate import Finished, GenerationEvent, Progress, Reason, Usage
from server.protocols.base import Sse

_FINISH_REASONS: dict[Reason, str] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "stop_sequence": "stop",
}
LogprobFormat = Callable[[Sequence[TokenLogprob]], list[dict[str, Any]]]


def logprob_format(decode: Callable[[Sequence[int]], str]) -> LogprobFormat:
    """Writes sampled tokens and their alternatives as this protocol does."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        text = decode((token_id,))
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    def write(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            {
                **token(entry.token, entry.logprob),
                "top_logprobs": [token(other, logprob) for other, logprob in entry.top],
            }
            for entry in entries
        ]

    return write


class ChatWriter:
    """``include_usage`` adds the chunk with usage that ends a stream; ``logprobs`` None: none asked for."""

    def __init__(self, model: str, *, include_usage: bool, logprobs: LogprobFormat | None) -> None:
        self._head: dict[str, Any] = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._format = logprobs
        self._thinking: list[str] = []
        self._text: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._finish_reason = ""
        self._usage: dict[str, Any] = {}
        self._call = -1
        """Index of the latest tool call."""
        self._freeform = False

    def begin(self, usage: Usage) -> list[Sse]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def write(self, event: GenerationEvent) -> list[Sse]:
        match event:
            case BlockStart(kind="tool_call"):
                self._call += 1
                self._freeform = event.freeform
                call = _called(event.id, event.name, "", event.freeform)
                return [self._chunk({"tool_calls": [{"index": self._call, **call}]})]
            case BlockStart():
                return []
            case BlockDelta():
                return self._delta(event)
            case BlockEnd():
                self._end(event)
                return []
            case Progress():
                return [self._chunk({})]
            case Finished():
                return self._finish(event)

    def failed(self, error: ApiError) -> list[Sse]:
        return [("", errors.body(error, "openai"))]

    def body(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._text) or None, "refusal": None}
        if self._thinking:
            message["reasoning_content"] = "".join(self._thinking)
        if self._calls:
            message["tool_calls"] = self._calls
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason, "logprobs": None}
        if self._format is not None:
            choice["logprobs"] = {"content": self._logprobs, "refusal": None}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": self._usage}

    def _delta(self, event: BlockDelta) -> list[Sse]:
        match event.kind:
            case "text":
                logprobs = self._format(event.logprobs) if self._format is not None else []
                self._logprobs.extend(logprobs)
                return [self._chunk({"content": event.text}, logprobs=logprobs)]
            case "thinking":
                return [self._chunk({"reasoning_content": event.text})]
            case "tool_call":
                piece = {"custom": {"input": event.text}} if self._freeform else {"function": {"arguments": event.text}}
                return [self._chunk({"tool_calls": [{"index": self._call, **piece}]})]

    def _end(self, event: BlockEnd) -> None:
        match event.kind:
            case "text":
                self._text.append(event.text)
            case "thinking":
                self._thinking.append(event.text)
            case "tool_call":
                self._calls.append(_called(event.id, event.name, event.text, event.freeform))

    def _finish(self, event: Finished) -> list[Sse]:
        self._finish_reason = _FINISH_REASONS[event.reason]
        self._usage = _usage(event.usage)
        out = [self._chunk({}, finish_reason=self._finish_reason)]
        if self._include_usage:
            out.append(("", {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage}))
        return [*out, ("", "[DONE]")]

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> Sse:
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
        }
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return "", {**chunk, "usage": None} if self._include_usage else chunk


def _called(call_id: str, name: str, text: str, freeform: bool) -> dict[str, Any]:
    if freeform:
        return {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.written},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
