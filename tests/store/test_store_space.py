"""Quota, eviction, garbage collection, the write budget, other models, the host tier and the queue."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from storekit import (
    ROOT,
    STATE_SIZES,
    FaultyFiles,
    Page,
    chain,
    content,
    disk_usage,
    put_state,
    read_page,
    read_state,
    settings,
    tokens,
)

from sessions.store.config import DAY
from sessions.store.index import MAP_SIZE
from sessions.store.store import Store, open_store

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    yield Clock()


class SmallDisk(FaultyFiles):
    def free(self, path: Path) -> tuple[int, int]:
        return 8 * MIB, 10 * MIB


def test_a_disk_smaller_than_a_segment_is_used(tmp_path: Path) -> None:
    config = replace(settings(tmp_path / "new" / "store"), segment_bytes=256 * MIB, quota_bytes=64 << 30, host_bytes=0)
    store = open_store(config, files=SmallDisk())
    pages = chain("s", 20)
    for page in pages:
        page.put(store)
    assert store.flush(30)
    assert not store.stats().get("skipped_no_room")
    assert max(path.stat().st_size for path in tmp_path.rglob("*.seg")) < 2 * MIB
    store.close()


def test_the_quota_holds_at_every_moment(tmp_path: Path) -> None:
    quota = 6 * MIB
    store = open_store(settings(tmp_path, quota_bytes=quota, host_bytes=0, fingerprint="old"))
    for page in chain("old", 100):
        page.put(store)
    store.close()
    files = FaultyFiles()
    store = open_store(settings(tmp_path, quota_bytes=quota, host_bytes=0), files=files)
    chance = random.Random(3)
    newest: list[Page] = []
    for session in range(60):
        newest = chain(session, chance.randrange(5, 30))
        for page in newest:
            page.put(store)
        put_state(store, newest[-1].key or b"", b"", len(newest) * 64, session=str(session))
        if session % 3 == 0:
            store.flush(10.0)
        assert disk_usage(tmp_path) <= quota
        assert len(list(tmp_path.rglob("*"))) <= quota // (256 << 10) + 16
    assert store.flush(10.0)
    numbers = store.stats()
    assert numbers["evicted"] > 0 and numbers["segments_dropped"] + numbers.get("segments_compacted", 0) > 0
    assert all(read_page(store, page) for page in newest), "the newest was evicted"
    assert numbers["disk_bytes"] <= quota
    assert numbers.get("skipped_no_room", 0) == 0
    assert numbers["bytes_moved"] <= 0.3 * numbers["bytes_written"]
    survivors = [page for session in range(60) for page in chain(session, 1) if read_page(store, page)]
    assert survivors
    store.close()
    assert disk_usage(tmp_path) <= quota
    store = open_store(settings(tmp_path, quota_bytes=quota))
    assert all(read_page(store, page) for page in newest)
    store.close()


def test_a_quota_that_was_lowered(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path, quota_bytes=16 * MIB))
    for number in range(10):
        for page in chain(number, 60):
            page.put(store)
        store.flush(10.0)
    store.close()
    assert disk_usage(tmp_path) > 9 * MIB
    store = open_store(settings(tmp_path, quota_bytes=4 * MIB))
    assert store.flush(10.0)
    assert disk_usage(tmp_path) <= 4 * MIB
    assert 50 < store.stats()["extents"] < 300
    store.close()


def test_pages_are_evicted_from_the_end(tmp_path: Path) -> None:
    """What is left of every chain is a start of it."""
    store = open_store(settings(tmp_path, quota_bytes=4 * MIB, host_bytes=0, state_components=()))
    chains = [chain(number, 40) for number in range(12)]
    for pages in chains:
        for page in pages:
            page.put(store)
        store.flush(10.0)
    assert store.stats()["evicted"] > 0
    for pages in chains:
        there = [read_page(store, page) is True for page in pages]
        assert there == sorted(there, reverse=True)
    store.close()


def test_pinned_and_held_survive_eviction(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path, quota_bytes=4 * MIB, host_bytes=0))
    first = chain("first", 10)
    tail = tokens("tail", 5)
    for page in first:
        page.put(store)
    Page(first[-1].key or b"", None, tail, 640).put(store)
    put_state(store, first[-1].key or b"", tail, 645, pinned=True, session="first")
    second = chain("second", 10)
    for page in second:
        page.put(store)
    assert store.flush(10.0)
    refs = [store.page(page.parent, page.key or b"", page.text) for page in second]
    store.hold([ref for ref in refs if ref])
    for number in range(20):
        for page in chain(number, 30):
            page.put(store)
        store.flush(10.0)
    assert store.stats()["evicted"] > 0
    assert all(read_page(store, page) for page in [*first, *second])
    assert read_state(store, first[-1].key or b"", tail)
    assert len(store.partial(first[-1].key or b"", tail)) == 1
    store.close()


def test_dead_space_is_collected(tmp_path: Path) -> None:
    """Mostly dead segments are compacted; what lives in them is found again, also after a restart."""
    store = open_store(settings(tmp_path, host_bytes=0))
    pages = chain("a", 120)
    for page in pages:
        page.put(store)
        half = page.text[:128]
        store.put_page(page.parent, None, tokens(page.position, 40), content(b"", half, (30000,)), position=0)
        assert page.position % 256 or store.flush(20.0)
    assert store.flush(20.0)
    for page in pages:
        text = tokens(page.position, 40) + tokens("more", 10)
        store.put_page(page.parent, None, text, content(b"", text, (10,)), position=0)
    before = disk_usage(tmp_path)
    assert store.collect(20.0)
    assert store.stats()["segments_compacted"] > 0
    assert disk_usage(tmp_path) < 0.7 * before
    assert all(read_page(store, page) for page in pages)
    store.close()
    store = open_store(settings(tmp_path))
    assert all(read_page(store, page) for page in pages)
    store.close()


def test_garbage_collection_passes_over_damage(tmp_path: Path) -> None:
    test_dead_space_is_collected(tmp_path / "first")
    store = open_store(settings(tmp_path / "first", host_bytes=0))
    for path in (tmp_path / "first").rglob("pages-*.seg"):
        with path.open("r+b") as file:
            file.seek(4096 + 20)
            file.write(b"????")
    for page in chain("a", 120):
        text = tokens(page.position, 40) + tokens("more", 12)
        store.put_page(page.parent, None, text, content(b"", text, (10,)), position=0)
    store.collect(20.0)
    lost = sum(read_page(store, page) is not True for page in chain("a", 120))
    assert lost <= store.stats().get("corrupt_extents", 0)
    store.close()


def test_other_models_go_first(tmp_path: Path, clock: Clock) -> None:
    for name in ("old", "older"):
        store = open_store(settings(tmp_path, fingerprint=name, quota_bytes=4 * MIB))
        for page in chain(name, 60):
            page.put(store)
        store.close()
    clock.now = max(path.stat().st_mtime for path in tmp_path.rglob("namespace.json")) + 3600
    config = settings(tmp_path, quota_bytes=4 * MIB, host_bytes=0, clock=clock, grace_seconds=DAY)
    store = open_store(config)
    mine = chain("mine", 60)
    for page in mine:
        page.put(store)
    assert store.flush(10.0)
    assert "namespaces_dropped" not in store.stats(), "within its grace"
    clock.now += DAY
    for page in chain("more", 150):
        page.put(store)
    assert store.flush(10.0)
    assert store.stats()["namespaces_dropped"] >= 1
    assert disk_usage(tmp_path) <= 4 * MIB
    store.close()


def test_days_of_retention(tmp_path: Path, clock: Clock) -> None:
    store = open_store(settings(tmp_path, clock=clock, retention_days=2, host_bytes=0))
    old, used, new = chain("old", 3), chain("used", 3), chain("new", 3)
    for page in [*old, *used]:
        page.put(store)
    assert store.flush(10.0)
    clock.now += 1.5 * DAY
    assert all(read_page(store, page) for page in used)
    for page in new:
        page.put(store)
    clock.now += 1.0 * DAY
    held = [ref for ref in [store.page(old[0].parent, old[0].key or b"", old[0].text)] if ref]
    store.hold(held)
    assert store.collect(10.0)
    assert store.stats()["expired"] == 2
    assert not held[0].gone
    store.release(held)
    assert store.collect(10.0)
    assert [read_page(store, page) for page in old] == [None] * 3
    assert all(read_page(store, page) for page in [*used, *new])
    assert store.stats()["expired"] == 3
    store.close()
    store = open_store(settings(tmp_path, clock=clock, retention_days=2, host_bytes=0))
    clock.now += 1.5 * DAY
    assert store.collect(10.0)
    assert all(read_page(store, page) for page in used), "its use was not recorded"
    store.close()


def test_the_daily_budget(tmp_path: Path, clock: Clock) -> None:
    """Green: everything; yellow: what matters; red: nothing; and it is remembered over a restart."""
    config = settings(tmp_path, clock=clock, daily_write_bytes=200 << 10, host_bytes=0)
    store = open_store(config)
    for page in chain("a", 7):
        page.put(store)
    assert store.flush(10.0)
    assert store.stats()["write_budget_level"] == 1
    (late,) = chain("late", 1, at=200)
    (early,) = chain("early", 1)
    late.put(store)
    early.put(store)
    put_state(store, ROOT, b"", 0, pinned=True)
    assert store.flush(10.0)
    assert read_page(store, late) and read_page(store, early) is None and read_state(store, ROOT, b"")
    assert store.stats()["skipped_budget_yellow"] == 1
    for page in chain("b", 6, at=200):
        page.put(store)
    assert store.flush(10.0)
    assert store.stats()["skipped_budget_red"] > 0
    assert store.stats()["bytes_written"] <= (200 << 10) + 32768
    store.close()
    store = open_store(config)
    assert store.stats()["write_budget_level"] == 2
    clock.now += DAY
    assert store.stats()["write_budget_level"] == 0
    store.close()


def test_the_queue_gives_up_what_matters_least(tmp_path: Path) -> None:
    """Over its limits: candidates, then checkpoints, then all; nothing blocks, and the host tier still has it."""
    files = FaultyFiles()
    files.fail["write"] = errno.EIO
    size = sum(STATE_SIZES)
    config = settings(tmp_path, queue_bytes=10 * size, host_bytes=100 * size, settle_seconds=60.0)
    store = open_store(config, files=files)
    for number in range(12):
        put_state(store, ROOT, tokens(number, 3), 3, priority=number / 12, pinned=number < 2, session=str(number))
    numbers = store.stats()
    assert numbers["queue_dropped"] > 0 and numbers["queue_bytes"] <= 0.9 * 10 * size
    assert all(read_state(store, ROOT, tokens(number, 3)) for number in range(12))
    for page in chain("a", 40):
        page.put(store)
    assert store.stats()["queue_bytes"] <= 10 * size
    assert all(read_page(store, page) for page in chain("a", 40))
    files.fail.clear()
    assert store.flush(10.0)
    store.close()
    store = open_store(settings(tmp_path))
    assert [bool(store.states(ROOT, tokens(number, 3))) for number in range(2)] == [True, True], "a pinned one was lost"
    store.close()


def test_the_host_tier_is_bounded_and_recent(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path, host_bytes=100_000))
    pages = chain("a", 40)
    for page in pages:
        page.put(store)
    assert store.flush(10.0)
    tiers = [ref.tier for page in pages if (ref := store.page(page.parent, page.key or b"", page.text))]
    assert tiers == ["disk"] * 29 + ["host"] * 11
    assert store.stats()["host_bytes"] <= 100_000 and store.stats()["queue_bytes"] == 0
    store.close()


def test_the_map_of_the_index_grows(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path, host_bytes=0, page_components=(8,)), map_size=64 << 10)
    pages = chain("a", 1500)
    for page in pages:
        store.put_page(page.parent, page.key, page.text, [memoryview(page.text[:8])], position=page.position)
    assert store.flush(30.0)
    assert store.stats()["index_growths"] > 0 and store.stats()["extents"] == 1500
    store.close()
    store = open_store(settings(tmp_path), map_size=64 << 10)
    assert store.stats()["extents"] == 1500
    assert store.stats()["index_bytes"] < MAP_SIZE
    store.close()


def test_the_index_in_ram_is_bounded(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path, max_extents=50))
    for page in chain("a", 80):
        page.put(store)
    assert store.stats()["extents"] == 50 and store.stats()["skipped_index_full"] == 30
    assert store.collect(10.0)
    assert store.stats()["extents"] < 50
    store.close()
    store = open_store(settings(tmp_path, max_extents=20))
    assert store.stats()["extents"] == 20
    store.close()


def test_reading_goes_on_while_segments_are_moved(tmp_path: Path) -> None:
    store: Store = open_store(settings(tmp_path, host_bytes=0))
    pages = chain("a", 60)
    for number in range(60):
        text = tokens(number, 20)
        store.put_page(ROOT, None, text, content(b"", text, (30000,)), position=0)
        pages[number].put(store)
        assert number % 4 or store.flush(10.0)
    assert store.flush(10.0)
    for number in range(60):
        text = tokens(number, 20) + tokens("more", 1)
        store.put_page(ROOT, None, text, content(b"", text, (10,)), position=0)
    refs = [ref for page in pages if (ref := store.page(page.parent, page.key or b"", page.text))]
    with_buffers = [(ref, [memoryview(bytearray(size)) for size in (3000, 1000, 5000)]) for ref in refs * 4]
    readings = [store.read(ref, into) for ref, into in with_buffers]
    assert store.collect(20.0)
    assert all(reading.wait() for reading in readings)
    assert all(read_page(store, page) for page in pages)
    store.close()


def test_nobody_waits_for_a_disk_that_hangs(tmp_path: Path) -> None:
    """Puts, look-ups and reads from RAM go on; the queue stays within its bound."""
    files = FaultyFiles()
    store = open_store(settings(tmp_path, queue_bytes=500_000, host_bytes=200_000), files=files)
    first = chain("first", 20)
    for page in first:
        page.put(store)
    assert store.flush(10.0)
    files.gate.clear()
    pages = chain("a", 200)
    for page in pages:
        page.put(store)
        assert read_page(store, page)
    put_state(store, ROOT, b"", 0, pinned=True)
    store.demote(ROOT, b"")
    assert all(read_page(store, page) for page in first[:3])
    assert not store.flush(0.05)
    assert store.stats()["queue_bytes"] <= 500_000 and store.stats()["queue_refused"] > 0
    files.gate.set()
    assert store.flush(10.0)
    store.close()
