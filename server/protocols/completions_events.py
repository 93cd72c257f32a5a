"""OpenAI Completions: answers out."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.api import TokenLogprob
from server.answers import Finished, GenerationEvent, Progress, Usage
from server.blocks import BlockDelta, BlockEnd, BlockStart
from server.protocols.base import Sse
from server.protocols.chunks import ChunkWriter

TokenBytes = Callable[[int], bytes]


class _Logprobs:
    """Of one answer, as this protocol has them: lists, one entry each for a token. A token that is no whole text is
    spelled as ``bytes:`` and escapes. Offsets are in characters of the answer's text."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            out["tokens"].append(self._spelled(entry.token))
            out["token_logprobs"].append(entry.logprob)
            out["top_logprobs"].append(self._best(entry))
            out["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._token_bytes(entry.token)))
        return out

    def _best(self, entry: TokenLogprob) -> dict[str, float]:
        """The best, and the one that was sampled. Where two are spelled alike, the better one."""
        best: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            best.setdefault(self._spelled(token), logprob)
        return best

    def _spelled(self, token: int) -> str:
        data = self._token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass
class _Choice:
    prefix: str
    logprobs: _Logprobs | None
    text: list[str] = field(default_factory=list)
    written: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str = ""


class CompletionsWriter(ChunkWriter):
    """``n`` answers to each of ``prompts``, in their order; ``echo`` begins each with its prompt."""

    def __init__(
        self,
        model: str,
        prompts: Sequence[str | tuple[int, ...]],
        *,
        n: int,
        echo: bool,
        include_usage: bool,
        logprobs: bool,
        token_bytes: TokenBytes,
    ) -> None:
        answers = n * len(prompts)
        super().__init__("cmpl", "text_completion", model, n=n, answers=answers, include_usage=include_usage)
        self._choices = [
            _Choice(_spelled(prompt, token_bytes) if echo else "", _Logprobs(token_bytes) if logprobs else None)
            for prompt in prompts
            for _ in range(n)
        ]

    def begin(self, usage: Usage) -> list[Sse]:
        return [self._chunk(at, choice.prefix) for at, choice in enumerate(self._choices) if choice.prefix]

    def write(self, event: GenerationEvent) -> list[Sse]:
        match event:
            case BlockDelta():
                return [self._delta(event)]
            case BlockStart() | BlockEnd():
                return []
            case Progress():
                return [self._chunk(event.choice, "")]
            case Finished():
                return self._finish(event)

    def body(self) -> dict[str, Any]:
        choices = [
            {
                "text": choice.prefix + "".join(choice.text),
                "index": at,
                "logprobs": None if choice.logprobs is None else choice.written or choice.logprobs.write(()),
                "finish_reason": choice.finish_reason,
            }
            for at, choice in enumerate(self._choices)
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _delta(self, event: BlockDelta) -> Sse:
        choice = self._choices[event.choice]
        choice.text.append(event.text)
        if choice.logprobs is None:
            return self._chunk(event.choice, event.text)
        written = choice.logprobs.write(event.logprobs)
        for name, values in written.items():
            choice.written.setdefault(name, []).extend(values)
        return self._chunk(event.choice, event.text, logprobs=written)

    def _finish(self, event: Finished) -> list[Sse]:
        reason = "length" if event.reason == "length" else "stop"
        self._choices[event.choice].finish_reason = reason
        return [self._chunk(event.choice, "", finish_reason=reason), *self._ended(event)]

    def _chunk(
        self,
        index: int,
        text: str,
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, list[Any]] | None = None,
    ) -> Sse:
        choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunk_of(choice)


def _spelled(prompt: str | tuple[int, ...], token_bytes: TokenBytes) -> str:
    return prompt if isinstance(prompt, str) else b"".join(map(token_bytes, prompt)).decode(errors="replace")
