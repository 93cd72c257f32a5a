"""What a parser says about generated tokens. Wire protocols only translate these; they never look at text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BoundaryKind = Literal["thinking_start", "thinking_end", "tool_call_start", "tool_call_end", "turn_end"]


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ThinkingDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The name is final. ``index`` counts the calls of this turn from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolArgsDelta:
    """A fragment of the JSON text of the arguments; fragments concatenate to the whole text."""

    index: int
    fragment: str


@dataclass(frozen=True)
class ToolCallEnd:
    """``complete`` is False when the output ended inside the call."""

    index: int
    complete: bool


@dataclass(frozen=True)
class Boundary:
    """A structural position: ``token`` sampled tokens lie before it. ``exact`` is False when the delimiter does not
    begin or end on a token edge and the position was moved down to the token's start. ``rest`` is then the text of the
    straddling token past the boundary."""

    kind: BoundaryKind
    token: int
    exact: bool = True
    rest: str = ""


@dataclass(frozen=True)
class Tolerated:
    """A deviation from the wire format that was accepted. Clean output causes none."""

    rule: str


Event = TextDelta | ThinkingDelta | ToolCallStart | ToolArgsDelta | ToolCallEnd | Boundary | Tolerated
