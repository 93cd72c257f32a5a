"""Forgetting while the store is in use: nothing of it is left on disk, and no rebuild brings it back."""

from __future__ import annotations

from pathlib import Path

import pytest
from storekit import PAGE_SIZES, Page, chain, content, disk_usage, put_state, read_page, read_state, settings

from sessions.store import fsck
from sessions.store.store import Store, open_store

STEM = chain("stem", 4)
END = STEM[-1].key or b""
MINE = chain("mine", 8, END, 4)
OTHERS = chain("others", 8, END, 4)


def filled(directory: Path, **changes: object) -> Store:
    """Two sessions that share a stem."""
    store = open_store(settings(directory, **changes))
    for page in (*STEM, *MINE, *OTHERS):
        page.put(store)
    put_state(store, MINE[-1].key or b"", b"", 768, session="mine")
    put_state(store, OTHERS[-1].key or b"", b"", 768, session="others")
    assert store.flush(10)
    return store


def on_disk(directory: Path, page: Page) -> bool:
    piece = bytes(content(page.parent, page.text, PAGE_SIZES)[0])[:64]
    return any(piece in path.read_bytes() for path in directory.rglob("*.seg"))


@pytest.mark.parametrize("reopen", [False, True])
def test_a_session_is_erased_and_the_rest_stays(tmp_path: Path, reopen: bool) -> None:
    store = filled(tmp_path)
    if reopen:
        store.close()
        store = open_store(settings(tmp_path))
    assert all(on_disk(tmp_path, page) for page in (*STEM, *MINE))
    assert store.forget("mine") == 9
    assert store.collect(10)
    assert not any(on_disk(tmp_path, page) for page in MINE)
    store.close()
    fsck.rebuild(tmp_path, "model A")
    store = open_store(settings(tmp_path))
    assert [read_page(store, page) for page in MINE] == [None] * 8
    assert all(read_page(store, page) for page in (*STEM, *OTHERS))
    assert read_state(store, OTHERS[-1].key or b"", b"") and not read_state(store, MINE[-1].key or b"", b"")
    assert store.stats().get("corrupt_extents", 0) == 0
    store.close()


def test_everything_goes_whoever_wrote_it(tmp_path: Path) -> None:
    filled(tmp_path, fingerprint="model B").close()
    store = filled(tmp_path)
    before = disk_usage(tmp_path)
    assert store.forget(None) == 22
    assert store.collect(10)
    assert list(tmp_path.rglob("*.seg")) == [] and disk_usage(tmp_path) < before / 2
    assert [one.fingerprint for one in fsck.stat(tmp_path)] == ["model A"]
    for page in STEM:
        page.put(store)
    assert store.flush(10) and all(read_page(store, page) for page in STEM)
    store.close()
    assert fsck.verify(tmp_path, "model A").pages == 4
