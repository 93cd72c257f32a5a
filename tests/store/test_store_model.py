"""The store against a dictionary, under random calls, and its pure parts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from storekit import (
    PAGE_BYTES,
    PAGE_SIZES,
    ROOT,
    STATE_SIZES,
    content,
    disk_usage,
    fetch,
    page_sizes,
    tokens,
)
from storekit import settings as store_settings
from xxhash import xxh3_128_digest

from sessions.store.format import Place
from sessions.store.mirror import Entry
from sessions.store.payload import Pool
from sessions.store.retention import Budget, Item, Level, Point, thin, victims
from sessions.store.store import Store, open_store

ALPHABET = [tokens(number) for number in range(3)]


class Against(RuleBasedStateMachine):
    """A tree of pages over three texts, so that branches, repeats and partial pages meet. The store may forget when
    it is full; it may never invent, mix up, or lose what fits."""

    quota = 64 << 20
    forgets = False
    key: bytes | None = None

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.keys = [ROOT]
        self.pages: dict[tuple[bytes, bytes], bytes] = {}
        self.partials: set[tuple[bytes, bytes]] = set()
        self.states: set[tuple[bytes, bytes]] = set()
        self.held: list[Entry] = []

    @initialize()
    def start(self) -> None:
        self.store = self._open()

    def _open(self) -> Store:
        config = store_settings(
            self.root, quota_bytes=self.quota, host_bytes=60_000, session_states=10_000, key=self.key
        )
        return open_store(config)

    @rule(parent=st.integers(0, 40), text=st.sampled_from(ALPHABET))
    def put_page(self, parent: int, text: bytes) -> None:
        before = self.keys[parent % len(self.keys)]
        key = xxh3_128_digest(before + text)
        self.store.put_page(before, key, text, content(before, text, PAGE_SIZES), position=64)
        self.pages[before, text] = key
        if key not in self.keys:
            self.keys.append(key)
        self.partials -= {one for one in self.partials if one[0] == before and text.startswith(one[1])}

    @rule(parent=st.integers(0, 40), text=st.sampled_from(ALPHABET), count=st.integers(1, 63))
    def put_partial(self, parent: int, text: bytes, count: int) -> None:
        before, part = self.keys[parent % len(self.keys)], text[: 4 * count]
        self.store.put_page(before, None, part, content(before, part, page_sizes(part)), position=64)
        if any(one == before and full.startswith(part) for one, full in [*self.pages, *self.partials]):
            return
        self.partials -= {one for one in self.partials if one[0] == before and part.startswith(one[1])}
        self.partials.add((before, part))

    @rule(parent=st.integers(0, 40), text=st.sampled_from(ALPHABET), count=st.integers(0, 63), pinned=st.booleans())
    def put_state(self, parent: int, text: bytes, count: int, pinned: bool) -> None:
        before, tail = self.keys[parent % len(self.keys)], text[: 4 * count]
        data = content(before, tail, STATE_SIZES)
        self.store.put_state(before, tail, data, position=count, kind="user", priority=0.5, pinned=pinned, session="s")
        self.states.add((before, tail))

    @rule()
    def flush(self) -> None:
        assert self.store.flush(20.0)

    @rule()
    def collect(self) -> None:
        assert self.store.collect(20.0)

    @rule()
    def reopen(self) -> None:
        self.held.clear()
        self.store.close()
        self.store = self._open()

    @rule()
    def rebuild(self) -> None:
        self.held.clear()
        self.store.close()
        for path in self.root.rglob("index"):
            shutil.rmtree(path)
        self.store = self._open()

    @rule(parent=st.integers(0, 40), text=st.sampled_from(ALPHABET))
    def look_up(self, parent: int, text: bytes) -> None:
        before = self.keys[parent % len(self.keys)]
        ref = self.store.page(before, xxh3_128_digest(before + text), text)
        self._expect(ref is not None, (before, text) in self.pages)
        if ref is not None:
            assert fetch(self.store, ref, before, text, PAGE_SIZES)
        for part in self.store.partial(before, text):
            assert part.tokens[:4] == text[:4]
            assert fetch(self.store, part, before, part.tokens, page_sizes(part.tokens))
        for state in self.store.states(before, text):
            assert text.startswith(state.tail) and (before, state.tail) in self.states
            assert fetch(self.store, state, before, state.tail, STATE_SIZES)
        expected = {tail for one, tail in self.states if one == before and text.startswith(tail)}
        self._expect({state.tail for state in self.store.states(before, text)} == expected, True)
        parts = {part for one, part in self.partials if one == before and part[:4] == text[:4]}
        found = {one.tokens for one in self.store.partial(before, text) if len(one.tokens) < PAGE_BYTES}
        self._expect(parts <= found, True)

    @rule(parent=st.integers(0, 40), text=st.sampled_from(ALPHABET))
    def hold(self, parent: int, text: bytes) -> None:
        before = self.keys[parent % len(self.keys)]
        ref = self.store.page(before, xxh3_128_digest(before + text), text)
        if ref is not None:
            self.store.hold([ref])
            self.held.append(ref)

    @rule()
    def release(self) -> None:
        self.store.release(self.held)
        self.held.clear()

    @invariant()
    def bounded(self) -> None:
        if self.root.exists():
            assert disk_usage(self.root) <= self.quota
        assert not any(ref.gone for ref in self.held)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    def _expect(self, got: bool, wanted: bool) -> None:
        assert got == wanted or (self.forgets and wanted)


class Sealed(Against):
    key = b"0123456789abcdef"


class Full(Against):
    quota = 600 << 10
    forgets = True


CI = settings(max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=400, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("machine", [Against, Sealed, Full])
def test_against_a_dictionary(machine: type[Against]) -> None:
    run_state_machine_as_test(machine, settings=CI)


@pytest.mark.deep
@pytest.mark.parametrize("machine", [Against, Sealed, Full])
def test_against_a_dictionary_for_long(machine: type[Against]) -> None:
    run_state_machine_as_test(machine, settings=LONG)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1), st.integers(0, 99), st.booleans())), st.integers(0, 99))
def test_victims(raw: list[tuple[int, float, int, bool]], need: int) -> None:
    items = [
        Item(size, value, before % at if at and before % 3 else -1, keep)
        for at, (size, value, before, keep) in enumerate(raw)
    ]
    chosen = victims(items, need)
    gone: set[int] = set()
    for at in chosen:
        gone.add(at)
        assert not items[at].keep
        assert all(one in gone for one, item in enumerate(items) if item.before == at), "what needs it goes first"
    freed = sum(items[at].size for at in chosen)
    if freed < need:
        left = set(range(len(items))) - gone
        assert all(items[at].keep or any(items[one].before == at for one in left) for at in left)
    elif chosen:
        assert freed - items[chosen[-1]].size < need


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1), st.booleans())))
def test_thinning(raw: list[tuple[int, float, bool]]) -> None:
    points = [Point(*one) for one in sorted(raw)]
    victim = thin(points)
    if victim is None:
        assert all(point.keep for point in points)
    else:
        assert not points[victim].keep


def test_thinning_keeps_both_ends_covered() -> None:
    """Down to 16 of 500 equally likely ones: the end is dense, the start is not lost."""
    points = [Point(64 * number, 1.0, False) for number in range(1, 501)]
    while len(points) > 16:
        victim = thin(points)
        assert victim is not None
        del points[victim]
    positions = [point.position for point in points]
    gaps = [b - a for a, b in zip([0, *positions], positions, strict=False)]
    assert positions[-1] == 32000 and max(gaps) <= 8000 and gaps[-1] < max(gaps)


def test_memory_of_payloads_is_used_again_when_nobody_reads_it() -> None:
    size = 3 << 20
    pool = Pool((size, 10))
    first = pool.gather([memoryview(b"a" * (size - 5)), memoryview(b"b" * 5)])
    assert bytes(first.view) == b"a" * (size - 5) + b"b" * 5
    reader = first
    del first
    second = pool.gather([memoryview(b"c" * size)])
    assert bytes(reader.view[-5:]) == b"bbbbb", "overwritten while it was read"
    memory = reader.view
    del reader
    third = pool.gather([memoryview(b"d" * size)])
    assert third.view is memory and bytes(second.view) == b"c" * size
    del third
    assert len(pool.gather([memoryview(b"e" * (2 << 20))]).view) == 2 << 20


def test_the_budget_drains() -> None:
    budget = Budget(86400, now=0.0)
    budget.write(50000, now=0.0)
    assert budget.level(0.0) is Level.YELLOW
    budget.write(40000, now=0.0)
    assert budget.level(0.0) is Level.RED
    assert budget.level(10000.0) is Level.YELLOW
    assert budget.level(86400.0) is Level.GREEN and budget.filled(90000.0) == 0.0
    assert budget.filled(0.0) == 0.0, "a clock that goes back"


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_places(segment: int, block: int) -> None:
    assert Place.unpack(Place(segment, block).pack()) == Place(segment, block)
