"""A small engine for the store's tests: states whose bytes are a function of the prefix, and files that fail."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from sessions.store.config import StoreConfig
from sessions.store.files import Files
from sessions.store.store import Store

PAGE_BYTES = 256
ROOT = xxh3_128_digest(b"root")
PAGE_SIZES = (3000, 1000, 5000)
STATE_SIZES = (20000, 700)


def settings(directory: Path, **changes: Any) -> StoreConfig:
    """Small, quick, and with a fingerprint."""
    base = StoreConfig(
        directory=directory,
        fingerprint="model A",
        page_components=PAGE_SIZES,
        state_components=STATE_SIZES,
        quota_bytes=64 << 20,
        host_bytes=1 << 20,
        queue_bytes=8 << 20,
        segment_bytes=256 << 10,
        settle_seconds=0.0,
    )
    return replace(base, **changes)


def tokens(seed: object, count: int = 64) -> bytes:
    return random.Random(repr(seed)).randbytes(4 * count)


def content(parent: bytes, text: bytes, sizes: tuple[int, ...]) -> list[memoryview]:
    """The only right bytes for what comes after ``parent`` with these tokens."""
    source = random.Random(xxh3_64_intdigest(parent + text))
    return [memoryview(source.randbytes(size)) for size in sizes]


def page_sizes(text: bytes) -> tuple[int, ...]:
    """A partial page has the bytes of its tokens only."""
    return tuple(size * len(text) // PAGE_BYTES for size in PAGE_SIZES)


@dataclass(frozen=True)
class Page:
    parent: bytes
    key: bytes | None
    text: bytes
    position: int

    def put(self, store: Store, session: str = "") -> None:
        data = content(self.parent, self.text, page_sizes(self.text))
        store.put_page(self.parent, self.key, self.text, data, position=self.position, session=session)


def chain(seed: object, count: int, start: bytes = ROOT, at: int = 0) -> list[Page]:
    """``count`` full pages one after the other."""
    pages = []
    for number in range(at, at + count):
        text = tokens((seed, number))
        key = xxh3_128_digest(start + text)
        pages.append(Page(start, key, text, 64 * number))
        start = key
    return pages


def put_state(store: Store, parent: bytes, tail: bytes, position: int, **wish: Any) -> None:
    wish = {"kind": "user", "priority": 1.0, "pinned": False, "session": "s"} | wish
    store.put_state(parent, tail, content(parent, tail, STATE_SIZES), position=position, **wish)


def read_page(store: Store, page: Page) -> bool | None:
    """None: not held. True: the right bytes came. False: lost. Wrong bytes fail the test."""
    ref = store.page(page.parent, page.key, page.text) if page.key else None
    if ref is None:
        return None
    return fetch(store, ref, page.parent, page.text, page_sizes(page.text))


def read_state(store: Store, parent: bytes, tail: bytes) -> bool | None:
    found = [one for one in store.states(parent, tail) if one.tail == tail]
    return fetch(store, found[0], parent, tail, STATE_SIZES) if found else None


def fetch(store: Store, ref: Any, parent: bytes, text: bytes, sizes: tuple[int, ...]) -> bool:
    into = [memoryview(bytearray(size)) for size in sizes]
    if not store.read(ref, into).wait():
        return False
    expected = content(parent, text, sizes)
    assert all(bytes(got) == bytes(want) for got, want in zip(into, expected, strict=True)), "wrong bytes were served"
    return True


def disk_usage(directory: Path) -> int:
    """What the directory occupies, allocated blocks included."""
    total = 0
    for path in directory.rglob("*"):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        if path.is_file():
            total += max(stat.st_blocks * 512, 0)
    return total


class FaultyFiles(Files):
    """``fail``: errno by method name. ``crash``: kill this process at the n-th time of a point, 0 for none. With
    ``deny``, nothing can be made or opened for writing."""

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.points: Counter[str] = Counter()
        self.crash: tuple[str, int] = ("", 0)
        self.capacity: int | None = None
        self.deny = False
        self.gate = threading.Event()
        self.gate.set()
        """Writes wait for it."""

    def point(self, name: str) -> None:
        self.points[name] += 1
        if self.crash == (name, self.points[name]):
            os.kill(os.getpid(), signal.SIGKILL)
        self._maybe(name)

    def make_directory(self, path: Path) -> None:
        if self.deny:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        super().make_directory(path)

    def open(self, path: Path, *, write: bool) -> int:
        if self.deny and write:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        self._maybe("open")
        return super().open(path, write=write)

    def write(self, descriptor: int, parts: Any, offset: int) -> None:
        self.gate.wait()
        if "write" in self.fail:
            short = b"".join(bytes(part) for part in parts)[:5000]
            super().write(descriptor, [short], offset)
        self._maybe("write")
        super().write(descriptor, parts, offset)

    def read(self, descriptor: int, parts: Any, offset: int) -> int:
        self._maybe("read")
        return super().read(descriptor, parts, offset)

    def allocate(self, descriptor: int, size: int) -> None:
        self._maybe("allocate")
        super().allocate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        self._maybe("sync")
        super().sync(descriptor)

    def free(self, path: Path) -> tuple[int, int]:
        return super().free(path) if self.capacity is None else (self.capacity, 100 * (self.capacity + 1))

    def _maybe(self, name: str) -> None:
        if name in self.fail:
            raise OSError(self.fail[name], os.strerror(self.fail[name]))
