"""Strings inside arguments: from the quotes and escapes of several languages to JSON."""

from __future__ import annotations

import json
import re
from typing import Literal

from parsers.codecs.call import Call, Malformed
from parsers.schema import unquoted
from parsers.source import Cut, Emit, Source, Step, Stops

_CONTROL = re.compile(r"[\x00-\x1f]")
_SURROGATE = re.compile(r"u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})")
_OPEN_ESCAPE = re.compile(  # what may still become a surrogate, or half a pair that may still become whole
    r"|u|u[dD]([89a-fA-F][0-9a-fA-F]?)?|u[dD][89abAB][0-9a-fA-F]{2}(\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?)?"
)
_SAME_IN_JSON = frozenset('nrtbf\\"u')
_OF_PYTHON = {"'": "'", "a": "\a", "v": "\v", "\n": "", "0": "\0"}
_HEX_DIGITS = {"x": 2, "U": 8}


class Strings:
    """Strings between any quotes, written as JSON. ``escapes``: those of JSON are passed on as they are, those of
    Python are translated, or there are none. ``before``: a quote only closes the string if one of these texts
    follows."""

    def __init__(
        self, quote: str, ends: tuple[str, ...], escapes: Literal["json", "python", ""], before: tuple[str, ...] = ()
    ) -> None:
        self._quote, self._ends, self._json, self._before = quote, ends, escapes == "json", before
        self._stops = Stops(quote, "\\" if escapes else "", *ends)

    def read(self, source: Source, call: Call, emit: Emit) -> Step[None]:
        """A string behind its opening quote, up to and with the closing one. Raises Interrupted and Cut."""

        def put(text: str) -> None:
            written = unquoted(call.text_of(text))
            if self._json and written is not text and _CONTROL.search(text):
                call.tolerate("raw_control_character")
            emit(written)

        emit('"')
        while True:
            stop = yield from source.inside(self._stops, put, self._ends)
            if stop != self._quote:
                emit(call.text_of((yield from (_json_escape if self._json else _python_escape)(source))))
            elif not self._before or (yield from source.follows((self._before,))):
                emit('"')
                return
            else:
                put(stop)

    def decoded(self, source: Source, call: Call) -> Step[str]:
        """The same as text. Raises Malformed, too."""
        parts: list[str] = []
        yield from self.read(source, call, parts.append)
        text = decoded_string("".join(parts))
        if text is None:
            raise Malformed
        return text


def decoded_string(text: str) -> str | None:
    """The value of a JSON string, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _json_escape(source: Source) -> Step[str]:
    """The escape behind a backslash: a character, or a whole surrogate pair; half a pair becomes U+FFFD, because no
    client could write it again. Raises Cut."""
    while _OPEN_ESCAPE.fullmatch(source.buffer):
        if source.ended:
            raise Cut
        yield
    pair = _SURROGATE.match(source.buffer)
    if pair is None:
        return "\\" + source.advance(1)
    text = source.advance(pair.end())
    return "\\" + (text if pair[1] else "ufffd")


def _python_escape(source: Source) -> Step[str]:
    """JSON text for the escape behind a backslash; the backslash stays where Python knows no such escape."""
    if (yield from source.peek()) in _SAME_IN_JSON:
        return (yield from _json_escape(source))
    kind = yield from _characters(source, 1)
    if kind in _HEX_DIGITS:
        digits = yield from _characters(source, _HEX_DIGITS[kind])
        try:
            return unquoted(chr(int(digits, 16)).encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except (ValueError, OverflowError):
            return unquoted("\\" + kind + digits)
    return unquoted(_OF_PYTHON.get(kind, "\\" + kind))


def _characters(source: Source, count: int) -> Step[str]:
    """Exactly so many characters. Raises Cut."""
    while len(source.buffer) < count:
        if source.ended:
            raise Cut
        yield
    return source.advance(count)
