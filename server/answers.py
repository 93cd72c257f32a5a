"""What a request may ask for, and what its answers consist of: plain data between protocols and generation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from parsers.conversation import Tool
from parsers.format import Effort
from parsers.grammar import Demand
from server.blocks import BlockEvent
from sessions.tracker import ReuseReport

Reason = Literal["stop", "length", "tool_calls", "stop_sequence"]


@dataclass(frozen=True)
class Raw:
    """Prompts that are no conversation: text, in which nothing is a control token, or the very token ids."""

    prompts: tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True)
class Options:
    """What a request asks for besides its conversation. None: the model's default.

    ``demand``: what the answer must be. ``described_tools`` may be called too, though the prompt's head does not list
    them. ``strict_budget``: a ``max_tokens`` that does not fit the context is an error, else it is cut.
    ``closing_text`` is said when the model ends without any text or call. ``n`` answers are made.
    """

    max_tokens: int | None = None
    thinking: bool = True
    effort: Effort | None = None
    demand: Demand = field(default_factory=Demand)
    described_tools: tuple[Tool, ...] = ()
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    strict_budget: bool = False
    closing_text: str = ""
    n: int = 1


@dataclass(frozen=True)
class Usage:
    """Tokens. ``cached`` prompt tokens were restored, ``written`` more are covered by checkpoints now; the rest of
    ``prompt`` was computed and is not kept. ``reasoning`` are those of ``output`` that were thinking."""

    prompt: int
    cached: int = 0
    written: int = 0
    output: int = 0
    reasoning: int = 0

    @classmethod
    def of(cls, prompt: int, resumed: int, checkpoints: Iterable[int], *, output: int = 0, reasoning: int = 0) -> Usage:
        """``checkpoints``: the positions of those that are kept of the prompt and the answer."""
        kept = min(prompt, max(checkpoints, default=0))
        return cls(prompt, resumed, max(0, kept - resumed), output, reasoning)


@dataclass(frozen=True)
class Progress:
    """Nothing to say yet; the connection wants a sign of life."""

    choice: int = 0


@dataclass(frozen=True)
class Finished:
    reason: Reason
    stop_string: str
    usage: Usage
    session: str = ""
    choice: int = 0


GenerationEvent = BlockEvent | Progress | Finished


class Answering(Protocol):
    """What is being made for a request: see ``Generation``. Events of several answers say in ``choice`` whose they
    are; ``usage`` and ``report`` are then the first one's."""

    @property
    def usage(self) -> Usage: ...

    @property
    def report(self) -> ReuseReport | None: ...

    @property
    def session_id(self) -> str: ...

    @property
    def headers(self) -> dict[str, str]: ...

    def __aiter__(self) -> AsyncIterator[list[GenerationEvent]]: ...

    async def close(self) -> None: ...
