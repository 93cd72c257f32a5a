"""A bounded record of what was computed before, kept or not, so that ``replayed``, ``new`` and ``evicted`` are true."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from engine.memory.keys import PAGE_BYTES, common_tokens, page_key


@dataclass(slots=True)
class _After:
    """What came after one page key: pages and part pages, and the ends of checkpoints as literal tokens."""

    pages: set[bytes] = field(default_factory=set)
    checkpoints: set[bytes] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.pages) + len(self.checkpoints)


@dataclass(frozen=True)
class Known:
    """``tokens`` of the prompt were computed before; checkpoints were once taken at ``checkpoints``, ascending."""

    tokens: int
    checkpoints: tuple[int, ...]


class History:
    """``limit`` bounds the number of pages and checkpoints remembered; the oldest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._after: OrderedDict[bytes, _After] = OrderedDict()

    def add_page(self, previous: bytes, tokens: bytes) -> None:
        """A page, or the computed part of one, after the page with key ``previous``."""
        after = self._entry(previous)
        before = len(after)
        after.pages = {page for page in after.pages if not tokens.startswith(page)} if after.pages else after.pages
        after.pages.add(tokens)
        self._grew(len(after) - before)

    def add_checkpoint(self, previous: bytes, tail: bytes) -> None:
        """A checkpoint after ``tail`` (less than a page) after the page with key ``previous``."""
        after = self._entry(previous)
        before = len(after)
        after.checkpoints.add(tail)
        self._grew(len(after) - before)

    def look_up(self, root: bytes, tokens: bytes) -> Known:
        """How far a prompt was computed before, and where checkpoints lay on the way."""
        key, start, path = root, 0, list[bytes]()
        checkpoints: list[int] = []
        known = 0
        while (after := self._after.get(key)) is not None:
            path.append(key)
            rest = tokens[start : start + PAGE_BYTES]
            checkpoints += sorted((start + len(tail)) // 4 for tail in after.checkpoints if rest.startswith(tail))
            if len(rest) == PAGE_BYTES and rest in after.pages:
                start += PAGE_BYTES
                known = start // 4
                key = page_key(key, rest)
                continue
            known = start // 4 + max((common_tokens(page, rest) for page in after.pages), default=0)
            break
        for key in reversed(path):
            self._after.move_to_end(key)
        return Known(known, tuple(one for one in checkpoints if one <= known))

    def _entry(self, previous: bytes) -> _After:
        after = self._after.setdefault(previous, _After())
        self._after.move_to_end(previous)
        return after

    def _grew(self, count: int) -> None:
        self._size += count
        while self._size > self._limit and len(self._after) > 1:
            _, oldest = self._after.popitem(last=False)
            self._size -= len(oldest)
