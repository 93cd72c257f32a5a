"""Turns that are several messages, each with a header that says what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from parsers.calls import Calls, Place, nothing
from parsers.events import Boundary, ThinkingDelta
from parsers.format import Format, Frames
from parsers.output import Output
from parsers.source import Cut, Source, Step, Stops, drop
from parsers.wire import Wire

_LIMIT = 256
_CODES = re.compile("[\ud800-\udfff]")
_BEGUN = re.compile("\\s*(?:[\ud800-\udfff].*|t(?:o(?:=.*)?)?)?", re.DOTALL)
"""A header that was cut off, rather than text that has none."""


@dataclass(frozen=True)
class _Head:
    """What a header says. ``text`` is what of it turned out to be text; ``stop`` ended the message already."""

    kind: Literal["thinking", "text", "call"]
    name: str = ""
    text: str = ""
    stop: str = ""


class Framed:
    """Reads one turn of messages. A header that says nothing known is text, and so is what follows it."""

    def __init__(
        self, wire_format: Format, frames: Frames, wire: Wire, source: Source, out: Output, calls: Calls
    ) -> None:
        self._source, self._out, self._calls, self._wire = source, out, calls, wire
        names = "".join(rf"{re.escape(name)}(?=[\s<]|$)|" for name in sorted(calls.odd_names, key=len, reverse=True))
        hole = f"(?P<name>{names}"
        patterns = ((route.pattern.replace("(?P<name>", hole), route.kind) for route in frames.routes)
        self._routes = [(re.compile(pattern, re.DOTALL), kind) for pattern, kind in patterns]
        self._start, self._message = wire.code(frames.start), wire.code(frames.message)
        self._turn_ends = tuple(map(wire.code, wire_format.ends))
        self._ends = tuple(dict.fromkeys((*map(wire.code, frames.ends), *self._turn_ends)))
        self._head_stops = Stops(self._message, "{", self._start[:1], *self._ends)
        self._body_stops = Stops(self._start, *self._ends)

    def run(self, thinking_open: bool) -> Step[None]:
        out = self._out
        head = _Head("thinking") if thinking_open else None
        stop: str | None = ""
        while stop is not None and stop not in self._turn_ends:
            start = out.boundary("thinking_start", self._source.position)
            head = head or (yield from self._head())
            if head is None:
                break
            stop = yield from self._body(head, start)
            head = None
        out.text.flush()
        if stop:
            out.emit(out.boundary("turn_end", self._source.position))

    def _head(self) -> Step[_Head | None]:
        """Reads a header with what ends it. None at the end of the input."""
        source = self._source
        begins = self._start[:1]
        while True:
            text = ""
            try:
                text, stop = yield from source.upto(self._head_stops, _LIMIT)
                if stop != begins or text.strip():
                    break
                if not (yield from source.literal(self._start)):
                    source.advance(1)
                    self._out.tolerate("foreign_role")
            except Cut:
                text += source.advance(len(source.buffer))
                if source.natural or not _BEGUN.fullmatch(text):
                    self._out.put_text(text)
                return None
        if stop is None:
            text = ""  # longer than any header: all of it is the body
        elif stop in (self._message, "{") and (head := self._route(text, stop)):
            return head
        if stop and stop not in ("{", begins):
            source.stop_here(stop)
        if text.strip():
            self._out.tolerate("malformed_header")
        return _Head("text", text=text, stop=stop if stop in self._ends else "")

    def _route(self, text: str, stop: str) -> _Head | None:
        """What a header says. Where the body begins without the token before it, only a call's does."""
        codes = _CODES.findall(text)
        for pattern, kind in self._routes:
            match = pattern.search(self._wire.text_of(text))
            if match is None or (stop == "{" and kind != "call"):
                continue
            if len(codes) != len(set(codes)):
                self._out.tolerate("repeated_header")
            if stop == self._message:
                self._source.stop_here(stop)
            else:
                self._out.tolerate("missing_message")
            return _Head(kind, match.groupdict().get("name") or "")
        return None

    def _body(self, head: _Head, start: Boundary) -> Step[str | None]:
        """A message's body. Returns the end that closed it, "" where the next message's start did; None at the end of
        the input."""
        source, out = self._source, self._out
        stop: str | None = head.stop
        if head.kind == "thinking":
            out.emit(start)
            stop = yield from source.until(self._body_stops, lambda text: out.emit(ThinkingDelta(out.visible(text))))
            if stop is not None:
                out.emit(out.boundary("thinking_end", source.at if stop == self._start else source.position))
        elif head.kind == "call":
            place = Place(out.put_text, nothing)
            called, stop = yield from self._calls.framed(head.name, place, replace(start, kind="tool_call_start"))
            if not stop:
                stop = yield from source.until(self._body_stops, drop if called else out.put_text)
        else:
            out.put_text(head.text)
            stop = stop or (yield from source.until(self._body_stops, out.put_text))
        out.text.flush()
        if stop == self._start:
            out.tolerate("missing_message_end")
            return ""
        return stop
