"""A conversation as the server sees it: turns and blocks, independent of any wire protocol.

Every value here is immutable, so that a conversation can be hashed, compared and shared between requests. Order is
the client's order: a ``system`` turn in the middle of a conversation stays in the middle.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Text:
    """Visible text, from the user, the system or the assistant."""

    text: str


@dataclass(frozen=True)
class Thinking:
    """Reasoning text. ``ticket`` is the opaque string we gave the client with it (signature, encrypted_content)."""

    text: str
    ticket: str = ""


@dataclass(frozen=True)
class ToolCall:
    """A call made by the assistant. ``arguments`` is JSON text exactly as received (possibly invalid), or the raw
    input of a free-form tool (``freeform``)."""

    id: str
    name: str
    arguments: str
    freeform: bool = False


@dataclass(frozen=True)
class ToolOutput:
    """What the harness answered to the call with ``call_id``."""

    call_id: str
    text: str
    is_error: bool = False


Block = Text | Thinking | ToolCall | ToolOutput


@dataclass(frozen=True)
class Sampled:
    """The tokens an assistant turn was sampled as, kept so that history is never re-rendered.

    ``ids``: every sampled token id, end-of-turn token included if it was sampled.
    ``thinking_end``: how many leading ids belong to the thinking including its closing delimiter; 0 without thinking.
    ``thinking_rest``: the text of a token that straddles the end of thinking, past the delimiter; usually empty.
    ``opener``: the ids that stood between the assistant header and them in the prompt.
    """

    ids: tuple[int, ...]
    thinking_end: int = 0
    thinking_rest: str = ""
    opener: tuple[int, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One message. ``sampled`` is set by the session layer on assistant turns whose exact tokens are known."""

    role: Role
    blocks: tuple[Block, ...]
    sampled: Sampled | None = None


@dataclass(frozen=True)
class Tool:
    """A tool the assistant may call. ``freeform`` tools take raw text instead of JSON arguments. ``strict``: its schema
    is to be enforced; ``grammar``: what the raw text must follow, as (``lark`` or ``regex``, definition)."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    freeform: bool = False
    strict: bool = False
    grammar: tuple[Literal["lark", "regex"], str] | None = None


@dataclass(frozen=True)
class Conversation:
    """Everything the model reads, in the order the client sent it."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()


def same_tools(some: Sequence[Tool], others: Sequence[Tool]) -> bool:
    """Are they the same objects? That they are equal says too little: 1 is equal to true in a schema."""
    return some is others or (len(some) == len(others) and all(map(operator.is_, some, others)))
