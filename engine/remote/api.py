"""A remote engine: another server that computes for us. What is asked of it, what it says of itself, what it sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from engine.api import Request, TokenLogprob

_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""No token is chosen for the model, not even where the grammar leaves only one text."""

_NEVER = -9999.0
SILENCE_SECONDS = 600.0
"""From one event of an answer that has begun to the next. The first may take as long as it takes."""


class RemoteError(Exception):
    """Why the remote engine cannot be used, in one line that says what to do. No key is in it."""


@dataclass(frozen=True)
class Address:
    """``key``: a bearer token; "" for none. ``model``: which of the remote's models to ask for; "" its first."""

    url: str
    key: str = field(default="", repr=False)
    model: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """What our side reads and writes tokens with: a model's folder, of which no weights are needed.

    ``context_length`` 0: not known. Whoever has the same vocabulary reads ``sample`` as ``sample_ids``. ``prompt`` is a
    short one, from the model's template. ``grammar`` allows ``grammar_ids`` alone; the last of them ends the answer.
    """

    path: str
    architecture: str
    vocab_size: int
    context_length: int
    sample: str
    sample_ids: tuple[int, ...]
    prompt: tuple[int, ...]
    grammar: str
    grammar_ids: tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """What a remote engine said of itself, or was seen to do.

    ``context_length``: 0 until it is known; no request may have the last ``spare`` tokens of what it says. ``weights``:
    their version. ``repeats``: each event holds the whole answer up to then, not what is new. ``seeds``: equal seeds
    give equal answers. ``token_ids``: it has a field for them; else they come as names of log probabilities.
    ``grammars``: it follows ours. ``same_vocabulary``: it was asked, and has ours; else it cannot be asked.
    """

    version: str
    model: str
    context_length: int
    spare: int = 0
    weights: str = ""
    repeats: bool = False
    seeds: bool = True
    token_ids: bool = True
    grammars: bool = False
    same_vocabulary: bool = False


@dataclass(frozen=True)
class Cached:
    """Tokens of a prompt that were not computed, by tier; ``unnamed`` where the remote does not say which."""

    device: int = 0
    host: int = 0
    disk: int = 0
    unnamed: int = 0

    @property
    def believable(self) -> bool:
        return min(self.device, self.host, self.disk, self.unnamed) >= 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk + self.unnamed


@dataclass(frozen=True)
class Problem:
    """An error in the terms of HTTP."""

    status: int
    message: str


class Error(BaseModel):
    """As both kinds of servers write it in an event."""

    message: str = "no message"
    code: int | str | None = None


def problem(error: Error | str, otherwise: int) -> Problem:
    """``otherwise``: the status where none is told."""
    if isinstance(error, str):
        return Problem(otherwise, error)
    return Problem(error.code if isinstance(error.code, int) and error.code else otherwise, error.message)


def finite(logprob: float | None) -> float:
    """JSON has no infinity: null, or no number, stands for what cannot be sampled."""
    return min(logprob, 0.0) if logprob is not None and logprob > _NEVER else _NEVER


@dataclass(frozen=True)
class Chunk:
    """What one event of an answer says. ``reason``: why it ended, in the remote's words; "" while it goes on.
    ``matched``: the token that ended it, where that is told."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cached: Cached | None = None
    reason: str = ""
    matched: int | None = None
    problem: Problem | None = None


class Dialect(Protocol):
    """How one kind of server is spoken to. ``reports_first``: its first event tells what was cached. ``grammar_hint``:
    how it is started to follow our grammars."""

    kind: str
    title: str
    path: str
    reports_first: bool
    grammar_hint: str

    def variants(self, facts: Facts) -> tuple[Facts, Facts]:
        """How it may write token ids: as its facts say, or else in another way."""
        ...

    def body(self, request: Request, facts: Facts) -> dict[str, Any]: ...

    def chunk(self, event: str, sampled: Sequence[int], facts: Facts) -> Chunk:
        """``sampled``: the answer up to then. Raises ValueError for what is no event of this kind of server."""
        ...

    def abort(self, request_id: str) -> tuple[str, Mapping[str, Any]] | None:
        """Path and body of what ends a request, where closing its connection may not be enough."""
        ...


def ended_by(constraint: str, stop_tokens: Sequence[int]) -> str:
    """The grammar with its end written out: other engines know one end of text, and models have several. The first
    line of ours is always its start."""
    head, rest = constraint.split("\n", 1)
    answer = head.removeprefix("start: ")
    ends = ",".join(map(str, stop_tokens))
    return f"{_OPTIONS}start: ( {answer} ) <[{ends}]>\n{rest}"
