"""Killed while a session is forgotten: it is all there, or no file has a byte of it once the directory was opened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sessions.persist import Persist, PersistConfig
from sessions.store.files import Files

MINE, OTHER = b"m" * 32, b"o" * 32
WORD = b"xylophone "
POINTS = ("sessions.commit", "sessions.committed", "sessions.copied", "sessions.erased")


class Deadly(Files):
    """Kills the process at a point."""

    deadly = ""

    def point(self, name: str) -> None:
        if name == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)


def config(root: Path) -> PersistConfig:
    return PersistConfig(root / "sessions", commit_seconds=0.001, map_bytes=1 << 16, clock=lambda: 0.0)


def found(root: Path) -> list[str]:
    files = [path for path in root.rglob("*") if path.is_file()]
    return sorted(path.name for path in files if WORD in path.read_bytes() or MINE in path.read_bytes())


def fill(persist: Persist) -> None:
    """Leaves copies behind: values that grow, in a map that does."""
    for size in (10, 3000, 100_000):
        persist.write(MINE, b"head " + WORD, {b"a": WORD * size, b"b": WORD}, used=1.0)
        persist.write(OTHER, b"head", {b"a": b"kazoo " * size}, used=2.0)
        assert persist.flush(10)


def killed(root: Path, point: str, *, opening: bool = False) -> None:
    """In a child that forgets the session, or one that only opens the directory."""
    process = os.fork()
    if process == 0:
        try:
            files = Deadly()
            if opening:
                files.deadly = point
            persist = Persist(config(root), files)
            if not opening:
                fill(persist)
                assert found(root)
                files.deadly = point
                persist.drop(MINE, erase=True)
                persist.flush(10)
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("again", ["", "sessions.copied", "sessions.erased"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_while_forgetting(tmp_path: Path, point: str, again: str) -> None:
    killed(tmp_path, point)
    begun = point in ("sessions.committed", "sessions.copied")
    if again and begun:
        killed(tmp_path, again, opening=True)
    persist = Persist(config(tmp_path))
    there = persist.read(MINE)
    if point == "sessions.commit":
        assert there == {b"a": WORD * 100_000, b"b": WORD}
    else:
        assert there == {} and found(tmp_path) == []
    assert persist.read(OTHER) == {b"a": b"kazoo " * 100_000}
    assert [group for group, _ in persist.heads(b"")] == ([MINE] if there else []) + [OTHER]
    assert (persist.stats()["persist_damaged"], persist.stats()["persist_corrupt"]) == (0, 0)
    persist.write(OTHER, b"head", {b"b": b"1"}, used=3.0)
    persist.close()
    assert not list(tmp_path.rglob("*.new"))
    persist = Persist(config(tmp_path))
    assert persist.read(OTHER)[b"b"] == b"1" and bool(persist.read(MINE)) == bool(there)
    persist.close()


def test_what_was_moved_aside_goes_too(tmp_path: Path) -> None:
    """It may have tokens of any session."""
    persist = Persist(config(tmp_path))
    fill(persist)
    persist.close()
    data = tmp_path / "sessions" / "env" / "data.mdb"
    raw = bytearray(data.read_bytes())
    raw[:16384] = os.urandom(16384)
    data.write_bytes(raw)
    persist = Persist(config(tmp_path))
    assert persist.stats()["persist_damaged"] == 1 and found(tmp_path)
    persist.write(OTHER, b"head", {}, used=2.0)
    persist.drop(MINE, erase=True)
    assert persist.flush(10) and found(tmp_path) == []
    assert [group for group, _ in persist.heads(b"")] == [OTHER]
    persist.close()
