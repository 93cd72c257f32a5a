"""How the arguments of a tool call are spelled: from wire text to the JSON text of an object, as it arrives.

Each codec is a generator over a ``Source`` that starts behind the call opener and ends behind the last thing it
understands. It reports to a ``Sink``: the name once, then fragments of JSON. ``Malformed`` means that this is no call.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Protocol

from parsers.format import JsonCall, Tagged
from parsers.schema import is_json_object, json_of, quoted
from parsers.source import Cut, Emit, Source, Step, Stops

_NAME_LIMIT = 256
_SCALAR_END = re.compile(r"[,}\]\s]|[\ud800-\udfff]")
_RAW_CONTROL = {code: f"\\u{code:04x}" for code in range(0x20)} | {10: "\\n", 13: "\\r", 9: "\\t"}
_CONTROL = re.compile(r"[\x00-\x1f]")


class Malformed(Exception):
    """The text is no call of this format."""


class Interrupted(Exception):
    """A delimiter that no value can contain came inside one; it is already consumed."""

    def __init__(self, stop: str) -> None:
        super().__init__(stop)
        self.stop = stop


class Sink(Protocol):
    """Where a codec reports to."""

    announced: bool

    def announce(self, name: str) -> None:
        """The name is final. Raises Malformed when the call may not be one."""

    def arguments(self, fragment: str) -> None: ...

    def text_of(self, wire: str) -> str:
        """Delimiters that turned out to be content, spelled out."""

    def types(self, key: str) -> frozenset[str] | None:
        """The types the schema allows for a key of the announced tool; None if it is not declared."""

    def tolerate(self, rule: str) -> None: ...


@dataclass(frozen=True)
class Fence:
    """The delimiters around a call, as they are in the buffer."""

    opens: tuple[str, ...]
    """Openers of the next call."""
    closes: tuple[str, ...]
    """Closers of this call; the first is certain, others are the same characters in ordinary tokens."""
    ends: tuple[str, ...]
    """Ends of the turn."""


# ── tagged ────────────────────────────────────────────────────────────────────────────────────────────────────────


class TaggedReader:
    """Reads ``Tagged`` calls. Values whose schema is exactly a string stream; others are written when they close.

    The text of a value may contain anything, so a closer only counts where what follows (or the line it stands on)
    says that the value really ends there.
    """

    def __init__(self, codec: Tagged, fence: Fence) -> None:
        self._codec = codec
        certain = (*fence.closes[:1], *fence.opens[:1])
        self._certain = frozenset((*certain, *fence.ends))
        self._ends = fence.ends
        self._name = Stops(codec.head_end, "\n", "<", *certain, *fence.ends)
        self._key = Stops(codec.open_end, "\n", "<", *certain, *fence.ends)
        self._between = Stops(codec.open, codec.tail, *certain, *fence.ends)
        self._value = Stops(codec.close, codec.open, codec.tail, *certain, *fence.ends)
        self._after_value = (codec.open, codec.tail, *fence.closes, *fence.ends)
        self._after_call = (*fence.closes, *fence.opens, *fence.ends)
        self._after_wrapper = (*fence.opens, *fence.ends)
        self.heads = (codec.head,)

    def read(self, source: Source, sink: Sink, opener: str) -> Step[str | None]:
        """Returns the delimiter behind the call that is consumed already; "" if none."""
        if opener not in self.heads:
            yield from source.space()
            if not (yield from source.literal(self._codec.head)):
                raise Malformed
        name, stop = yield from source.take(self._name, _NAME_LIMIT)
        if stop in self._certain:
            raise Interrupted(stop)
        if stop != self._codec.head_end:
            raise Malformed
        clean = name.strip().strip("\"'").strip()
        if not clean:
            raise Malformed
        sink.announce(clean)
        if clean != name:
            sink.tolerate("spaced_name")
        seen: set[str] = set()
        stop = yield from self._parameters_until(source, sink)
        while stop == self._codec.open:
            stop = yield from self._parameter(source, sink, seen)
        if stop is None and not source.natural:
            raise Cut
        sink.arguments("}" if seen else "{}")
        if stop == self._codec.tail:
            return ""
        sink.tolerate("missing_tail")
        return stop or ""

    def _parameters_until(self, source: Source, sink: Sink) -> Step[str | None]:
        noise: list[str] = []
        stop = yield from source.until(self._between, noise.append, hold_at_end=True)
        if "".join(noise).strip():
            sink.tolerate("text_in_call")
        return stop

    def _parameter(self, source: Source, sink: Sink, seen: set[str]) -> Step[str | None]:
        """One parameter, from behind its opener to the next stop."""
        key, stop = yield from source.take(self._key, _NAME_LIMIT)
        key = key.strip().strip("\"'")
        if stop in self._certain:
            sink.tolerate("malformed_parameter")
            return stop
        if stop != self._codec.open_end or not key or key in seen:
            sink.tolerate("duplicate_parameter" if key in seen else "malformed_parameter")
            value: _Value = _Ignored()
        else:
            types = sink.types(key)
            lead = ("{" if not seen else ", ") + quoted(key) + ": "
            seen.add(key)
            value = _Streamed(sink, lead) if types == frozenset({"string"}) else _Collected(sink, lead, types)
        trim = _Trim(value.put, self._codec.trim == "newline")
        while True:
            stop = yield from source.until(self._value, trim.put, hold_at_end=True)
            if stop is None:
                raise Cut
            if stop in self._ends:
                raise Interrupted(stop)
            if (yield from self._really_ends(source, stop, trim.line_start)):
                break
            trim.put(sink.text_of(stop))
        value.close()
        if stop == self._codec.close:
            return (yield from self._parameters_until(source, sink))
        sink.tolerate("missing_parameter_close")
        return stop

    def _really_ends(self, source: Source, stop: str, line_start: bool) -> Step[bool]:
        codec = self._codec
        if stop == codec.close:
            return (yield from source.follows(self._after_value))
        if stop == codec.open:
            return line_start
        if stop == codec.tail:
            return line_start and (yield from source.follows(self._after_call))
        return line_start or (yield from source.follows(self._after_wrapper))


class _Trim:
    """Takes one newline off each side of a value, across chunks; knows whether the text so far ends a line."""

    def __init__(self, emit: Emit, enabled: bool) -> None:
        self._emit, self._enabled = emit, enabled
        self._first = True
        self._held = ""
        self.line_start = True

    def put(self, text: str) -> None:
        self.line_start = text.endswith("\n")
        if self._enabled:
            if self._first and text.startswith("\n"):
                text = text[1:]
            text, self._held = self._held + text, ""
            if text.endswith("\n"):
                text, self._held = text[:-1], "\n"
        self._first = False
        if text:
            self._emit(text)


class _Value(Protocol):
    def put(self, text: str) -> None: ...

    def close(self) -> None: ...


class _Ignored:
    def put(self, text: str) -> None:
        """A parameter without a usable key has no place in the arguments."""

    def close(self) -> None: ...


class _Streamed:
    def __init__(self, sink: Sink, lead: str) -> None:
        self._sink = sink
        sink.arguments(lead + '"')

    def put(self, text: str) -> None:
        self._sink.arguments(quoted(text)[1:-1])

    def close(self) -> None:
        self._sink.arguments('"')


class _Collected:
    def __init__(self, sink: Sink, lead: str, types: frozenset[str] | None) -> None:
        self._sink, self._lead, self._types = sink, lead, types
        self._parts: list[str] = []

    def put(self, text: str) -> None:
        self._parts.append(text)

    def close(self) -> None:
        value, python = json_of("".join(self._parts), self._types)
        if python:
            self._sink.tolerate("python_literal")
        self._sink.arguments(self._lead + value)


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class JsonReader:
    """Reads ``JsonCall`` calls: one JSON object whose argument object is passed through verbatim.

    JSON delimits itself, so a delimiter inside a string is content; only an end of turn interrupts it.
    """

    heads: tuple[str, ...] = ()

    def __init__(self, codec: JsonCall, fence: Fence) -> None:
        self._codec = codec
        self._fence = fence
        self._string = Stops('"', "\\", *fence.ends)
        self._nested = Stops('"', "{", "}", "[", "]", *fence.closes[:1], *fence.opens[:1], *fence.ends)

    def read(self, source: Source, sink: Sink, opener: str) -> Step[str]:
        """Returns "": what follows the object is not consumed."""
        yield from source.space()
        if not (yield from source.literal("{")):
            raise Malformed
        name = ""
        arguments: str | None = None  # None: not seen; "": streamed; else waiting for the name
        while True:
            yield from source.space()
            character = yield from source.peek()
            if not character:
                raise Cut
            if character == ",":
                source.advance(1)
            elif character == '"':
                key = yield from self._key(source, sink)
                if key in self._codec.names and not name:
                    name = yield from self._name(source, sink)
                elif key in self._codec.arguments and arguments is None:
                    arguments = yield from self._arguments(source, sink, name)
                else:
                    yield from self._value(source, sink, _ignore)
                if name and arguments:
                    self._report(sink, name, arguments)
                    arguments = ""
            else:
                if not name or (character != "}" and character not in self._fence.closes):
                    raise Malformed
                if not sink.announced:
                    self._report(sink, name, "null")
                if character == "}":
                    source.advance(1)
                else:
                    sink.tolerate("missing_brace")
                return ""

    def _key(self, source: Source, sink: Sink) -> Step[str]:
        source.advance(1)
        key = yield from self._whole_string(source, sink)
        yield from source.space()
        if not (yield from source.literal(":")):
            raise Malformed
        yield from source.space()
        return key

    def _name(self, source: Source, sink: Sink) -> Step[str]:
        if not (yield from source.literal('"')):
            raise Malformed
        name = (yield from self._whole_string(source, sink)).strip()
        if not name or len(name) > _NAME_LIMIT:
            raise Malformed
        return name

    def _arguments(self, source: Source, sink: Sink, name: str) -> Step[str]:
        """The argument object. Behind the name it streams, and "" is returned; anything else is returned whole."""
        if name and (yield from source.peek()) == "{":
            sink.announce(name)
            yield from self._value(source, sink, sink.arguments)
            return ""
        held: list[str] = []
        yield from self._value(source, sink, held.append)
        return "".join(held)

    @staticmethod
    def _report(sink: Sink, name: str, arguments: str) -> None:
        """Arguments that could not be streamed: absent, before the name, or an object encoded once more as a string."""
        if arguments == "null":
            arguments = "{}"
        elif arguments.startswith('"'):
            decoded = decode_string(arguments)
            if decoded is None or not is_json_object(decoded):
                raise Malformed
            arguments = decoded
            sink.tolerate("encoded_arguments")
        if not is_json_object(arguments):
            raise Malformed
        sink.announce(name)
        sink.arguments(arguments)

    def _whole_string(self, source: Source, sink: Sink) -> Step[str]:
        """A short string behind its opening quote, decoded."""
        parts: list[str] = []
        yield from self._string_body(source, sink, parts.append)
        text = decode_string('"' + "".join(parts))
        if text is None:
            raise Malformed
        return text

    def _string_body(self, source: Source, sink: Sink, emit: Emit) -> Step[None]:
        """A string behind its opening quote, with the closing quote. Raw control characters are escaped."""

        def put(text: str) -> None:
            if _CONTROL.search(text):
                sink.tolerate("raw_control_character")
                text = text.translate(_RAW_CONTROL)
            emit(sink.text_of(text))

        while True:
            stop = yield from source.until(self._string, put, hold_at_end=True)
            if stop is None:
                raise Cut
            if stop in self._fence.ends:
                raise Interrupted(stop)
            emit(stop)
            if stop == '"':
                return
            if not (yield from source.peek()):
                raise Cut
            emit(sink.text_of(source.advance(1)))

    def _value(self, source: Source, sink: Sink, emit: Emit) -> Step[None]:
        """Exactly one JSON value, verbatim."""
        character = yield from source.peek()
        if character == '"':
            emit(source.advance(1))
            yield from self._string_body(source, sink, emit)
        elif character in ("{", "["):
            yield from self._nested_value(source, sink, emit)
        elif not character:
            raise Cut
        elif not re.match(r"[-0-9tfn]", character):
            raise Malformed
        else:
            yield from self._scalar(source, emit)

    def _nested_value(self, source: Source, sink: Sink, emit: Emit) -> Step[None]:
        depth = 0
        while True:
            stop = yield from source.until(self._nested, emit, hold_at_end=True)
            if stop is None:
                raise Cut
            if stop in self._fence.ends or stop in self._fence.closes or stop in self._fence.opens:
                raise Interrupted(stop)
            emit(stop)
            if stop == '"':
                yield from self._string_body(source, sink, emit)
            else:
                depth += 1 if stop in "{[" else -1
                if depth == 0:
                    return

    @staticmethod
    def _scalar(source: Source, emit: Emit) -> Step[None]:
        while True:
            match = _SCALAR_END.search(source.buffer)
            if match:
                emit(source.advance(match.start()))
                return
            emit(source.advance(len(source.buffer)))
            if source.ended:
                raise Cut
            yield


def decode_string(text: str) -> str | None:
    """The value of a JSON string, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _ignore(text: str) -> None:
    """Members of the call object that mean nothing to us."""


Reader = TaggedReader | JsonReader


def reader_for(codec: JsonCall | Tagged, fence: Fence) -> Reader:
    match codec:
        case JsonCall():
            return JsonReader(codec, fence)
        case Tagged():
            return TaggedReader(codec, fence)
