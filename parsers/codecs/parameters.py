"""Parameters that arrive one by one, written as the members of one JSON object."""

from __future__ import annotations

import re
from typing import Literal

from parsers.codecs.call import Call, Malformed
from parsers.schema import is_json_object, json_of, quoted, unquoted, wire_json
from parsers.source import Interrupted

_MARKS = re.compile(r'\\.|["\n]', re.DOTALL)
_WRAPPERS = ("arguments", "parameters")
"""Keys that hold the argument object when it is wrapped once more."""


class Parameters:
    """The members so far. Of two with one key the first counts: it may be on its way to the client already."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._seen: set[str] = set()
        self._wrapped: tuple[str, str] | None = None
        self._whole = self._lost = False

    def unreadable(self, rule: str) -> None:
        """Something that is no parameter was there."""
        self._lost = True
        self.call.tolerate(rule)

    def written_whole(self) -> None:
        """The object is written by someone else."""
        self._whole = not self._seen
        self._seen.add("")

    def begin(self, key: str) -> str:
        """What stands before the value of a new member; "" if it must be dropped."""
        if self._wrapped:
            (lead, text), self._wrapped = self._wrapped, None
            self.call.arguments(lead + text)
        if not key or key in self._seen or self._whole:
            if key in self._seen:
                self.call.tolerate("duplicate_parameter")
            else:
                self.unreadable("malformed_parameter")
            return ""
        lead = ("{" if not self._seen else ", ") + quoted(key) + ": "
        self._seen.add(key)
        return lead

    def value(self, key: str, kind: str, typed: Literal["", "string", "type"], trims: bool) -> Value:
        """``kind`` is the type on the wire, "" if it does not say."""
        lead = self.begin(key)
        types = self.call.types(key)
        says_string = bool(kind) and kind == {"": "", "string": "true", "type": "string"}[typed]
        streams = says_string or (not kind and types == frozenset({"string"}))
        return Value(self, key, lead, types, bool(kind) and not says_string, streams, trims)

    def finished(self, key: str, lead: str, text: str, types: frozenset[str] | None) -> None:
        """A value that was held until it closed."""
        if types is None and key in _WRAPPERS and len(self._seen) == 1 and is_json_object(text):
            self._wrapped = lead, text
        else:
            self.call.arguments(lead + text)

    def close(self, stop: str) -> None:
        """``stop`` is what ended the parameters. Where something was there but no parameter, this is no call."""
        if self._whole:
            return
        if self._lost and not self._seen:
            raise Interrupted(stop) if stop else Malformed
        if self._wrapped:
            self.call.arguments(self._wrapped[1])
            self.call.tolerate("wrapped_arguments")
        elif self._seen:
            self.call.arguments("}")


class JsonStrings:
    """Does the text so far, an object or a list, end inside a string?"""

    def __init__(self) -> None:
        self.inside = False
        self._nested: bool | None = None
        self._escape = ""

    def feed(self, text: str) -> None:
        if self._nested is None and text.strip():
            self._nested = text.lstrip()[0] in "{["
        if not self._nested:
            return
        text, end = self._escape + text, 0
        for mark in _MARKS.finditer(text):
            end = mark.end()
            if mark[0] == "\n":
                self.inside = False  # no string of JSON goes on in the next line
            elif mark[0] == '"':
                self.inside = not self.inside
        self._escape = "\\" if text.endswith("\\") and end < len(text) else ""


class Value:
    """The text of one parameter. It streams where it is certainly a string; without ``lead`` it is dropped."""

    def __init__(
        self,
        parameters: Parameters,
        key: str,
        lead: str,
        types: frozenset[str] | None,
        json: bool,
        streams: bool,
        trims: bool,
    ) -> None:
        self._parameters, self._call = parameters, parameters.call
        self._key, self._lead, self._types, self._json = key, lead, types, json
        self._streams, self._trims = streams, trims
        self._parts: list[str] = []
        self._first, self._held = True, ""
        self._strings = JsonStrings() if not streams and (json or not types or types & {"object", "array"}) else None
        self.line_start = True
        """The text so far ends a line."""
        self.string = 0, False
        """What is known of the string at the end of the text so far: up to where, and whether it goes on there."""
        self.doubted = 0
        """Up to where it is known that no delimiter is a better end than those before it."""
        if lead and streams:
            self._call.arguments(lead + '"')

    def put(self, text: str) -> None:
        """Takes one newline off the front, and holds the last one, across chunks."""
        text = self._call.text_of(text)
        self.line_start = text.endswith("\n")
        if self._strings:
            self._strings.feed(text)
        if self._first and self._trims and text.startswith("\n"):
            text = text[1:]
        self._first = False
        text, self._held = self._held + text, ""
        if text.endswith("\n"):
            text, self._held = text[:-1], "\n"
        self._add(text)

    @property
    def in_string(self) -> bool:
        """The text so far ends inside a string, if it is an object or a list."""
        return self._strings is not None and self._strings.inside

    def _add(self, text: str) -> None:
        if text and self._lead:
            if self._streams:
                self._call.arguments(unquoted(text))
            else:
                self._parts.append(text)

    def close(self, drop_newline: bool = False) -> None:
        """``drop_newline``: the last newline is the layout of what came instead of the closer."""
        if self._held and not (self._trims or drop_newline):
            self._add(self._held)
        if self._lead and self._streams:
            self._call.arguments('"')
        elif self._lead:
            raw = "".join(self._parts)
            text, python = wire_json(raw) if self._json else json_of(raw, self._types)
            self._parameters.finished(self._key, self._lead, text, self._types)
            if python:
                self._call.tolerate("python_literal")
