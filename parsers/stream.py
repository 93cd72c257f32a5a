"""The one incremental machine: sampled token ids in, events out, whatever the family.

There is no second path for whole answers: those are fed token by token too. Policy on delimiters: one that is a single
token of the vocabulary is that id; the same characters spelled in ordinary tokens are text. The only exception are
spelled call openers, accepted (and counted) while tools are declared, outside thinking and quoted code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from parsers.codecs import Call, Fence, Interrupted, Malformed, Reader, reader_for
from parsers.conversation import Tool
from parsers.events import (
    Boundary,
    BoundaryKind,
    Event,
    TextDelta,
    ThinkingDelta,
    Tolerated,
    ToolArgsDelta,
    ToolCallEnd,
)
from parsers.format import Format
from parsers.schema import is_json_object
from parsers.source import Cut, Emit, Source, Step, Stops
from parsers.tokens import Tokenizer

FinishReason = Literal["stop", "length", "abort"]
FREEFORM_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Formats know only JSON arguments: a free-form tool's input travels as the one string ``input``."""
_FIRST_CODE = 0xD800


@dataclass(frozen=True)
class Wire:
    """A format resolved against a vocabulary. ``codes`` spells each delimiter as it appears in the parser's buffer: a
    lone surrogate where it is a single token, its own characters otherwise."""

    codes: dict[str, str]
    by_id: dict[int, str]
    spelled: dict[int, str]

    @classmethod
    def resolve(cls, wire_format: Format, tokenizer: Tokenizer) -> Wire:
        codes: dict[str, str] = {}
        by_id: dict[int, str] = {}
        spelled: dict[int, str] = {}
        for number, delimiter in enumerate(dict.fromkeys(wire_format.delimiters)):
            token = tokenizer.token_id(delimiter)
            codes[delimiter] = delimiter if token is None else chr(_FIRST_CODE + number)
            if token is not None:
                by_id[token] = codes[delimiter]
                spelled[_FIRST_CODE + number] = delimiter
        return cls(codes, by_id, spelled)

    def text_of(self, wire: str) -> str:
        return wire if wire.isascii() else wire.translate(self.spelled)


class StreamParser:
    """Parses one assistant turn. ``feed`` takes one sampled id; ``finish`` says why there are no more."""

    def __init__(
        self, wire_format: Format, wire: Wire, tokenizer: Tokenizer, tools: Sequence[Tool], thinking_open: bool
    ) -> None:
        call, tolerances = wire_format.call, wire_format.tolerances
        self._wire = wire
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._tools = {tool.name: FREEFORM_SCHEMA if tool.freeform else tool.parameters for tool in tools}
        self._source = Source()
        self._events: list[Event] = []
        self._calls = 0
        self._orphans = 0  # malformed calls given back as text whose closers are still to come
        self._text = _Trimmed(lambda text: self._emit(TextDelta(text)))
        self._quotes = _Quotes()

        code = wire.codes.__getitem__
        self._ends = tuple(code(end) for end in wire_format.ends)
        self._think = (code(wire_format.think.open), code(wire_format.think.close)) if wire_format.think else None
        self._call_codes = (code(call.open), code(call.close))
        opens = dict.fromkeys((code(call.open), call.open))
        closes = dict.fromkeys((code(call.close), call.close))
        self._closes = Stops(*closes)
        self._reader: Reader = reader_for(call.codec, Fence(tuple(opens), tuple(closes), self._ends))
        heads = self._reader.heads if tolerances.bare_head else ()
        self._openers = (*(opens if tolerances.spelled_opener else (code(call.open),)), *heads) if self._tools else ()
        self._call_in_thinking = tolerances.call_in_thinking and len(code(call.open)) == 1 and bool(self._tools)
        think = self._think or ()
        self._text_stops = Stops(*self._ends, *think, *self._openers, *self._call_codes[1:] if self._tools else ())
        self._think_stops = Stops(*self._ends, *think, *(code for code in self._call_codes if len(code) == 1))
        self._machine: Step[None] | None = self._turn(thinking_open and self._think is not None)
        self._run()

    def feed(self, token: int) -> list[Event]:
        """The events of one more sampled id."""
        if self._machine is None:
            return self._drain()
        code = self._wire.by_id.get(token)
        if code is not None and (self._tools or code not in self._call_codes):
            self._source.append(self._detokenizer.flush())
            self._source.push(code)
        elif token in self._tokenizer.special:
            self._source.append(self._detokenizer.flush())
            self._source.push("")
            self._emit(Tolerated("stray_control_token"))
        else:
            self._source.push(self._detokenizer.push(token))
        self._run()
        return self._drain()

    def finish(self, reason: FinishReason) -> list[Event]:
        """The remaining events. Only after "stop" may missing closers be forgiven."""
        if self._machine is not None:
            if reason == "stop":  # half a code point that was cut off is not text yet
                self._source.append(self._detokenizer.flush())
            self._source.end(natural=reason == "stop")
            self._run()
        return self._drain()

    def _run(self) -> None:
        if self._machine is not None and next(self._machine, self) is self:
            self._machine = None

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _emit(self, event: Event) -> None:
        """Adds an event; deltas of the same kind that come at once are one."""
        match self._events[-1] if self._events else None, event:
            case TextDelta(before), TextDelta(text):
                self._events[-1] = TextDelta(before + text)
            case ThinkingDelta(before), ThinkingDelta(text):
                self._events[-1] = ThinkingDelta(before + text)
            case ToolArgsDelta(index, before), ToolArgsDelta(same, text) if index == same:
                self._events[-1] = ToolArgsDelta(index, before + text)
            case _:
                self._events.append(event)

    def _boundary(self, kind: BoundaryKind, position: int) -> Boundary:
        token, exact, rest = self._source.token_at(position)
        return Boundary(kind, token, exact, self._wire.text_of(rest))

    def _put_text(self, text: str) -> None:
        self._quotes.feed(text)
        self._text.put(text)

    # ── the grammar of a turn ─────────────────────────────────────────────────────────────────────────────────────

    def _turn(self, thinking_open: bool) -> Step[None]:
        source = self._source
        stop: str | None = None
        if thinking_open:
            self._emit(Boundary("thinking_start", 0))
            stop = yield from self._thinking()
        while True:
            stop = stop or (yield from source.until(self._text_stops, self._put_text))
            if stop is None or stop in self._ends:
                if self._text.begun or not self._calls:
                    self._text.flush()  # white space between and behind calls is layout
                if stop is not None:
                    self._emit(self._boundary("turn_end", source.position))
                return
            current, stop = stop, None
            if self._think and current == self._think[0]:
                self._text.drop()
                self._emit(self._boundary("thinking_start", source.at))
                stop = yield from self._thinking()
            elif current in self._openers:
                if self._quotes.inside and len(current) > 1:
                    self._put_text(current)
                else:
                    _, stop = yield from self._call(current, self._put_text, self._text.drop)
            else:
                self._stray(current, self._put_text)

    def _stray(self, stop: str, as_text: Emit) -> None:
        """A delimiter out of place: the closer of a call given back as text, or characters that only look like one, are
        text too; a control token is dropped."""
        if len(stop) > 1 or (stop == self._call_codes[1] and self._orphans):
            self._orphans -= len(stop) == 1
            as_text(self._wire.text_of(stop))
        else:
            self._emit(Tolerated("stray_delimiter"))

    def _thinking(self) -> Step[str | None]:
        """From behind the opener to behind the layout after the closer. Returns a delimiter that ended it instead."""
        source = self._source
        thinking = _Trimmed(lambda text: self._emit(ThinkingDelta(text)), "\n", lead=True)
        stop: str | None = None
        while True:
            stop = stop or (yield from source.until(self._think_stops, thinking.put))
            if stop is None:
                return None
            if self._think and stop == self._think[1]:
                yield from source.space("\n")
                self._emit(self._boundary("thinking_end", source.position))
                return None
            end = self._boundary("thinking_end", source.at)
            if stop not in self._ends and not (stop == self._call_codes[0] and self._call_in_thinking):
                self._stray(stop, thinking.put)
                stop = None
                continue
            if stop in self._ends:
                self._emit(Tolerated("unclosed_thinking"))
                self._emit(end)
                return stop
            announced, stop = yield from self._call(stop, thinking.put, lambda: self._leave(thinking, end))  # noqa: B023
            if announced:
                return stop

    def _leave(self, thinking: _Trimmed, end: Boundary) -> None:
        thinking.drop()
        self._emit(Tolerated("call_in_thinking"))
        self._emit(end)

    def _call(self, opener: str, as_text: Emit, before: Callable[[], None]) -> Step[tuple[bool, str | None]]:
        """One call behind its opener. ``before`` runs when it is known to be one; else its text goes to ``as_text``.

        Returns whether it was a call, and a delimiter behind it that is consumed already.
        """
        source = self._source
        start = self._boundary("tool_call_start", source.at)

        def begin() -> None:
            source.log = None
            before()
            self._emit(start)

        rules = ["spelled_opener"] if opener in self._wire.spelled.values() else []
        rules += ["bare_head"] if opener in self._reader.heads else []
        call = Call(self._tools, self._calls, self._emit, self._wire.text_of, begin, rules)
        source.log = [opener]
        stop: str | None = None
        complete = False
        try:
            stop = (yield from self._reader.read(source, call, opener)) or None
            complete = True
        except Malformed:
            pass
        except Interrupted as interrupted:
            stop = interrupted.stop
        except Cut:
            source.advance(len(source.buffer))
            if not call.announced and not source.natural:
                source.log = None
                return True, None  # cut off before it said what it is: neither a call nor text
        if not call.announced:
            consumed, source.log = "".join(source.log or ()), None
            if stop is not None:
                consumed = consumed[: -len(stop)]
            if len(opener) == 1:
                self._emit(Tolerated("malformed_call"))
                self._orphans += 1
            as_text(self._wire.text_of(consumed))
            return False, stop
        self._calls += 1
        if complete and stop is None:
            stop, complete = yield from self._closer(call)
        elif not complete and stop is None and not source.ended:
            stop = yield from source.until(Stops(*self._call_codes, *self._ends), _drop, hold_at_end=True)
        elif complete and stop != self._call_codes[1]:
            call.tolerate("missing_call_close")
        complete = complete and is_json_object("".join(call.parts))
        if stop == self._call_codes[1]:
            stop = None
            end = self._boundary("tool_call_end", source.position)
        else:
            end = self._boundary("tool_call_end", source.position if stop is None else source.at)
        self._emit(ToolCallEnd(call.index, complete))
        self._emit(end)
        return True, stop

    def _closer(self, call: Call) -> Step[tuple[str | None, bool]]:
        """What stands behind a call that closed by itself: (a consumed delimiter, complete)."""
        source = self._source
        try:
            found = yield from source.follows(self._closes.delimiters)
        except Cut:
            source.advance(len(source.buffer))
            return None, False
        if found and source.buffer.strip():  # empty: a natural end
            yield from source.until(self._closes, _drop)
            return self._call_codes[1], True
        call.tolerate("missing_call_close")
        return None, True


class _Trimmed:
    """Holds back trailing layout (and drops leading layout if ``lead``), so that it can still turn out to be none."""

    def __init__(self, emit: Emit, layout: str = " \t\r\n", lead: bool = False) -> None:
        self._emit, self._layout, self._lead = emit, layout, lead
        self._held: list[str] = []
        self.begun = False
        """Anything was emitted since the last ``drop``."""

    def put(self, text: str) -> None:
        if self._lead:
            text = text.lstrip(self._layout)
            self._lead = not text
        body = text.rstrip(self._layout)
        if body:
            self._held.append(body)
            self.flush()
            self.begun = True
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def drop(self) -> None:
        self._held.clear()
        self.begun = False

    def flush(self) -> None:
        if self._held:
            self._emit("".join(self._held))
        self._held.clear()


class _Quotes:
    """Is the end of the text so far inside a code fence or an inline code span?"""

    def __init__(self) -> None:
        self._fence = ""
        self._head = ""  # the first visible characters of the current line
        self._ticks = 0

    def feed(self, text: str) -> None:
        for number, part in enumerate(text.split("\n")):
            if number:
                mark = self._head if self._head in ("```", "~~~") else ""
                self._fence = ("" if mark == self._fence else self._fence) if self._fence else mark
                self._head, self._ticks = "", 0
            if len(self._head) < 3:
                self._head = (self._head + part).lstrip()[:3]
            self._ticks += part.count("`")

    @property
    def inside(self) -> bool:
        return bool(self._fence) or self._ticks % 2 == 1 or self._head in ("```", "~~~")


def _drop(text: str) -> None:
    """What follows a broken call up to the next delimiter."""
