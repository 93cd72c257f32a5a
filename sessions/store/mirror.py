"""What the store holds, in RAM: every look-up is answered from here, whatever is still being written.

Measured: 13 MB per million stored tokens (820 bytes per page of 64 tokens, its 256 bytes of tokens included), and
620 bytes per checkpoint. ``max_extents`` bounds it. The session that wrote a page costs nothing here (one text for all
its pages) and 32 bytes per page in the index: 0.5 MB per million tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from sessions.store.format import About, Place, Shape, aligned
from sessions.store.payload import Payload

_PAGE = 256
"""Bytes of a full page's tokens."""
Key = TypeVar("Key", str, bytes)


class Entry:
    """One extent, to be written, in RAM or on disk; also the PageRef or StateRef that look-ups return.

    ``size``: payload bytes; ``header``: bytes of its header on disk. ``payload``: in RAM, with the ``sizes`` of its
    components while it waits to be written. ``holds``: plans that rely on it. ``gone``: no longer held;
    ``forgotten``: because a person wanted that. ``session``: who wrote it, or, of a checkpoint, wanted it last."""

    __slots__ = (
        "exact", "forgotten", "gone", "header", "hits", "holds", "key", "kind", "parent", "payload", "pinned", "place",
        "position", "priority", "queued", "session", "shape", "size", "sizes", "superseded", "tokens", "used",
    )  # fmt: skip

    def __init__(self, about: About, size: int) -> None:
        self.shape = about.shape
        self.parent = about.parent
        self.key = about.key
        self.tokens = about.tokens
        self.position = about.position
        self.kind = about.kind
        self.priority = about.priority
        self.pinned = about.pinned
        self.session = sys.intern(about.session)
        self.exact = about.exact
        self.used = about.created
        self.size = size
        self.header = 0
        self.sizes: tuple[int, ...] = ()
        self.place: Place | None = None
        self.payload: Payload | None = None
        self.queued = 0.0
        self.superseded = False
        self.gone = self.forgotten = False
        self.hits = 0
        self.holds = 0

    @property
    def tier(self) -> Literal["host", "disk"]:
        return "disk" if self.payload is None else "host"

    @property
    def end(self) -> bool:
        """A checkpoint without bytes: a session ends here, and needs the pages before it, whoever wrote them."""
        return self.shape is Shape.STATE and not self.size

    @property
    def tail(self) -> bytes:
        """A checkpoint's tokens after its parent page."""
        return self.tokens

    @property
    def length(self) -> int:
        """Bytes on disk."""
        return aligned(self.header + self.size)

    def about(self, created: float) -> About:
        return About(
            self.shape, self.parent, self.key, self.tokens, self.position, self.kind, self.priority, self.pinned,
            self.session, self.exact, created,
        )  # fmt: skip


class Mirror:
    """Not thread-safe; its owner holds a lock."""

    def __init__(self) -> None:
        self._pages: dict[bytes, Entry] = {}
        self._after: dict[bytes, list[Entry]] = {}
        self._sessions: dict[str, list[Entry]] = {}
        self._all: set[Entry] = set()

    def __len__(self) -> int:
        return len(self._all)

    def all(self) -> list[Entry]:
        """Every entry, in no order; a copy, quickly made."""
        return list(self._all)

    def page(self, parent: bytes, key: bytes, tokens: bytes) -> Entry | None:
        """The full page with this key, if it has exactly these tokens after this parent."""
        entry = self._pages.get(key)
        return entry if entry and entry.tokens == tokens and entry.parent == parent else None

    def run(self, parent: bytes, keys: Sequence[bytes], tokens: bytes) -> list[Entry]:
        """The longest run of full pages after ``parent`` with exactly these tokens, of which ``keys`` are the keys."""
        found: list[Entry] = []
        get = self._pages.get
        for key in keys:
            entry = get(key)
            if entry is None or entry.parent != parent:
                break
            found.append(entry)
            parent = key
        if b"".join([one.tokens for one in found]) != tokens[: _PAGE * len(found)]:
            right = (one.tokens == tokens[_PAGE * at : _PAGE * (at + 1)] for at, one in enumerate(found))
            del found[list(right).index(False) :]
        return found

    def full(self, key: bytes) -> Entry | None:
        """The page with this key, whatever its tokens."""
        return self._pages.get(key)

    def before(self, starts: Iterable[Entry]) -> set[Entry]:
        """All pages that these entries lie in or follow."""
        found: set[Entry] = set()
        for start in starts:
            if start.shape is Shape.STATE and start.tokens:
                beside = (one for one in self.after(start.parent) if one.shape is not Shape.STATE)
                found.update(one for one in beside if one.tokens.startswith(start.tokens))
            page = self._pages.get(start.parent)
            while page is not None and page not in found:
                found.add(page)
                page = self._pages.get(page.parent)
        return found

    def end(self, parent: bytes, tail: bytes, session: str) -> Entry | None:
        """Where a session ends, if that is here."""
        ends = (one for one in self.after(parent) if one.end and one.session == session)
        return next((one for one in ends if one.tokens == tail), None)

    def ends_before(self, parent: bytes, tail: bytes, session: str) -> list[Entry]:
        """Where the same session ended last on the way to here."""
        ends = [one for one in self.session(session) if one.end]
        first = min((one.position for one in ends), default=None)
        rest, key = tail, parent
        while first is not None:
            here = [one for one in ends if one.parent == key and rest.startswith(one.tokens)]
            here = [one for one in here if (key, one.tokens) != (parent, tail)]
            page = self._pages.get(key)
            if here or page is None or page.position + _PAGE // 4 < first:
                return here
            rest, key = page.tokens, page.parent
        return []

    def taken(self, key: bytes) -> bool:
        """Whether some page has this key, whatever its tokens."""
        return key in self._pages

    def sharing(self, parent: bytes, rest: bytes) -> list[Entry]:
        """Pages after ``parent``, whole or partial, that have their first token in common with ``rest``."""
        first = rest[:4]
        return [
            one for one in self._after.get(parent, ()) if one.shape is not Shape.STATE and one.tokens[:4] == first
        ] if first else []  # fmt: skip

    def states(self, parent: bytes, rest: bytes) -> list[Entry]:
        """Checkpoints after ``parent`` whose tail ``rest`` begins with."""
        states = (one for one in self._after.get(parent, ()) if one.shape is Shape.STATE and not one.end)
        return [one for one in states if rest.startswith(one.tokens)]

    def find(self, shape: Shape, parent: bytes, tokens: bytes) -> Entry | None:
        """The entry with exactly these tokens."""
        for one in self._after.get(parent, ()):
            if one.shape is shape and one.tokens == tokens and not one.end:
                return one
        return None

    def replaced(self, parent: bytes, tokens: bytes) -> list[Entry]:
        """Partial pages after ``parent`` that a page with these tokens continues."""
        return [
            one
            for one in self._after.get(parent, ())
            if one.shape is Shape.PARTIAL and len(one.tokens) < len(tokens) and tokens.startswith(one.tokens)
        ]

    def after(self, key: bytes) -> list[Entry]:
        return self._after.get(key, [])

    def session(self, name: str) -> list[Entry]:
        """A session's checkpoints and ends."""
        return self._sessions.get(name, [])

    def add(self, entry: Entry) -> bool:
        """False if its place is taken."""
        if entry.key is not None:
            if entry.key in self._pages:
                return False
            self._pages[entry.key] = entry
        elif entry.end:
            if self.end(entry.parent, entry.tokens, entry.session) is not None:
                return False
        elif self.find(entry.shape, entry.parent, entry.tokens) is not None:
            return False
        before = self._pages.get(entry.parent)
        if before is not None and before.key is not None:
            entry.parent = before.key
        self._after.setdefault(entry.parent, []).append(entry)
        if entry.shape is Shape.STATE:
            self._sessions.setdefault(entry.session, []).append(entry)
        self._all.add(entry)
        return True

    def remove(self, entry: Entry) -> None:
        """Forget an entry; removing it twice does nothing."""
        if entry.gone:
            return
        entry.gone = True
        self._all.discard(entry)
        if entry.key is not None:
            del self._pages[entry.key]
        _take(self._after, entry.parent, entry)
        if entry.shape is Shape.STATE:
            _take(self._sessions, entry.session, entry)

    def move(self, entry: Entry, session: str) -> None:
        """A checkpoint now belongs to another session."""
        _take(self._sessions, entry.session, entry)
        entry.session = sys.intern(session)
        self._sessions.setdefault(session, []).append(entry)


def _take(lists: dict[Key, list[Entry]], key: Key, entry: Entry) -> None:
    entries = lists[key]
    entries.remove(entry)
    if not entries:
        del lists[key]
