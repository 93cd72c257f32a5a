"""Looking after a closed store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from storekit import Page, chain, disk_usage, put_state, read_page, settings, tokens

from sessions.store import fsck
from sessions.store.config import StoreBusy, StoreKeyError
from sessions.store.store import open_store

KEY = b"0123456789abcdef"
PAGES = chain("a", 12)


def made(directory: Path, key: bytes | None = None, fingerprint: str = "model A") -> None:
    store = open_store(settings(directory, key=key, fingerprint=fingerprint))
    for page in PAGES:
        page.put(store)
    Page(PAGES[-1].key or b"", None, tokens("t", 7), 768).put(store)
    put_state(store, PAGES[-1].key or b"", b"", 768)
    store.close()


@pytest.mark.parametrize("key", [None, KEY])
def test_verify_reads_everything_and_changes_nothing(tmp_path: Path, key: bytes | None) -> None:
    made(tmp_path, key)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done: list[int] = []
    report = fsck.verify(tmp_path, "model A", key, lambda at, total: done.append(at - total))
    assert (report.pages, report.partial, report.states, report.damaged) == (12, 1, 1, 0)
    assert report.tokens == 12 * 64 + 7 and done[-1] == 0
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (segment,) = tmp_path.rglob("pages-*.seg")
    raw = bytearray(segment.read_bytes())
    raw[4096 + 4096 + 10] ^= 1
    segment.write_bytes(raw)
    assert fsck.verify(tmp_path, "model A", key).damaged == 1


def test_rebuild(tmp_path: Path) -> None:
    made(tmp_path)
    for index in tmp_path.rglob("index"):
        shutil.rmtree(index)
    assert fsck.rebuild(tmp_path, "model A") == 14
    store = open_store(settings(tmp_path))
    assert all(read_page(store, page) for page in PAGES)
    assert store.stats().get("index_lost", 0) == 0
    store.close()


def test_stat_and_forget(tmp_path: Path) -> None:
    made(tmp_path)
    made(tmp_path, fingerprint="model B")
    stats = fsck.stat(tmp_path)
    assert [one.fingerprint for one in stats] == ["model A", "model B"]
    assert all(one.segments == 2 and one.size > 12 * 9000 for one in stats)
    assert fsck.stat(tmp_path / "nothing") == []
    size = stats[0].size
    assert fsck.forget(tmp_path, "model A") == size
    assert [one.fingerprint for one in fsck.stat(tmp_path)] == ["model B"]
    store = open_store(settings(tmp_path, fingerprint="model B"))
    with pytest.raises(StoreBusy):
        fsck.forget(tmp_path)
    assert len(fsck.stat(tmp_path)) == 1, "statistics are for everybody"
    store.close()
    fsck.forget(tmp_path)
    assert fsck.stat(tmp_path) == [] and disk_usage(tmp_path) <= 4096


def test_forgetting_all_forgets_the_key(tmp_path: Path) -> None:
    made(tmp_path, KEY)
    with pytest.raises(StoreKeyError):
        fsck.verify(tmp_path, "model A")
    fsck.forget(tmp_path)
    made(tmp_path)
    assert fsck.verify(tmp_path, "model A").pages == 12


def test_collect(tmp_path: Path) -> None:
    made(tmp_path)
    numbers = fsck.collect(settings(tmp_path, retention_days=-1.0))
    assert numbers["expired"] == 14
    assert fsck.verify(tmp_path, "model A").pages == 0
