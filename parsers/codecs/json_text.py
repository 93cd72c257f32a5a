"""Arguments that are JSON on the wire: passed through verbatim, as they arrive. JSON delimits itself, so a delimiter
inside a string is content; only an end of turn interrupts it."""

from __future__ import annotations

import re

from parsers.codecs.call import NAME_LIMIT, Call, Fence, Malformed, Single
from parsers.codecs.strings import Strings, decoded_string
from parsers.format import JsonCall
from parsers.schema import is_json_object, well_formed
from parsers.source import Cut, Emit, Source, Step, Stops, drop

_SCALAR_START = re.compile(r"[-0-9tfn]")
_SCALAR_END = re.compile(r"[,}\]\s]|[\ud800-\udfff]")
_ABOUT = frozenset(("id", "index", "type"))
"""What may be said of a call besides its name and its arguments."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class JsonValues:
    """Reads JSON values. Deviations that Python's spelling brings along are set right on the way."""

    def __init__(self, fence: Fence) -> None:
        self._outside = fence.outer
        self._strings = {'"': Strings('"', fence.ends, "json"), "'": Strings("'", fence.ends, "python")}
        self._nested = Stops('"', "'", "{", "}", "[", "]", ",", *_PYTHON, *fence.outer)

    def value(self, source: Source, call: Call, emit: Emit) -> Step[None]:
        """Exactly one value. Raises Malformed, Interrupted and Cut."""
        character = yield from source.peek()
        if character == '"':
            source.advance(1)
            yield from self._strings['"'].read(source, call, emit)
        elif character in ("{", "["):
            yield from self._container(source, call, emit)
        elif not character:
            raise Cut
        elif not _SCALAR_START.match(character):
            raise Malformed
        else:
            yield from self._scalar(source, emit)

    def string(self, source: Source, call: Call) -> Step[str]:
        """A short string, decoded."""
        if not (yield from source.literal('"')):
            raise Malformed
        return (yield from self._strings['"'].decoded(source, call))

    def _container(self, source: Source, call: Call, emit: Emit) -> Step[None]:
        depth = 0

        def put(text: str) -> None:
            emit(call.text_of(text))

        while True:
            stop = yield from source.inside(self._nested, put, self._outside)
            if stop == "'" or stop in _PYTHON:
                call.tolerate("python_literal")
            if stop == ",":
                yield from _comma(source, call, emit)
            elif stop in self._strings:
                yield from self._strings[stop].read(source, call, emit)
            elif stop in _PYTHON:
                emit(_PYTHON[stop])
            else:
                emit(stop)
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
            if source.ended and not source.natural:
                raise Cut
            if source.ended:
                return
            yield


def _comma(source: Source, call: Call, emit: Emit) -> Step[None]:
    """A comma before a closing bracket is dropped."""
    while not source.buffer.strip() and not source.ended:
        yield
    if source.buffer.lstrip()[:1] in ("}", "]"):
        call.tolerate("trailing_comma")
    elif source.buffer.strip():
        emit(",")
    else:
        raise Cut


class JsonReader(Single):
    """Reads ``Json`` arguments: one object, or none, or one that is encoded as a string."""

    def __init__(self, fence: Fence) -> None:
        self._values = JsonValues(fence)
        self._behind = fence.behind

    def read(self, source: Source, call: Call) -> Step[str]:
        """Returns "": what follows the object is not consumed."""
        yield from source.space()
        if (yield from source.peek()) == "{":
            yield from self._values.value(source, call, call.arguments)
        elif not (yield from source.follows((self._behind,))):
            held: list[str] = []
            yield from self._values.value(source, call, held.append)
            report(call, "".join(held))
        return ""


def report(call: Call, arguments: str, name: str = "") -> None:
    """Arguments that were not streamed: null, held until the name came, or an object encoded once more as a string."""
    encoded = arguments.startswith('"')
    if encoded:
        arguments = well_formed(decoded_string(arguments) or "")
    elif arguments == "null":
        arguments = "{}"
    if not is_json_object(arguments):
        raise Malformed
    if name:
        call.announce(name)
    call.arguments(arguments)
    if encoded:
        call.tolerate("encoded_arguments")


class JsonCallReader:
    """Reads ``JsonCall`` calls: one object that names the tool and holds the arguments, in any order."""

    def __init__(self, codec: JsonCall, fence: Fence) -> None:
        self._codec = codec
        self._behind = fence.outer
        self._values = JsonValues(fence)
        self._separator = "," if codec.many else ";"

    def begin(self, source: Source) -> Step[None]:
        if self._codec.many:
            yield from source.space()
            if (yield from source.peek()) == "[":
                source.advance(1)

    def more(self, source: Source) -> Step[bool]:
        yield from source.space()
        character = yield from source.peek()
        if character and character in (self._separator, "]"):
            source.advance(1)
        return character == self._separator

    def read(self, source: Source, call: Call) -> Step[str]:
        """Returns "": what follows the object is not consumed."""
        yield from source.space()
        if not (yield from source.literal("{")):
            raise Malformed
        yield from self._members(source, call, _Members(call), nested=False)
        return ""

    def _members(self, source: Source, call: Call, seen: _Members, nested: bool) -> Step[None]:
        """An object behind its opening brace."""
        while True:
            yield from source.space()
            character = yield from source.peek()
            if character == ",":
                source.advance(1)
                yield from source.space()
                seen.lost = seen.lost or (yield from source.peek()) == "}"
            elif character == '"':
                yield from self._member(source, call, seen, nested)
            elif character == "}":
                source.advance(1)
                if not nested:
                    seen.close()
                return
            elif seen.arguments == "" and (yield from source.follows((self._behind,))):
                call.tolerate("missing_brace")
                return
            else:
                raise Malformed if character else Cut

    def _member(self, source: Source, call: Call, seen: _Members, nested: bool) -> Step[None]:
        key = yield from self._values.string(source, call)
        yield from source.space()
        if not (yield from source.literal(":")):
            raise Malformed
        yield from source.space()
        if key in self._codec.names and not seen.name:
            seen.name = yield from self._values.string(source, call)
            if seen.name not in call.tools:
                seen.name = seen.name.strip()
                if not seen.name or len(seen.name) > NAME_LIMIT:
                    raise Malformed
        elif key in self._codec.arguments and seen.arguments is None:
            yield from self._arguments(source, call, seen)
        elif key == "function" and not nested and not seen.name and (yield from source.peek()) == "{":
            source.advance(1)
            call.tolerate("nested_call")
            yield from self._members(source, call, seen, nested=True)
        else:
            seen.lost = seen.lost or key not in _ABOUT
            yield from self._values.value(source, call, drop)
        seen.report()

    def _arguments(self, source: Source, call: Call, seen: _Members) -> Step[None]:
        """The argument object streams behind the name; before it, and anything else, is held."""
        if seen.name and (yield from source.peek()) == "{":
            call.announce(seen.name)
            seen.arguments = ""
            yield from self._values.value(source, call, call.arguments)
            return
        held: list[str] = []
        yield from self._values.value(source, call, held.append)
        seen.arguments = "".join(held)


class _Members:
    """What of a call's object has been read."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.name = ""
        self.arguments: str | None = None
        """None: not seen; "": reported; else waiting for the name."""
        self.lost = False
        """There was something else, which may have been meant for the arguments."""

    def report(self) -> None:
        if self.name and self.arguments:
            report(self._call, self.arguments, self.name)
            self.arguments = ""

    def close(self) -> None:
        """At the end of the object: no arguments are an empty object."""
        if not self.name or (self.lost and self.arguments is None):
            raise Malformed
        if self.arguments is None:
            report(self._call, "null", self.name)
