"""A prompt as it is written: ids and the spans that say what they are.

Text is collected and encoded in one go up to the next cut, so that a piece between two control tokens is encoded as a
whole however many spans begin or end inside it; their places are found by counting bytes. The one deliberate cut is
behind an assistant header, where every prompt ends that is followed by a sampled turn.
"""

from __future__ import annotations

import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from parsers.alternatives import alternatives
from parsers.format import Effort
from parsers.guard import visible
from parsers.memory import Memory
from parsers.tokens import Tokenizer

TurnKind = Literal["system", "user", "assistant", "tool_output"]
PartKind = Literal["tools", "assistant_header", "thinking", "text", "tool_call", "generation_prompt"]
SpanKind = TurnKind | PartKind
_Piece = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids, and the positions of places among them."""
_MEMORY = 128 << 20
_SIZE = array("I").itemsize


class Span(NamedTuple):
    """A token range of the final ids. ``turn`` indexes the conversation's turns; -1 where there is none.

    "system", "user", "assistant" and "tool_output" are whole turns, header to end of turn; the others lie inside.
    """

    start: int
    end: int
    kind: SpanKind
    turn: int


@dataclass(frozen=True)
class Prompt:
    """What the engine reads. ``thinking_open``: the generation prompt ends inside the thinking. ``opener``: the ids
    behind its assistant header. ``continues``: it is followed by more of its last turn, instead of a new one."""

    packed: bytes = field(repr=False)
    """The ids as u32 of this machine's byte order."""
    spans: tuple[Span, ...]
    thinking_open: bool
    thinking: bool
    effort: Effort | None = None
    opener: tuple[int, ...] = ()
    continues: bool = False

    def __len__(self) -> int:
        return len(self.packed) // _SIZE

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """For those who need them as numbers, which takes a millisecond for a long prompt."""
        return tuple(memoryview(self.packed).cast("I"))


class Pieces:
    """Encodes pieces of prompts, and says where in their ids a place of their text is. A piece is remembered as a
    whole, so that an earlier turn costs one look-up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._control = re.compile(alternatives(tokenizer.control))
        self._numbers = list(range(tokenizer.vocab_size))  # ids are one object each in all that is remembered
        self._known: Memory[tuple[str, tuple[int, ...], int | None], _Piece] = Memory(_MEMORY, _size)

    def forget(self) -> None:
        self._known.forget()
        self.tokenizer.forget()

    def of(self, text: str, offsets: tuple[int, ...], before: int | None, remember: bool) -> _Piece:
        """``offsets`` ascend; ``before`` is the id that precedes the piece."""
        if not remember:
            return self._of(text, offsets, before, remember)
        return self._known.of((text, offsets, before), lambda: self._of(text, offsets, before, remember))

    def _of(self, text: str, offsets: tuple[int, ...], before: int | None, remember: bool) -> _Piece:
        ids: list[int] = []
        at = {0: 0}
        # Beside a control token it may be cut: both sides are encoded independently.
        clean = {edge for match in self._control.finditer(text) for edge in match.span()}
        for begin, end in pairwise(sorted({0, len(text), *clean.intersection(offsets)})):
            new = self.tokenizer.encode_trusted(text[begin:end], remember, ids[-1] if ids else before)
            inside = [offset for offset in offsets if begin < offset < end]
            if inside:
                edges = [0, *accumulate(len(self.tokenizer.token_bytes(token)) for token in new)]
                sizes = (len(visible(text[begin:offset]).encode()) for offset in inside)
                places = (len(ids) + bisect_right(edges, size) - 1 for size in sizes)
                at.update(zip(inside, places, strict=True))
            ids += new
            at[end] = len(ids)
        numbers = self._numbers
        return tuple([numbers[token] for token in ids]), tuple([at[offset] for offset in offsets])


def _size(key: tuple[str, tuple[int, ...], int | None], piece: _Piece) -> int:
    return sys.getsizeof(key[0]) + sum(map(sys.getsizeof, (key, key[1], piece, *piece)))


_Open = tuple[int, int, SpanKind, int]
"""A span from one place to another."""


@dataclass(frozen=True)
class Written:
    """What a writer had written, the first ``size`` ids of ``packed``, and what it still held."""

    packed: bytes
    size: int
    spans: tuple[Span, ...]
    text: str
    places: tuple[int, ...]
    pending: tuple[int, ...]
    open: tuple[_Open, ...]


_NOTHING = Written(b"", 0, (), "", (), (), ())


class Writer:
    """Ids and spans as they grow. A place is a number for a position that is known once the text around it is."""

    def __init__(self, pieces: Pieces, remember: bool, before: Written = _NOTHING) -> None:
        """``before``: what another writer had written up to here."""
        self._pieces, self._remember = pieces, remember
        self._before = before
        self._base = before.size
        self._ids: list[int] = []  # behind those
        self._text: list[str] = [before.text] if before.text else []
        self._length = len(before.text)
        self._places = [*before.places]
        self._pending = [*before.pending]  # places in the collected text, as offsets in it
        self._spans = [*before.open]

    def written(self) -> Written:
        """``packed`` is what ``finish`` will give: it begins with these ids."""
        known = len(self._places)
        # The last one may still grow.
        closed = [span for span in self._spans[:-1] if max(span[:2]) < known]
        still = [span for span in self._spans[:-1] if max(span[:2]) >= known] + self._spans[-1:]
        kept = sorted({place for span in still for place in span[:2] if place < known})
        number = {place: at for at, place in enumerate([*kept, *range(known, known + len(self._pending))])}
        return Written(
            *(b"", self._base + len(self._ids), self._all_spans(closed), "".join(self._text)),
            *(tuple([self._places[place] for place in kept]), tuple(self._pending)),
            tuple([(number[start], number[end], kind, turn) for start, end, kind, turn in still]),
        )

    def text(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._length += len(text)

    def tokens(self, ids: Sequence[int]) -> None:
        self.cut()
        self._ids.extend(ids)

    def place(self) -> int:
        self._pending.append(self._length)
        return len(self._places) + len(self._pending) - 1

    def token_place(self, position: int) -> int:
        """A place among the ids that are written already, behind a cut."""
        self._places.append(position)
        return len(self._places) - 1

    def span(self, start: int, kind: SpanKind, turn: int, end: int | None = None) -> None:
        """A span from a place to another one, or to here; outputs of one turn become one span."""
        last = self._spans[-1] if self._spans else None
        end = self.place() if end is None else end
        if kind == "tool_output" and last and last[2:] == (kind, turn) and self._meet(last[1], start):
            self._spans[-1] = (last[0], end, kind, turn)
        else:
            self._spans.append((start, end, kind, turn))

    def cut(self) -> int:
        """What follows is encoded by itself. Returns the number of ids so far."""
        start = self._base + len(self._ids)
        if self._text:
            before = self._last()
            piece = self._pieces.of("".join(self._text), tuple(self._pending), before, self._remember)
            self._ids.extend(piece[0])
            self._places.extend([start + position for position in piece[1]])
        else:
            self._places.extend([start] * len(self._pending))
        self._text, self._length, self._pending = [], 0, []
        return self._base + len(self._ids)

    def ids(self, start: int) -> tuple[int, ...]:
        """Those from a number on which no other writer wrote."""
        return tuple(self._ids[start - self._base :])

    def finish(self) -> tuple[bytes, tuple[Span, ...]]:
        """Packed ids, and spans."""
        self.cut()
        before = memoryview(self._before.packed)[: self._base * _SIZE]
        return b"".join((before, array("I", self._ids))), self._all_spans(self._spans)

    def _last(self) -> int | None:
        if self._ids:
            return self._ids[-1]
        last = array("I", self._before.packed[max(0, self._base - 1) * _SIZE : self._base * _SIZE])
        return last[0] if last else None

    def _all_spans(self, some: Iterable[_Open]) -> tuple[Span, ...]:
        """Those from before and these, in order."""
        places, before = self._places, self._before.spans
        spans = sorted((Span(places[start], places[end], kind, turn) for start, end, kind, turn in some), key=_order)
        first = bisect_right(before, _order(spans[0]), key=_order) if spans else len(before)
        return (*before[:first], *sorted((*before[first:], *spans), key=_order))

    def _meet(self, one: int, other: int) -> bool:
        """Are two places the same?"""
        known = len(self._places)
        if max(one, other) < known:
            return self._places[one] == self._places[other]
        return min(one, other) >= known and self._pending[one - known] == self._pending[other - known]


def _order(span: Span) -> tuple[int, int]:
    return span.start, -span.end
