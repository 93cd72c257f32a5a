"""Killed at any moment, again and again in the same directory: what was flushed is there, what is there is right."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from storekit import FaultyFiles, Page, chain, disk_usage, put_state, read_page, read_state, settings, tokens

from sessions.store.store import Store, open_store

POINTS = (
    "extent.written", "segment.created", "segment.roll", "index.commit", "map.grow", "rebuild.start",
    "rebuild.segment", "gc.copied", "gc.committed", "gc.dropped", "erase.asked", "erase.begun", "erase.wiped",
    "index.copied", "index.compacted", "erase.finished", "",
)  # fmt: skip
PAGES = 6
MANY = 100
"""More sessions than a child usually lives to write."""


def start(directory: Path, quota: int, files: FaultyFiles | None = None, key: bytes | None = None) -> Store:
    """Small segments and a small map, so that both grow all the time."""
    config = settings(directory, quota_bytes=quota, host_bytes=0, segment_bytes=128 << 10, key=key)
    return open_store(config, files=files, map_size=32 << 10)


def session(number: int) -> tuple[list[Page], bytes, bytes]:
    """Pages, a state's parent, its tail."""
    pages = chain(number, PAGES)
    return pages, pages[-1].key or b"", tokens((number, "tail"), number % 5)


def work(store: Store, numbers: range, chance: random.Random, acknowledge: Callable[[int], None]) -> None:
    """Sessions one after the other, each in pieces that leave dead space behind."""
    for number in numbers:
        pages, parent, tail = session(number)
        for page in pages:
            for count in (20, 40, 64):
                Page(page.parent, page.key if count == 64 else None, page.text[: 4 * count], page.position).put(store)
                if chance.random() < 0.3:
                    store.flush(20.0)
        put_state(store, parent, tail, 64 * PAGES + len(tail) // 4, session=str(number))
        if store.flush(20.0):
            acknowledge(number)
        if chance.random() < 0.1:
            store.forget("nobody")
        if chance.random() < 0.3:
            store.collect(20.0)


def child(directory: Path, quota: int, first: int, seed: int, point: str, pipe: int, key: bytes | None) -> None:
    chance = random.Random(seed)
    files = FaultyFiles()
    files.crash = (point, chance.choice([1, 1, 2, 3]))
    store = start(directory, quota, files, key)

    def acknowledge(number: int) -> None:
        os.write(pipe, number.to_bytes(4, "little"))

    work(store, range(first, first + MANY), chance, acknowledge)
    assert "skipped_no_room" not in store.stats()


def crash(directory: Path, quota: int, first: int, seed: int, point: str, key: bytes | None) -> list[int]:
    """Run a child that is killed at the point, or after a while; the sessions that it had flushed."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(reader)
            child(directory, quota, first, seed, point, writer, key)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    until = time.monotonic() + (0.4 if point else 0.25 * random.Random(seed).random())
    ended = status = 0
    while not ended and time.monotonic() < until:
        time.sleep(0.005)
        ended, status = os.waitpid(process, os.WNOHANG)
    if not ended:
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
    assert status in (0, signal.SIGKILL), "the store failed in the child"
    raw = os.read(reader, 4096)
    os.close(reader)
    return [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]


def check(store: Store, numbers: list[int]) -> int:
    """How many of the sessions are there whole; nothing that is there is wrong or damaged."""
    whole = 0
    for number in numbers:
        pages, parent, tail = session(number)
        got = [read_page(store, page) for page in pages]
        got.append(read_state(store, parent, tail))
        assert False not in got, "an extent that the index knows was damaged"
        whole += all(got)
    return whole


def rounds(root: Path, count: int, seed: int, *, quota: int, key: bytes | None = None) -> None:
    chance = random.Random(seed)
    acknowledged: list[int] = []
    for number in range(count):
        point = POINTS[number % len(POINTS)]
        if point.startswith("rebuild"):
            for index in root.rglob("index"):
                shutil.rmtree(index)
        acknowledged += crash(root, quota, MANY * number, chance.randrange(1 << 30), point, key)
        assert disk_usage(root) <= quota
        if chance.random() < 0.3:
            continue
        store = start(root, quota, key=key)
        sample = acknowledged[-10:] + chance.sample(acknowledged, min(len(acknowledged), 10))
        whole = check(store, sample)
        evicted = store.stats().get("evicted", 0) or quota < 32 << 20
        assert whole == len(sample) or evicted, f"lost after {point or 'a random moment'}"
        store.close()
    assert acknowledged
    assert len(list(root.rglob("*.seg"))) <= quota // (128 << 10) + 4


@pytest.mark.parametrize("quota", [256 << 20, 3 << 20], ids=["ample", "tight"])
def test_killed(tmp_path: Path, quota: int) -> None:
    rounds(tmp_path, 22, 1, quota=quota)


def test_killed_encrypted(tmp_path: Path) -> None:
    rounds(tmp_path, 11, 2, quota=256 << 20, key=b"0123456789abcdef")


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(20))
def test_killed_a_thousand_times(tmp_path: Path, seed: int) -> None:
    """Fifty times in each of twenty directories."""
    key = b"0123456789abcdef" if seed % 4 == 3 else None
    rounds(tmp_path, 50, 100 + seed, quota=(3 << 20) if seed % 2 else (512 << 20), key=key)


def test_a_turn_survives_a_kill_a_second_later(tmp_path: Path) -> None:
    """What is pinned does not wait to settle, nor does the page it lies in, whole or not; what is not pinned does."""
    pages = chain("turn", PAGES)
    end, at = pages[-1].key or b"", 64 * PAGES
    text = tokens("part", 30)
    other = chain("other", 1)[0].key or b""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            store = open_store(settings(tmp_path, settle_seconds=600.0))
            time.sleep(0.1)
            for page in pages:
                page.put(store)
            put_state(store, end, text[:80], at + 20, kind="user")
            Page(end, None, text, at).put(store)
            put_state(store, end, text, at + 30, kind="tip", pinned=True)
            put_state(store, other, b"", 64, pinned=False)
            os.write(writer, b"x")
            time.sleep(60.0)
        finally:
            os._exit(1)
    assert os.read(reader, 1) == b"x"
    time.sleep(1.0)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(reader)
    os.close(writer)
    store = open_store(settings(tmp_path))
    assert [read_page(store, page) for page in pages] == [True] * PAGES
    (part,) = store.partial(end, text)
    assert part.tokens == text
    assert read_state(store, end, text) is True
    assert read_state(store, end, text[:80]) is None and read_state(store, other, b"") is None
    store.close()


def test_nothing_grows_over_many_kills(tmp_path: Path) -> None:
    """The same sessions again and again: no leftovers."""
    for seed in range(8):
        crash(tmp_path, 256 << 20, 0, seed, "", None)
    start(tmp_path, 256 << 20).close()
    store = start(tmp_path, 256 << 20)
    store.collect(20.0)
    numbers = store.stats()
    longest = numbers["extents"] / (PAGES + 1) + 1
    assert numbers["disk_bytes"] <= 3 * longest * (PAGES * 16384 + 28672) + (1 << 20)
    store.close()


def test_every_point_is_passed(tmp_path: Path) -> None:
    """Each point of the list is reached by the work above, so that killing there means something."""
    files = FaultyFiles()
    store = start(tmp_path, 4 << 20, files)
    work(store, range(40), random.Random(1), lambda number: None)
    store.close()
    for index in tmp_path.rglob("index"):
        shutil.rmtree(index)
    start(tmp_path, 4 << 20, files).close()
    assert {point for point in POINTS if point} <= set(files.points)
