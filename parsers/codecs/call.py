"""What all codecs share: the call that is being read, the delimiters around it, and the ways in which it ends early.

A codec is a generator over a ``Source`` that starts behind the header of a call and ends behind its arguments. It
reports fragments of JSON text to a ``Call``; the announcement comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from parsers.events import Event, Tolerated, ToolArgsDelta, ToolCallStart
from parsers.schema import property_types
from parsers.source import Source, Step

NAME_LIMIT = 256
"""Characters that a name or a key may have."""


class Malformed(Exception):
    """The text is no call of this format."""


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
        self.parameters: Mapping[str, Any] = {}
        """The schema of the tool's arguments, once it is announced."""
        self.guarded = bool(rules)
        self.tools = tools
        self._emit, self._begin = emit, begin
        self.tolerated = dict.fromkeys(rules)

    def announce(self, name: str) -> None:
        """Raises Malformed when this is no call after all."""
        if self.guarded and name not in self.tools:
            raise Malformed
        self.announced = True
        self.parameters = self.tools.get(name, {})
        self._begin()
        self._emit(ToolCallStart(self.index, name))
        for rule in self.tolerated:
            self._emit(Tolerated(rule))

    def arguments(self, fragment: str) -> None:
        self.parts.append(fragment)
        self._emit(ToolArgsDelta(self.index, fragment))

    def types(self, key: str) -> frozenset[str] | None:
        """What the schema allows for a key; None if it is not declared."""
        return property_types(self.parameters, key)

    def tolerate(self, rule: str) -> None:
        """Counted once per call, and only if it turns out to be one."""
        if rule not in self.tolerated:
            self.tolerated[rule] = None
            if self.announced:
                self._emit(Tolerated(rule))


def declared(source: Source, names: Mapping[str, str]) -> Step[str]:
    """The longest of these texts that comes next, consumed; "" if none does. ``names`` are the tools that they name."""
    while any(len(text) > len(source.buffer) and text.startswith(source.buffer) for text in names):
        if source.ended:
            break
        yield
    found = max((text for text in names if source.buffer.startswith(text)), key=len, default="")
    return source.advance(len(found))


@dataclass(frozen=True)
class Fence:
    """The delimiters around the arguments of a call, as they are in the buffer."""

    opens: tuple[str, ...]
    """Openers of the next call; the first is certain, others are the same characters in ordinary tokens."""
    closes: tuple[str, ...]
    """Closers of this call, and then of the section; the first is certain."""
    ends: tuple[str, ...]
    """Ends of the turn."""
    tail: str = ""
    """What closes the arguments before the call's closer, as in the header's own element."""
    head: str = ""
    """How the header of a call begins."""

    @property
    def outer(self) -> tuple[str, ...]:
        """All that is no argument, but for the tail."""
        return tuple(text for text in (*self.closes, *self.opens, *self.ends) if text)

    @property
    def behind(self) -> tuple[str, ...]:
        """What may follow arguments."""
        return (self.tail, *self.outer) if self.tail else self.outer


class Reader(Protocol):
    """Reads the arguments of one call."""

    def read(self, source: Source, call: Call) -> Step[str]:
        """Returns the delimiter behind the arguments that is consumed already; "" if none.

        Raises Malformed, Interrupted and Cut.
        """
        ...

    def begin(self, source: Source) -> Step[None]:
        """Consumes what opens a list of calls, where there is one."""
        ...

    def more(self, source: Source) -> Step[bool]:
        """Behind one call of a list: consumes what stands before the next and returns True, or the end of the list."""
        ...


class Single:
    """A codec whose calls stand alone."""

    def begin(self, source: Source) -> Step[None]:
        yield from ()

    def more(self, source: Source) -> Step[bool]:
        yield from ()
        return False
