"""A model family's wire format as immutable data.

One value describes what the checkpoint's template writes and what the model generates. Small interpreters read it:
``stream`` (tokens -> events and boundaries), ``render`` (where turns begin and end), ``write`` (blocks -> text),
``grammar`` (tools -> constraint) and ``probe`` (does this format fit the checkpoint?). A new family is a new value; a
new class is only needed for a new way to spell arguments (a codec).

Every string is exact text; a control token of the vocabulary inside it is that token. White space that the fields
``inner``, ``first``, ``between`` and ``after`` name is layout: written by ``write``, optional when reading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

LONGEST_NAME = 200
"""Characters that the name of a tool may have, with those that stand around it."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much thinking is wanted, over all protocols."""
EFFORTS: tuple[Effort, ...] = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class Pair:
    open: str
    close: str


@dataclass(frozen=True)
class Turns:
    """How turns are framed. ``tools`` frames a turn of tool outputs.

    ``close`` of ``assistant`` is what the model samples to end its turn; it is "" where the header of the next turn
    does that, which is then one of ``stops`` (further tokens that end generation). ``tail`` stands behind every close
    in history. ``headless``: texts behind which an assistant turn begins without its header. ``others`` are headers of
    turns that the template writes by itself, for tools or settings.
    """

    system: Pair
    user: Pair
    assistant: Pair
    tools: Pair
    tail: str = ""
    stops: tuple[str, ...] = ()
    headless: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @classmethod
    def framed(
        cls, header: str, end: str, names: str = "system user assistant tool", tools: str = "", **rest: Any
    ) -> Turns:
        """Headers that only differ in the role's name ``{}``, and one end. ``tools``: another header of outputs."""
        headers = [header.replace("{}", name) for name in names.split()]
        system, user, assistant, outputs = (Pair(one, end) for one in (*headers[:3], tools or headers[3]))
        return cls(system, user, assistant, outputs, **rest)


@dataclass(frozen=True)
class Think:
    """Thinking is ``open`` ``inner`` text ``inner`` ``close`` ``after``; the white space is layout, not content.

    ``closer_alone``: an answer without thinking may begin with the closer.
    """

    open: str
    close: str
    inner: str = "\n"
    after: str = "\n\n"
    closer_alone: bool = False


@dataclass(frozen=True)
class Answer:
    """A wrapper around visible text. ``always``: an answer of calls alone begins with an empty one."""

    open: str
    close: str
    inner: str = ""
    always: bool = False


@dataclass(frozen=True)
class Json:
    """The arguments are one JSON object, verbatim. It delimits itself."""


@dataclass(frozen=True)
class JsonCall:
    """A call is one JSON object: ``{"name": ..., "arguments": {...}}``. Arguments are passed through verbatim.

    ``many``: a section holds one JSON list of such objects. ``id_key``: the member that carries the call's id.
    """

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    many: bool = False
    id_key: str = ""


@dataclass(frozen=True)
class Tagged:
    """``open`` KEY (``key_end`` TYPE) ``open_end`` VALUE ``close``, repeated.

    ``trim`` says what belongs to the layout of a value: one newline on each side, or nothing. Without ``key_end`` the
    tool's schema says how a value becomes JSON (``parsers.schema``). With it the wire does: TYPE is ``true`` for text
    and ``false`` for JSON (``typed`` "string"), or the name of a JSON type (``typed`` "type"). ``escapes``: ``&`` and
    ``"`` in names and keys are escaped as in XML. ``between`` is the layout around parameters, ``empty`` more of it
    where there are none. White space inside ``open_end`` is layout too. ``whole`` may stand for all parameters: its
    body is the argument object as JSON.
    """

    open: str
    open_end: str
    close: str
    trim: Literal["newline", "none"] = "newline"
    key_end: str = ""
    typed: Literal["", "string", "type"] = ""
    escapes: bool = False
    between: str = "\n"
    empty: str = ""
    whole: Pair | None = None


@dataclass(frozen=True)
class Literals:
    """``{key:value,...}`` with unquoted keys, strings between ``quote`` and ``quote``, JSON otherwise (Gemma)."""

    quote: str


@dataclass(frozen=True)
class Elements:
    """Nested elements, one per argument: ``prefix<key>value prefix</key>``; list items are ``item`` (MiniMax-M3)."""

    prefix: str
    item: str = "item"


@dataclass(frozen=True)
class PythonCalls:
    """Calls as Python: ``name(key=literal, ...)``. ``many``: in one list; else one call per line. ``quote`` is the one
    that strings are written in where they need no escapes."""

    many: bool = True
    quote: str = '"'


Codec = Json | JsonCall | Tagged | Literals | Elements | PythonCalls


@dataclass(frozen=True)
class Tolerances:
    """Deviations that are accepted and counted. They never apply to clean output."""

    spelled_opener: bool = True
    """A call opener written in ordinary tokens although the vocabulary has a token for it."""
    bare_head: bool = True
    """A call without its wrapper, or outside its section."""
    call_in_thinking: bool = True
    """A call opener token ends the thinking."""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other spellings of a delimiter."""


@dataclass(frozen=True)
class Call:
    """Tool calls: ``section.open`` (``open`` ``inner`` header arguments ``tail`` ``inner`` ``close``)* and
    ``section.close``.

    ``header`` names the tool: text with ``{name}`` and at most one of ``{n}`` (the call's number in the conversation,
    from 0), ``{n1}`` (its number in the message, from 1) and ``{id}`` (its id). What follows the name may be left out
    when the first parameter or the closer says where it ends. A codec that names the tool itself has no header.
    ``first`` and ``between`` are the layout before the first call (or section) behind text, and before other calls.
    ``bare``: an answer that begins like this codec and is nothing but calls is one, without any opener.
    """

    open: str
    close: str
    codec: Codec
    header: str = ""
    tail: str = ""
    section: Pair | None = None
    inner: str = ""
    first: str = ""
    between: str = "\n"
    first_alone: bool = False
    """``first`` is written where no text is before the calls, too."""
    around: str = ""
    """Layout behind the section's opener and before its closer."""
    bare: bool = False


@dataclass(frozen=True)
class Result:
    """One tool output inside a turn of tool outputs: ``lead`` ``open`` text ``close``.

    ``open`` may have ``{name}`` and ``{id}``. Without ``open`` each output is a turn of its own.
    """

    lead: str
    open: str
    close: str
    inner: str = ""


@dataclass(frozen=True)
class Route:
    """A message whose header matches ``pattern`` is of this kind; a group ``name`` in it names the tool."""

    pattern: str
    kind: Literal["thinking", "text", "call"]


@dataclass(frozen=True)
class Frames:
    """An assistant turn is several messages: ``start`` HEADER ``message`` BODY, ended by one of ``ends``.

    The turn's header is the first ``start``. The first route that matches a header says what the body is. An end that
    also ends turns closes the turn, the others only the message. ``thinking``, ``text`` and ``call`` are the headers
    written for each kind, ``{name}`` being the tool, and ``preamble`` that of text before a call, where it has one of
    its own; ``tokens`` are further control tokens that a header may have.
    """

    start: str
    message: str
    ends: tuple[str, ...]
    routes: tuple[Route, ...]
    thinking: str
    text: str
    call: str
    call_end: str
    tokens: tuple[str, ...] = ()
    preamble: str = ""


@dataclass(frozen=True)
class Switches:
    """What the template is told. ``always`` holds for every prompt: what keeps earlier prompts a prefix of later ones.

    ``efforts`` are the levels that the family knows; a level between two of them is the next lower one, and one below
    all of them the lowest.
    """

    always: Mapping[str, object] = field(default_factory=dict)
    on: Mapping[str, object] = field(default_factory=lambda: {"enable_thinking": True})
    off: Mapping[str, object] = field(default_factory=lambda: {"enable_thinking": False})
    efforts: Mapping[Effort, Mapping[str, object]] = field(default_factory=dict)

    def variables(self, thinking: bool, effort: Effort | None = None) -> dict[str, object]:
        """What the template gets for one prompt."""
        if not thinking or effort == "none":
            return {**self.always, **self.off}
        return {**self.always, **self.on, **(self._level(effort) if effort else {})}

    @property
    def levels(self) -> tuple[Effort, ...]:
        """The efforts that make a difference, from less to more. A family that can only be switched on and off knows
        "none" and "medium"."""
        known = tuple(level for level in EFFORTS if level in self.efforts)
        told = [{**self.on, **self.efforts[level]} for level in known]
        if self.off == self.on or self.off in told:
            return known
        return ("none", *(known or ("medium",)))

    def _level(self, effort: Effort) -> Mapping[str, object]:
        known = [level for level in EFFORTS if level in self.efforts]
        below = [level for level in known if EFFORTS.index(level) <= EFFORTS.index(effort)]
        return self.efforts[(below or known)[-1 if below else 0]] if known else {}


UNTOLD = Switches(on={}, off={})
"""Nothing can be switched."""


def by_level(variable: str, *levels: Effort, **values: object) -> Mapping[Effort, Mapping[str, object]]:
    """Efforts that one variable of the template is told: by their own names, or by values."""
    told: dict[str, object] = {**{level: level for level in levels}, **values}
    return {level: {variable: told[level]} for level in EFFORTS if level in told}


@dataclass(frozen=True)
class ToolsText:
    """How tools are declared in the system text when the checkpoint's template ignores them."""

    before: str
    after: str


CallIds = Literal["any", "numbered", "nine"]
"""What call ids must look like in a prompt: anything, ``functions.NAME:N`` counted over the conversation, or nine
letters and digits."""


@dataclass(frozen=True)
class Format:
    """A family's whole wire format. ``tools_text`` is set where the template knows nothing of tools, ``encoder`` names
    the renderer of ours that stands for the template that the checkpoint does not have. ``suffix`` is a pattern for
    control tokens whose first group is what ``{suffix}`` stands for in this format. ``models`` are examples for
    people."""

    name: str
    models: tuple[str, ...]
    turns: Turns
    call: Call
    result: Result
    think: Think | None = None
    answer: Answer | None = None
    frames: Frames | None = None
    switches: Switches = Switches()
    call_ids: CallIds = "any"
    tolerances: Tolerances = Tolerances()
    tools_text: ToolsText | None = None
    encoder: str = ""
    suffix: str = ""

    @property
    def ends(self) -> tuple[str, ...]:
        """What ends a generated turn; the regular end first."""
        return tuple(end for end in (self.turns.assistant.close, *self.turns.stops) if end)

    def generated(self) -> Iterator[str]:
        """Every string that structures what the model generates."""
        yield from self.ends
        for part in (self.call, self.think, self.answer, self.frames, self.tolerances.aliases):
            yield from _strings(part)

    def structure(self) -> Iterator[str]:
        """Everything that is looked for in rendered text; untrusted text must not have it."""
        turns, call = self.turns, self.call
        pairs = [(pair.open, pair.close) for pair in (turns.system, turns.user, turns.assistant, turns.tools)]
        pairs += [(call.open, call.close), (self.result.open, self.result.close)]
        pairs += [(pair.open, pair.close) for pair in (self.think, self.answer, call.section) if pair]
        for opener, closer in pairs:
            yield from (text.strip() for text in (*re.split(r"\{+\w+\}*", opener), closer))
        yield from (text.strip() for text in (*turns.headless, *turns.others, *self.ends))
        if self.frames:
            yield from (self.frames.start, self.frames.message, *self.frames.ends)

    def can_call(self, name: str) -> bool:
        """Whether a tool's name can be told from all else that is written where it stands."""
        if not name.strip() or len(name) > LONGEST_NAME:
            return False
        if self.frames is None:
            return True
        header = self.frames.call.replace("{name}", name.strip())
        kinds = (route.kind for route in self.frames.routes if re.search(route.pattern, header, re.DOTALL))
        return next(kinds, "") == "call" and "{" not in name

    def with_suffix(self, suffix: str) -> Format:
        """The format of a checkpoint whose tags all end in ``suffix``."""
        return replace(self, **{f.name: _filled(getattr(self, f.name), suffix) for f in fields(self)})


def _strings(part: object) -> Iterator[str]:
    match part:
        case str():
            yield part
        case Route():
            return
        case tuple():
            for item in part:
                yield from _strings(item)
        case Mapping():
            yield from _strings((*part.keys(), *part.values()))
        case _ if is_dataclass(part):
            for one in fields(part):
                yield from _strings(getattr(part, one.name))


def _filled(part: Any, suffix: str) -> Any:
    if isinstance(part, str):
        return part.replace("{suffix}", suffix)
    if isinstance(part, tuple):
        return tuple(_filled(item, suffix) for item in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: _filled(getattr(part, f.name), suffix) for f in fields(part)})
    return part
