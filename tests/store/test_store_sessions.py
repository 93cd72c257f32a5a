"""Whose pages are they? Without checkpoints the store knows by who wrote them, and by where sessions end."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from storekit import FaultyFiles, Page, chain, read_page, settings, tokens

from sessions.store.config import DAY, StoreConfig
from sessions.store.format import Shape
from sessions.store.store import Store, open_store

STEM = chain("stem", 4)
END = STEM[-1].key or b""
MINE = chain("mine", 6, END, 4)
OTHERS = chain("others", 6, END, 4)
TAIL = Page(MINE[-1].key or b"", None, tokens("tail", 30), 640)


def config(directory: Path, **changes: object) -> StoreConfig:
    return settings(directory, **({"state_components": ()} | changes))


def ask(store: Store, pages: list[Page], session: str) -> None:
    """A request: pages that are not there yet, and where it ends."""
    for page in pages:
        page.put(store, session)
    last = pages[-1]
    where = (last.key, b"") if last.key is not None else (last.parent, last.text)
    store.put_end(*where, position=last.position + len(last.text) // 4, session=session)


def two(store: Store) -> None:
    ask(store, [*STEM, *MINE, TAIL], "mine")
    ask(store, [*STEM, *OTHERS], "others")
    assert store.flush(10)


def reopened(store: Store, directory: Path, how: str, **changes: object) -> Store:
    if how == "running":
        return store
    store.close()
    if how == "rebuilt":
        for index in directory.rglob("index"):
            shutil.rmtree(index)
    return open_store(config(directory, **changes))


def ends(store: Store, session: str) -> list[int]:
    return sorted(one.position for one in store._mirror.all() if one.end and one.session == session)


@pytest.mark.parametrize("how", ["running", "reopened", "rebuilt"])
def test_a_session_goes_with_the_pages_that_only_it_needs(tmp_path: Path, how: str) -> None:
    store = open_store(config(tmp_path))
    two(store)
    store = reopened(store, tmp_path, how)
    assert store.forget("mine") == 8
    assert [read_page(store, page) for page in MINE] == [None] * 6
    assert list(store.partial(TAIL.parent, TAIL.text)) == []
    store = reopened(store, tmp_path, how)
    assert all(read_page(store, page) for page in (*STEM, *OTHERS))
    assert [read_page(store, page) for page in MINE] == [None] * 6
    assert store.forget("others") == 11
    assert store.stats()["extents"] == 0
    store.close()


@pytest.mark.parametrize("how", ["running", "reopened", "rebuilt"])
@pytest.mark.parametrize("first", ["mine", "others"])
def test_who_ends_on_the_pages_of_another_keeps_them(tmp_path: Path, how: str, first: str) -> None:
    """The same conversation twice, or the first half of one."""
    store = open_store(config(tmp_path))
    ask(store, [*STEM, *MINE], "mine")
    ask(store, [*STEM, *MINE], "others")
    ask(store, STEM, "short")
    assert store.flush(10)
    store = reopened(store, tmp_path, how)
    assert store.forget(first) == 1
    assert all(read_page(store, page) for page in (*STEM, *MINE))
    store = reopened(store, tmp_path, how)
    assert store.forget("mine" if first == "others" else "others") == 7
    assert [read_page(store, page) for page in (*STEM, *MINE)] == [True] * 4 + [None] * 6
    assert store.forget("short") == 5
    store.close()


def test_a_session_that_goes_on_has_one_end_and_one_for_each_branch(tmp_path: Path) -> None:
    store = open_store(config(tmp_path))
    ask(store, STEM, "s")
    ask(store, [*STEM, *MINE[:2]], "s")
    ask(store, [*STEM, *MINE, TAIL], "s")
    assert ends(store, "s") == [670]
    ask(store, [*STEM, *OTHERS], "s")
    longer = Page(TAIL.parent, None, tokens("tail", 30) + tokens("more", 10), 640)
    ask(store, [*STEM, *MINE, longer], "s")
    assert ends(store, "s") == [640, 680]
    for number in range(70):
        ask(store, chain(number, 1, END, 4), "s")
    assert len(ends(store, "s")) == 64
    assert store.forget("s") == store.stats().get("forgotten") and store.stats()["extents"] == 0
    store.close()


def test_ends_are_no_checkpoints_and_go_with_their_pages(tmp_path: Path) -> None:
    store = open_store(config(tmp_path, quota_bytes=4 << 20, host_bytes=0))
    for number in range(40):
        ask(store, chain(number, 20), str(number))
        assert store.flush(10)
    assert store.states(chain(39, 20)[-1].key or b"", b"") == []
    assert store.stats()["evicted"] > 0 and len(ends(store, "39")) == 1 and ends(store, "0") == []
    assert store.verify()["damaged"] == 0
    entries = store._mirror.all()
    pages = {one.key for one in entries}
    assert all(one.parent in pages for one in entries if one.end)
    assert not list(tmp_path.rglob("states-*.seg"))
    store.close()


@pytest.mark.parametrize("how", ["running", "reopened", "rebuilt"])
def test_a_pin_protects_the_whole_chain(tmp_path: Path, how: str) -> None:
    now = [1e9]
    small = {"quota_bytes": 4 << 20, "host_bytes": 0, "clock": lambda: now[0]}
    store = open_store(config(tmp_path, **small))
    two(store)
    assert store.pin("mine", True) == 1
    store = reopened(store, tmp_path, how, **small)
    for number in range(40):
        ask(store, chain(number, 20), str(number))
        assert store.flush(10)
    now[0] += 30 * DAY
    assert store.collect(10)
    assert all(read_page(store, page) for page in (*STEM, *MINE)) and read_page(store, OTHERS[-1]) is None
    assert len(store.partial(TAIL.parent, TAIL.text)) == 1
    store.pin("mine", False)
    now[0] += 30 * DAY
    assert store.collect(10)
    assert store.stats()["extents"] == 0
    store.close()


def found(directory: Path, pages: list[Page]) -> list[str]:
    """Files with the tokens of one of these pages, or half of them."""
    pieces = [page.text[:128] for page in pages] + [page.text[128:] for page in pages if len(page.text) > 128]
    files = [path for path in directory.rglob("*") if path.is_file()]
    return sorted({path.name for path in files for piece in pieces if piece and piece in path.read_bytes()})


def restless(store: Store) -> None:
    """Leaves copies behind: part pages that grow, segments that are compacted."""
    for page in MINE:
        for count in (20, 40):
            Page(page.parent, None, page.text[: 4 * count], page.position).put(store, "mine")
            assert store.flush(10)
    two(store)


@pytest.mark.parametrize("all_of_it", [True, False])
@pytest.mark.parametrize("recurrent", [True, False])
def test_no_file_has_a_token_of_what_was_forgotten(tmp_path: Path, recurrent: bool, all_of_it: bool) -> None:
    store = open_store(settings(tmp_path) if recurrent else config(tmp_path))
    restless(store)
    assert found(tmp_path, [*MINE, TAIL]) != []
    assert store.forget(None if all_of_it else "mine") > 0
    assert found(tmp_path, [*MINE, TAIL, *(STEM if all_of_it else [])]) == []
    assert [read_page(store, page) for page in (*STEM, *OTHERS)] == [None if all_of_it else True] * 10
    two(store)
    store.close()
    store = open_store(settings(tmp_path) if recurrent else config(tmp_path))
    assert all(read_page(store, page) for page in (*STEM, *MINE, *OTHERS))
    store.close()


POINTS = (
    "erase.asked", "index.commit", "erase.begun", "erase.wiped", "index.copied", "index.compacted", "erase.finished",
)  # fmt: skip


@pytest.mark.parametrize("index_lost", [False, True])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("all_of_it", [True, False])
def test_killed_while_forgetting(tmp_path: Path, point: str, all_of_it: bool, index_lost: bool) -> None:
    """It is all there, or it is in no file as soon as the next process had time to end what the other began."""
    process = os.fork()
    if process == 0:
        try:
            files = FaultyFiles()
            store = open_store(config(tmp_path), files=files)
            restless(store)
            files.crash = (point, files.points[point] + 1)
            store.forget(None if all_of_it else "mine")
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    if index_lost:
        shutil.rmtree(next(tmp_path.rglob("index")))
    store = open_store(config(tmp_path))
    assert store.flush(10)
    there = [read_page(store, page) for page in MINE]
    if point == "erase.asked":
        assert there == [True] * 6
    else:
        assert there == [None] * 6 and found(tmp_path, [*MINE, TAIL]) == []
    assert store.stats().get("corrupt_extents", 0) == 0
    if not all_of_it:
        assert all(read_page(store, page) for page in (*STEM, *OTHERS))
    store.close()
    assert not list(tmp_path.rglob("*.new")) and not list(tmp_path.rglob("erasing"))
    again = open_store(config(tmp_path))
    assert [read_page(again, page) for page in MINE] == there
    assert all(one.shape is not Shape.STATE or one.end for one in again._mirror.all())
    again.close()
