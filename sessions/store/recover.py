"""Opening a namespace whatever its condition: after a clean end, a kill, a power loss, with a damaged or lost index."""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Callable

import lmdb

from sessions.store import owner
from sessions.store.config import StoreConfig
from sessions.store.crypt import Cipher, Unreadable
from sessions.store.disk import RECORD, USED, Disk, record
from sessions.store.erasure import recall
from sessions.store.files import Files
from sessions.store.format import BLOCK, About, Place, aligned
from sessions.store.index import MAP_SIZE, Changes, Index, IndexDamaged, remove_index
from sessions.store.mirror import Entry, Mirror
from sessions.store.segments import Segment, Segments

_log = logging.getLogger(__name__)
_BATCH = 4096
"""Index records per transaction while rebuilding."""
Progress = Callable[[int, int], None]
"""(bytes scanned, bytes to scan) while an index is rebuilt."""


def no_progress(done: int, total: int) -> None:
    """Nobody watches."""


def open_disk(
    config: StoreConfig,
    cipher: Cipher | None,
    files: Files,
    mirror: Mirror,
    counters: Counter[str],
    *,
    writable: bool,
    rebuild: bool = False,
    map_size: int = MAP_SIZE,
    progress: Progress = no_progress,
) -> Disk:
    """Open the config's namespace and fill the mirror. Raises OSError, lmdb.Error if it cannot be used at all."""
    namespace = owner.namespace_id(config.fingerprint)
    path = config.directory / namespace.hex()
    if writable:
        path = owner.enter(config.directory, config.fingerprint, files)
    segments = Segments(files, path, namespace, config.segment_bytes, writable=writable)
    disk = Disk(path, namespace, cipher, segments)
    disk.erasing = recall(path, cipher)
    try:
        loader = _Loader(config, disk, files, mirror, counters, writable=writable, map_size=map_size)
        if not loader.load() or rebuild:
            loader.rebuild(progress)
        if writable:
            segments.resume()
            disk.others = [one for one in owner.namespaces(config.directory) if one.directory != path]
            disk.others_bytes = sum(one.size for one in disk.others)
        return disk
    except (OSError, lmdb.Error):
        if disk.index is not None:
            disk.index.close()
        segments.abandon_all()
        raise


class _Loader:
    def __init__(
        self,
        config: StoreConfig,
        disk: Disk,
        files: Files,
        mirror: Mirror,
        counters: Counter[str],
        *,
        writable: bool,
        map_size: int,
    ) -> None:
        self._config = config
        self._disk = disk
        self._files = files
        self._mirror = mirror
        self._counters = counters
        self._writable = writable
        self._map_size = map_size
        self._directory = disk.path / "index"

    def load(self) -> bool:
        """Fill the mirror from the index; False if there is none to be trusted."""
        segments = self._disk.segments.all
        if segments and not (self._directory / "data.mdb").exists():
            return self._lost("missing")
        try:
            index = self._open_index()
        except IndexDamaged as error:
            return self._lost(str(error))
        changes = Changes()
        for place, raw, used in index.extents():
            if not self._indexed(place, raw, used):
                changes.gone.add(place)
        self._counters["index_records_damaged"] += index.damaged
        if self._counters["index_records_damaged"]:
            index.close()
            self._disk.index = None
            return self._lost("damaged records")
        clean = index.meta(b"clean") == b"1"
        rebooted = index.meta(b"boot") != owner.boot_id()
        for segment in segments.values():
            if clean:
                segment.end = max(aligned(segment.size), BLOCK)
                continue
            if rebooted and self._is_last(segment):
                self._verify(segment, changes)
            self._adopt(segment, changes, verify=True)
        if self._disk.index is None:
            index.close()
        elif changes:
            index.commit(changes)
        return True

    def rebuild(self, progress: Progress) -> None:
        """Make the index anew from what the segments say."""
        self._files.point("rebuild.start")
        if self._disk.index is not None:
            self._disk.index.close()
            self._disk.index = None
        for entry in self._mirror.all():
            self._mirror.remove(entry)
        changes = Changes()
        total, done = self._disk.segments.total, 0
        for segment in self._disk.segments.all.values():
            segment.live, segment.end = 0, BLOCK
            self._adopt(segment, changes, verify=self._is_last(segment))
            self._files.point("rebuild.segment")
            done += segment.size
            progress(done, total)
        self._counters["index_rebuilt"] += 1
        _log.warning("rebuilt the index of %s: %d extents", self._disk.path.name, len(self._mirror))
        if not self._writable:
            return
        if self._directory.exists():
            remove_index(self._directory)
        try:
            index = self._open_index()
        except IndexDamaged as error:
            raise OSError(f"no index can be made: {error}") from error
        places = list(changes.extents.items())
        for at in range(0, len(places), _BATCH):
            index.commit(Changes(extents=dict(places[at : at + _BATCH])))

    def _open_index(self) -> Index:
        """Raises IndexDamaged, OSError."""
        if self._writable:
            self._directory.mkdir(mode=0o700, exist_ok=True)
        index = Index(self._directory, self._disk.cipher, self._files, map_size=self._map_size, writable=self._writable)
        if self._writable:
            self._disk.index = index
        return index

    def _lost(self, why: str) -> bool:
        _log.warning("the index of %s cannot be used and is rebuilt: %s", self._disk.path.name, why)
        self._counters["index_lost"] += 1
        return False

    def _indexed(self, place: Place, raw: bytes, used: bytes | None) -> bool:
        """Take an indexed extent into the mirror; False if it is not there, or not wanted any more."""
        segment = self._disk.segments.all.get(place.segment)
        try:
            header, size = RECORD.unpack_from(raw)
            entry = Entry(About.unpack(raw[RECORD.size :]), size)
        except (Unreadable, struct.error):
            self._counters["index_records_damaged"] += 1
            return False
        entry.header, entry.place = header, place
        if used is not None and len(used) == USED.size:
            entry.used, entry.hits, flags = USED.unpack(used)
            entry.pinned, entry.superseded = bool(flags & 1), bool(flags & 2)
        if segment is None or place.block * BLOCK + header + size > segment.size:
            self._counters["extents_truncated"] += 1
            return False
        return self._take(entry, place, segment)

    def _adopt(self, segment: Segment, changes: Changes, *, verify: bool) -> None:
        """Find a segment's end, and take in the extents behind what the index knows of."""
        for header in self._disk.segments.scan(segment, segment.end):
            segment.end = header.place.block * BLOCK + header.length
            try:
                about = header.about(self._disk.cipher)
            except Unreadable:
                self._counters["extents_unreadable"] += 1
                continue
            if self._disk.erasing.everything or header.place in self._disk.erasing.places:
                continue
            if verify and not self._disk.segments.verify(header, self._disk.cipher):
                self._counters["extents_torn"] += 1
                continue
            entry = Entry(about, header.size)
            entry.header, entry.place = len(header.raw), header.place
            if self._take(entry, header.place, segment):
                self._counters["extents_adopted"] += 1
                changes.extents[header.place] = record(entry)

    def _verify(self, segment: Segment, changes: Changes) -> None:
        """After a power loss: forget the indexed extents that did not reach the disk."""
        for entry in self._mirror.all():
            place = entry.place
            if place is None or place.segment != segment.number:
                continue
            header = next(self._disk.segments.scan(segment, place.block * BLOCK), None)
            if header is None or header.place != place or not self._disk.segments.verify(header, self._disk.cipher):
                self._mirror.remove(entry)
                segment.live -= entry.length
                changes.gone.add(place)
                self._counters["extents_torn"] += 1

    def _take(self, entry: Entry, place: Place, segment: Segment) -> bool:
        segment.end = max(segment.end, place.block * BLOCK + entry.length)
        if len(self._mirror) >= self._config.max_extents or not self._mirror.add(entry):
            return False
        segment.live += entry.length
        return True

    def _is_last(self, segment: Segment) -> bool:
        """Whether a segment may have been written to when the process ended."""
        same = (one.number for one in self._disk.segments.all.values() if one.group is segment.group)
        return segment.number == max(same)
