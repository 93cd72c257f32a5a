"""What the engine's thread, the writer and the readers share, behind one lock that is held for microseconds."""

from __future__ import annotations

import threading
from collections import Counter

from sessions.store.config import StoreConfig
from sessions.store.erasure import Erasure
from sessions.store.files import Files
from sessions.store.format import Place
from sessions.store.mirror import Entry, Mirror
from sessions.store.pins import Pins
from sessions.store.ram import Ram


class Core:
    """``changed`` is the lock, and wakes the writer. ``dead``: extents that the writer is to take off the index.
    ``erasing``: what was forgotten and is to be overwritten.
    ``pins``: sessions that a person wants kept.
    ``touched``: entries whose use is to be recorded. ``writable``: there is a disk to write to."""

    def __init__(self, config: StoreConfig, files: Files) -> None:
        self.config = config
        self.files = files
        self.changed = threading.Condition(threading.Lock())
        self.mirror = Mirror()
        self.ram = Ram(config.queue_bytes, config.host_bytes)
        self.counters: Counter[str] = Counter()
        self.dead: list[tuple[Place, int]] = []
        self.erasing = Erasure()
        self.pins = Pins(None, None)
        self.touched: set[Entry] = set()
        self.writable = False

    def drop(self, entry: Entry, cause: str) -> None:
        """Forget an entry, wherever it is, and count it under ``cause``. With the lock."""
        if entry.gone:
            return
        entry.forgotten = cause == "forgotten"
        self.mirror.remove(entry)
        self.ram.remove(entry)
        self.touched.discard(entry)
        if entry.place is not None:
            self.died(entry, entry.place)
        self.counters[cause] += 1

    def died(self, entry: Entry, place: Place) -> None:
        """What an entry that is gone has on disk is dead. With the lock."""
        self.dead.append((place, entry.length))
        if entry.forgotten:
            self.erasing.places.add(place)

    def settled(self, entry: Entry) -> None:
        """An entry waits no longer: it lives on in the host tier, or on disk, or not at all. With the lock."""
        self.ram.written(entry)
        if entry.payload is None and entry.place is None:
            self.drop(entry, "unwritten_lost")
        self.trim()

    def trim(self) -> None:
        """Keep the host tier within its bound. With the lock."""
        for entry in self.ram.overflow():
            self.drop(entry, "host_evicted")
