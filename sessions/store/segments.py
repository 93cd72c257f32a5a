"""The segment files of one namespace: append, read, scan, drop. One thread appends; any thread reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sessions.store.crypt import TAG, Cipher, Unreadable
from sessions.store.files import Files
from sessions.store.format import (
    BLOCK,
    EXTENT_MAGIC,
    Group,
    Header,
    Place,
    aligned,
    decode_header,
    header_bytes,
    segment_header,
    settle,
)

_WINDOW = 1 << 20
GAP = 64 << 10
"""Bytes between two reads up to which one call that reads over them is cheaper than two."""
_UNWANTED = memoryview(bytearray(GAP))
"""The buffer for bytes that are read over."""


class NoRoom(Exception):
    """A new segment does not fit into the quota or on the disk."""


@dataclass(eq=False, slots=True)
class Segment:
    """``end``: where the next extent goes. ``size``: bytes of the file. ``live``: bytes of extents still wanted.
    ``readers`` keep the descriptor open after the file was dropped."""

    number: int
    group: Group
    path: Path
    descriptor: int
    size: int
    end: int
    live: int = 0
    readers: int = 0
    dropped: bool = False

    @property
    def dead(self) -> int:
        """Bytes written that nobody wants any more."""
        return self.end - BLOCK - self.live


@dataclass(frozen=True, slots=True)
class Span:
    """Components ``first`` and on of an extent, and buffers of their sizes for them. ``skip``: payload bytes before
    them. ``header``: the extent's, if it was read before; else it is read too."""

    place: Place
    header_size: int
    into: Sequence[memoryview]
    first: int = 0
    skip: int = 0
    header: Header | None = None


class Segments:
    """``room(bytes, moving)`` says whether so many more bytes may be allocated, and may free some to say yes."""

    def __init__(
        self, files: Files, directory: Path, namespace: bytes, segment_bytes: int, *, writable: bool = True
    ) -> None:
        self.all: dict[int, Segment] = {}
        self.written = 0
        """Bytes of extents written since the start."""
        self._files = files
        self._directory = directory
        self._namespace = namespace
        self._segment_bytes = segment_bytes
        self._active: dict[Group, Segment] = {}
        self._unsynced: set[Segment] = set()
        self._uncommitted: dict[Place, int] = {}
        self._new_names = False
        self._last = 0
        self._lock = threading.Lock()
        for path in sorted(directory.glob("*.seg")):
            kind, _, number = path.stem.partition("-")
            if kind.upper() in Group.__members__ and number.isdecimal():
                descriptor = files.open(path, write=writable)
                size = files.size(descriptor)
                self._last = max(self._last, int(number))
                self.all[int(number)] = Segment(int(number), Group[kind.upper()], path, descriptor, size, BLOCK)

    @property
    def total(self) -> int:
        return sum(segment.size for segment in list(self.all.values()))

    @property
    def live(self) -> int:
        return sum(segment.live for segment in list(self.all.values()))

    def resume(self) -> None:
        """Go on writing the last segment of each kind. After a scan has found their ends. Raises OSError."""
        for segment in sorted(self.all.values(), key=lambda one: one.number):
            self._active[segment.group] = segment
        self.trim()

    def append(
        self, kind: Group, header: bytearray, payload: Sequence[bytes | memoryview], room: Callable[[int], bool]
    ) -> Place:
        """Write an extent; not durable before ``sync``. Raises OSError, NoRoom."""
        length = aligned(len(header) + sum(len(part) for part in payload))
        segment = self._segment_for(kind, length, room)
        place = Place(segment.number, segment.end // BLOCK)
        settle(header, place)
        self._unsynced.add(segment)
        self._files.write(segment.descriptor, [header, *payload], segment.end)
        self._files.point("extent.written")
        segment.end += length
        segment.live += length
        self.written += length
        self._uncommitted[place] = length
        return place

    def sync(self) -> None:
        """Make durable what was appended. Raises OSError; what was appended since the last sync is then in doubt."""
        for segment in list(self._unsynced):
            self._files.sync(segment.descriptor)
            self._unsynced.discard(segment)
        if self._new_names:
            self._files.sync_directory(self._directory)
            self._new_names = False

    def committed(self, places: Iterable[Place]) -> None:
        """The index knows these extents."""
        for place in places:
            self._uncommitted.pop(place, None)

    def abandon(self) -> None:
        """After an error: extents that the index does not know are dead, and what was being written to is never
        written to again; the next extent opens a new segment."""
        for place, length in list(self._uncommitted.items()):
            self.release(place, length)
        for segment in self._unsynced:
            if self.active(segment):
                del self._active[segment.group]
        self._unsynced.clear()

    def trim(self) -> None:
        """Give back what was allocated in segments that are not written to any more. Raises OSError."""
        for segment in self.all.values():
            if not self.active(segment):
                self._shrink(segment)

    def release(self, place: Place, length: int) -> None:
        """An extent is dead."""
        self._uncommitted.pop(place, None)
        segment = self.all.get(place.segment)
        if segment is not None:
            segment.live -= length

    def blank(self, segment: Segment, start: int, end: int) -> None:
        """Overwrite what is not zero already; not durable before ``sync``. Raises OSError."""
        for at in range(start, end, _WINDOW):
            window = bytearray(min(_WINDOW, end - at))
            self._files.read(segment.descriptor, [window], at)
            if window != bytes(len(window)):
                self._unsynced.add(segment)
                self._files.write(segment.descriptor, [bytes(len(window))], at)

    def seal(self, segment: Segment) -> None:
        """Nothing is appended to it any more."""
        if self.active(segment):
            del self._active[segment.group]

    def active(self, segment: Segment) -> bool:
        return self._active.get(segment.group) is segment

    def drop(self, segment: Segment) -> None:
        """Delete the file; whoever reads it now may finish. Raises OSError."""
        if self.active(segment):
            del self._active[segment.group]
        self._unsynced.discard(segment)
        self._files.unlink(segment.path)
        with self._lock:
            del self.all[segment.number]
            segment.dropped = True
            if segment.readers == 0:
                self._files.close(segment.descriptor)

    def read(self, spans: Sequence[Span], cipher: Cipher | None) -> list[Header]:
        """Spans that lie in one segment, in its order, verified: what is close together is read in one call. All or
        nothing; returns their headers. Raises OSError, Unreadable."""
        segment = self._hold(spans[0].place)
        try:
            fetches = [_Fetch(span, cipher) for span in spans]
            self._gather(segment, (piece for fetch in fetches for piece in fetch.pieces()))
            headers = []
            for fetch in fetches:
                span = fetch.span
                header = span.header or self._header(bytes(fetch.raw), span.place)
                fetch.open(header, cipher)
                headers.append(header)
            return headers
        finally:
            self._unhold(segment)

    def raw(self, place: Place, header_size: int, size: int) -> tuple[bytearray, memoryview]:
        """(header, payload as stored), the header verified; for moving an extent. Raises OSError, Unreadable."""
        segment = self.all.get(place.segment)
        if segment is None:
            raise Unreadable("the segment is gone")
        header, payload = bytearray(header_size), bytearray(size)
        if self._files.read(segment.descriptor, [header, payload], place.block * BLOCK) != header_size + size:
            raise Unreadable("the segment ends too early")
        self._header(bytes(header), place)
        return header, memoryview(payload)

    def scan(self, segment: Segment, start: int = BLOCK, end: int | None = None) -> Iterator[Header]:
        """Headers of the extents from ``start`` on, and up to ``end``, that are whole; damaged stretches are skipped.
        Raises OSError."""
        at, end = max(start, BLOCK), segment.size if end is None else end
        while at + BLOCK <= end:
            header = self._header_at(segment, at)
            if header is None:
                at = self._next_magic(segment, at + BLOCK)
                continue
            if at + len(header.raw) + header.size > end:
                return
            yield header
            at += header.length

    def verify(self, header: Header, cipher: Cipher | None) -> bool:
        """Whether an extent's payload is intact. Raises OSError."""
        into = [memoryview(bytearray(size)) for size in header.sizes]
        try:
            self.read([Span(header.place, len(header.raw), into)], cipher)
        except Unreadable:
            return False
        return True

    def close(self) -> None:
        """Give back what was allocated and not used, and close the files. Raises OSError."""
        self._active.clear()
        try:
            self.trim()
        finally:
            self.abandon_all()

    def abandon_all(self) -> None:
        """Close the files as they are."""
        for segment in self.all.values():
            self._files.close(segment.descriptor)
        self.all.clear()

    def _segment_for(self, kind: Group, length: int, room: Callable[[int], bool]) -> Segment:
        """The segment to append to, with so many bytes allocated behind its end."""
        segment = self._active.get(kind)
        if segment is not None and segment.end + length <= segment.size:
            return segment
        grows = segment is not None and segment.end + length <= self._segment_bytes
        size = self._segment_bytes if grows else max(self._segment_bytes, BLOCK + length)
        if not room(size - segment.size if segment is not None and grows else size):
            raise NoRoom
        now = self._active.get(kind)
        if now is not segment and now is not None and now.end + length <= now.size:
            return now  # making room has opened one
        if now is not None and now is segment and grows:
            self._files.allocate(now.descriptor, size)
            now.size = size
            return now
        if now is not None:
            self._files.point("segment.roll")
            del self._active[kind]
        return self._create(kind, size)

    def _create(self, kind: Group, size: int) -> Segment:
        self._last += 1
        number = self._last
        path = self._directory / f"{kind.name.lower()}-{number:08d}.seg"
        descriptor = self._files.open(path, write=True)
        try:
            self._files.allocate(descriptor, size)
            self._files.write(descriptor, [segment_header(kind, number, self._namespace)], 0)
        except OSError:
            self._files.close(descriptor)
            self._files.unlink(path)
            raise
        segment = Segment(number, kind, path, descriptor, size, BLOCK)
        with self._lock:
            self.all[number] = segment
        self._active[kind] = segment
        self._unsynced.add(segment)
        self._new_names = True
        self._files.point("segment.created")
        return segment

    def _shrink(self, segment: Segment) -> None:
        if segment.size > segment.end:
            self._files.truncate(segment.descriptor, segment.end)
            segment.size = segment.end

    def _gather(self, segment: Segment, pieces: Iterable[tuple[int, bytearray | memoryview]]) -> None:
        """Fill the buffers with what lies at their offsets. Raises OSError, Unreadable."""
        run: list[bytearray | memoryview] = []
        start = end = 0
        for offset, buffer in pieces:
            if run and 0 <= offset - end <= GAP:
                run.append(_UNWANTED[: offset - end])
            else:
                self._fill(segment, run, start, end - start)
                run, start = [], offset
            run.append(buffer)
            end = offset + len(buffer)
        self._fill(segment, run, start, end - start)

    def _fill(self, segment: Segment, run: Sequence[bytearray | memoryview], start: int, size: int) -> None:
        if run and self._files.read(segment.descriptor, run, start) != size:
            raise Unreadable("the segment ends too early")

    def _header(self, raw: bytes, place: Place) -> Header:
        header = decode_header(raw)
        if header.place != place or header.namespace != self._namespace:
            raise Unreadable("an extent of another place or namespace")
        return header

    def _header_at(self, segment: Segment, at: int) -> Header | None:
        """None if no extent lies there whole."""
        raw = bytearray(BLOCK)
        self._files.read(segment.descriptor, [raw], at)
        try:
            length = header_bytes(raw)
            if length > BLOCK:
                raw = bytearray(length)
                self._files.read(segment.descriptor, [raw], at)
            header = self._header(bytes(raw), Place(segment.number, at // BLOCK))
        except Unreadable:
            return None
        return header if at + len(header.raw) + header.size <= segment.size else None

    def _next_magic(self, segment: Segment, at: int) -> int:
        """Where the next extent may begin."""
        while at < segment.size:
            window = bytearray(min(_WINDOW, segment.size - at))
            self._files.read(segment.descriptor, [window], at)
            found = window.find(EXTENT_MAGIC)
            while found >= 0 and found % BLOCK:
                found = window.find(EXTENT_MAGIC, found + 1)
            if found >= 0:
                return at + found
            at += len(window)
        return at

    def _hold(self, place: Place) -> Segment:
        with self._lock:
            segment = self.all.get(place.segment)
            if segment is None:
                raise Unreadable("the segment is gone")
            segment.readers += 1
            return segment

    def _unhold(self, segment: Segment) -> None:
        with self._lock:
            segment.readers -= 1
            if segment.dropped and segment.readers == 0:
                self._files.close(segment.descriptor)


class _Fetch:
    """A span on its way: ``raw`` is for the header, and what is sealed is read beside the buffers it is meant for."""

    def __init__(self, span: Span, cipher: Cipher | None) -> None:
        self.span = span
        self.raw = bytearray(span.header_size if span.header is None else 0)
        self._targets = span.into
        if cipher is not None:
            self._targets = [memoryview(bytearray(len(part) + TAG))[: len(part)] for part in span.into]

    def pieces(self) -> Iterator[tuple[int, bytearray | memoryview]]:
        """(offset in the segment, where to read it to)."""
        offset = self.span.place.block * BLOCK
        if self.raw:
            yield offset, self.raw
        offset += self.span.header_size + self.span.skip
        for target in self._targets:
            yield offset, target
            offset += len(target)

    def open(self, header: Header, cipher: Cipher | None) -> None:
        """Verify what was read, and unseal it into its buffers. Raises Unreadable."""
        span = self.span
        first, last = span.first, span.first + len(span.into)
        sizes = tuple(len(part) for part in span.into)
        if header.sizes[first:last] != sizes or sum(header.sizes[:first]) != span.skip:
            raise Unreadable("components of other sizes")
        if header.encrypted != (cipher is not None):
            raise Unreadable("encrypted" if header.encrypted else "not encrypted")
        if cipher is None:
            header.check(span.into, first)
            return
        sealer, checks = cipher.sealer(header.salt), header.checks[first:last]
        for number, (target, check, part) in enumerate(zip(self._targets, checks, span.into, strict=True), first + 1):
            sealed = memoryview(target.obj)
            sealed[len(part) :] = check
            sealer.open(number, sealed, part)
