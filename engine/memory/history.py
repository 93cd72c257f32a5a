"""A bounded record of what was computed before, kept or not, so that ``replayed``, ``new`` and ``evicted`` are true."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.memory.keys import PAGE_BYTES, common_tokens, page_key


@dataclass(frozen=True)
class Known:
    """``tokens`` of the prompt were computed before; checkpoints were once taken at ``checkpoints``, ascending."""

    tokens: int
    checkpoints: tuple[int, ...]


_Item = tuple[bytes, bytes, bool]
"""(key before it, tokens, whether it is a checkpoint)"""


class History:
    """``limit`` bounds the number of pages and checkpoints remembered; the oldest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pages: dict[bytes, list[bytes]] = {}
        """Pages and part pages after a page key, sorted; none of them starts with another."""
        self._checkpoints: dict[bytes, set[bytes]] = {}
        """The tokens between a page key and a checkpoint."""
        self._items: OrderedDict[_Item, None] = OrderedDict()
        """All of them, by when they were last added or looked up."""

    def __len__(self) -> int:
        return len(self._items)

    def add_page(self, previous: bytes, tokens: bytes) -> None:
        """A page, or the computed part of one, after the page with key ``previous``."""
        pages = self._pages.setdefault(previous, [])
        at = bisect_left(pages, tokens)
        if at < len(pages) and pages[at].startswith(tokens):
            self._touch((previous, pages[at], False))
            return
        if at and tokens.startswith(pages[at - 1]):
            del self._items[previous, pages[at - 1], False]
            pages[at - 1] = tokens
        else:
            pages.insert(at, tokens)
        self._touch((previous, tokens, False))

    def add_chain(self, key: bytes, tokens: bytes) -> None:
        """Pages one after the other, after the page with this key."""
        for start in range(0, len(tokens), PAGE_BYTES):
            page = tokens[start : start + PAGE_BYTES]
            self.add_page(key, page)
            key = page_key(key, page)

    def add_checkpoint(self, previous: bytes, tail: bytes) -> None:
        """A checkpoint after ``tail`` (less than a page) after the page with key ``previous``."""
        self._checkpoints.setdefault(previous, set()).add(tail)
        self._touch((previous, tail, True))

    def look_up(self, keys: Sequence[bytes], tokens: bytes) -> Known:
        """How far a prompt was computed before, and where checkpoints lay on the way. ``keys``: its ``page_keys``."""
        known = 0
        seen: list[_Item] = []
        checkpoints: list[int] = []
        for number, key in enumerate(keys):
            start = PAGE_BYTES * number
            rest = tokens[start : start + PAGE_BYTES]
            tails = self._checkpoints.get(key, set())
            for size in range(0, min(len(rest) + 4, PAGE_BYTES), 4) if tails else ():
                if rest[:size] in tails:
                    seen.append((key, rest[:size], True))
                    checkpoints.append((start + size) // 4)
            pages = self._pages.get(key, [])
            at = bisect_left(pages, rest)
            shared, page = max(
                ((common_tokens(one, rest), one) for one in pages[max(0, at - 1) : at + 1]), default=(0, b"")
            )
            known = start // 4 + shared
            if shared:
                seen.append((key, page, False))
            if 4 * shared < PAGE_BYTES:
                break
        for item in reversed(seen):
            self._touch(item)
        return Known(known, tuple(one for one in checkpoints if one <= known))

    def _touch(self, item: _Item) -> None:
        self._items[item] = None
        self._items.move_to_end(item)
        while len(self._items) > self._limit:
            self._forget(*self._items.popitem(last=False)[0])

    def _forget(self, previous: bytes, tokens: bytes, is_checkpoint: bool) -> None:
        if is_checkpoint:
            tails = self._checkpoints[previous]
            tails.discard(tokens)
            if not tails:
                del self._checkpoints[previous]
        else:
            pages = self._pages[previous]
            pages.pop(bisect_left(pages, tokens))
            if not pages:
                del self._pages[previous]
