"""What a store is opened with, and the errors that are the user's to solve."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
DAY = 86400.0


class StoreError(Exception):
    """The store cannot be opened; the message says what to do."""


class StoreBusy(StoreError):
    """Another process owns the directory."""

    def __init__(self, directory: Path, pid: int | None) -> None:
        owner = f"process {pid}" if pid else "another process"
        super().__init__(f"{directory} is in use by {owner}: stop it, or choose another store directory")
        self.pid = pid


class StoreKeyError(StoreError):
    """The key is wrong, missing, or given for a store that is not encrypted."""


@dataclass(frozen=True)
class StoreConfig:
    """``directory`` belongs to the store alone. ``fingerprint`` names everything that decides the bytes of a state;
    what was written under another one is never read. ``page_components`` and ``state_components`` are the bytes of
    each component of a full page and of a checkpoint (no states: the model is not recurrent).

    ``quota_bytes`` bounds all of the directory, ``host_bytes`` the recent payloads kept in RAM, ``queue_bytes`` those
    that wait to be written, ``daily_write_bytes`` what is written per day on average, ``max_extents`` the index in RAM.
    ``settle_seconds`` is how long checkpoints that are not pinned, and partial pages that hold none that is, wait, so
    that only those that survive are written; everything else is written within a fraction of a second.
    ``session_states`` is how many checkpoints one session keeps. ``grace_seconds`` protects what other fingerprints
    wrote. ``exact``: the states are bit-exact. ``clock`` gives seconds since the epoch."""

    directory: Path
    fingerprint: str
    page_components: tuple[int, ...]
    state_components: tuple[int, ...] = ()
    quota_bytes: int = 64 << 30
    host_bytes: int = 4 << 30
    daily_write_bytes: int = 300_000_000_000
    queue_bytes: int = 512 * MIB
    key: bytes | None = None
    retention_days: float = 7.0
    exact: bool = True
    clock: Callable[[], float] = time.time
    segment_bytes: int = 256 * MIB
    settle_seconds: float = 5.0
    session_states: int = 32
    grace_seconds: float = DAY
    max_extents: int = 1 << 18
    readers: int = 8
