"""Tool calls: sections, lists and single calls, with what may be missing around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from parsers.codecs.call import Call, Fence, Malformed
from parsers.codecs.readers import reader_for
from parsers.events import Boundary, Event, Tolerated, ToolArgsDelta, ToolCallEnd, ToolCallStart
from parsers.format import Format, Json
from parsers.header import Header, usual
from parsers.output import Output
from parsers.schema import is_json_object
from parsers.source import Cut, Emit, Interrupted, Source, Step, Stops, certain, drop
from parsers.wire import Wire

Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters of the declared tools by name."""
Kind = Literal["section", "call", "head", "frame"]


@dataclass(frozen=True)
class Opener:
    """``rule``: the tolerance that it takes to see a call here. ``guarded``: only declared tools are called."""

    kind: Kind
    rule: str = ""
    guarded: bool = False


@dataclass(frozen=True)
class Place:
    """Where calls stand: what becomes of text that is none, and what happens before the first call."""

    text: Emit
    before: Callable[[], None]


class Calls:
    """Reads the calls of one turn. Without tools nothing is called: where calls are written in control tokens, their
    names and arguments are text without these; elsewhere all of a call is text."""

    def __init__(self, wire_format: Format, wire: Wire, tools: Schemas, source: Source, out: Output) -> None:
        call, frames, tolerances = wire_format.call, wire_format.frames, wire_format.tolerances
        self._wire, self._tools, self._source, self._out = wire, tools, source, out

        def spellings(text: str) -> tuple[str, ...]:
            return wire.spellings(text, *tolerances.aliases.get(text, ())) if text else ()

        section_open = spellings(call.section.open) if call.section else ()
        self._section_close = spellings(call.section.close) if call.section else ()
        self._open, self._close = spellings(call.open), spellings(call.close)
        ends = tuple(map(wire.code, (*wire_format.ends, *(frames.ends if frames else ()))))
        if frames and not call.open:
            self._close = (wire.code(frames.call_end), *map(wire.code, frames.ends))
        self._tail = wire.code(call.tail).strip()
        self._fence = Fence(
            (*self._open, *section_open),
            (*self._close, *self._section_close),
            tuple(dict.fromkeys(end for end in ends if end not in self._close)),
            self._tail,
            wire.code(call.header.partition("{name}")[0]).strip(),
        )
        self._reader = reader_for(call.codec, self._fence, wire)
        around = [pair for pair in (wire_format.think, wire_format.answer) if pair]
        others = [one for pair in around for one in map(wire.code, (pair.open, pair.close)) if certain(one)]
        self._header = Header(call, self._fence, tuple(others), wire) if call.header else None
        self.odd_names = tuple(name for name in tools if not usual(name))
        """Names of tools that only those who know them tell from other text."""
        self._json = isinstance(call.codec, Json)
        self._listed = not call.open and call.section is not None
        self._framed = frames is not None and not call.open
        self._broken = False
        """A call was incomplete."""
        self._muted = not tools
        self._bare = ("{", "[") if call.bare and tools else ()
        head = self._header.head if self._header else ""
        heads = (head,) if head.startswith("<") and not certain(head) and tolerances.bare_head else ()
        inner = {} if self._listed else _named("call", self._open, "") | _named("head", heads, "bare_head")
        self._inner = inner
        self.openers = _named("section", section_open, "")
        if not self._listed and (tolerances.bare_head or not section_open):
            self.openers |= _named("call", self._open, "bare_head" if section_open else "")
            self.openers |= _named("head", heads, "bare_head", guarded=True)
        if not tolerances.spelled_opener:
            self.openers = {text: one for text, one in self.openers.items() if one.rule != "spelled_opener"}
        if not tools:
            self.openers = {text: one for text, one in self.openers.items() if set(text) & wire.special}
        self.closers = self._fence.closes if self.openers and not frames else ()
        """Closers, which may be out of place."""
        self._hard = hard = (*self._close, *self._section_close, *section_open[:1], *self._fence.ends, *others)
        self._own = frozenset((*self._close, *self._section_close, *section_open[:1]))
        """Delimiters of a section that do not end it, or only it."""
        self._in_section = Stops(*inner, *hard)
        self._recovery = Stops(*self._fence.opens, *hard)

    def _emit(self, event: Event) -> None:
        if not self._muted or isinstance(event, Tolerated):
            self._out.emit(event)
        elif isinstance(event, ToolCallStart):
            self._out.put_text(event.name)
        elif isinstance(event, ToolArgsDelta):
            self._out.put_text(event.fragment)

    def read(self, found: str, place: Place) -> Step[tuple[bool, str]]:
        """Calls behind an opener. Returns whether there were any, and a delimiter behind them that is consumed."""
        opener = self.openers[found]
        start = self._out.boundary("tool_call_start", self._source.at)
        if opener.kind == "section":
            return (yield from self.section(found, opener, place, start))
        return (yield from self._call(found, opener, place, start))

    # ── several calls ─────────────────────────────────────────────────────────────────────────────────────────────

    def section(self, found: str, opener: Opener, place: Place, start: Boundary) -> Step[tuple[bool, str]]:
        """Calls behind a section's opener. Text between calls is dropped, and counted; it is text after all where no
        call follows it, or where a malformed call is in it."""
        source, out = self._source, self._out
        noise = _Noise(found)
        called, closed = False, opener.kind == "frame"

        def begin() -> None:
            nonlocal called
            if noise.kept:
                place.text(self._wire.text_of(noise.clear()))
            elif noise.junk:
                out.tolerate("text_between_calls")
            noise.clear()
            if not called:
                place.before()
            called = True

        inside = Place(noise.keep, begin)
        stop: str | None = (yield from self._list(noise, opener, inside, start)) if self._listed else ""
        if self._listed and not self._section_close:
            return self._leave(noise, stop, called, True, place)
        while True:
            stop = stop or (yield from source.until(self._in_section, noise.put, hold_at_end=True))
            if stop in self._inner:
                at = out.boundary("tool_call_start", source.at) if called else start
                _, stop = yield from self._call(stop, _merged(self._inner[stop], opener), inside, at)
            elif stop in self._own:
                noise.parts.append(stop)
                closed = closed or stop in self._section_close
                if stop in self._section_close and opener.kind != "frame":
                    return self._leave(noise, "", called, closed, place)
                stop = ""
            else:
                return self._leave(noise, stop, called, closed, place)

    def _leave(self, noise: _Noise, stop: str | None, called: bool, closed: bool, place: Place) -> tuple[bool, str]:
        """The end of a section, at its closer or at anything that cannot be in it."""
        if not called:
            if not stop and self._source.ended and not self._source.natural:
                return True, ""  # cut off before it said what it is: neither a call nor text
            self._out.tolerate("malformed_call")
        elif not closed and self._section_close:
            self._out.tolerate("missing_section_close")
        if not called or noise.kept or (noise.junk and not closed):
            place.text(self._wire.text_of(noise.clear()))
        elif noise.junk:
            self._out.tolerate("text_between_calls")
        return called, stop or ""

    def _list(self, noise: _Noise, opener: Opener, place: Place, start: Boundary) -> Step[str]:
        """Calls without openers. Returns a delimiter behind the last that is consumed already; "" if none."""
        source = self._source
        source.logs.append(noise.parts)
        try:
            yield from self._reader.begin(source)
        except Cut:
            return ""
        finally:
            source.logs.pop()
        while True:
            called, stop = yield from self._call("", opener, place, start)
            if not called or stop:
                return stop
            if not (yield from self._reader.more(source)):
                return ""
            yield from source.space()
            start = self._out.boundary("tool_call_start", source.position)

    def bare(self, as_text: Emit) -> Step[str]:
        """At the beginning of an answer: calls without any opener, if the answer is nothing but calls; else its text
        so far. Returns a delimiter that is consumed already; "" if none."""
        source, out = self._source, self._out
        if not self._bare:
            return ""
        log: list[str] = []
        source.logs.append(log)
        yield from source.space()
        stop, calls, self._broken = "", out.calls, False
        if (yield from source.peek()) in self._bare:
            start = out.boundary("tool_call_start", source.position)
            out.keep()
            stop = yield from self._list(_Noise(""), Opener("call", guarded=True), Place(drop, nothing), start)
            try:
                alone = not stop and (yield from source.follows((self._fence.ends,)))
            except Cut:
                alone = True
            cut = source.ended and not source.natural
            alone = out.calls > calls and (cut or not self._broken) and (alone or stop in self._fence.ends)
            out.release(alone)
            if alone:
                source.logs.pop()
                return stop
            out.calls = calls
        source.logs.pop()
        text = "".join(log)
        as_text(self._wire.text_of(text[: len(text) - len(stop)]))
        return stop

    # ── one call ──────────────────────────────────────────────────────────────────────────────────────────────────

    def framed(self, name: str, place: Place, start: Boundary) -> Step[tuple[bool, str]]:
        """The call of a message whose header named the tool."""
        if self._json:
            return (yield from self._call("", Opener("call"), place, start, name))
        return (yield from self.section("", Opener("frame"), place, start))

    def _call(
        self, found: str, opener: Opener, place: Place, start: Boundary, name: str = ""
    ) -> Step[tuple[bool, str]]:
        """One call behind its opener. Returns whether it was a call, and a delimiter behind it that is consumed."""
        source = self._source
        begun, log = source.position, [found]

        def begin() -> None:
            source.logs.pop()
            place.before()
            self._emit(start)

        call = Call(self._tools, self._out.calls, self._emit, self._wire.text_of, begin, ())
        call.guarded = opener.guarded and not self._muted
        if opener.rule:
            call.tolerate(opener.rule)
        source.logs.append(log)
        stop, complete = "", False
        try:
            yield from self._announced(call, opener, name)
            stop = yield from self._reader.read(source, call)
            complete = True
        except Malformed:
            # what was read last may be the opener, before this call: then nothing stopped it
            stop = source.just_read(self._hard) if source.position > begun else ""
        except Interrupted as interrupted:
            stop = interrupted.stop
        except Cut:
            source.advance(len(source.buffer))
            if not call.announced and not source.natural:
                source.logs.pop()
                return True, ""  # cut off before it said what it is: neither a call nor text
        if call.announced:
            return True, (yield from self._end(call, stop, complete))
        source.logs.pop()
        text = "".join(log)
        if certain(found) or name:
            self._out.tolerate("malformed_call")
            self._out.orphans += bool(self._close and found)
        place.text(self._wire.text_of(text[: len(text) - len(stop)]))
        return False, stop

    def _announced(self, call: Call, opener: Opener, name: str) -> Step[None]:
        """Reads the header, unless the codec names the tool itself. What cannot be arguments makes no call."""
        source = self._source
        if self._header:
            name = yield from self._header.read(source, call, opener.kind == "head")
        if name and self._json:
            yield from source.space()
            if not (yield from source.follows((("{", '"', "null", *self._fence.behind),))):
                raise Malformed
        if name:
            call.announce(name)

    def _end(self, call: Call, stop: str, complete: bool) -> Step[str]:
        """From behind the arguments to behind the closer. Returns a delimiter beyond it that is consumed already."""
        source = self._source
        if complete:
            stop, complete = yield from self._closing(call, stop)
        elif not stop and not source.ended:
            stop = (yield from source.until(self._recovery, drop, hold_at_end=True)) or ""
        closed = stop in self._close
        if complete and not call.parts and (closed or self._says_nothing(call)):
            call.arguments("{}")
        complete = complete and is_json_object("".join(call.parts))
        self._broken = self._broken or not complete
        end = self._out.boundary("tool_call_end", source.at if stop and not closed else source.position)
        self._emit(ToolCallEnd(call.index, complete))
        self._emit(end)
        self._out.calls += not self._muted
        return stop if self._framed or not closed else ""

    def _says_nothing(self, call: Call) -> bool:
        """Whether a call without arguments and without its closer is one: what closes the arguments stands there, as
        it does behind a whole header. Else arguments were to come."""
        return not self._close or bool(
            self._tail and not {"missing_tail", "missing_header_end"} & call.tolerated.keys()
        )

    def _closing(self, call: Call, stop: str) -> Step[tuple[str, bool]]:
        """Reads tail and closer as far as they are there: (a delimiter that is consumed, complete)."""
        source = self._source
        for expected, rule in (
            ((self._tail,) if self._tail else (), "missing_tail"),
            (self._close, "missing_call_close"),
        ):
            if not expected:
                continue
            if not stop:
                try:
                    found = yield from source.follows((expected,))
                except Cut:
                    source.advance(len(source.buffer))
                    return "", False
                if found and source.buffer.strip():  # empty: a natural end
                    stop = (yield from source.until(Stops(*expected), drop)) or ""
            if stop not in expected:
                call.tolerate(rule)
            elif expected is not self._close:
                stop = ""
        return stop, True


class _Noise:
    """What stands in a section besides calls."""

    def __init__(self, opener: str) -> None:
        self.parts = [opener]
        self.junk = False
        """Anything but layout and delimiters is in it."""
        self.kept = False
        """A malformed call is in it: it is text."""

    def put(self, text: str) -> None:
        self.parts.append(text)
        self.junk = self.junk or bool(text.strip())

    def keep(self, text: str) -> None:
        self.put(text)
        self.kept = True

    def clear(self) -> str:
        text = "".join(self.parts)
        self.parts.clear()
        self.junk = self.kept = False
        return text


def _named(kind: Kind, texts: tuple[str, ...], rule: str, guarded: bool = False) -> dict[str, Opener]:
    """Openers by their spellings, the first of which is right."""
    found: dict[str, Opener] = {}
    for number, text in enumerate(texts):
        plain = certain(texts[0]) and not certain(text)
        how = "spelled_opener" if plain else "alias" if number else rule
        found[text] = Opener(kind, how, guarded or plain)
    return found


def _merged(inner: Opener, outer: Opener) -> Opener:
    return Opener(inner.kind, outer.rule or inner.rule, inner.guarded or outer.guarded)


def nothing() -> None:
    """Before a call that stands alone."""
