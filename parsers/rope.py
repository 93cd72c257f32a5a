"""A long text that grows at its end: what it shares with an earlier one is neither copied nor read again."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate


class Rope:
    """``pieces`` of a text. Those of a longer text that was made of it are the same objects, but for the last ones:
    each is at least twice as long as the one behind it, so there are few."""

    __slots__ = ("_ends", "_pieces")

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces
        self._ends = [*accumulate(map(len, pieces))]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __str__(self) -> str:
        return "".join(self._pieces)

    def __add__(self, text: str) -> Rope:
        if not text:
            return self
        kept = len(self._pieces)
        size = len(text)
        while kept and len(self._pieces[kept - 1]) < 2 * size:
            kept -= 1
            size += len(self._pieces[kept])
        return Rope(*self._pieces[:kept], "".join((*self._pieces[kept:], text)))

    def upto(self, end: int) -> Rope:
        """Its first ``end`` characters."""
        at = bisect_left(self._ends, end)
        return Rope(*self._pieces[:at]) + self.text(self._begin(at), end)

    def text(self, begin: int, end: int | None = None) -> str:
        """What stands between two places."""
        end = len(self) if end is None else min(end, len(self))
        if begin >= end:
            return ""
        first, last = bisect_left(self._ends, begin + 1), bisect_left(self._ends, end)
        start = self._begin(first)
        if first == last:
            return self._pieces[first][begin - start : end - start]
        head, tail = self._pieces[first][begin - start :], self._pieces[last][: end - self._begin(last)]
        return "".join((head, *self._pieces[first + 1 : last], tail))

    def begins_with(self, other: Rope) -> bool:
        pairs = enumerate(zip(self._pieces, other._pieces, strict=False))
        same = next((at for at, (one, its) in pairs if one is not its), min(len(self._pieces), len(other._pieces)))
        begin, end = self._begin(same), len(other)
        return end <= len(self) and self.text(begin, end) == other.text(begin)

    def _begin(self, at: int) -> int:
        return self._ends[at - 1] if at else 0
