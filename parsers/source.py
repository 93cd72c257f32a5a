"""The input of the parser, and the one primitive that sees the edges between chunks.

The parser is recursive descent written as generators: ``yield`` means "more input, please". Everything above ``until``,
``literal`` and ``follows`` reads as if the whole text were there, so no chunking of the input can change what it does.

Each control token of a delimiter travels in the buffer as a lone surrogate, its code: text decoded from UTF-8 can never
contain one, so the same characters spelled in ordinary tokens stay text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Container, Generator
from functools import lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]
Emit = Callable[[str], None]


Path = tuple[tuple[str, ...], ...]
"""Texts that follow each other: one of each set, with white space before each."""
SPACE_LIMIT = 64
_CODE = re.compile("[\ud800-\udfff]")


def certain(text: str) -> bool:
    """Does ``text`` have a control token, which no content can spell?"""
    return _CODE.search(text) is not None


class Cut(Exception):
    """The input ended where more of it would have decided."""


class Interrupted(Exception):
    """A delimiter that no value can contain came inside one; it is already consumed."""

    def __init__(self, stop: str) -> None:
        super().__init__(stop)
        self.stop = stop


def drop(text: str) -> None:
    """For text that means nothing."""


class Stops:
    """A set of delimiters, compiled: the longest one wins where several begin at the same place."""

    def __init__(self, *delimiters: str) -> None:
        self.pattern, self.longest, self.prefixes = _compiled(delimiters)

    def held(self, text: str) -> int:
        """Where the suffix of ``text`` begins that may still become a (longer) delimiter; len(text) if none."""
        for start in range(max(0, len(text) - self.longest + 1), len(text)):
            if text[start:] in self.prefixes:
                return start
        return len(text)


@lru_cache(1024)
def _compiled(delimiters: tuple[str, ...]) -> tuple[re.Pattern[str], int, frozenset[str]]:
    """Remembered: every answer of a family is read with the same ones."""
    ordered = sorted({d for d in delimiters if d}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, ordered)) if ordered else "(?!)")
    prefixes = frozenset(d[:n] for d in ordered for n in range(1, len(d)))
    return pattern, len(ordered[0]) if ordered else 0, prefixes


class _Edge(NamedTuple):
    """Where a token ends."""

    characters: int
    tokens: int
    silent: int
    """Tokens with those behind them that have no characters."""
    unfinished: bool = False
    """The token has bytes of what comes next, too."""


class Source:
    """Buffered input with absolute character positions, each of which maps to a token."""

    def __init__(self) -> None:
        self.buffer = ""
        self.position = 0
        """Characters consumed so far: the absolute position of ``buffer[0]``."""
        self.at = 0
        """Where the delimiter that ``until`` returned last begins."""
        self.ended = False
        self.natural = False
        """The input ended because the model stopped, not because it was cut off."""
        self.stop = ""
        """The delimiter that was returned last; it lies at ``at``."""
        self.logs: list[list[str]] = []
        """Logs of consumed text, for as long as it may turn out to be no call."""
        self._edges = deque([_Edge(0, 0, 0)])
        self._length = 0
        self._tokens = 0

    def push(self, text: str, unfinished: bool = False) -> None:
        """Append the text of one more token. ``unfinished``: it ends within a code point, which may be all of it."""
        self._tokens += 1
        if text:
            self._reaches(text, unfinished)
        else:
            self._edges[-1] = self._edges[-1]._replace(silent=self._tokens)

    def append(self, text: str) -> None:
        """Append text that belongs to the last token (the flush of an unfinished code point)."""
        if text:
            if self._edges[-1].unfinished:
                self._edges.pop()
            self._reaches(text, unfinished=False)

    def _reaches(self, text: str, unfinished: bool) -> None:
        self.buffer += text
        self._length += len(text)
        self._edges.append(_Edge(self._length, self._tokens, self._tokens, unfinished))

    def end(self, natural: bool) -> None:
        self.ended, self.natural = True, natural

    def token_at(self, position: int) -> tuple[int, bool, str]:
        """(tokens before ``position``, exact, text of the straddling token past it, half a code point as U+FFFD).

        ``position`` is that of the last stop (``at``) or of the next character (``position``).
        """
        before = self._edges[0]
        for edge in self._edges:
            if edge.characters > position or (edge.unfinished and edge.characters == position):
                if before.characters == position:
                    break
                known = self.stop + self.buffer if position == self.at else self.buffer
                half = "\ufffd" if edge.unfinished else ""
                return before.silent, False, known[: edge.characters - position] + half
            before = edge
        return before.tokens, True, ""

    def advance(self, count: int) -> str:
        text, self.buffer = self.buffer[:count], self.buffer[count:]
        self.position += count
        for log in self.logs:
            log.append(text)
        while len(self._edges) > 2 and self._edges[2].characters <= self.at:  # the last edge may still move
            self._edges.popleft()
        return text

    def stop_here(self, text: str) -> str:
        """Consumes a delimiter that comes next."""
        self.at, self.stop = self.position, text
        return self.advance(len(text))

    def just_read(self, delimiters: Container[str]) -> str:
        """The delimiter that was consumed last, if it is one of these and nothing was consumed since; else ""."""
        return self.stop if self.stop in delimiters and self.at + len(self.stop) == self.position else ""

    def until(self, stops: Stops, emit: Emit, hold_at_end: bool = False) -> Step[str | None]:
        """Pass text to ``emit`` up to the first stop; consume and return the stop, or None at the end of the input.

        Only a suffix that may still become a stop is held back. At the end it is text; it is dropped where it has a
        control token, and where ``hold_at_end`` says that half a delimiter must not appear (inside calls).
        """
        while True:
            match = stops.pattern.search(self.buffer)
            hold = stops.held(self.buffer)
            if self.ended and not hold_at_end and not certain(self.buffer[hold:]):
                hold = len(self.buffer)
            if match and (match.start() < hold or self.ended):
                if match.start():
                    emit(self.advance(match.start()))
                return self.stop_here(match[0])
            if hold:
                self.at, self.stop = self.position + hold, ""
                emit(self.advance(hold))
            if self.ended:
                self.advance(len(self.buffer))
                self.at, self.stop = self.position, ""
                return None
            yield

    def inside(self, stops: Stops, emit: Emit, ends: Container[str]) -> Step[str]:
        """``until`` within a value, of which half a delimiter is no part. Raises Cut, and Interrupted at ``ends``."""
        stop = yield from self.until(stops, emit, hold_at_end=True)
        if stop is None:
            raise Cut
        if stop in ends:
            raise Interrupted(stop)
        return stop

    def take(self, stops: Stops, limit: int) -> Step[tuple[str, str | None]]:
        """The text up to the first stop, and the stop; (text, None) when it is longer than ``limit``. Raises Cut."""
        text, stop = yield from self.upto(stops, limit)
        return text, stop and self.stop_here(stop)

    def upto(self, stops: Stops, limit: int) -> Step[tuple[str, str | None]]:
        """As ``take``, but the stop is not consumed."""
        while True:
            match, held = stops.pattern.search(self.buffer), stops.held(self.buffer)
            known = match is not None and (match.start() < held or (self.ended and self.natural))
            if match and known and match.start() <= limit:
                return self.advance(match.start()), match[0]
            if known or held > limit:
                return self.buffer[:limit], None
            if self.ended:
                raise Cut
            yield

    def peek(self) -> Step[str]:
        """The next character, or "" at the end."""
        while not self.buffer and not self.ended:
            yield
        return self.buffer[:1]

    def space(self, characters: str = " \t\r\n") -> Step[None]:
        """Consume layout."""
        while True:
            rest = self.buffer.lstrip(characters)
            if rest != self.buffer:
                self.advance(len(self.buffer) - len(rest))
            if self.buffer or self.ended:
                return
            yield

    def literal(self, text: str) -> Step[bool]:
        """Consume exactly ``text`` if it comes next. Raises Cut."""
        while len(self.buffer) < len(text) and text.startswith(self.buffer):
            if self.ended:
                raise Cut
            yield
        if self.buffer.startswith(text):
            self.stop_here(text)
            return True
        return False

    def follows(self, *paths: Path) -> Step[bool]:
        """Does what one of ``paths`` describes come next? Consumes nothing.

        A natural end of the input counts as what was to follow. Raises Cut at an end that leaves it open.
        """
        while True:
            verdicts = [compared(self.buffer, path) for path in paths]
            if True in verdicts or None not in verdicts:
                return True in verdicts
            if self.ended and not self.natural:
                raise Cut
            if self.ended:
                rest = self.buffer.strip()
                return not rest or any(len(path) > 1 and rest in path[0] for path in paths)
            yield


def compared(text: str, path: Path) -> bool | None:
    """Whether ``text`` begins as ``path`` says; None while more text may decide."""
    for options in path:
        rest = text.lstrip(" \t\r\n")
        if len(text) - len(rest) > SPACE_LIMIT:
            return False
        found = next((option for option in options if rest.startswith(option)), None)
        if found is None:
            return None if any(option.startswith(rest) for option in options) else False
        text = rest[len(found) :]
    return True
