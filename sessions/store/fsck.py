"""Looking after a store that nobody uses: what lies in it, whether it is whole, and forgetting it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sessions.store import owner
from sessions.store.config import StoreConfig
from sessions.store.crypt import Cipher
from sessions.store.files import Files
from sessions.store.format import Shape
from sessions.store.mirror import Mirror
from sessions.store.owner import Namespace
from sessions.store.recover import Progress, no_progress, open_disk
from sessions.store.store import open_store
from sessions.store.tend import intact


@dataclass(frozen=True)
class Report:
    """``damaged`` extents of ``extents``; ``tokens`` and ``states`` are what can be resumed from; ``counters`` name
    what was found when opening."""

    pages: int
    partial: int
    states: int
    tokens: int
    damaged: int
    size: int
    counters: dict[str, int]


def stat(directory: Path) -> list[Namespace]:
    """Every namespace, the longest unused first. Works beside a running server. Raises OSError."""
    return owner.namespaces(directory) if directory.is_dir() else []


def verify(directory: Path, fingerprint: str, key: bytes | None = None, progress: Progress = no_progress) -> Report:
    """Read every extent and check it; changes nothing. Raises StoreError, OSError, lmdb.Error."""
    counters: Counter[str] = Counter()
    mirror = Mirror()
    with _owned(directory, key) as cipher:
        config = StoreConfig(directory=directory, fingerprint=fingerprint, page_components=(), key=key)
        disk = open_disk(config, cipher, Files(), mirror, counters, writable=False)
        try:
            entries = mirror.all()
            shapes = Counter(entry.shape for entry in entries if not entry.end)
            total, done, damaged = sum(entry.length for entry in entries), 0, 0
            for entry in entries:
                damaged += not intact(disk, entry)
                done += entry.length
                progress(done, total)
            tokens = sum(len(entry.tokens) // 4 for entry in entries if entry.shape is not Shape.STATE)
            return Report(
                pages=shapes[Shape.PAGE],
                partial=shapes[Shape.PARTIAL],
                states=shapes[Shape.STATE],
                tokens=tokens,
                damaged=damaged,
                size=disk.used,
                counters=dict(counters),
            )
        finally:
            disk.close()


def rebuild(directory: Path, fingerprint: str, key: bytes | None = None, progress: Progress = no_progress) -> int:
    """Make the index anew from the segments; how many extents it has. Raises StoreError, OSError, lmdb.Error."""
    mirror = Mirror()
    with _owned(directory, key) as cipher:
        config = StoreConfig(directory=directory, fingerprint=fingerprint, page_components=(), key=key)
        disk = open_disk(config, cipher, Files(), mirror, Counter(), writable=True, rebuild=True, progress=progress)
        disk.close()
    return len(mirror)


def collect(config: StoreConfig, timeout: float = 600.0) -> dict[str, float]:
    """Retention and garbage collection as the running store would do it; its numbers. Raises StoreError."""
    store = open_store(config)
    try:
        store.collect(timeout)
        return store.stats()
    finally:
        store.close()


def forget(directory: Path, fingerprint: str | None = None) -> int:
    """Delete what this fingerprint, or all, have stored; the bytes that are free now. Raises StoreBusy, OSError."""
    lock = owner.Owner(directory, Files())
    try:
        chosen = [one for one in owner.namespaces(directory) if fingerprint in (None, one.fingerprint)]
        size = sum(one.size for one in chosen)
        for one in chosen:
            owner.forget(one)
        if fingerprint is None:
            owner.forget_key(directory)
        return size
    finally:
        lock.close()


@contextmanager
def _owned(directory: Path, key: bytes | None) -> Iterator[Cipher | None]:
    lock = owner.Owner(directory, Files())
    try:
        cipher = Cipher(key) if key is not None else None
        owner.check_key(directory, cipher)
        yield cipher
    finally:
        lock.close()
