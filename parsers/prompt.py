"""A prompt as it is written: ids and the spans that say what they are.

Text is collected and encoded in one go up to the next cut, so that a piece between two control tokens is encoded as a
whole however many spans begin or end inside it; their places are found by counting bytes. The one deliberate cut is
behind an assistant header, where every prompt ends that is followed by a sampled turn.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from parsers.alternatives import alternatives
from parsers.format import Effort
from parsers.guard import visible
from parsers.tokens import Tokenizer

TurnKind = Literal["system", "user", "assistant", "tool_output"]
PartKind = Literal["tools", "assistant_header", "thinking", "text", "tool_call", "generation_prompt"]
SpanKind = TurnKind | PartKind


@dataclass(frozen=True)
class Span:
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
    behind its assistant header."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    thinking_open: bool
    thinking: bool
    effort: Effort | None = None
    opener: tuple[int, ...] = ()


class Edges:
    """Says where a text may be cut because a control token is on one side: both sides are encoded independently."""

    def __init__(self, control: Collection[str]) -> None:
        self._control = frozenset(control)
        self._next = re.compile(alternatives(control))
        self._sizes = sorted({len(name) for name in control})

    def clean(self, text: str, offset: int) -> bool:
        return bool(self._next.match(text, offset)) or any(
            text[offset - n : offset] in self._control for n in self._sizes
        )


class Writer:
    """Ids and spans as they grow. A place is a number for a position that is known once the text around it is."""

    def __init__(self, tokenizer: Tokenizer, edges: Edges, remember: bool) -> None:
        self._tokenizer, self._edges, self._remember = tokenizer, edges, remember
        self._ids: list[int] = []
        self._text: list[str] = []
        self._length = 0
        self._places: list[int] = []
        self._pending: list[tuple[int, int]] = []  # (offset in the collected text, place)
        self._spans: list[tuple[int, int, SpanKind, int]] = []

    def text(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._length += len(text)

    def tokens(self, ids: Sequence[int]) -> None:
        self.cut()
        self._ids.extend(ids)

    def place(self) -> int:
        self._places.append(-1)
        self._pending.append((self._length, len(self._places) - 1))
        return len(self._places) - 1

    def token_place(self, position: int) -> int:
        """A place among the ids that are written already."""
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
        text = "".join(self._text)
        offsets = sorted({offset for offset, _ in self._pending if self._edges.clean(text, offset)} | {0, len(text)})
        pending = sorted(self._pending)
        self._text, self._length, self._pending = [], 0, []
        at = {0: len(self._ids)}
        for begin, end in pairwise(offsets):
            start = len(self._ids)
            before = self._ids[-1] if self._ids else None
            self._ids.extend(self._tokenizer.encode_trusted(text[begin:end], self._remember, before))
            inside = [offset for offset, _ in pending if begin < offset < end]
            at.update(self._positions(text, begin, inside, start))
            at[end] = len(self._ids)
        for offset, place in pending:
            self._places[place] = at[offset]
        return len(self._ids)

    def finish(self) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        self.cut()
        places = self._places
        spans = [Span(places[start], places[end], kind, turn) for start, end, kind, turn in self._spans]
        return tuple(self._ids), tuple(sorted(spans, key=lambda span: (span.start, -span.end)))

    def _meet(self, one: int, other: int) -> bool:
        offsets = {place: offset for offset, place in self._pending}
        if one in offsets or other in offsets:
            return offsets.get(one) == offsets.get(other)
        return self._places[one] == self._places[other]

    def _positions(self, text: str, begin: int, offsets: Sequence[int], start: int) -> dict[int, int]:
        """Token positions of offsets inside one piece, moved down to the token's start."""
        if not offsets:
            return {}
        edges = [0, *accumulate(len(self._tokenizer.token_bytes(token)) for token in self._ids[start:])]
        return {
            offset: start + bisect_right(edges, len(visible(text[begin:offset]).encode())) - 1 for offset in offsets
        }
