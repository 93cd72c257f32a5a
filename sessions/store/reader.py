"""Reading into the caller's buffers, by a pool of threads, verified to the last byte."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from sessions.store.core import Core
from sessions.store.crypt import Unreadable
from sessions.store.disk import Disk
from sessions.store.format import Header, Place
from sessions.store.mirror import Entry

Buffers = Sequence[memoryview]
_log = logging.getLogger(__name__)


class Reading:
    """One read under way."""

    def __init__(self, future: Future[bool]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> bool:
        """True: the bytes are there and verified. False: they are lost, which is counted."""
        return self._future.result()


class Reader:
    """``depth`` reads at a time."""

    def __init__(self, core: Core, disk: Disk | None, depth: int) -> None:
        self._core = core
        self._disk = disk
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix="store reader")

    def read(self, entry: Entry, into: Buffers) -> Reading:
        """Raises ValueError if the buffers do not have the size of the entry."""
        views = [memoryview(one).cast("B") for one in into]
        if sum(len(view) for view in views) != entry.size:
            raise ValueError(f"buffers of {sum(len(view) for view in views)} bytes for {entry.size}")
        return Reading(self._pool.submit(self._read, entry, views))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=False)

    def _read(self, entry: Entry, into: Buffers) -> bool:
        core = self._core
        tried: Place | None = None
        while True:
            with core.changed:
                payload, place = entry.payload, entry.place
            if payload is not None:
                at = 0
                for view in into:
                    view[:] = payload.view[at : at + len(view)]
                    at += len(view)
                return self._served(entry, "host")
            if place is None or self._disk is None or place == tried:
                with core.changed:
                    core.counters["reads_lost"] += 1
                return False
            tried = place
            try:
                self._check(entry, self._disk.segments.read(place, entry.header, into, self._disk.cipher))
                return self._served(entry, "disk")
            except Unreadable as error:
                if self._moved(entry, place):
                    continue
                return self._quarantine(entry, "corrupt_extents", error)
            except OSError as error:
                return self._quarantine(entry, "read_errors", error)

    def _check(self, entry: Entry, header: Header) -> None:
        """Raises Unreadable if the extent is not what the index says."""
        about = header.about(self._disk.cipher if self._disk else None)
        known = (entry.shape, entry.parent, entry.key, entry.tokens, entry.position)
        if (about.shape, about.parent, about.key, about.tokens, about.position) != known:
            raise Unreadable("an extent of something else")

    def _moved(self, entry: Entry, place: Place) -> bool:
        """Whether the extent was moved while it was read."""
        with self._core.changed:
            return entry.place != place and not entry.gone

    def _served(self, entry: Entry, tier: str) -> bool:
        core = self._core
        now = core.config.clock()
        with core.changed:
            entry.used = now
            entry.hits += 1
            core.ram.touch(entry)
            if not entry.gone:
                core.touched.add(entry)
            core.counters[f"reads_{tier}"] += 1
            core.counters[f"bytes_read_{tier}"] += entry.size
        return True

    def _quarantine(self, entry: Entry, cause: str, error: Exception) -> bool:
        """Forget what could not be read, so that it is asked for once."""
        _log.warning("lost an extent of %d bytes at position %d: %s", entry.size, entry.position, error)
        with self._core.changed:
            self._core.drop(entry, cause)
        return False
