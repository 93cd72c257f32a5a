"""``ft store`` on a directory, and beside a server that has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from launchers import store_cmd
from launchers.cli import main
from sessions.persist import Persist, PersistConfig
from sessions.store.config import StoreConfig
from sessions.store.store import Store, open_store

if TYPE_CHECKING:
    from conftest import FakeServer

KEY = b"0123456789abcdef"
ROOT = bytes(16)


def opened(directory: Path, key: bytes | None = None, fingerprint: str = "model A") -> Store:
    return open_store(
        StoreConfig(directory / "state", fingerprint, (4096,), key=key, host_bytes=1, segment_bytes=1 << 20)
    )


def fill(directory: Path, key: bytes | None = None) -> None:
    for fingerprint in ("model A", "model B"):
        store = opened(directory, key, fingerprint)
        tokens = fingerprint.encode().ljust(256)
        store.put_page(ROOT, b"k" * 16, tokens, [memoryview(b"private" * 585)], position=64)
        store.close()
    persist = Persist(PersistConfig(directory / "sessions", key))
    persist.write(b"g" * 32, b"head", {b"name": b"private"}, used=1e10)
    persist.close()


def content(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


def ft(capsys: pytest.CaptureFixture[str], directory: Path, *arguments: str) -> tuple[int, Any]:
    """Exit code, and what was printed: JSON, or the error."""
    code = main(["store", *arguments, "--store", str(directory), "--json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else printed.err


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in (["stat"], ["gc"], ["forget", "--all"]):
        code, _ = ft(capsys, tmp_path / "none", *action)
        assert code == 0
    for action in (["verify"], ["rebuild"]):
        code, error = ft(capsys, tmp_path / "none", *action)
        assert code == 1 and "there is no store in" in error and "--store DIR" in error
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("key", [None, KEY])
def test_a_closed_store(tmp_path: Path, key: bytes | None, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, key)
    (tmp_path / "key").write_bytes(KEY)
    flags = ["--store-key-file", str(tmp_path / "key")] if key else []
    code, stat = ft(capsys, tmp_path, "stat")
    assert code == 0 and set(stat["models"]) == {"model A", "model B"} and stat["sessions_bytes"] > 0
    code, report = ft(capsys, tmp_path, "verify", *flags)
    assert code == 0 and {name: one["pages"] for name, one in report.items()} == {"model A": 1, "model B": 1}
    assert ft(capsys, tmp_path, "rebuild", *flags) == (0, {name: {"extents": 1} for name in report})
    code, collected = ft(capsys, tmp_path, "gc", *flags)
    assert code == 0 and set(collected) == set(report)
    assert (b"private" in content(tmp_path)) == (key is None)
    code, freed = ft(capsys, tmp_path, "forget", "--all")
    assert code == 0 and freed["freed_bytes"] > 8192
    assert ft(capsys, tmp_path, "verify") == (0, {})
    assert b"private" not in content(tmp_path)
    fill(tmp_path)  # another key, or none, may be used from now on


def test_damage_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    segment = min(tmp_path.rglob("*.seg"))
    segment.write_bytes(segment.read_bytes().replace(b"private", b"Private", 1))
    code, report = ft(capsys, tmp_path, "verify")
    assert code == 1 and sum(one["damaged"] for one in report.values()) == 1


def test_a_wrong_or_missing_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, KEY)
    (tmp_path / "key").write_bytes(b"another key of 16 bytes")
    for flags in ([], ["--store-key-file", str(tmp_path / "key")], ["--store-key-file", str(tmp_path / "none")]):
        code, error = ft(capsys, tmp_path, "verify", *flags)
        assert code == 1 and "--store-key-file" in error


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Path]:
    """A store in use."""
    fill(tmp_path)
    store = opened(tmp_path)
    yield tmp_path
    store.close()


def test_the_server_that_has_it_is_asked(
    owned: Path, fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store_cmd, "DEFAULT_URL", fake_server.url)
    fake_server.answers |= {
        "/v1/store": (200, {"directory": str(owned), "extents": 7}),
        "/v1/store/verify": (200, {"ok": True, "extents": 7, "damaged": 2}),
        "/v1/store/gc": (200, {"ok": True}),
        "/v1/store/forget": (200, {"forgotten": 7, "sessions": 1}),
    }
    assert ft(capsys, owned, "stat")[1]["server"]["extents"] == 7
    assert ft(capsys, owned, "verify") == (1, {"ok": True, "extents": 7, "damaged": 2})
    assert ft(capsys, owned, "gc") == (0, {"ok": True})
    assert ft(capsys, owned, "forget", "--all") == (0, {"forgotten": 7, "sessions": 1})
    assert fake_server.asked[-1] == ("POST", "/v1/store/forget", b'{"all":true}')
    code, error = ft(capsys, owned, "rebuild")
    assert code == 1 and "while no server runs" in error
    fake_server.answers["/v1/store"] = (200, {"directory": "/elsewhere"})
    code, error = ft(capsys, owned, "forget", "--all")
    assert code == 1 and "has another" in error and "--url" in error
    assert b"private" in content(owned)


def test_nobody_answers_for_a_store_in_use(
    owned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store_cmd, "DEFAULT_URL", "http://127.0.0.1:1")
    for action in (["verify"], ["gc"], ["forget", "--all"]):
        code, error = ft(capsys, owned, *action)
        assert code == 1 and "in use by process" in error and "--url http://HOST:PORT" in error
    code, stat = ft(capsys, owned, "stat")
    assert code == 0 and set(stat["models"]) == {"model A", "model B"}


def test_everything_has_to_be_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["store", "forget"])
    assert "--all" in capsys.readouterr().err
