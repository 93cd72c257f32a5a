"""The checkpoint store: pages and recurrent states by what came before them, in RAM and on disk.

Every method returns at once, from RAM, unless it says otherwise; a writer thread and a pool of readers do the rest.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import lmdb

from sessions.store import owner, tend
from sessions.store.config import StoreConfig
from sessions.store.core import Core
from sessions.store.crypt import Cipher
from sessions.store.disk import Disk
from sessions.store.files import Files
from sessions.store.format import BLOCK, About, Shape
from sessions.store.index import MAP_SIZE
from sessions.store.mirror import Entry
from sessions.store.payload import Pool
from sessions.store.pins import PINS, Pins
from sessions.store.ram import CANDIDATES, CHECKPOINTS
from sessions.store.reader import Buffers, Reader, Reading
from sessions.store.recover import Progress, no_progress, open_disk
from sessions.store.retention import Point, thin
from sessions.store.words import REMEDY, why
from sessions.store.writer import Writer

_log = logging.getLogger(__name__)
_HEADER_ROOM = 4 * BLOCK
_MANY_SEGMENTS = 16
"""A quota, or a disk, has room for at least so many segments: garbage collection wants something to choose from."""
_ENDS = 64
"""A session has at most so many branches that are known to need their pages; beyond, the oldest is on its own."""
ERASING_SECONDS = 300.0
CLOSING = 60.0
"""Seconds for the last writes: a full queue of 512 MiB at 9 MB/s. A worker has had its own, shorter time to flush
before, and ends by itself soon after it; this is for those who open a store themselves."""


def open_store(
    config: StoreConfig,
    *,
    files: Files | None = None,
    map_size: int = MAP_SIZE,
    progress: Progress = no_progress,
) -> Store:
    """Raises StoreBusy, StoreKeyError (and StoreError without `cryptography`, if there is a key). A directory that is
    damaged is repaired, one that cannot be written is read, and without any the store lives in RAM; all of this is
    logged and counted."""
    files = files or Files()
    config = _fitting(config, files)
    cipher = Cipher(config.key) if config.key is not None else None
    core = Core(config, files)
    lock: owner.Owner | None = None
    disk: Disk | None = None
    try:
        try:
            lock = owner.Owner(config.directory, files)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            core.counters["read_only"] = 1
            _log.warning("the store in %s can only be read (%s)", config.directory, why(error))
        owner.check_key(config.directory, cipher)
        disk = open_disk(
            config,
            cipher,
            files,
            core.mirror,
            core.counters,
            writable=lock is not None,
            map_size=map_size,
            progress=progress,
        )
        core.writable = lock is not None
        core.pins = Pins(disk.path / PINS if core.writable else None, cipher)
        tend.forget_again(core, disk.erasing)
    except (OSError, lmdb.Error) as error:
        core.counters["disk_off"] = 1
        for entry in core.mirror.all():
            core.mirror.remove(entry)
        told = "states are kept in RAM only, since the folder %s cannot be used (%s): %s"
        _log.warning(told, config.directory, why(error), REMEDY)
    except BaseException:
        if lock is not None:
            lock.close()
        raise
    return Store(core, disk, lock)


class Store:
    """Made by ``open_store``. Refs are valid as long as the store; what they refer to, while they are held."""

    def __init__(self, core: Core, disk: Disk | None, lock: owner.Owner | None) -> None:
        self._core = core
        self._mirror = core.mirror
        self._disk = disk
        self._lock = lock
        self._pool = Pool((sum(core.config.page_components), sum(core.config.state_components)))
        self._writer = Writer(core, disk) if disk is not None and core.writable else None
        self._reader = Reader(core, disk, core.config.readers)

    def page(self, parent: bytes, key: bytes, tokens: bytes) -> Entry | None:
        """The full page after ``parent`` with exactly these tokens, written or not. Takes no lock: it is one look into
        a dictionary, and prompts have thousands of pages."""
        return self._mirror.page(parent, key, tokens)

    def pages(self, parent: bytes, keys: Sequence[bytes], tokens: bytes) -> Sequence[Entry]:
        """The longest run of full pages after ``parent`` with exactly these tokens, of which ``keys`` are the keys."""
        with self._core.changed:
            return self._mirror.run(parent, keys, tokens)

    def partial(self, parent: bytes, rest: bytes) -> Sequence[Entry]:
        """Pages after ``parent``, partial or full, that share a start with ``rest``."""
        with self._core.changed:
            return self._core.mirror.sharing(parent, rest)

    def states(self, parent: bytes, rest: bytes) -> Sequence[Entry]:
        """Checkpoints after ``parent`` whose tail ``rest`` begins with."""
        with self._core.changed:
            return self._core.mirror.states(parent, rest)

    def put_page(
        self,
        parent: bytes,
        key: bytes | None,
        tokens: bytes,
        data: Buffers,
        *,
        position: int,
        session: str = "",
    ) -> None:
        """Copies ``data`` and returns. A page that is known is ignored; one that continues a partial page replaces
        it. Without room to keep it, it is skipped and counted. ``session``: who computed it."""
        shape = Shape.PARTIAL if key is None else Shape.PAGE
        with self._core.changed:
            if key is not None and self._core.mirror.taken(key):
                known = self._core.mirror.page(parent, key, tokens)
                if known is None:
                    self._core.counters["key_collisions"] += 1
                else:
                    known.used = self._core.config.clock()
                    known.hits += 1
                    self._core.touched.add(known)
                return
            if key is None and any(one.tokens.startswith(tokens) for one in self._core.mirror.sharing(parent, tokens)):
                return
        about = About(shape, parent, key, tokens, position, session=session, exact=self._core.config.exact)
        if self._put(about, data, settle=key is None and bool(self._core.config.state_components)):
            with self._core.changed:
                for one in self._core.mirror.replaced(parent, tokens):
                    if not one.holds:
                        self._core.drop(one, "replaced")

    def put_state(
        self,
        parent: bytes,
        tail: bytes,
        data: Buffers,
        *,
        position: int,
        kind: str,
        priority: float,
        pinned: bool,
        session: str,
    ) -> None:
        """Copies ``data`` and returns. One that is known is wanted once more; beyond the number that a session keeps,
        the one whose loss costs the least goes. What is pinned is written at once, with the page it lies in."""
        with self._core.changed:
            known = self._core.mirror.find(Shape.STATE, parent, tail)
            if known is not None:
                self._renew(known, kind, priority, pinned, session)
                self._hurry(known)
                return
        exact = self._core.config.exact
        about = About(Shape.STATE, parent, None, tail, position, kind, priority, pinned, session, exact)
        if self._put(about, data, settle=not pinned):
            with self._core.changed:
                added = self._core.mirror.find(Shape.STATE, parent, tail)
                if added is not None:
                    self._hurry(added)
                self._thin(session)

    def put_end(self, parent: bytes, tail: bytes, *, position: int, session: str) -> None:
        """A session ends here for now. Where there are no checkpoints, this says that it needs the pages before,
        whoever wrote them; where it ended before on the way to here does not matter any more."""
        mirror = self._core.mirror
        with self._core.changed:
            known = mirror.end(parent, tail, session)
            if known is not None:
                known.used = self._core.config.clock()
                self._core.touched.add(known)
                return
            over = mirror.ends_before(parent, tail, session)
        about = About(Shape.STATE, parent, None, tail, position, "end", session=session, exact=self._core.config.exact)
        if self._put(about, (), settle=False):
            with self._core.changed:
                ends = sorted((one for one in mirror.session(session) if one.end), key=lambda one: one.used)
                for one in {*over, *ends[:-_ENDS]}:
                    self._core.drop(one, "replaced")

    def demote(self, parent: bytes, tail: bytes) -> None:
        """A checkpoint is superseded, or no longer pinned. If it still waits, it is not written."""
        with self._core.changed:
            known = self._core.mirror.find(Shape.STATE, parent, tail)
            if known is None:
                return
            known.pinned, known.superseded = False, True
            self._core.touched.add(known)
            self._core.ram.demote(known)
            if known.payload is None and known.place is None:
                self._core.drop(known, "demoted")
            self._core.trim()

    def read(self, ref: object, into: Buffers) -> Reading:
        """Fill one buffer per component, in the background. Raises ValueError for buffers of another size."""
        return self.read_parts([(ref, into, 0)])[0]

    def read_parts(self, parts: Iterable[tuple[object, Buffers, int]]) -> Sequence[Reading]:
        """Fill buffers with components of entries, from the given one on, in the background and in this order; what
        lies close together is read together. Raises ValueError for buffers of other sizes."""
        return self._reader.read([(_entry(ref), into, first) for ref, into, first in parts])

    def hold(self, refs: Iterable[object]) -> None:
        """Keep these until they are released as often."""
        with self._core.changed:
            for ref in refs:
                _entry(ref).holds += 1

    def release(self, refs: Iterable[object]) -> None:
        with self._core.changed:
            for ref in refs:
                _entry(ref).holds -= 1

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges."""
        core = self._core
        with core.changed:
            numbers: dict[str, float] = dict(core.counters)
            numbers |= {
                "extents": len(core.mirror),
                "queue_bytes": core.ram.queued,
                "queue_extents": core.ram.waiting,
                "host_bytes": core.ram.hosted,
                "writable": float(core.writable),
            }
        if self._disk is not None:
            numbers |= {"disk_bytes": self._disk.used, "segments": len(self._disk.segments.all)}
            numbers |= {"live_bytes": self._disk.segments.live, "bytes_written": self._disk.segments.written}
        if self._disk is not None and self._disk.index is not None:
            numbers |= {"index_bytes": self._disk.index.total, "index_growths": self._disk.index.growths}
        if self._writer is not None:
            level = self._writer.budget.level(core.config.clock())
            numbers |= {"commits": self._writer.commits, "bytes_moved": self._writer.space.moved}
            numbers |= {"write_budget_level": float(level), "write_paused": float(self._writer.paused)}
        return numbers

    def flush(self, timeout: float) -> bool:
        """Wait until everything is on disk; False if it could not be."""
        return self._writer.flush(timeout) if self._writer is not None else False

    def collect(self, timeout: float) -> bool:
        """Run retention and garbage collection now, and wait for it."""
        return self._writer.collect(timeout) if self._writer is not None else False

    def verify(self) -> dict[str, float]:
        """Read and check everything; takes as long as that, in any thread."""
        return tend.verify(self._core, self._disk)

    def forget(self, session: str | None) -> int:
        """Forget what a session alone has, or everything, that of other fingerprints too, and wait until it is
        overwritten; how many extents. What takes too long, or fails, is gone on with, by the next process if need be.
        In any thread."""
        count = tend.forget(self._core, session)
        if self._writer is not None and not self._writer.flush(ERASING_SECONDS):
            _log.warning("what was forgotten is not overwritten yet; that is tried again")
        return count

    def pin(self, session: str, pinned: bool) -> int:
        """Keep what a session needs whatever its age, or no longer; how many checkpoints it has. In any thread."""
        return tend.pin(self._core, session, pinned=pinned)

    def close(self) -> None:
        """Write what waits, and end. Nothing may be called afterwards."""
        self._reader.close()
        try:
            if self._writer is not None and self._disk is not None and self._writer.close(CLOSING):
                owner.leave(self._disk.path)
            if self._disk is not None and not (self._writer is not None and self._writer.alive):
                self._disk.close()
        except (OSError, lmdb.Error) as error:
            _log.warning("the store was not closed cleanly: %s", error)
        finally:
            if self._lock is not None:
                self._lock.close()

    def _put(self, about: About, data: Buffers, *, settle: bool) -> bool:
        """Take a new entry into RAM, if there is room for it; whether there was."""
        views = [memoryview(one).cast("B") for one in data]
        size = sum(len(view) for view in views)
        with self._core.changed:
            queue = self._core.writable and self._admitted(about, size)
            if not queue and not self._core.ram.hosts(size):
                self._core.counters["skipped_queue_full" if self._core.writable else "skipped_no_disk"] += 1
                return False
            if len(self._core.mirror) >= self._core.config.max_extents:
                self._core.counters["skipped_index_full"] += 1
                return False
        payload = self._pool.gather(views)
        now = self._core.config.clock()
        with self._core.changed:
            entry = Entry(about, size)
            entry.used = now
            entry.sizes = tuple(len(view) for view in views)
            entry.payload = payload
            if not self._core.mirror.add(entry):
                return False
            if queue:
                due = time.monotonic() + (self._core.config.settle_seconds if settle else 0.0)
                idle = not self._core.ram.waiting
                self._core.ram.queue(entry, due, settle=settle)
                if idle or self._core.ram.pressure(0) >= CANDIDATES:
                    self._core.changed.notify_all()
            else:
                self._core.ram.host(entry)
                self._core.trim()
        return True

    def _admitted(self, about: About, size: int) -> bool:
        """Whether the queue takes it, after giving up what matters least. With the lock."""
        ram = self._core.ram
        while ram.pressure(size) > CANDIDATES and (least := ram.candidate()) is not None:
            ram.demote(least)
            self._core.counters["queue_dropped"] += 1
            if least.payload is None:
                self._core.drop(least, "unwritten_lost")
            self._core.trim()
        full = CHECKPOINTS if about.shape is Shape.STATE and not about.pinned else 1.0
        if ram.pressure(size) <= full:
            return True
        self._core.counters["queue_refused"] += 1
        return False

    def _renew(self, known: Entry, kind: str, priority: float, pinned: bool, session: str) -> None:
        """The stronger of both wishes holds. With the lock."""
        if priority >= known.priority:
            known.kind, known.priority = kind, priority
        known.pinned, known.superseded = known.pinned or pinned, False
        known.used = self._core.config.clock()
        self._core.touched.add(known)
        if session != known.session:
            self._core.mirror.move(known, session)

    def _hurry(self, state: Entry) -> None:
        """A pinned checkpoint and the partial page it lies in do not wait to settle. With the lock."""
        if not state.pinned:
            return
        now = time.monotonic()
        self._core.ram.hurry(state, now)
        for page in self._core.mirror.sharing(state.parent, state.tail):
            if page.tokens.startswith(state.tail):
                self._core.ram.hurry(page, now)

    def _thin(self, session: str) -> None:
        """Keep as many checkpoints of a session as the config says. With the lock."""
        states = sorted(self._core.mirror.session(session), key=lambda one: one.position)
        while len(states) > self._core.config.session_states:
            points = [
                Point(one.position, one.priority * (0.1 if one.superseded else 1.0), one.pinned or one.holds > 0)
                for one in states
            ]
            victim = thin(points)
            if victim is None:
                return
            self._core.drop(states.pop(victim), "thinned")


def _entry(ref: object) -> Entry:
    """Refs come back from callers that know them only by their attributes."""
    if not isinstance(ref, Entry):
        raise TypeError(f"not a ref of this store: {ref!r}")
    return ref


def _fitting(config: StoreConfig, files: Files) -> StoreConfig:
    """With segments that suit the quota, or the disk where that is smaller, and an absolute directory."""
    directory = Path(config.directory).absolute()
    most = config.quota_bytes
    with suppress(OSError):  # what is wrong with it is told by whoever opens it
        most = min(most, files.free(next(path for path in (directory, *directory.parents) if path.is_dir()))[1])
    largest = max(sum(config.page_components), sum(config.state_components)) + _HEADER_ROOM
    size = min(config.segment_bytes, max(most // _MANY_SEGMENTS, largest))
    return replace(config, directory=directory, segment_bytes=-(-size // BLOCK) * BLOCK)
