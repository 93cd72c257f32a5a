"""Room on disk: the quota, the disk's reserve, eviction, garbage collection. Runs in the writer thread."""

from __future__ import annotations

import logging
import math
from collections.abc import Set

from sessions.store import gc, owner, tend
from sessions.store.config import DAY
from sessions.store.core import Core
from sessions.store.crypt import Unreadable
from sessions.store.disk import Disk, record, used_record
from sessions.store.erasure import Erasure, finished, remember, wipe
from sessions.store.format import Place
from sessions.store.index import Changes, Index
from sessions.store.mirror import Entry
from sessions.store.retention import Budget, Level, victims, weigh
from sessions.store.segments import NoRoom, Segment

_log = logging.getLogger(__name__)
RESERVE = 0.05
"""Share of the disk that is left free for others."""
FULL = 0.8
"""Share of the quota that live extents may have; the rest is what garbage collection works with."""
FLOOR = 0.5
"""Share of the quota below which live extents are rather copied than evicted to get a segment back."""
CHEAP = 0.5
"""A segment with at least this share of dead bytes is worth copying what lives in it."""
SLACK = 0.05
"""Share of the quota that is evicted at once, so that eviction is rare."""
_ROUNDS = 64
_SMALL_FILES = 32 << 10
_INDEX_GROWTH = 64 << 20
"""The index is allowed to grow by so much, or 1/32 of the quota, before the next segment is asked for."""


class Space:
    """Whatever writes raises OSError and lmdb.Error."""

    def __init__(self, core: Core, disk: Disk, budget: Budget) -> None:
        self.moved = 0
        """Bytes copied by garbage collection."""
        self._core = core
        self._disk = disk
        self._budget = budget
        self._config = core.config

    def room(self, count: int) -> bool:
        """Whether ``count`` more bytes may be allocated, after making room by every means there is."""
        spare = self._config.segment_bytes
        for _ in range(_ROUNDS):
            if self._fits(count, spare):
                return True
            if self._drop_dead() or self._drop_other(self._config.grace_seconds):
                continue
            if not self._disk_free(count):
                self._core.counters["disk_full"] += 1
                return False
            self.evict(count)
            if self._drop_dead():
                continue
            if not self._reclaim() and not self._drop_other(0.0):
                return False
        return False

    def evict(self, count: int) -> None:
        """Give up the least valuable entries until ``count`` more bytes fit under the share of live bytes."""
        quota = self._config.quota_bytes - self._disk.others_bytes
        need = self._disk.segments.live + count - (int(FULL * quota) - self._config.segment_bytes)
        if need > 0:
            self._give_up(need + int(SLACK * quota))

    def expire(self, now: float) -> None:
        """Forget what was not used for the days of retention, and what is too much for the index."""
        oldest, kept = now - self._config.retention_days * DAY, self._kept()
        stale = [one for one in self._everything() if one.used < oldest and one.place is not None and one not in kept]
        self._drop(stale, "expired")
        if len(self._core.mirror) > self._config.max_extents * (1 - SLACK):
            self._give_up(int(2 * SLACK * self._disk.segments.live))
        while self._drop_other(max(self._config.retention_days * DAY, self._config.grace_seconds)):
            pass

    def collect(self) -> bool:
        """Drop what is dead, or compact one segment that is mostly dead; whether there was something to do."""
        self._disk.segments.trim()
        if self._drop_dead():
            return True
        victim = gc.worst(self._closed())
        affordable = self._budget.level(self._config.clock()) is not Level.RED
        return victim is not None and affordable and self.compact(victim)

    def bury(self) -> None:
        """Take dead extents off the index; what was forgotten is then overwritten."""
        with self._core.changed:
            dead, erasing = list(self._core.dead), self._core.erasing.copy()
        if self._disk.index is None or not (dead or erasing):
            return
        if erasing:
            self._core.files.point("erase.asked")
            remember(self._disk.path, erasing, self._disk.cipher, self._core.files)
        self._disk.index.commit(Changes(gone={place for place, _ in dead}))
        for place, length in dead:
            self._disk.segments.release(place, length)
        with self._core.changed:
            del self._core.dead[: len(dead)]
        if erasing:
            self._erase(self._disk.index, erasing)

    def _erase(self, index: Index, erasing: Erasure) -> None:
        """Overwrites what was forgotten, so that no rebuild brings it back. A segment in which nothing else lives is
        deleted."""
        segments = self._disk.segments
        self._core.files.point("erase.begun")
        while erasing.everything and self._drop_other(-math.inf):
            pass
        for segment in gc.empty(segments.all.values()):
            segments.drop(segment)
            self._core.counters["segments_dropped"] += 1
        wipe(segments, self._disk.cipher, self._everything(), erasing)
        segments.sync()
        self._core.files.point("erase.wiped")
        index.compact()
        with self._core.changed:
            self._core.erasing.remove(erasing)
            more = bool(self._core.erasing)
        if not more:
            finished(self._disk.path, self._core.files)
        self._core.files.point("erase.finished")

    def compact(self, victim: Segment) -> bool:
        """Copy what lives, commit, delete the file; False if there is no room to copy to."""
        index = self._disk.index
        if index is None:
            return False
        living = [(one, one.place) for one in self._everything() if one.place and one.place.segment == victim.number]
        moved: list[tuple[Entry, Place]] = []
        changes = Changes()
        for entry, place in living:
            try:
                header, payload = self._disk.segments.raw(place, entry.header, entry.size)
                new = self._disk.segments.append(victim.group, header, [payload], self._moving_room)
            except Unreadable:
                with self._core.changed:
                    self._core.drop(entry, "corrupt_extents")
                continue
            except NoRoom:
                for copied, copy in moved:
                    self._disk.segments.release(copy, copied.length)
                return False
            self.moved += entry.length
            self._budget.write(entry.length, self._config.clock())
            moved.append((entry, new))
            changes.gone.add(place)
            changes.extents[new] = record(entry)
            changes.used[new] = used_record(entry)
        self._disk.segments.sync()
        self._core.files.point("gc.copied")
        index.commit(changes)
        self._disk.segments.committed(changes.extents)
        self._core.files.point("gc.committed")
        with self._core.changed:
            for entry, new in moved:
                if entry.gone:
                    self._core.died(entry, new)
                entry.place = new
        self._disk.segments.drop(victim)
        self._core.files.point("gc.dropped")
        self._core.counters["segments_compacted"] += 1
        return True

    def _reclaim(self) -> bool:
        """Get a segment back, by copying little; whether something was gained."""
        quota = self._config.quota_bytes - self._disk.others_bytes
        victim = gc.worst(self._closed(), share=CHEAP)
        if victim is None and self._disk.segments.live > FLOOR * quota and self._give_up(int(SLACK * quota)):
            self.bury()
            return True
        victim = victim or gc.worst(self._closed(), share=0.0)
        return (victim is not None and self.compact(victim)) or self._sacrifice()

    def _sacrifice(self) -> bool:
        """Without room even to copy: forgets everything in the segment that holds the least."""
        kept = {one.place.segment for one in self._kept() if one.place is not None}
        closed = (one for one in self._closed() if one.number not in kept)
        victim = min(closed, key=lambda one: one.live, default=None)
        if victim is None:
            return False
        living = [one for one in self._everything() if one.place and one.place.segment == victim.number]
        self._drop(living, "evicted")
        return self._drop_dead()

    def _give_up(self, need: int) -> int:
        """Evict about so many bytes; how many entries."""
        now = self._config.clock()
        entries = [one for one in self._everything() if one.place is not None]
        items = weigh(entries, now, recurrent=bool(self._config.state_components), kept=self._kept())
        chosen = [entries[at] for at in victims(items, need)]
        self._drop(chosen, "evicted")
        return len(chosen)

    def _kept(self) -> Set[Entry]:
        """What pinned sessions need."""
        names = self._core.pins.names
        if not names:
            return frozenset()
        with self._core.changed:
            return tend.needed_by(self._core.mirror, names)

    def _everything(self) -> list[Entry]:
        with self._core.changed:
            return self._core.mirror.all()

    def _drop(self, entries: list[Entry], cause: str) -> None:
        """Forget those that no plan holds, without keeping the lock for long."""
        for entry in entries:
            with self._core.changed:
                if not entry.holds:
                    self._core.drop(entry, cause)

    def _drop_dead(self) -> bool:
        """Delete segments of which nothing is wanted; whether there were any."""
        self.bury()
        dead = gc.empty(self._closed())
        for segment in dead:
            self._disk.segments.drop(segment)
            self._core.counters["segments_dropped"] += 1
        return bool(dead)

    def _drop_other(self, age: float) -> bool:
        """Delete the longest unused namespace of another fingerprint, if it is older than ``age`` seconds."""
        if not self._disk.others or self._config.clock() - self._disk.others[0].used < age:
            return False
        other = self._disk.others.pop(0)
        _log.warning("forgetting what another model wrote: %s", other.directory.name)
        owner.forget(other)
        self._disk.others_bytes = sum(one.size for one in self._disk.others)
        self._core.counters["namespaces_dropped"] += 1
        return True

    def _closed(self) -> list[Segment]:
        return [one for one in self._disk.segments.all.values() if not self._disk.segments.active(one)]

    def _moving_room(self, count: int) -> bool:
        return self._fits(count, 0)

    def _fits(self, count: int, spare: int) -> bool:
        quota = self._config.quota_bytes
        rest = _SMALL_FILES + min(quota // 32, _INDEX_GROWTH)
        return self._disk.used + count + spare + rest <= quota and self._disk_free(count)

    def _disk_free(self, count: int) -> bool:
        free, total = self._core.files.free(self._disk.path)
        return free - count >= RESERVE * total
