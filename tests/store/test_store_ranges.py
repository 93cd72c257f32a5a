"""Reading parts of extents, many at once: always the bytes that single whole reads give, or a loss that is told."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from storekit import (
    PAGE_SIZES,
    ROOT,
    STATE_SIZES,
    FaultyFiles,
    Page,
    chain,
    content,
    page_sizes,
    put_state,
    settings,
    tokens,
)

from sessions.store.segments import GAP
from sessions.store.store import Store, open_store

KEYS = [None, b"k" * 32]
STATE = tokens("state", 7)


def filled(
    directory: Path, count: int = 6, files: FaultyFiles | None = None, **changes: Any
) -> tuple[Store, list[Page]]:
    """Reopened, so that everything is read from the disk: a chain, a partial page and a state behind it."""
    changes = {"host_bytes": 0, **changes}
    pages = chain("ranges", count)
    last = pages[-1].key
    assert last is not None
    pages.append(Page(last, None, tokens("partial", 23), 64 * count))
    store = open_store(settings(directory, **changes))
    for page in pages:
        page.put(store)
    put_state(store, ROOT, STATE, 7)
    assert store.flush(10.0)
    store.close()
    return open_store(settings(directory, **changes), files=files), pages


def ref_of(store: Store, page: Page) -> Any:
    if page.key is not None:
        return store.page(page.parent, page.key, page.text)
    return next(one for one in store.partial(page.parent, page.text) if one.tokens == page.text)


def buffers(sizes: Sequence[int]) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def check(store: Store, page: Page, first: int, last: int, *, right: bool = True) -> None:
    """Components [first, last) of a page."""
    into = buffers(page_sizes(page.text)[first:last])
    assert store.read_parts([(ref_of(store, page), into, first)])[0].wait() is right
    if right:
        wanted = content(page.parent, page.text, page_sizes(page.text))[first:last]
        assert [bytes(one) for one in into] == [bytes(one) for one in wanted]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("host", [0, 1 << 20])
def test_every_range_of_components(tmp_path: Path, key: bytes | None, host: int) -> None:
    store, pages = filled(tmp_path, key=key)
    if host:
        store.close()
        store = open_store(settings(tmp_path / "host", key=key, host_bytes=host, settle_seconds=600.0))
        for page in pages:
            page.put(store)
        put_state(store, ROOT, STATE, 7)
        assert {ref_of(store, page).tier for page in pages} == {"host"}
    for page in pages:
        for first in range(len(PAGE_SIZES)):
            for last in range(first + 1, len(PAGE_SIZES) + 1):
                check(store, page, first, last)
    state = store.states(ROOT, STATE)[0]
    for first in range(len(STATE_SIZES)):
        into = buffers(STATE_SIZES[first:])
        assert store.read_parts([(state, into, first)])[0].wait()
        assert b"".join(into) == b"".join(content(ROOT, STATE, STATE_SIZES)[first:])
    store.close()


def test_buffers_of_other_sizes_are_refused_and_cost_nothing(tmp_path: Path) -> None:
    store, pages = filled(tmp_path)
    for sizes, first in (((1000, 3000), 0), (PAGE_SIZES[:1], 1), (PAGE_SIZES[1:], 2), ((999,), 1), ((5000, 1), 2)):
        with pytest.raises(ValueError, match="component"):
            store.read_parts([(ref_of(store, pages[0]), buffers(sizes), first)])
    check(store, pages[0], 0, 3)
    store.close()


def segment_with(directory: Path, needle: bytes) -> tuple[Path, int]:
    for path in sorted(directory.rglob("*.seg")):
        at = path.read_bytes().find(needle)
        if at >= 0:
            return path, at
    raise AssertionError("nowhere on disk")


def spoil(directory: Path, page: Page, component: int) -> None:
    """Turn one bit of a component on disk."""
    part = bytes(content(page.parent, page.text, page_sizes(page.text))[component])
    path, at = segment_with(directory, part)
    with path.open("r+b") as file:
        file.seek(at + len(part) // 2)
        byte = file.read(1)
        file.seek(at + len(part) // 2)
        file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("bad", range(len(PAGE_SIZES)))
def test_only_ranges_with_the_corrupt_component_are_lost(tmp_path: Path, bad: int) -> None:
    store, pages = filled(tmp_path)
    spoil(tmp_path, pages[2], bad)
    for first in range(len(PAGE_SIZES)):
        for last in range(first + 1, len(PAGE_SIZES) + 1):
            if not first <= bad < last:
                check(store, pages[2], first, last)
    ref = ref_of(store, pages[2])
    assert store.stats().get("corrupt_extents", 0) == 0
    into = buffers(PAGE_SIZES[bad : bad + 1])
    assert not store.read_parts([(ref, into, bad)])[0].wait()
    assert store.stats()["corrupt_extents"] == 1 and ref_of(store, pages[2]) is None
    store.close()


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("component", range(len(PAGE_SIZES)))
def test_a_sealed_or_plain_component_that_is_damaged(tmp_path: Path, key: bytes | None, component: int) -> None:
    """Sealed ones cannot be searched for: any byte of the extent's payload is turned."""
    store, pages = filled(tmp_path, key=key)
    ref = ref_of(store, pages[1])
    path = next(path for path in tmp_path.rglob("pages-*.seg") if f"{ref.place.segment:08d}" in path.name)
    at = 4096 * ref.place.block + ref.header + sum(PAGE_SIZES[:component]) + 17
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    for other in range(len(PAGE_SIZES)):
        if other != component:
            check(store, pages[1], other, other + 1)
    assert not store.read_parts([(ref, buffers(PAGE_SIZES[component:][:1]), component)])[0].wait()
    store.close()


@pytest.mark.parametrize("kept", range(len(PAGE_SIZES)))
def test_a_segment_that_ends_inside_an_extent(tmp_path: Path, kept: int) -> None:
    """What comes before the end can be read, what comes after is lost; so is what is read together with it."""
    store, pages = filled(tmp_path)
    path, at = segment_with(tmp_path, bytes(content(pages[3].parent, pages[3].text, PAGE_SIZES)[kept]))
    with path.open("r+b") as file:
        file.truncate(at + 10)
    if kept:
        check(store, pages[3], 0, kept)
    refs = [ref_of(store, page) for page in pages]
    parts = [(ref, buffers(page_sizes(page.text)), 0) for ref, page in zip(refs, pages, strict=True)]
    came = [one.wait() for one in store.read_parts(parts)]
    assert came == [True] * 3 + [False] * 4
    store.close()


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("seed", range(12))
def test_together_as_one_by_one(tmp_path: Path, key: bytes | None, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any parts in any order, some corrupt, in batches of any size: what comes is what single reads give."""
    rng = random.Random(seed)
    monkeypatch.setattr("sessions.store.reader.SMALLEST", rng.choice((1, 5000, 40_000, 1 << 20)))
    monkeypatch.setattr("sessions.store.reader.LARGEST", rng.choice((4000, 30_000, 1 << 20)))
    monkeypatch.setattr("sessions.store.segments.GAP", rng.choice((0, 4096, GAP)))
    store, pages = filled(tmp_path, 12, key=key, segment_bytes=rng.choice((64 << 10, 256 << 10)))
    bad = {} if key else {page: rng.randrange(3) for page in rng.sample(pages, rng.randint(0, 3))}
    for page, component in bad.items():
        spoil(tmp_path, page, component)
    wanted = []
    for _ in range(40):
        page, first = rng.choice(pages), rng.randrange(3)
        wanted.append((page, first, rng.randint(first + 1, 3)))
    if rng.random() < 0.7:
        wanted.sort(key=lambda one: (one[1], one[0].position))
    refs = {page: ref_of(store, page) for page in pages}
    parts = [(refs[page], buffers(page_sizes(page.text)[a:b]), a) for page, a, b in wanted]
    readings = store.read_parts(parts)
    for (page, first, last), (_, into, _), reading in zip(wanted, parts, readings, strict=True):
        spoiled = page in bad and first <= bad[page] < last
        assert reading.wait() is not spoiled
        assert reading.done()
        if not spoiled:
            right = content(page.parent, page.text, page_sizes(page.text))[first:last]
            assert [bytes(one) for one in into] == [bytes(one) for one in right]
    asked = {page for page, first, last in wanted if page in bad and first <= bad[page] < last}
    assert store.stats().get("corrupt_extents", 0) == len(asked)
    assert all((ref_of(store, page) is None) == (page in asked) for page in pages if page.key is not None)
    store.close()


def test_neighbours_are_read_by_one_call(tmp_path: Path) -> None:
    files = FaultyFiles()
    calls: list[int] = []
    read = files.read
    files.read = lambda *given: calls.append(given[2]) or read(*given)  # type: ignore[method-assign]
    store, pages = filled(tmp_path, files=files, readers=1)
    calls.clear()
    parts = [(ref_of(store, page), buffers(page_sizes(page.text)[1:2]), 1) for page in pages]
    assert all([one.wait() for one in store.read_parts(parts)])
    assert len(calls) == 1
    store.close()


def test_an_error_costs_only_what_it_hits(tmp_path: Path) -> None:
    """A call that reads several fails: then each alone, and only what fails again is lost."""
    files = FaultyFiles()
    store, pages = filled(tmp_path, files=files, readers=1)
    bad = ref_of(store, pages[4])
    read = files.read

    def faulty(descriptor: int, parts: Any, offset: int) -> int:
        if offset <= 4096 * bad.place.block < offset + sum(len(one) for one in parts):
            raise OSError(errno.EIO, "a bad block")
        return read(descriptor, parts, offset)

    files.read = faulty  # type: ignore[method-assign]
    parts = [(ref_of(store, page), buffers(page_sizes(page.text)), 0) for page in pages]
    assert [one.wait() for one in store.read_parts(parts)] == [page is not pages[4] for page in pages]
    assert store.stats()["read_errors"] == 1
    store.close()
