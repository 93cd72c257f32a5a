"""What every wire protocol provides: a reader of requests and a writer of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from parsers.conversation import Conversation, Turn
from server.answers import GenerationEvent, Options, Raw, Usage
from server.errors import ApiError, Shape
from sessions.tracker import RequestMeta

Sse = tuple[str, Mapping[str, Any] | str]
"""Event name ("" for none) and payload."""

_T = TypeVar("_T")
_NEWS = 16
"""How many messages a request usually adds to the one before, at most."""
Items = Annotated[list[_T], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: errors for millions of items would fill the memory."""
StopStrings = Annotated[Items[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=32)]
"""Every piece of an answer is searched for each of them."""


class Wire(BaseModel):
    """A value as clients send it: types are checked strictly, numbers are finite, unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    @cached_property
    def made(self) -> dict[str, Any]:
        """A cache of what was made of this value, by name: messages come again with each request (``bodies``)."""
        return {}


def turns_before(items: Sequence[Wire]) -> tuple[int, tuple[Turn, ...]]:
    """How many of these items became turns in an earlier request (``keep_turns``), and those turns."""
    for at in range(len(items) - 1, max(len(items) - _NEWS, 0), -1):
        turns = items[at].made.pop("before", None)
        if turns is not None:
            return at, turns
    return 0, ()


def keep_turns(item: Wire, turns: tuple[Turn, ...]) -> None:
    """Remembers ``turns``, which the items before this one became. An item is always preceded by the same items."""
    item.made["before"] = turns


class Writer(Protocol):
    """Formats one answer. Fed with every event, it gives a stream; ``body`` gives the whole answer at the end."""

    def begin(self, usage: Usage) -> list[Sse]: ...

    def write(self, event: GenerationEvent) -> list[Sse]: ...

    def failed(self, error: ApiError) -> list[Sse]:
        """The end of a stream that cannot go on."""
        ...

    def body(self) -> dict[str, Any]:
        """The answer to a request that wanted no stream; valid after ``Finished`` was written."""
        ...


@dataclass(frozen=True)
class Inbound:
    """A request, read."""

    conversation: Conversation
    options: Options
    meta: RequestMeta
    stream: bool
    writer: Writer
    answered: bool = True
    """False: only what it begins with is to be computed."""

    raw: Raw | None = None
    """Prompts in place of the conversation."""

    request: Wire | None = None
    """As it was checked, where its messages are worth remembering."""

    @property
    def choices(self) -> int:
        """How many answers it wants."""
        return self.options.n * (1 if self.raw is None else len(self.raw.prompts))


@dataclass(frozen=True)
class WireProtocol:
    """A protocol's error shape, and its reader: parsed JSON body, lower-case headers and namespace to a request.
    The reader raises ApiError or pydantic's ValidationError. ``field`` has the messages."""

    shape: Shape
    read: Callable[[object, Mapping[str, str], str], Inbound]
    field: str = ""


MOST_CHOICES = 16
"""Answers to one request: each takes a place in the engine's queue."""


def no_media(kind: str, where: str) -> ApiError:
    """``where``: the path of the very item."""
    return invalid(f"{where}: {kind} is not supported: this model reads text only", where)


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError("invalid", message, param=param)
