"""The one thread that writes: payload, fdatasync, index; then retention and garbage collection when there is time.

Errors of the disk never reach the engine: what could not be written is tried again, after a pause that doubles.
"""

from __future__ import annotations

import errno
import logging
import threading
import time

import lmdb

from sessions.store import owner
from sessions.store.core import Core
from sessions.store.disk import Disk, budget_record, record, used_record
from sessions.store.format import Place
from sessions.store.index import Changes
from sessions.store.mirror import Entry
from sessions.store.retention import Budget, Level, worth_writing
from sessions.store.segments import NoRoom
from sessions.store.space import Space

_log = logging.getLogger(__name__)
GROUP = 0.25
"""Seconds between commits, and how long the first of a group waits for the others."""
_IDLE = 1.0
BATCH = 64 << 20
"""Bytes per commit."""
_MAINTENANCE = 30.0
_USE = 60.0
"""Seconds between records of what was used."""
_PAUSE, _LONGEST_PAUSE = 1.0, 300.0


class Writer:
    """Started at once; ``close`` ends it."""

    def __init__(self, core: Core, disk: Disk) -> None:
        self.commits = 0
        self.dead = False
        """The thread has ended by an error of ours; the store goes on without writing."""
        self._core = core
        self._disk = disk
        now = core.config.clock()
        filled, at = disk.budget() or (0.0, now)
        self.budget = Budget(core.config.daily_write_bytes, min(at, now), filled)
        self.space = Space(core, disk, self.budget)
        self._asked = 0
        self._answered = 0
        self._failed = 0
        self._marked = False
        self._closing = False
        self._collect_asked = False
        self._pause = _PAUSE
        self._resume_at = 0.0
        self._maintained = float("-inf")
        self._recorded = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="store writer", daemon=True)
        self._thread.start()

    def flush(self, timeout: float) -> bool:
        """Write everything that waits; False if that failed or took too long."""
        with self._core.changed:
            self._asked += 1
            ticket = self._asked
            self._core.changed.notify_all()
            self._core.changed.wait_for(lambda: self._answered >= ticket or self.dead, timeout)
            return self._answered >= ticket > self._failed

    def collect(self, timeout: float) -> bool:
        """Run retention and garbage collection now; False if that failed or took too long."""
        with self._core.changed:
            self._collect_asked = True
        return self.flush(timeout)

    def close(self, timeout: float) -> bool:
        """End, after writing what waits and marking the store as whole; whether that succeeded."""
        done = self.flush(timeout)
        with self._core.changed:
            self._closing = True
            self._core.changed.notify_all()
        self._thread.join(max(timeout, 1.0))
        with self._core.changed:
            left, count = self._core.ram.queued, self._core.ram.waiting
        if count:
            _log.warning("the store ends with %d extents of %.1f MB unwritten", count, left / 1e6)
        if not done or self.alive or self._disk.index is None:
            return False
        try:
            self.space.bury()
            meta = self._meta()
            meta[b"clean"] = b"1"
            self._disk.index.commit(Changes(used=self._take_use(), meta=meta))
        except (OSError, lmdb.Error) as error:
            self._trouble(error)
            return False
        return True

    @property
    def alive(self) -> bool:
        """Still at work, so that its files cannot be closed."""
        return self._thread.is_alive()

    @property
    def paused(self) -> bool:
        """Waiting to try again after an error."""
        return time.monotonic() < self._resume_at

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            if not self._closing:
                _log.error("the store's writer has failed; nothing more is written")
                with self._core.changed:
                    self.dead = True
                    self._core.writable = False
                    self._core.changed.notify_all()

    def _turn(self) -> None:
        with self._core.changed:
            if self._asked == self._answered and not self._core.ram.waiting:
                self._core.changed.wait(_IDLE)
            if self._asked == self._answered and self._core.ram.waiting:
                self._core.changed.wait(GROUP)
            asked, collect = self._asked, self._collect_asked
        urgent = asked > self._answered
        if self.paused and not urgent:
            return
        failed = False
        try:
            while self._write(everything=urgent):
                pass
            self._maintain(now=collect)
            self._pause = _PAUSE
        except (OSError, lmdb.Error) as error:
            self._trouble(error)
            failed = True
        with self._core.changed:
            self._failed = asked if failed else self._failed
            self._answered = asked
            self._collect_asked = self._collect_asked and not collect
            self._core.changed.notify_all()

    def _write(self, *, everything: bool) -> bool:
        """One batch; whether there was one. Raises OSError, lmdb.Error; the batch then waits again."""
        now = self._core.config.clock()
        with self._core.changed:
            batch = self._core.ram.due(time.monotonic(), BATCH, everything=everything)
        if not batch:
            return False
        try:
            placed = self._append(batch, now)
            self._disk.segments.sync()
            self._commit(placed)
        except (OSError, lmdb.Error):
            with self._core.changed:
                self._core.ram.put_back([entry for entry in batch if not entry.gone])
            raise
        with self._core.changed:
            places = dict(placed)
            for entry in batch:
                place = places.get(entry)
                if entry.gone:
                    if place is not None:
                        self._core.died(entry, place)
                    continue
                entry.place = place
                self._core.settled(entry)
        return True

    def _append(self, batch: list[Entry], now: float) -> list[tuple[Entry, Place]]:
        placed: list[tuple[Entry, Place]] = []
        self._mark()
        for entry in batch:
            with self._core.changed:
                payload = entry.payload
            if payload is None:
                continue
            level = self.budget.level(now)
            if not worth_writing(entry, level):
                self._count("skipped_budget_red" if level is Level.RED else "skipped_budget_yellow")
                continue
            try:
                place = self._disk.append(entry, payload.view, now, self.space.room)
            except NoRoom:
                self._no_room()
                continue
            self.budget.write(entry.length, now)
            placed.append((entry, place))
        return placed

    def _commit(self, placed: list[tuple[Entry, Place]]) -> None:
        if self._disk.index is not None and placed:
            extents = {place: record(entry) for entry, place in placed if not entry.gone}
            self._disk.index.commit(Changes(extents=extents, meta=self._meta()))
            self._disk.segments.committed(place for _, place in placed)
            self.commits += 1

    def _mark(self) -> None:
        """Before anything is written: from now on the store is not known to be whole."""
        if not self._marked and self._disk.index is not None:
            self._disk.index.commit(Changes(meta={b"clean": b"0", b"boot": owner.boot_id()}))
            self._marked = True

    def _maintain(self, *, now: bool) -> None:
        """Bury the dead; sometimes expire, collect and record what was used."""
        self._mark_if_dead()
        self.space.bury()
        clock = time.monotonic()
        if (now or clock - self._recorded > _USE) and self._disk.index is not None:
            self._recorded = clock
            if use := self._take_use():
                self._mark()
                self._disk.index.commit(Changes(used=use))
            self._disk.index.clear_stale_readers()
        if now or clock - self._maintained > _MAINTENANCE:
            self._maintained = clock
            self._mark()
            self.space.expire(self._core.config.clock())
            self.space.room(0)
            while self.space.collect() and now:
                pass

    def _mark_if_dead(self) -> None:
        if self._core.dead or self._core.erasing:
            self._mark()

    def _take_use(self) -> dict[Place, bytes]:
        with self._core.changed:
            touched, self._core.touched = self._core.touched, set()
            return {one.place: used_record(one) for one in touched if one.place is not None}

    def _meta(self) -> dict[bytes, bytes]:
        now = self._core.config.clock()
        return {b"budget": budget_record(self.budget.filled(now), now)}

    def _trouble(self, error: OSError | lmdb.Error) -> None:
        name = errno.errorcode.get(error.errno or 0, "EIO") if isinstance(error, OSError) else type(error).__name__
        self._count(f"write_errors_{name}")
        _log.warning("the store cannot write (%s); next try in %.0f s", error, self._pause)
        self._disk.segments.abandon()
        self._resume_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _no_room(self) -> None:
        self._count("skipped_no_room")
        if self._core.counters["skipped_no_room"] == 1:
            _log.warning("the store has no room for what is new: free some of its disk, or raise --store-quota")

    def _count(self, name: str) -> None:
        with self._core.changed:
            self._core.counters[name] += 1
