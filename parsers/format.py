"""A model family's wire format as immutable data.

One value describes what the checkpoint's template writes and what the model generates. Small interpreters read it:
``stream`` (tokens -> events and boundaries), ``render`` (where turns begin and end), ``write`` (blocks -> text) and
``probe`` (does this format fit the checkpoint?). A new family is a new value; a new class is only needed for a new way
to spell arguments (a codec).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Turns:
    """How turns are framed. ``system``, ``user`` and ``assistant`` are headers; ``tools`` opens a turn of tool outputs.

    ``end`` closes a turn and is followed by ``tail`` in history. ``stops`` are further tokens that end generation.
    Every header and ``end`` must begin with a control token of the vocabulary.
    """

    system: str
    user: str
    assistant: str
    tools: str
    end: str
    tail: str
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Think:
    """Thinking is ``open`` ``inner`` text ``inner`` ``close`` ``after``; the white space is layout, not content."""

    open: str
    close: str
    inner: str = "\n"
    after: str = "\n\n"


@dataclass(frozen=True)
class JsonCall:
    """One JSON object per call: ``{"name": ..., "arguments": {...}}``. Arguments are passed through verbatim."""

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")


@dataclass(frozen=True)
class Tagged:
    """``head`` NAME ``head_end`` (``open`` KEY ``open_end`` VALUE ``close``)* ``tail``.

    ``trim`` says what belongs to the layout of a value: one newline on each side, or nothing. The tool's schema says
    how its text becomes JSON (``parsers.schema``).
    """

    head: str
    head_end: str
    tail: str
    open: str
    open_end: str
    close: str
    trim: Literal["newline", "none"] = "newline"


Codec = JsonCall | Tagged


@dataclass(frozen=True)
class Tolerances:
    """Deviations that are accepted and counted. They never apply to clean output."""

    spelled_opener: bool = True
    """A call opener written in ordinary tokens although the vocabulary has a token for it."""
    bare_head: bool = True
    """A call without its wrapper (``Tagged`` only)."""
    call_in_thinking: bool = True
    """A call opener token ends the thinking."""


@dataclass(frozen=True)
class Call:
    """Tool calls. ``first`` and ``between`` are the layout before the first call (after text) and before others."""

    open: str
    close: str
    codec: Codec
    inner: str = "\n"
    first: str = "\n"
    between: str = "\n"


@dataclass(frozen=True)
class Result:
    """One tool output inside a turn of tool outputs: ``lead`` ``open`` text ``close``."""

    lead: str
    open: str
    close: str
    inner: str = "\n"


@dataclass(frozen=True)
class ToolsText:
    """How tools are declared in the system text when the checkpoint's template ignores them."""

    before: str
    after: str


@dataclass(frozen=True)
class Format:
    """A family's whole wire format. ``tools_text`` is set where the template knows nothing of tools."""

    name: str
    turns: Turns
    think: Think | None
    call: Call
    result: Result
    tolerances: Tolerances = Tolerances()
    tools_text: ToolsText | None = None

    @property
    def ends(self) -> tuple[str, ...]:
        """What ends an assistant turn."""
        return (self.turns.end, *self.turns.stops)

    @property
    def delimiters(self) -> tuple[str, ...]:
        """Everything that separates one part of a generated turn from another."""
        think = (self.think.open, self.think.close) if self.think else ()
        return (*self.ends, *think, self.call.open, self.call.close)

    @property
    def structure(self) -> tuple[str, ...]:
        """Everything the renderer looks for in rendered text."""
        turns = self.turns
        headers = (turns.system, turns.user, turns.assistant, turns.tools)
        return (*self.delimiters, *headers, self.result.open, self.result.close)
