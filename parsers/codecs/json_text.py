"""How the arguments of a tool call are spelled: from wire text to the JSON text of an object, as it arrives.

Each codec is a generator over a ``Source`` that starts behind the call opener and ends behind the last thing it
understands. It reports to a ``Call``: the name once, then fragments of JSON. ``Malformed`` means that this is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parsers.events import Event, Tolerated, ToolArgsDelta, ToolCallStart
from parsers.format import JsonCall, Tagged
from parsers.schema import is_json_object, json_of, property_types, quoted, well_formed
from parsers.source import Cut, Emit, Source, Step, Stops

_NAME_LIMIT = 256
_SCALAR_END = re.compile(r"[,}\]\s]|[\ud800-\udfff]")
_SURROGATE = re.compile(r"u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})")
_OPEN_ESCAPE = re.compile(  # what may still become a surrogate, or half a pair that may still become whole
    r"|u|u[dD]([89a-fA-F][0-9a-fA-F]?)?|u[dD][89abAB][0-9a-fA-F]{2}(\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?)?"
)
_RAW_CONTROL = {code: f"\\u{code:04x}" for code in range(0x20)} | {10: "\\n", 13: "\\r", 9: "\\t"}
_CONTROL = re.compile(r"[\x00-\x1f]")


class Malformed(Exception):
    """The text is no call of this format."""


class Interrupted(Exception):
    """A delimiter that no value can contain came inside one; it is already consumed."""

    def __init__(self, stop: str) -> None:
        super().__init__(stop)
        self.stop = stop


class Call:
    """One call as it is read: announced once its name is final, then fragments of its arguments.

    ``rules``: tolerances that it takes to see a call here; then only declared tools are called. ``begin`` runs at the
    announcement.
    """

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        index: int,
        emit: Callable[[Event], None],
        text_of: Callable[[str], str],
        begin: Callable[[], None],
        rules: Sequence[str],
    ) -> None:
        self.announced = False
        self.parts: list[str] = []
        self.text_of = text_of
        """Spells out delimiters that turned out to be content."""
        self.index = index
        self._tools, self._emit, self._begin = tools, emit, begin
        self._guarded = bool(rules)
        self._tolerated = dict.fromkeys(rules)
        self._parameters: Mapping[str, Any] = {}

    def announce(self, name: str) -> None:
        """Raises Malformed when this is no call after all."""
        if self._guarded and name not in self._tools:
            raise Malformed
        self.announced = True
        self._parameters = self._tools.get(name, {})
        self._begin()
        self._emit(ToolCallStart(self.index, name))
        for rule in self._tolerated:
            self._emit(Tolerated(rule))

    def arguments(self, fragment: str) -> None:
        self.parts.append(fragment)
        self._emit(ToolArgsDelta(self.index, fragment))

    def types(self, key: str) -> frozenset[str] | None:
        """What the schema allows for a key; None if it is not declared."""
        return property_types(self._parameters, key)

    def tolerate(self, rule: str) -> None:
        """Counted once per call, and only if it turns out to be one."""
        if rule not in self._tolerated:
            self._tolerated[rule] = None
            if self.announced:
                self._emit(Tolerated(rule))


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

    def read(self, source: Source, call: Call, opener: str) -> Step[str | None]:
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
        call.announce(clean)
        if clean != name:
            call.tolerate("spaced_name")
        seen: set[str] = set()
        stop = yield from self._parameters_until(source, call)
        while stop == self._codec.open:
            stop = yield from self._parameter(source, call, seen)
        if stop is None and not source.natural:
            raise Cut
        call.arguments("}" if seen else "{}")
        if stop == self._codec.tail:
            return ""
        call.tolerate("missing_tail")
        return stop or ""

    def _parameters_until(self, source: Source, call: Call) -> Step[str | None]:
        noise: list[str] = []
        stop = yield from source.until(self._between, noise.append, hold_at_end=True)
        if "".join(noise).strip():
            call.tolerate("text_in_call")
        return stop

    def _parameter(self, source: Source, call: Call, seen: set[str]) -> Step[str | None]:
        """One parameter, from behind its opener to the next stop."""
        key, stop = yield from source.take(self._key, _NAME_LIMIT)
        key = key.strip().strip("\"'")
        if stop in self._certain:
            call.tolerate("malformed_parameter")
            return stop
        lead = ("{" if not seen else ", ") + quoted(key) + ": "
        if stop != self._codec.open_end or not key or key in seen:
            call.tolerate("duplicate_parameter" if key in seen else "malformed_parameter")
            lead = ""
        else:
            seen.add(key)
        value = _Value(call, lead, call.types(key), self._codec.trim == "newline")
        while True:
            stop = yield from source.until(self._value, value.put, hold_at_end=True)
            if stop is None:
                raise Cut
            if stop in self._ends:
                raise Interrupted(stop)
            if (yield from self._really_ends(source, stop, value.line_start)):
                break
            value.put(call.text_of(stop))
        value.close()
        if stop == self._codec.close:
            return (yield from self._parameters_until(source, call))
        call.tolerate("missing_parameter_close")
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


class _Value:
    """The text of one parameter; streams where the schema says that it is a string. Without ``lead`` it is dropped."""

    def __init__(self, call: Call, lead: str, types: frozenset[str] | None, trim: bool) -> None:
        self._call, self._lead, self._types, self._trim = call, lead, types, trim
        self._streams = types == frozenset({"string"})
        self._parts: list[str] = []
        self._first, self._held = True, ""
        self.line_start = True
        """The text so far ends a line."""
        if lead and self._streams:
            call.arguments(lead + '"')

    def put(self, text: str) -> None:
        """Takes one newline off each side, across chunks."""
        self.line_start = text.endswith("\n")
        if self._trim:
            if self._first and text.startswith("\n"):
                text = text[1:]
            text, self._held = self._held + text, ""
            if text.endswith("\n"):
                text, self._held = text[:-1], "\n"
        self._first = False
        if text and self._lead:
            if self._streams:
                self._call.arguments(quoted(text)[1:-1])
            else:
                self._parts.append(text)

    def close(self) -> None:
        if self._lead and self._streams:
            self._call.arguments('"')
        elif self._lead:
            value, python = json_of("".join(self._parts), self._types)
            self._call.arguments(self._lead + value)
            if python:
                self._call.tolerate("python_literal")


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

    def read(self, source: Source, call: Call, opener: str) -> Step[str]:
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
                key = yield from self._key(source, call)
                if key in self._codec.names and not name:
                    name = yield from self._name(source, call)
                elif key in self._codec.arguments and arguments is None:
                    arguments = yield from self._arguments(source, call, name)
                else:
                    yield from self._value(source, call, _ignore)
                if name and arguments:
                    self._report(call, name, arguments)
                    arguments = ""
            else:
                if not name or (character != "}" and character not in self._fence.closes):
                    raise Malformed
                if not call.announced:
                    self._report(call, name, "null")
                if character == "}":
                    source.advance(1)
                else:
                    call.tolerate("missing_brace")
                return ""

    def _key(self, source: Source, call: Call) -> Step[str]:
        source.advance(1)
        key = yield from self._whole_string(source, call)
        yield from source.space()
        if not (yield from source.literal(":")):
            raise Malformed
        yield from source.space()
        return key

    def _name(self, source: Source, call: Call) -> Step[str]:
        if not (yield from source.literal('"')):
            raise Malformed
        name = (yield from self._whole_string(source, call)).strip()
        if not name or len(name) > _NAME_LIMIT:
            raise Malformed
        return name

    def _arguments(self, source: Source, call: Call, name: str) -> Step[str]:
        """The argument object. Behind the name it streams, and "" is returned; anything else is returned whole."""
        if name and (yield from source.peek()) == "{":
            call.announce(name)
            yield from self._value(source, call, call.arguments)
            return ""
        held: list[str] = []
        yield from self._value(source, call, held.append)
        return "".join(held)

    @staticmethod
    def _report(call: Call, name: str, arguments: str) -> None:
        """Arguments that could not be streamed: absent, before the name, or an object encoded once more as a string."""
        encoded = arguments.startswith('"')
        if encoded:
            arguments = well_formed(decode_string(arguments) or "")
        elif arguments == "null":
            arguments = "{}"
        if not is_json_object(arguments):
            raise Malformed
        call.announce(name)
        call.arguments(arguments)
        if encoded:
            call.tolerate("encoded_arguments")

    def _whole_string(self, source: Source, call: Call) -> Step[str]:
        """A short string behind its opening quote, decoded."""
        parts: list[str] = []
        yield from self._string_body(source, call, parts.append)
        text = decode_string('"' + "".join(parts))
        if text is None:
            raise Malformed
        return text

    def _string_body(self, source: Source, call: Call, emit: Emit) -> Step[None]:
        """A string behind its opening quote, with the closing quote. Raw control characters are escaped."""

        def put(text: str) -> None:
            if _CONTROL.search(text):
                call.tolerate("raw_control_character")
                text = text.translate(_RAW_CONTROL)
            emit(call.text_of(text))

        while True:
            stop = yield from source.until(self._string, put, hold_at_end=True)
            if stop is None:
                raise Cut
            if stop in self._fence.ends:
                raise Interrupted(stop)
            if stop == '"':
                emit(stop)
                return
            emit(stop + call.text_of((yield from self._escape(source))))

    @staticmethod
    def _escape(source: Source) -> Step[str]:
        """What stands behind a backslash: a character, or a whole surrogate pair; half a pair becomes U+FFFD, because
        no client could write it again. Raises Cut."""
        while _OPEN_ESCAPE.fullmatch(source.buffer):
            if source.ended:
                raise Cut
            yield
        pair = _SURROGATE.match(source.buffer)
        if pair is None:
            return source.advance(1)
        text = source.advance(pair.end())
        return text if pair[1] else "ufffd"

    def _value(self, source: Source, call: Call, emit: Emit) -> Step[None]:
        """Exactly one JSON value, verbatim."""
        character = yield from source.peek()
        if character == '"':
            emit(source.advance(1))
            yield from self._string_body(source, call, emit)
        elif character in ("{", "["):
            yield from self._nested_value(source, call, emit)
        elif not character:
            raise Cut
        elif not re.match(r"[-0-9tfn]", character):
            raise Malformed
        else:
            yield from self._scalar(source, emit)

    def _nested_value(self, source: Source, call: Call, emit: Emit) -> Step[None]:
        depth = 0
        while True:
            stop = yield from source.until(self._nested, emit, hold_at_end=True)
            if stop is None:
                raise Cut
            if stop in self._fence.ends or stop in self._fence.closes or stop in self._fence.opens:
                raise Interrupted(stop)
            emit(stop)
            if stop == '"':
                yield from self._string_body(source, call, emit)
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
