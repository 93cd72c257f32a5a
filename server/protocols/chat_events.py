"""OpenAI Chat Completions: answers out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from server.answers import Finished, GenerationEvent, Progress, Reason, Usage
from server.blocks import BlockDelta, BlockEnd, BlockStart
from server.logprobs import LogprobFormat
from server.protocols.base import Sse
from server.protocols.chunks import ChunkWriter

_FINISH_REASONS: dict[Reason, str] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "stop_sequence": "stop",
}


@dataclass
class _Choice:
    """What one answer has said so far. ``call``: index of its latest tool call."""

    thinking: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    call: int = -1
    freeform: bool = False
    finish_reason: str = ""

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.text) or None, "refusal": None}
        if self.thinking:
            message["reasoning_content"] = "".join(self.thinking)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class ChatWriter(ChunkWriter):
    """``logprobs`` None: none asked for."""

    def __init__(self, model: str, *, n: int, include_usage: bool, logprobs: LogprobFormat | None) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk", model, n=n, answers=n, include_usage=include_usage)
        self._format = logprobs
        self._choices = [_Choice() for _ in range(n)]

    def begin(self, usage: Usage) -> list[Sse]:
        return [self._chunk(at, {"role": "assistant", "content": ""}) for at in range(len(self._choices))]

    def write(self, event: GenerationEvent) -> list[Sse]:
        match event:
            case BlockDelta():
                return [self._delta(event)]
            case BlockStart(kind="tool_call"):
                choice = self._choices[event.choice]
                choice.call += 1
                choice.freeform = event.freeform
                call = _called(event.id, event.name, "", event.freeform)
                return [self._chunk(event.choice, {"tool_calls": [{"index": choice.call, **call}]})]
            case BlockStart():
                return []
            case BlockEnd():
                self._end(event)
                return []
            case Progress():
                return [self._chunk(event.choice, {})]
            case Finished():
                return self._finish(event)

    def body(self) -> dict[str, Any]:
        choices = [
            {
                "index": at,
                "message": choice.message,
                "finish_reason": choice.finish_reason,
                "logprobs": None if self._format is None else {"content": choice.logprobs, "refusal": None},
            }
            for at, choice in enumerate(self._choices)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    def _delta(self, event: BlockDelta) -> Sse:
        choice = self._choices[event.choice]
        match event.kind:
            case "text":
                logprobs = self._format(event.logprobs) if self._format is not None else []
                choice.logprobs.extend(logprobs)
                return self._chunk(event.choice, {"content": event.text}, logprobs=logprobs)
            case "thinking":
                return self._chunk(event.choice, {"reasoning_content": event.text})
            case "tool_call":
                name, key = ("custom", "input") if choice.freeform else ("function", "arguments")
                return self._chunk(event.choice, {"tool_calls": [{"index": choice.call, name: {key: event.text}}]})

    def _end(self, event: BlockEnd) -> None:
        choice = self._choices[event.choice]
        match event.kind:
            case "text":
                choice.text.append(event.text)
            case "thinking":
                choice.thinking.append(event.text)
            case "tool_call":
                choice.calls.append(_called(event.id, event.name, event.text, event.freeform))

    def _finish(self, event: Finished) -> list[Sse]:
        reason = self._choices[event.choice].finish_reason = _FINISH_REASONS[event.reason]
        return [self._chunk(event.choice, {}, finish_reason=reason), *self._ended(event)]

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> Sse:
        choice = {
            "index": index,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
        }
        return self._chunk_of(choice)


def _called(call_id: str, name: str, text: str, freeform: bool) -> dict[str, Any]:
    if freeform:
        return {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
