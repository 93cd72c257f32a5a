"""One namespace on disk: its segments, its index, its place in the quota."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from sessions.store.crypt import Cipher
from sessions.store.erasure import Erasure
from sessions.store.format import Group, Place, encode_extent, group
from sessions.store.index import Index
from sessions.store.mirror import Entry
from sessions.store.owner import Namespace
from sessions.store.segments import Segments

RECORD = struct.Struct("<IQ")
"""Before an extent's description in the index: header bytes, payload bytes."""
USED = struct.Struct("<dIB")
"""Last use, hits, pinned and superseded."""
_BUDGET = struct.Struct("<dd")


class Disk:
    """``index`` is None where nothing can be written. ``others``: namespaces of other fingerprints, oldest first.
    ``erasing``: what was being forgotten when the process before ended."""

    def __init__(self, path: Path, namespace: bytes, cipher: Cipher | None, segments: Segments) -> None:
        self.path = path
        self.segments = segments
        self.index: Index | None = None
        self.erasing = Erasure()
        self.cipher = cipher
        self.others: list[Namespace] = []
        self.others_bytes = 0
        self._namespace = namespace

    @property
    def used(self) -> int:
        """Bytes of the whole directory."""
        return self.segments.total + (self.index.total if self.index else 0) + self.others_bytes

    def append(self, entry: Entry, payload: memoryview, now: float, room: Callable[[int], bool]) -> Place:
        """Write an entry's extent; sets ``entry.header``. Raises OSError, NoRoom."""
        header, parts = encode_extent(entry.about(now), payload, entry.sizes, self._namespace, self.cipher)
        entry.header = len(header)
        kind = Group.PAGES if entry.end else group(entry.shape)
        return self.segments.append(kind, header, parts, room)

    def budget(self) -> tuple[float, float] | None:
        """(written bytes that had not drained, when), as last recorded."""
        raw = self.index.meta(b"budget") if self.index else None
        return _BUDGET.unpack(raw) if raw is not None and len(raw) == _BUDGET.size else None

    def close(self) -> None:
        """Raises OSError."""
        if self.index is not None:
            self.index.close()
        self.segments.close()


def budget_record(filled: float, now: float) -> bytes:
    return _BUDGET.pack(filled, now)


def record(entry: Entry) -> bytes:
    """The index record of an extent."""
    return RECORD.pack(entry.header, entry.size) + entry.about(entry.used).pack()


def used_record(entry: Entry) -> bytes:
    return USED.pack(entry.used, entry.hits, entry.pinned | entry.superseded << 1)
