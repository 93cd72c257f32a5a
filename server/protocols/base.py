"""What every wire protocol provides: a reader of requests and a writer of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from parsers.conversation import Conversation
from server.errors import ApiError, Shape
from server.generate import GenerationEvent, Options, Usage
from sessions.tracker import RequestMeta

Sse = tuple[str, Mapping[str, Any] | str]
"""Event name ("" for none) and payload."""

_T = TypeVar("_T")
Items = Annotated[list[_T], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: only that one is reported, and millions would fill the memory."""
StopStrings = Annotated[Items[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=32)]
"""Every piece of an answer is searched for each of them."""


class Wire(BaseModel):
    """A value as clients send it: types are checked strictly, numbers are finite, unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


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


@dataclass(frozen=True)
class WireProtocol:
    """A protocol's error shape, and its reader: parsed JSON body, lower-case headers and namespace to a request.
    The reader raises ApiError or pydantic's ValidationError."""

    shape: Shape
    read: Callable[[object, Mapping[str, str], str], Inbound]


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError("invalid", message, param=param)
