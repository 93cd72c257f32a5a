"""The grammar of an assistant turn: thinking, text and calls, one after the other."""

from __future__ import annotations

from parsers.calls import Calls, Place
from parsers.events import Boundary, ThinkingDelta
from parsers.format import Format
from parsers.output import Output, Trimmed
from parsers.source import Emit, Source, Step, Stops, certain
from parsers.wire import Wire


class Turn:
    """Reads one turn. ``call_in_thinking``: a call's opener ends the thinking."""

    def __init__(self, wire_format: Format, wire: Wire, source: Source, out: Output, calls: Calls) -> None:
        self._source, self._out, self._calls, self._wire = source, out, calls, wire
        self._format_think, self._format_answer = wire_format.think, wire_format.answer
        think, answer = wire_format.think, wire_format.answer
        self._ends = tuple(map(wire.code, wire_format.ends))
        self._think = (wire.code(think.open), wire.code(think.close)) if think else ("", "")
        self._answer = (wire.code(answer.open), wire.code(answer.close)) if answer else ("", "")
        closers = calls.closers
        self._text_stops = Stops(*self._ends, *self._think, *self._answer, *calls.openers, *closers)
        inside = wire_format.tolerances.call_in_thinking
        self._in_thinking = frozenset(text for text in calls.openers if certain(text) and inside)
        known = (*calls.openers, *closers)
        self._think_stops = Stops(*self._ends, *self._think, *self._answer, *filter(certain, known))

    def run(self, thinking_open: bool) -> Step[None]:
        source, out = self._source, self._out
        place = Place(out.put_text, out.text.drop)
        stop: str | None = ""
        if thinking_open and self._format_think:
            out.emit(Boundary("thinking_start", 0))
            stop = yield from self._thinking()
        stop = stop or (yield from self._calls.bare(out.put_text))
        while True:
            stop = stop or (yield from source.until(self._text_stops, out.put_text))
            if stop is None or stop in self._ends:
                out.end_text()
                if stop is not None:
                    out.emit(out.boundary("turn_end", source.position))
                return
            found, stop = stop, ""
            if found == self._think[0]:
                out.text.drop()
                out.emit(out.boundary("thinking_start", source.at))
                stop = (yield from self._thinking()) or (yield from self._calls.bare(out.put_text))
            elif found == self._think[1] and self._alone:
                yield from self._layout()
            elif found in self._answer:
                yield from self._answer_edge(found == self._answer[0])
            elif found not in self._calls.openers:
                self._stray(found, out.put_text)
            elif out.quotes.inside and not certain(found):
                out.put_text(found)
            else:
                _, stop = yield from self._calls.read(found, place)

    @property
    def _alone(self) -> bool:
        """A thinking closer that stands first says that there is no thinking, where the family writes it so."""
        think = self._format_think
        return think is not None and think.closer_alone and not self._out.text.begun and not self._out.calls

    def _answer_edge(self, opens: bool) -> Step[None]:
        """White space around the wrapper of an answer is layout, and so is its own inside it."""
        inner = self._format_answer.inner if self._format_answer else ""
        text = self._out.text
        if not opens:
            text.shorten(inner)
            text.flush()
        elif not text.begun:
            text.drop()
        if opens and inner:
            yield from self._source.space(inner)

    def _layout(self) -> Step[None]:
        if self._format_think and self._format_think.after:
            yield from self._source.space("\n")

    def _stray(self, stop: str, as_text: Emit) -> None:
        """A delimiter out of place: the closer of a call given back as text, or characters that only look like one, are
        text too; control tokens are dropped."""
        if not certain(stop):
            as_text(stop)
        elif self._out.orphans and stop in self._calls.closers:
            self._out.orphans -= 1
            as_text(self._wire.text_of(stop))
        else:
            self._out.tolerate("stray_delimiter")

    def _thinking(self) -> Step[str]:
        """From behind the opener to behind the layout after the closer. Returns a delimiter that ended it instead."""
        source, out = self._source, self._out
        layout = self._format_think.inner if self._format_think else ""
        thinking = Trimmed(lambda text: out.emit(ThinkingDelta(text)), layout, lead=True)

        def put(text: str) -> None:
            thinking.put(out.visible(text))

        stop: str | None = ""
        while True:
            stop = stop or (yield from source.until(self._think_stops, put))
            if stop is None:
                return ""
            if stop == self._think[1]:
                yield from self._layout()
                out.emit(out.boundary("thinking_end", source.position))
                return ""
            end = out.boundary("thinking_end", source.at)

            def leave(rule: str = "call_in_thinking", end: Boundary = end) -> None:
                thinking.drop()
                out.tolerate(rule)
                out.emit(end)

            if stop in self._ends or stop in self._answer:
                leave("unclosed_thinking")
                return stop
            if stop not in self._in_thinking:
                self._stray(stop, put)
                stop = ""
                continue
            called, stop = yield from self._calls.read(stop, Place(put, leave))
            if called:
                return stop
