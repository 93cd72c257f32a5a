"""The header of a call: a pattern with a hole for the tool's name."""

from __future__ import annotations

import html
import re

from parsers.codecs.call import NAME_LIMIT, Call, Fence, Malformed, declared
from parsers.codecs.writers import spelled
from parsers.format import Call as CallFormat
from parsers.format import Codec, Elements, Json, Literals, Tagged
from parsers.source import Interrupted, Source, Step, Stops
from parsers.wire import Wire

_HOLE = re.compile(r"\{(name|n|n1|id)\}")
_HOLES = {"name": r"(?P<name>.*?)", "n": r"\d*", "n1": r"\d*", "id": r"[^\s]*?"}
_NAME = re.compile("[^\\s\ud800-\udfff\"'<>(){}\\[\\]]+")
_EDGES = " \t\r\n\"'"
_LIMIT = 2 * NAME_LIMIT


class Header:
    """Reads what stands between a call's opener and its arguments.

    Accepted and counted: quotes and space around the name, plain text of the pattern left out, and a header that the
    first parameter or the call's closer ends. ``others`` are further delimiters that no header contains.
    """

    def __init__(self, call: CallFormat, fence: Fence, others: tuple[str, ...], wire: Wire) -> None:
        parts = _HOLE.split(wire.code(call.header))
        self.head = parts[0].strip()
        """How a header begins, where it is distinctive."""
        end = parts[-1].strip()
        self._codec = call.codec
        self._escapes = isinstance(call.codec, Tagged) and call.codec.escapes
        self._starts = tuple(wire.code(start) for start in _starts(call.codec))
        self._hard = (*fence.outer, *others)
        self._ends = tuple(dict.fromkeys(one for one in (end, end.lstrip("\"'")) if one))
        ends = self._ends or ("\n",)
        self._closers = (fence.tail, *fence.closes)
        self._stops = Stops(*ends, *self._starts, fence.tail, *self._hard)
        self._strict = re.compile(_pattern(parts, strict=True), re.DOTALL)
        self._behind_name = re.compile(_rest(parts), re.DOTALL)
        self._loose = re.compile(_pattern(parts, strict=False), re.DOTALL)

    def read(self, source: Source, call: Call, begun: bool) -> Step[str]:
        """The tool's name. ``begun``: the first text of the pattern is consumed already. What ended the header, where
        that is no part of it, still comes next. Raises Malformed, Interrupted and Cut."""
        lead = "" if begun else self.head
        odd = {(lead + spelled(self._codec, name)).lstrip(): name for name in call.tools if not usual(name)}
        yield from source.space()
        known = yield from declared(source, odd)
        text, stop = yield from source.upto(self._stops, _LIMIT)
        if stop is None:
            raise Malformed
        if stop in self._ends:
            source.stop_here(stop)
        elif stop in self._hard and stop not in self._closers:
            raise Interrupted(source.stop_here(stop))
        elif self._ends:
            call.tolerate("missing_header_end")
        if known and self._behind_name.fullmatch(text.strip()):
            return odd[known]
        text = (self.head if begun else "") + known + text.strip()
        match = self._strict.fullmatch(text)
        if match is None or not usual(match["name"]):
            match = self._loose.fullmatch(text)
            call.tolerate("header_spelling")
        name = match["name"].strip(_EDGES) if match else ""
        if not usual(name) and name not in call.tools:
            raise Malformed
        return html.unescape(name) if self._escapes else name


def usual(name: str) -> bool:
    """Whether a name is told from what stands around it even where no tool has it."""
    return len(name) <= NAME_LIMIT and _NAME.fullmatch(name) is not None


def _pattern(parts: list[str], strict: bool) -> str:
    """A regular expression for the header up to the text that ends it. The loose one can do without plain text, and
    without all that stands behind the name."""
    before, behind = parts[0].strip(), list(zip(parts[2:-1:2], parts[3::2], strict=True))
    if strict:
        return rf"{re.escape(before)}\s*{_HOLES['name']}{_rest(parts)}\s*"
    rest = "".join(rf"(?:\s*{_unquoted(text)}[\s\"']*{_HOLES[hole]}[\s\"']*)?" for text, hole in behind)
    return rf"(?:{_unquoted(before)})?[\s\"']*{_HOLES['name']}[\s\"']*{rest}"


def _rest(parts: list[str]) -> str:
    """The strict pattern behind the name."""
    behind = zip(parts[2:-1:2], parts[3::2], strict=True)
    return "".join(rf"\s*{re.escape(text.strip())}\s*{_HOLES[hole]}" for text, hole in behind)


def _unquoted(text: str) -> str:
    return re.escape(text.strip(_EDGES))


def _starts(codec: Codec) -> tuple[str, ...]:
    """How arguments begin."""
    match codec:
        case Tagged():
            return (codec.open.removesuffix('"'), codec.whole.open if codec.whole else "")
        case Elements():
            return (f"{codec.prefix}<",)
        case Json():
            return ("{",)
        case Literals():
            return ("{", "(")
        case _:
            return ()
