"""Strings inside arguments: from the quotes and escapes of several languages to the inside of a JSON string."""

from __future__ import annotations

import re

from parsers.codecs.call import Call, Interrupted
from parsers.schema import quoted
from parsers.source import Cut, Emit, Source, Step, Stops

_CODES = re.compile("[\ud800-\udfff]+")
_CONTROL = re.compile(r"[\x00-\x1f]")
_RAW_CONTROL = {code: f"\\u{code:04x}" for code in range(0x20)} | {10: "\\n", 13: "\\r", 9: "\\t"}
_SURROGATE = re.compile(r"u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})")
_OPEN_ESCAPE = re.compile(  # what may still become a surrogate, or half a pair that may still become whole
    r"|u|u[dD]([89a-fA-F][0-9a-fA-F]?)?|u[dD][89abAB][0-9a-fA-F]{2}(\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?)?"
)
_SAME_IN_JSON = frozenset('nrtbf\\"u')
_OF_PYTHON = {"'": "'", "a": "\a", "v": "\v", "\n": "", "0": "\0"}
_HEX_DIGITS = {"x": 2, "U": 8}


class JsonString:
    """JSON strings, passed through verbatim."""

    def __init__(self, ends: tuple[str, ...]) -> None:
        self._ends = ends
        self._stops = Stops('"', "\\", *ends)

    def body(self, source: Source, call: Call, emit: Emit) -> Step[None]:
        """A string behind its opening quote, with the closing quote. Raw control characters are escaped."""

        def put(text: str) -> None:
            if _CONTROL.search(text):
                call.tolerate("raw_control_character")
                text = text.translate(_RAW_CONTROL)
            emit(_CODES.sub(lambda code: quoted(call.text_of(code[0]))[1:-1], text))

        while True:
            stop = yield from source.until(self._stops, put, hold_at_end=True)
            if stop is None:
                raise Cut
            if stop in self._ends:
                raise Interrupted(stop)
            if stop == '"':
                emit(stop)
                return
            emit(stop + call.text_of((yield from json_escape(source))))


class QuotedString:
    """Strings between any quotes, with the escapes of Python or with none, written as the inside of a JSON string.

    ``closes_before``: a quote only closes the string if one of these texts follows.
    """

    def __init__(self, quote: str, ends: tuple[str, ...], escapes: bool, closes_before: tuple[str, ...] = ()) -> None:
        self._quote, self._ends, self._closes_before = quote, ends, closes_before
        self._stops = Stops(quote, "\\" if escapes else "", *ends)

    def body(self, source: Source, call: Call, emit: Emit) -> Step[None]:
        """A string behind its opening quote up to and with the closing one, which is not emitted."""

        def put(text: str) -> None:
            emit(quoted(call.text_of(text))[1:-1])

        while True:
            stop = yield from source.until(self._stops, put, hold_at_end=True)
            if stop is None:
                raise Cut
            if stop in self._ends:
                raise Interrupted(stop)
            if stop == self._quote:
                if not self._closes_before or (yield from source.follows((self._closes_before,))):
                    return
                put(stop)
                continue
            emit(call.text_of((yield from _python_escape(source))))


def json_escape(source: Source) -> Step[str]:
    """What stands behind a backslash: a character, or a whole surrogate pair; half a pair becomes U+FFFD, because no
    client could write it again. Raises Cut."""
    while _OPEN_ESCAPE.fullmatch(source.buffer):
        if source.ended:
            raise Cut
        yield
    pair = _SURROGATE.match(source.buffer)
    if pair is None:
        return source.advance(1)
    text = source.advance(pair.end())
    return text if pair[1] else "ufffd"


def _python_escape(source: Source) -> Step[str]:
    """JSON text for the escape behind a backslash; the backslash stays where Python knows no such escape."""
    kind = yield from characters(source, 1, peek=True)
    if kind in _SAME_IN_JSON:
        return "\\" + (yield from json_escape(source))
    source.advance(1)
    if kind in _HEX_DIGITS:
        digits = yield from characters(source, _HEX_DIGITS[kind])
        try:
            return quoted(chr(int(digits, 16)).encode("utf-16", "surrogatepass").decode("utf-16", "replace"))[1:-1]
        except (ValueError, OverflowError):
            return quoted("\\" + kind + digits)[1:-1]
    return quoted(_OF_PYTHON.get(kind, "\\" + kind))[1:-1]


def characters(source: Source, count: int, peek: bool = False) -> Step[str]:
    """Exactly so many characters. Raises Cut."""
    while len(source.buffer) < count:
        if source.ended:
            raise Cut
        yield
    return source.buffer[:count] if peek else source.advance(count)
