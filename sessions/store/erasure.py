"""What was forgotten and is still to be overwritten.

A file of its own says so, from before the entries leave the index until they are overwritten. So the erasure goes on
after a crash at any point, whether there is an index or not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sessions.store.crypt import Cipher, Unreadable
from sessions.store.files import Files
from sessions.store.format import BLOCK, Header, Place, open_record, seal_record
from sessions.store.mirror import Entry
from sessions.store.owner import write_file
from sessions.store.segments import Segment, Segments

_log = logging.getLogger(__name__)
ERASING = "erasing"
"""The file's name."""


@dataclass
class Erasure:
    """``places``: extents that were forgotten. ``sessions``: those whose older copies go too. ``everything``: all
    extents, also of other fingerprints."""

    places: set[Place] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)
    everything: bool = False

    def __bool__(self) -> bool:
        return bool(self.places or self.sessions or self.everything)

    def copy(self) -> Erasure:
        return Erasure(set(self.places), set(self.sessions), self.everything)

    def add(self, other: Erasure) -> None:
        self.places |= other.places
        self.sessions |= other.sessions
        self.everything |= other.everything

    def remove(self, done: Erasure) -> None:
        self.places -= done.places
        self.sessions -= done.sessions
        self.everything &= not done.everything

    def covers(self, place: Place, session: str) -> bool:
        return self.everything or place in self.places or session in self.sessions

    def pack(self) -> bytes:
        places = sorted((place.segment, place.block) for place in self.places)
        return json.dumps([places, sorted(self.sessions), self.everything]).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> Erasure:
        """Raises ValueError, TypeError."""
        places, sessions, everything = json.loads(raw)
        return cls({Place(*place) for place in places}, set(sessions), bool(everything))


def recall(directory: Path, cipher: Cipher | None) -> Erasure:
    """What the process before had begun."""
    path = directory / ERASING
    if not path.exists():
        return Erasure()
    try:
        return Erasure.unpack(open_record(path.read_bytes(), cipher))
    except (OSError, Unreadable, ValueError, TypeError) as error:
        _log.warning("what was being forgotten cannot be read: %s; forget it again", error)
        return Erasure()


def remember(directory: Path, erasure: Erasure, cipher: Cipher | None, files: Files) -> None:
    """Durable when this returns. Raises OSError."""
    write_file(directory / ERASING, seal_record(erasure.pack(), cipher))
    files.sync_directory(directory)


def finished(directory: Path, files: Files) -> None:
    """Raises OSError."""
    files.unlink(directory / ERASING)


def wipe(segments: Segments, cipher: Cipher | None, entries: list[Entry], erasure: Erasure) -> None:
    """Overwrites, in all segments, what is forgotten and whatever is no extent; not durable before ``sync``. Raises
    OSError. ``entries`` are those that live."""
    living: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry.place is not None:
            living.setdefault(entry.place.segment, []).append(entry)
    for segment in list(segments.all.values()):
        if segment.dead or segment.size > segment.end:
            for start, end in _unwanted(segments, cipher, segment, living.get(segment.number, []), erasure):
                segments.blank(segment, start, end)


def _unwanted(
    segments: Segments, cipher: Cipher | None, segment: Segment, living: list[Entry], erasure: Erasure
) -> Iterator[tuple[int, int]]:
    """Stretches between what lives that are to be overwritten."""
    spans = sorted((one.place.block * BLOCK, one.length) for one in living if one.place is not None)
    at = BLOCK
    for start, length in [*spans, (segment.size, 0)]:
        for header in segments.scan(segment, at, start) if at < start else ():
            place = header.place.block * BLOCK
            yield at, place
            at = place + header.length
            if _forgotten(header, cipher, erasure):
                yield place, at
        yield at, start
        at = start + length


def _forgotten(header: Header, cipher: Cipher | None, erasure: Erasure) -> bool:
    """Also what cannot be read, and what nobody is known to have written."""
    try:
        session = header.about(cipher).session
    except Unreadable:
        return True
    return not session or erasure.covers(header.place, session)
