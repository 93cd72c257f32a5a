"""What the store costs and gives on this machine; for `ft bench store`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from xxhash import xxh3_128_digest

from sessions.store.config import StoreConfig
from sessions.store.files import Files
from sessions.store.store import Store, open_store

PAGE_BYTES = 256
_PIECE = 4 << 20


@dataclass(frozen=True)
class LookUp:
    """Seconds to hash a prompt's pages into keys, and to find all of them in the store."""

    pages: int
    hashing: float
    finding: float


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second: pages through the store, verified, at its queue depth; and plain sequential reads of the same
    segments. ``cold``: the page cache was dropped before both."""

    size: int
    restore: float
    plain: float
    cold: bool


def hash_chain(root: bytes, tokens: bytes) -> list[bytes]:
    """The key after each full page."""
    keys, key = [], root
    for at in range(0, len(tokens) - PAGE_BYTES + 1, PAGE_BYTES):
        key = xxh3_128_digest(key + tokens[at : at + PAGE_BYTES])
        keys.append(key)
    return keys


def fill(store: Store, root: bytes, tokens: bytes, components: Sequence[int]) -> None:
    """Put a chain of pages, waiting where the queue is full."""
    parent = root
    for number, key in enumerate(hash_chain(root, tokens)):
        data = [memoryview(os.urandom(min(size, 4096)) * -(-size // 4096))[:size] for size in components]
        text = tokens[PAGE_BYTES * number : PAGE_BYTES * (number + 1)]
        if store.stats()["queue_bytes"] > _PIECE:
            store.flush(60.0)
        store.put_page(parent, key, text, data, position=64 * number)
        parent = key
    store.flush(60.0)


def look_up(config: StoreConfig, tokens: int = 100_000) -> LookUp:
    """Finding every page of a prompt against hashing it. Uses RAM and a little of the disk; best of five."""
    store = open_store(replace(config, page_components=(8,)))
    try:
        root, text = os.urandom(16), os.urandom(4 * tokens)
        fill(store, root, text, (8,))
        hashing, finding = [], []
        for _ in range(5):
            start = time.perf_counter()
            keys = hash_chain(root, text)
            hashed = time.perf_counter()
            if len(store.pages(root, keys, text)) < len(keys):
                raise RuntimeError("a page was not found")
            finding.append(time.perf_counter() - hashed)
            hashing.append(hashed - start)
        return LookUp(len(keys), min(hashing), min(finding))
    finally:
        store.close()


def read_bandwidth(config: StoreConfig, size: int) -> Bandwidth:
    """Restore ``size`` bytes of pages that were just written, and read their segments plainly."""
    page = sum(config.page_components)
    root, text = os.urandom(16), os.urandom(PAGE_BYTES * max(size // page, 1))
    store = open_store(replace(config, host_bytes=0))
    try:
        fill(store, root, text, config.page_components)
        files = sorted(config.directory.rglob("pages-*.seg"))
        cold = all([_forget_cache(str(path)) for path in files])
        into = [
            [memoryview(bytearray(part)) for part in config.page_components] for _ in range(len(text) // PAGE_BYTES)
        ]
        parent, refs = root, []
        for number, key in enumerate(hash_chain(root, text)):
            ref = store.page(parent, key, text[PAGE_BYTES * number : PAGE_BYTES * (number + 1)])
            if ref is None:
                raise RuntimeError("a page was not found")
            refs.append(ref)
            parent = key
        start = time.perf_counter()
        readings = [store.read(ref, buffers) for ref, buffers in zip(refs, into, strict=True)]
        if not all([reading.wait() for reading in readings]):
            raise RuntimeError("a page was lost")
        restore = page * len(refs) / (time.perf_counter() - start)
        cold = all([_forget_cache(str(path)) for path in files]) and cold
        start = time.perf_counter()
        plain = sum(_read_through(str(path)) for path in files)
        return Bandwidth(page * len(refs), restore, plain / (time.perf_counter() - start), cold)
    finally:
        store.close()


def _read_through(path: str) -> int:
    files = Files()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        total, buffer = 0, bytearray(_PIECE)
        while count := files.read(descriptor, [buffer], total):
            total += count
        return total
    finally:
        os.close(descriptor)


def _forget_cache(path: str) -> bool:
    """Ask the kernel to drop a file from its page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
