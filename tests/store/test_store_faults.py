"""Damage of every kind: never a wrong answer, never a failed start, and a counter that names the loss."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import lmdb
import pytest
from storekit import (
    ROOT,
    FaultyFiles,
    Page,
    chain,
    content,
    page_sizes,
    put_state,
    read_page,
    read_state,
    settings,
    tokens,
)

from sessions.store import format as format_module
from sessions.store import index as index_module
from sessions.store.config import StoreKeyError
from sessions.store.store import Store, open_store

KEY = b"a key of thirty-two bytes or so."
PAGES = chain("a", 30)
TAIL = tokens("tail", 9)


def fill(store: Store) -> None:
    for page in PAGES:
        page.put(store)
    Page(PAGES[-1].key or b"", None, TAIL, 1920).put(store)
    put_state(store, PAGES[-1].key or b"", TAIL, 1929)
    put_state(store, PAGES[9].key or b"", b"", 640)


def survey(store: Store) -> int:
    """How much of it is there; what is there is right, and what a read has lost is not offered again."""
    found = 0
    for page in PAGES:
        got = read_page(store, page)
        found += got is True
        if got is False:
            assert read_page(store, page) is None
    for parent, tail in ((PAGES[-1].key or b"", TAIL), (PAGES[9].key or b"", b"")):
        got = read_state(store, parent, tail)
        found += got is True
        if got is False:
            assert read_state(store, parent, tail) is None
    return found


def made(directory: Path, **changes: object) -> None:
    store = open_store(settings(directory, **changes))
    fill(store)
    store.close()


def losses(store: Store) -> float:
    """Everything that names damage."""
    numbers = store.stats()
    names = ("corrupt_extents", "extents_truncated", "extents_torn", "extents_unreadable", "index_lost")
    return sum(numbers.get(name, 0) for name in (*names, "index_records_damaged", "read_errors"))


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_bit_flips_in_every_file(tmp_path: Path, key: bytes | None) -> None:
    chance = random.Random(1)
    made(tmp_path / "0", key=key)
    names = [path.relative_to(tmp_path / "0") for path in sorted((tmp_path / "0").rglob("*")) if path.is_file()]
    assert len(names) >= 5
    total = len(PAGES) + 2
    for name in names:
        for attempt in range(2):
            root = tmp_path / f"{name.name}{attempt}"
            made(root, key=key)
            damaged = root / name
            raw = bytearray(damaged.read_bytes())
            if not raw:
                continue
            for _ in range(3):
                raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
            damaged.write_bytes(raw)
            store = open_store(settings(root, key=key))
            found = survey(store)
            if name.suffix == ".seg":
                assert total - 3 <= found and (found == total or losses(store) > 0)
            elif name.name == "data.mdb":
                assert found == total
            fill(store)
            store.close()
            store = open_store(settings(root, key=key))
            assert survey(store) == total
            store.close()


@pytest.mark.parametrize("rest", [0, 1, 4095, 4096, 5000, 40_000])
def test_truncation_of_every_file(tmp_path: Path, rest: int) -> None:
    made(tmp_path / "0")
    names = [path.relative_to(tmp_path / "0") for path in sorted((tmp_path / "0").rglob("*")) if path.is_file()]
    for name in names:
        root = tmp_path / f"{name.name}"
        made(root)
        size = (root / name).stat().st_size
        with (root / name).open("r+b") as file:
            file.truncate(min(rest, size))
        store = open_store(settings(root))
        found = survey(store)
        if name.suffix == ".seg" and found < len(PAGES) + 2:
            assert losses(store) > 0
        elif name.name == "data.mdb":
            assert found == len(PAGES) + 2
        fill(store)
        store.close()
        store = open_store(settings(root))
        assert survey(store) == len(PAGES) + 2
        store.close()


@pytest.mark.parametrize("gone", ["index", "data.mdb", "lock.mdb", "namespace.json", "owner.lock"])
def test_deleted_files(tmp_path: Path, gone: str) -> None:
    made(tmp_path)
    for path in list(tmp_path.rglob(gone)):
        for file in [*path.rglob("*"), path]:
            file.unlink() if file.is_file() else file.rmdir()
    seen: list[tuple[int, int]] = []
    store = open_store(settings(tmp_path), progress=lambda done, total: seen.append((done, total)))
    assert survey(store) == len(PAGES) + 2
    if gone in ("index", "data.mdb"):
        assert store.stats()["index_lost"] == store.stats()["index_rebuilt"] == 1
        assert seen and seen[-1][0] == seen[-1][1]
    store.close()


def test_a_lost_segment(tmp_path: Path) -> None:
    made(tmp_path)
    next(tmp_path.rglob("states-*.seg")).unlink()
    store = open_store(settings(tmp_path))
    assert survey(store) == len(PAGES)
    assert store.stats()["extents_truncated"] == 2
    store.close()


def test_an_index_of_another_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(index_module, "FORMAT", 0)
        made(tmp_path)
    store = open_store(settings(tmp_path))
    assert survey(store) == len(PAGES) + 2
    assert store.stats()["index_rebuilt"] == 1
    store.close()


def test_segments_of_another_format_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(format_module, "FORMAT", 0)
        made(tmp_path)
    store = open_store(settings(tmp_path))
    assert survey(store) == 0
    assert losses(store) > 0
    fill(store)
    store.close()
    store = open_store(settings(tmp_path))
    assert survey(store) == len(PAGES) + 2
    store.close()


def test_keys(tmp_path: Path) -> None:
    made(tmp_path / "a", key=KEY)
    for wrong in (None, b"another key of thirty-two bytes.", b"short"):
        with pytest.raises(StoreKeyError):
            open_store(settings(tmp_path / "a", key=wrong))
    store = open_store(settings(tmp_path / "a", key=KEY))
    assert survey(store) == len(PAGES) + 2
    store.close()
    made(tmp_path / "b")
    with pytest.raises(StoreKeyError):
        open_store(settings(tmp_path / "b", key=KEY))


def test_an_encrypted_store_shows_nothing(tmp_path: Path) -> None:
    made(tmp_path / "plain")
    made(tmp_path / "sealed", key=KEY)
    (page,) = [one for one in PAGES if one.position == 640]
    payload = bytes(content(page.parent, page.text, page_sizes(page.text))[0])[:64]
    secrets = [page.text, page.key or b"", payload, b"user"]
    for root, shown in (("plain", True), ("sealed", False)):
        raw = b"".join(path.read_bytes() for path in (tmp_path / root).rglob("*") if path.is_file())
        assert [secret in raw for secret in secrets] == [shown] * 4


@pytest.mark.parametrize("operation", ["write", "sync", "allocate", "open", "index.commit"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_errors_while_writing(tmp_path: Path, operation: str, error: int) -> None:
    """The engine sees nothing of them; what is in RAM is served, and written once the disk is well again."""
    files = FaultyFiles()
    store = open_store(settings(tmp_path), files=files)
    for page in PAGES[:3]:
        page.put(store)
    assert store.flush(10.0)
    for page in chain("filler", 24):
        page.put(store)
    files.fail[operation] = error
    fill(store)
    assert not store.flush(10.0)
    assert survey(store) == len(PAGES) + 2
    numbers = store.stats()
    assert numbers[f"write_errors_{errno.errorcode[error]}"] >= 1 and numbers["write_paused"] == 1
    files.fail.clear()
    assert store.flush(10.0)
    store.close()
    store = open_store(settings(tmp_path))
    assert survey(store) == len(PAGES) + 2
    assert "corrupt_extents" not in store.stats()
    store.close()


def test_an_error_of_lmdb_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(settings(tmp_path))

    def full(self: object, changes: object) -> None:
        raise lmdb.DiskError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(index_module.Index, "_write", full)
        fill(store)
        assert not store.flush(10.0)
        assert store.stats()["write_errors_DiskError"] >= 1
    assert store.flush(10.0)
    store.close()
    store = open_store(settings(tmp_path))
    assert survey(store) == len(PAGES) + 2
    store.close()


def test_a_disk_that_never_gets_well(tmp_path: Path) -> None:
    """RAM stays bounded and the newest is served from it."""
    files = FaultyFiles()
    files.fail["write"] = errno.ENOSPC
    store = open_store(settings(tmp_path, host_bytes=200_000, queue_bytes=200_000), files=files)
    pages = chain("long", 200)
    for page in pages:
        page.put(store)
        numbers = store.stats()
        assert numbers["queue_bytes"] <= 200_000 and numbers["host_bytes"] <= 200_000
    assert read_page(store, pages[-1])
    assert store.stats()["queue_refused"] > 0
    store.close()
    store = open_store(settings(tmp_path))
    assert read_page(store, pages[-1]) is None
    store.close()


def test_a_full_disk_leaves_a_reserve(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.capacity = 1 << 20
    store = open_store(settings(tmp_path), files=files)
    fill(store)
    assert store.flush(10.0)
    assert store.stats()["disk_full"] > 0 and store.stats()["bytes_written"] == 0
    assert survey(store) == len(PAGES) + 2
    store.close()


def test_errors_while_reading(tmp_path: Path) -> None:
    made(tmp_path)
    files = FaultyFiles()
    store = open_store(settings(tmp_path), files=files)
    files.fail["read"] = errno.EIO
    assert read_page(store, PAGES[0]) is False
    files.fail.clear()
    assert read_page(store, PAGES[0]) is None
    assert survey(store) == len(PAGES) + 1
    assert store.stats()["read_errors"] == 1
    store.close()


def test_a_read_only_directory_is_read(tmp_path: Path) -> None:
    made(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    files = FaultyFiles()
    files.deny = True
    store = open_store(settings(tmp_path), files=files)
    assert survey(store) == len(PAGES) + 2
    new = chain("new", 3)
    for page in new:
        page.put(store)
    assert [read_page(store, page) for page in new] == [True] * 3
    assert store.stats()["read_only"] == 1 and not store.flush(1.0)
    store.close()
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("obstacle", ["file", "read_only_nothing"])
def test_without_a_usable_directory_states_live_in_ram(tmp_path: Path, obstacle: str) -> None:
    files = FaultyFiles()
    root = tmp_path / "store"
    if obstacle == "file":
        root.write_text("not a directory")
    else:
        files.deny = True
    store = open_store(settings(root), files=files)
    fill(store)
    assert survey(store) == len(PAGES) + 2
    assert not store.flush(1.0)
    assert root.is_file() or not root.exists()
    store.close()


def test_a_replaced_payload_is_caught(tmp_path: Path) -> None:
    """An extent copied whole over another one has right checksums but is not what was asked for."""
    made(tmp_path)
    (path,) = sorted(tmp_path.rglob("pages-*.seg"))[:1]
    raw = bytearray(path.read_bytes())
    length = 16384
    raw[4096 + length : 4096 + 2 * length] = raw[4096 : 4096 + length]
    path.write_bytes(raw)
    store = open_store(settings(tmp_path))
    assert read_page(store, PAGES[0])
    assert read_page(store, PAGES[1]) is False
    store.close()


def test_an_index_that_points_elsewhere(tmp_path: Path) -> None:
    """A record that leads to a whole extent of something else."""
    made(tmp_path)
    store = open_store(settings(tmp_path))
    first, second = (store.page(page.parent, page.key or b"", page.text) for page in PAGES[:2])
    assert first is not None and second is not None
    first.place = second.place
    assert read_page(store, PAGES[0]) is False
    assert read_page(store, PAGES[0]) is None
    assert store.stats()["corrupt_extents"] == 1
    store.close()


def test_an_unclean_end_is_repaired(tmp_path: Path) -> None:
    """Not closed, and started again after the machine has lost power: the last segments are read through."""
    store = open_store(settings(tmp_path))
    fill(store)
    assert store.flush(10.0)
    store._writer._closing = True  # type: ignore[union-attr]
    store._writer._thread.join()  # type: ignore[union-attr]
    store._disk.index.close()  # type: ignore[union-attr]
    store._disk.segments.abandon_all()  # type: ignore[union-attr]
    store._lock.close()  # type: ignore[union-attr]
    path = max(tmp_path.rglob("pages-*.seg"))
    raw = bytearray(path.read_bytes())
    raw[4096 + 5000] ^= 1
    path.write_bytes(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sessions.store.owner.boot_id", lambda: b"another boot")
        store = open_store(settings(tmp_path))
    assert store.stats()["extents_torn"] == 1
    assert survey(store) == len(PAGES) + 1
    assert store.stats().get("corrupt_extents", 0) == 0
    store.close()


class OrderedFiles(FaultyFiles):
    """Notes whether something not yet durable was there when the index was written."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: set[int] = set()
        self.commits: list[bool] = []

    def write(self, descriptor: int, parts: object, offset: int) -> None:
        self.pending.add(descriptor)
        super().write(descriptor, parts, offset)

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.pending.discard(descriptor)

    def point(self, name: str) -> None:
        if name == "index.commit":
            self.commits.append(not self.pending)


def test_payload_is_durable_before_the_index_says_so(tmp_path: Path) -> None:
    files = OrderedFiles()
    store = open_store(settings(tmp_path), files=files)
    for page in chain("long", 60):
        page.put(store)
        if page.position % 640 == 0:
            assert store.flush(10.0)
    fill(store)
    store.close()
    assert len(files.commits) >= 8 and all(files.commits)


def test_refs_of_others_are_refused(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path))
    with pytest.raises(TypeError):
        store.hold(["a page"])
    store.close()


def test_the_root_key_is_no_page(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path))
    assert store.page(ROOT, ROOT, b"") is None and store.states(ROOT, b"") == [] and store.partial(ROOT, b"") == []
    store.demote(ROOT, b"")
    store.close()


def test_what_could_not_be_written_in_the_end_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    store = open_store(settings(tmp_path), files=files)
    PAGES[0].put(store)
    assert store.flush(10)
    files.fail = {"write": errno.ENOSPC}
    for page in PAGES[1:4]:
        page.put(store)
    store.close()
    assert "ends with 3 extents of 0.0 MB unwritten" in caplog.text
    files.fail = {}
    caplog.clear()
    store = open_store(settings(tmp_path), files=files)
    assert [read_page(store, page) for page in PAGES[:4]] == [True, None, None, None]
    store.close()
    assert "unwritten" not in caplog.text
