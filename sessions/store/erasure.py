"""What was forgotten and is still to be overwritten.

It is in the index from the moment that the entries are not, so that it is gone on with after a crash at any point.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from sessions.store.crypt import Cipher, Unreadable
from sessions.store.format import BLOCK, Header, Place
from sessions.store.mirror import Entry
from sessions.store.segments import Segment, Segments

ERASING = b"erasing"
"""Its name in the index."""


@dataclass
class Erasure:
    """``places``: extents that were forgotten. ``sessions``: whose older copies are to go too. ``everything``: that of
    other fingerprints, too."""

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
    def unpack(cls, raw: bytes | None) -> Erasure:
        """Nothing for None, and for what cannot be read."""
        try:
            places, sessions, everything = json.loads(raw or b"[[], [], false]")
            return cls({Place(*place) for place in places}, set(sessions), bool(everything))
        except (ValueError, TypeError):
            return cls()


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
