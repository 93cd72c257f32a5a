"""What a store promises when nothing goes wrong."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from storekit import (
    PAGE_SIZES,
    ROOT,
    STATE_SIZES,
    Page,
    chain,
    content,
    disk_usage,
    fetch,
    page_sizes,
    put_state,
    read_page,
    read_state,
    settings,
    tokens,
)
from xxhash import xxh3_128_digest

from sessions.store.config import StoreBusy
from sessions.store.store import Store, open_store


def test_pages_and_states_survive_a_restart(tmp_path: Path) -> None:
    pages = chain("a", 20)
    tip, tail = pages[-1].key or b"", tokens("tail", 10)
    store = open_store(settings(tmp_path))
    for page in pages:
        page.put(store)
    Page(tip, None, tail, 1280).put(store)
    put_state(store, tip, tail, 1290, pinned=True)
    put_state(store, pages[3].key or b"", b"", 256, kind="system", priority=0.25, session="other")
    store.close()
    store = open_store(settings(tmp_path))
    assert store.stats()["extents"] == 23
    assert store.stats()["index_rebuilt"] == 0 if "index_rebuilt" in store.stats() else True
    assert all(read_page(store, page) for page in pages)
    assert read_state(store, tip, tail)
    (state,) = store.states(pages[3].key or b"", tokens("whatever"))
    assert (state.kind, state.priority, state.pinned, state.session) == ("system", 0.25, False, "other")
    assert (state.tail, state.tier, state.size, state.exact) == (b"", "disk", sum(STATE_SIZES), True)
    (partial,) = store.partial(tip, tail + tokens("more", 5))
    assert partial.tokens == tail
    assert fetch(store, partial, tip, tail, page_sizes(tail))
    store.close()


def test_a_page_is_found_before_it_is_written(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path, settle_seconds=60.0))
    (page,) = chain("a", 1)
    page.put(store)
    ref = store.page(page.parent, page.key or b"", page.text)
    assert ref is not None and ref.tier == "host"
    assert read_page(store, page)
    put_state(store, page.key or b"", b"", 64)
    assert read_state(store, page.key or b"", b"")
    store.close()


def test_keys_alone_are_not_trusted(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path))
    (page,) = chain("a", 1)
    page.put(store)
    other = tokens("other")
    assert store.page(page.parent, page.key or b"", other) is None
    assert store.page(bytes(16), page.key or b"", page.text) is None
    store.put_page(page.parent, page.key, other, content(page.parent, other, PAGE_SIZES), position=0)
    assert store.stats()["key_collisions"] == 1
    assert read_page(store, page)
    store.close()


def test_a_longer_page_replaces_the_partial_one(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path))
    text = tokens("a")
    for count in (10, 20, 5):
        Page(ROOT, None, text[: 4 * count], 0).put(store)
    assert [one.tokens for one in store.partial(ROOT, text)] == [text[:80]]
    Page(ROOT, None, tokens("b", 7), 0).put(store)
    Page(ROOT, xxh3_128_digest(ROOT + text), text, 0).put(store)
    assert [one.tokens for one in store.partial(ROOT, text[:12])] == [text]
    assert len(store.partial(ROOT, tokens("b", 7))) == 1
    assert store.partial(ROOT, b"") == []
    store.close()


def test_states_whose_tail_the_rest_begins_with(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path))
    rest = tokens("rest")
    for count in (0, 3, 9):
        put_state(store, ROOT, rest[: 4 * count], count)
    assert sorted(len(one.tail) // 4 for one in store.states(ROOT, rest)) == [0, 3, 9]
    assert sorted(len(one.tail) // 4 for one in store.states(ROOT, rest[:20])) == [0, 3]
    assert sorted(len(one.tail) // 4 for one in store.states(ROOT, tokens("else"))) == [0]
    store.close()


def test_a_state_is_wanted_once_more(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path))
    put_state(store, ROOT, b"", 0, priority=0.5, session="a")
    put_state(store, ROOT, b"", 0, priority=0.9, pinned=True, session="b", kind="tip")
    (state,) = store.states(ROOT, b"")
    assert (state.priority, state.pinned, state.session, state.kind) == (0.9, True, "b", "tip")
    assert store.flush(10.0)
    store.demote(ROOT, b"")
    assert not state.pinned and state.superseded
    store.close()
    store = open_store(settings(tmp_path))
    (state,) = store.states(ROOT, b"")
    assert not state.pinned and state.superseded
    store.close()


def test_a_run_of_pages_ends_where_anything_differs(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path))
    pages, other = chain("a", 5), chain("b", 5)
    for page in (*pages[:4], *other):
        page.put(store)
    keys, text = [page.key or b"" for page in pages], b"".join(page.text for page in pages)

    def found(parent: bytes, keys: list[bytes], text: bytes) -> list[bytes]:
        return [one.tokens for one in store.pages(parent, keys, text)]

    assert found(ROOT, keys, text) == [page.text for page in pages[:4]]
    assert found(ROOT, keys[:2], text) == [page.text for page in pages[:2]]
    assert found(keys[1], keys[2:], text[512:]) == [page.text for page in pages[2:4]]
    assert found(keys[0], keys, text) == found(b"?" * 16, keys, text) == found(ROOT, [], text) == []
    assert found(ROOT, [*keys[:2], other[2].key or b"", keys[3]], text) == [page.text for page in pages[:2]]
    for at in range(4):
        wrong = bytearray(text)
        wrong[256 * at + 40] ^= 1
        assert found(ROOT, keys, bytes(wrong)) == [page.text for page in pages[:at]]
    store.close()


def test_what_is_demoted_before_it_settles_is_not_written(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path, settle_seconds=60.0))
    put_state(store, ROOT, b"", 0, pinned=True)
    store.demote(ROOT, b"")
    assert store.flush(10.0)
    assert store.stats()["bytes_written"] == 0
    assert read_state(store, ROOT, b"")
    store.close()
    store = open_store(settings(tmp_path))
    assert not store.states(ROOT, b"")
    store.close()


def test_sessions_keep_a_number_of_checkpoints(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path, session_states=8, settle_seconds=60.0))
    pages = chain("a", 40)
    for page in pages:
        page.put(store)
        put_state(store, page.key or b"", b"", page.position + 64, pinned=page.position == 0)
    kept = [page.position + 64 for page in pages if store.states(page.key or b"", b"")]
    assert len(kept) == 8 and kept[0] == 64 and kept[-1] == 2560
    assert max(b - a for a, b in pairwise(kept)) <= 1280
    assert store.stats()["thinned"] == 32
    store.close()


def test_another_fingerprint_finds_nothing(tmp_path: Path) -> None:
    pages = chain("a", 3)
    store = open_store(settings(tmp_path))
    for page in pages:
        page.put(store)
    store.close()
    store = open_store(settings(tmp_path, fingerprint="model B"))
    assert [read_page(store, page) for page in pages] == [None] * 3
    for page in pages:
        store.put_page(page.parent, page.key, page.text, content(b"B", page.text, PAGE_SIZES), position=page.position)
    store.close()
    store = open_store(settings(tmp_path, quota_bytes=32 << 20, host_bytes=0, queue_bytes=1 << 20))
    assert all(read_page(store, page) for page in pages)
    store.close()


def test_files_are_private(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir(mode=0o755)
    store = open_store(settings(root))
    for page in chain("a", 3):
        page.put(store)
    assert store.flush(10.0)
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    store.close()


def test_one_owner(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path))
    with pytest.raises(StoreBusy, match=str(os.getpid())) as caught:
        open_store(settings(tmp_path))
    assert caught.value.pid == os.getpid()
    store.close()
    open_store(settings(tmp_path)).close()


def test_buffers_of_another_size_are_refused(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path))
    (page,) = chain("a", 1)
    page.put(store)
    ref = store.page(page.parent, page.key or b"", page.text)
    assert ref is not None
    with pytest.raises(ValueError):
        store.read(ref, [memoryview(bytearray(10))])
    store.close()


def test_held_entries_stay(tmp_path: Path) -> None:
    """A partial page that a plan uses is not replaced; a host-only payload that a plan uses is not given up."""
    store = open_store(settings(tmp_path, host_bytes=30_000, queue_bytes=0))
    pages = chain("a", 20)
    pages[0].put(store)
    ref = store.page(pages[0].parent, pages[0].key or b"", pages[0].text)
    assert ref is not None
    store.hold([ref])
    for page in pages[1:]:
        page.put(store)
    assert read_page(store, pages[0])
    assert store.stats()["host_bytes"] <= 30_000
    store.release([ref])
    for page in chain("b", 5):
        page.put(store)
    assert read_page(store, pages[0]) is None
    store.close()


def test_written_bytes_are_close_to_unique_bytes(tmp_path: Path) -> None:
    """Also when the same things come again, tips grow, and segments are many."""
    store = open_store(settings(tmp_path, page_components=(64000,), settle_seconds=60.0, queue_bytes=64 << 20))
    unique = 0
    for page in chain("a", 60):
        for count in (11, 30, 64, 64):
            key = page.key if count == 64 else None
            data = [memoryview(bytes(64000 * count // 64))]
            store.put_page(page.parent, key, page.text[: 4 * count], data, position=page.position)
        unique += 64000
    assert store.flush(20.0)
    store.close()
    assert disk_usage(tmp_path) <= 1.3 * unique
    again = open_store(settings(tmp_path))
    assert again.stats()["extents"] == 60
    again.close()


def test_the_store_needs_no_torch_and_nothing_of_ours(tmp_path: Path) -> None:
    code = (
        "import sys, sessions.store.store, sessions.store.fsck\n"
        "bad = {'torch', 'numpy', 'cryptography', 'engine', 'server', 'parsers', 'launchers', 'sessions.tracker'}\n"
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"


def test_close_is_quick_and_final(tmp_path: Path) -> None:
    store: Store = open_store(settings(tmp_path))
    (page,) = chain("a", 1)
    page.put(store)
    store.close()
    segments = list(tmp_path.rglob("*.seg"))
    assert segments and all(path.stat().st_size < 64 << 10 for path in segments)
