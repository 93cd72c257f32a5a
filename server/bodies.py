"""Bodies of requests as they were read before: each request of a conversation brings all its messages again.

A body that begins and ends with the very bytes of an earlier one, up to between two of its messages and from the end of
them on, is read only in between. That is exact: after the same bytes a reader of JSON is in the same state, so what the
equal parts say is what they said before. The rest (and any body that is not so) is read as ever.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ValidationError, from_json

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},]', re.DOTALL)
_NAMED = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")

_MODEL = 2048
"""Bytes of a message as it is remembered, beside its text."""
_VALUES = ((b"{", 200), (b"[", 100), (b",", 60))
"""Bytes of what begins there as it is remembered, beside its text."""
_KEPT = 256
"""How many bodies are remembered: all of them are compared with each new one."""
Owner = tuple[str, str]
"""A namespace, and the protocol whose models they are."""


class Body(dict[str, Any]):
    """A body with messages and tools that were read before: in their places stand the models that they were read as.
    ``raw``: all of it as it came."""

    raw: dict[str, Any]


class Known(list[Any]):
    """Messages, the first ``read`` of which are models."""

    read = 0


def news(value: object, check: Callable[[object], list[Any]]) -> list[Any]:
    """Wraps pydantic's check of a list of messages: those that were read before are taken as they are. Where a new one
    is wrong, all are checked, so that the error names its place among all."""
    if isinstance(value, Known):
        try:
            return [*value[: value.read], *check(value[value.read :])]
        except ValidationError:
            pass
    return check(value)


def raw_body(body: object) -> object:
    return body.raw if isinstance(body, Body) else body


@dataclass
class Entry:
    """A body that was read. ``begins``: where each message but the first begins, behind its comma; ``end``: the bracket
    behind the last one. ``weight``: about the bytes of all values. ``messages`` and ``tools``: the models made of them.
    ``instead``: the number of the entry whose place it takes."""

    owner: Owner
    field: str
    data: bytes
    begins: list[int]
    end: int
    raw: dict[str, Any]
    weight: int
    messages: Sequence[Any] = ()
    tools: Sequence[Any] | None = None
    instead: int | None = None

    @property
    def size(self) -> int:
        """About what it takes, in bytes: short messages and small values take far more than their text."""
        return self.weight + _MODEL * len(self.raw[self.field])


class Bodies:
    """The latest bodies, at most ``limit`` bytes of them. Those of one ``owner`` are used for no other."""

    def __init__(self, limit: int = 64 << 20) -> None:
        self._limit = limit
        self._known: OrderedDict[int, Entry] = OrderedDict()
        self._size = 0
        self._next = 0

    def read(self, data: bytes, owner: Owner, field: str) -> tuple[object, Entry | None]:
        """The value, in which ``field`` has the messages, and what is to be remembered of it with their models
        (``keep``). Raises ValueError where it is no JSON."""
        number, shared = self._find(data, owner, field)
        if number is not None:
            known = self._continued(self._known[number], shared, data)
            if known is not None:
                self._known.move_to_end(number)
                if shared >= len(self._known[number].begins):  # this one has all of its messages, and takes its place
                    known[1].instead = number
                return known
        value, weight = from_json(data, allow_inf_nan=False), _weight(data)
        if weight > self._limit // 4 or not isinstance(value, dict) or not isinstance(value.get(field), list):
            return value, None
        places = _array(data, field)
        return value, None if places is None else Entry(owner, field, data, *places, value, weight)

    def keep(self, entry: Entry, messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
        """``messages`` and ``tools``: the models that they were read as."""
        if len(messages) != len(entry.raw[entry.field]):
            return
        entry.messages, entry.tools = messages, tools
        if entry.instead is not None and entry.instead in self._known:
            self._drop(entry.instead)
        self._next += 1
        self._known[self._next] = entry
        self._size += entry.size
        while self._size > self._limit or len(self._known) > _KEPT:
            self._drop(next(iter(self._known)))

    def forget(self) -> None:
        self._known.clear()
        self._size = 0

    def _drop(self, number: int) -> None:
        self._size -= self._known.pop(number).size

    def _find(self, data: bytes, owner: Owner, field: str) -> tuple[int | None, int]:
        """Which body shares most of its messages with this one, and how many."""
        best: tuple[int | None, int] = (None, 0)
        for number, entry in reversed(self._known.items()):
            if (entry.owner, entry.field) == (owner, field):
                count = _shared(entry, data)
                best = (number, count) if count > best[1] else best
        return best

    def _continued(self, entry: Entry, count: int, data: bytes) -> tuple[Body, Entry] | None:
        """The body, the first ``count`` of whose messages are the entry's."""
        tail, begin = entry.data[entry.end :], entry.begins[count - 1]
        end = len(data) - len(tail)
        weight = entry.weight - _weight(entry.data[begin : entry.end]) + _weight(data[begin:end])
        if end <= begin or not data.endswith(tail) or weight > self._limit // 4:
            return None
        try:
            new = from_json(b'{"":[%s]}' % data[begin:end], allow_inf_nan=False)[""]
        except ValueError:
            return None
        begins, closed = _places(data, begin)
        if not new or closed != end:
            return None
        field = entry.field
        raw = {**entry.raw, field: entry.raw[field][:count] + new}
        messages = Known(entry.messages[:count])
        messages += new
        messages.read = count
        body = Body({**raw, field: messages})
        if entry.tools is not None and "tools" in raw:
            body["tools"] = entry.tools
        body.raw = raw
        return body, Entry(entry.owner, field, data, [*entry.begins[:count], *begins], end, raw, weight)


def _weight(data: bytes) -> int:
    """About what the values in a text take, in bytes; commas and brackets in strings are counted with the others."""
    return len(data) + sum(size * data.count(sign) for sign, size in _VALUES)


def _shared(entry: Entry, data: bytes) -> int:
    """How many messages both bodies begin with, each followed by another one."""
    begins = entry.begins
    if not begins or not data.startswith(entry.data[: begins[0]]):
        return 0
    if data.startswith(entry.data[: begins[-1]]):
        return len(begins)
    return bisect_right(begins, False, key=lambda begin: not data.startswith(entry.data[:begin]))


def _places(data: bytes, begin: int) -> tuple[list[int], int]:
    """In an array: where the items behind the next commas begin, and where it ends."""
    begins: list[int] = []
    depth = 0
    for match in _TOKEN.finditer(data, begin):
        token = match[0]
        if token in (b"[", b"{"):
            depth += 1
        elif token in (b"]", b"}"):
            if not depth:
                return begins, match.start()
            depth -= 1
        elif token == b"," and not depth:
            begins.append(match.end())
    return begins, len(data)


def _array(data: bytes, field: str) -> tuple[list[int], int] | None:
    """The places in the array of that name in the object that ``data`` is; None where the name comes twice."""
    found: tuple[list[int], int] | None = None
    depth, at = 0, 0
    while match := _TOKEN.search(data, at):
        token, at = match[0], match.end()
        if token in (b"[", b"{"):
            depth += 1
        elif token in (b"]", b"}"):
            depth -= 1
        elif depth == 1 and token != b"," and (named := _NAMED.match(data, at)) and from_json(token) == field:
            if found is not None or data[named.end() : named.end() + 1] != b"[":
                return None
            found = _places(data, named.end() + 1)
            at = found[1] + 1
    return found
