"""Payloads in RAM: those that wait to be written, and the recent ones (the host tier). Its owner holds a lock."""

from __future__ import annotations

from collections import OrderedDict

from sessions.store.mirror import Entry

CANDIDATES = 0.75
"""Share of the queue beyond which what matters least is given up."""
CHECKPOINTS = 0.9
"""Share of the queue beyond which checkpoints are not taken unless pinned."""


class Ram:
    """``queued`` bytes wait to be written or are being written, ``hosted`` bytes are kept besides."""

    def __init__(self, queue_bytes: int, host_bytes: int) -> None:
        self.queued = 0
        self.hosted = 0
        self._queue_bytes = queue_bytes
        self._host_bytes = host_bytes
        self._now: OrderedDict[Entry, None] = OrderedDict()
        self._later: OrderedDict[Entry, None] = OrderedDict()
        self._writing: set[Entry] = set()
        self._host: OrderedDict[Entry, None] = OrderedDict()

    def pressure(self, size: int) -> float:
        """How full the queue would be with ``size`` more bytes; above 1 it does not fit."""
        return (self.queued + size) / self._queue_bytes if self._queue_bytes else 2.0

    def hosts(self, size: int) -> bool:
        """Whether the host tier takes a payload of this size at all."""
        return size <= self._host_bytes

    def queue(self, entry: Entry, due: float, *, settle: bool) -> None:
        """To be written from ``due`` on; what settles waits in a line of its own."""
        entry.queued = due
        (self._later if settle else self._now)[entry] = None
        self.queued += entry.size

    def hurry(self, entry: Entry, due: float) -> None:
        """To be written from ``due`` on, if it waits to settle."""
        if entry in self._later:
            del self._later[entry]
            entry.queued = due
            self._now[entry] = None

    def host(self, entry: Entry) -> None:
        """Keep a payload as the most recent one."""
        if not self.hosts(entry.size):
            entry.payload = None
            return
        self._host[entry] = None
        self.hosted += entry.size

    def touch(self, entry: Entry) -> None:
        if entry in self._host:
            self._host.move_to_end(entry)

    def due(self, now: float, limit: int, *, everything: bool) -> list[Entry]:
        """Take what is to be written now, about ``limit`` bytes of it; each is to be ``written`` or ``put_back``."""
        batch: list[Entry] = []
        for line in (self._now, self._later):
            while line and limit > 0:
                entry = next(iter(line))
                if not everything and entry.queued > now:
                    break
                del line[entry]
                limit -= entry.size
                batch.append(entry)
        self._writing.update(batch)
        return batch

    def written(self, entry: Entry) -> None:
        """Done with the disk, whether it is there or not: from now on it is only hosted."""
        if entry in self._writing:
            self._writing.discard(entry)
            self.queued -= entry.size
            if entry.payload is not None:
                self.host(entry)

    def put_back(self, entries: list[Entry]) -> None:
        """Could not be written now: first in line again."""
        for entry in reversed(entries):
            if entry in self._writing:
                self._writing.discard(entry)
                self._now[entry] = None
                self._now.move_to_end(entry, last=False)

    def remove(self, entry: Entry) -> None:
        """Let go of an entry's payload."""
        for line in (self._now, self._later):
            if entry in line:
                del line[entry]
                self.queued -= entry.size
        if entry in self._writing:
            self._writing.discard(entry)
            self.queued -= entry.size
        if entry in self._host:
            del self._host[entry]
            self.hosted -= entry.size
        entry.payload = None

    def demote(self, entry: Entry) -> None:
        """No longer worth writing, if it still waits."""
        for line in (self._now, self._later):
            if entry in line:
                del line[entry]
                self.queued -= entry.size
                self.host(entry)

    def candidate(self) -> Entry | None:
        """The least of what waits to settle: neither pinned nor held."""
        return min(
            (one for one in self._later if not one.pinned and not one.holds), key=lambda one: one.priority, default=None
        )

    def overflow(self) -> list[Entry]:
        """Take payloads out of a host tier that is too full, oldest first. Those of them that are on no disk are
        returned: they are lost. What a plan holds and is nowhere else stays."""
        lost: list[Entry] = []
        if self.hosted <= self._host_bytes:
            return lost
        for entry in list(self._host):
            if self.hosted <= self._host_bytes:
                break
            if entry.holds and entry.place is None:
                continue
            del self._host[entry]
            self.hosted -= entry.size
            entry.payload = None
            if entry.place is None:
                lost.append(entry)
        return lost

    @property
    def waiting(self) -> int:
        """How many entries wait to be written."""
        return len(self._now) + len(self._later) + len(self._writing)
