"""What a server keeps over its end, who may have it, and what is left when it is forgotten."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from launchers.child_server import ChildServer
from tests.process.support import HANG_SECONDS, child_environment
from tests.process.test_serve import Serve, Served, chat, one_line_error, start, wait_for

__all__ = ["start"]
SECRET = "correct horse battery staple "


def serve_store(start: Serve, model: Path, store: Path, **more: Any) -> Served:
    return start(model, store=str(store), **more)


def ask(url: str, text: str = "hello") -> httpx.Response:
    body = chat(url, 40)
    body["json"]["messages"][0]["content"] = text
    body["json"]["temperature"] = 0
    answer = httpx.post(**body)
    assert answer.status_code == 200, answer.text
    return answer


def get(url: str, path: str) -> Any:
    return httpx.get(url + path, timeout=HANG_SECONDS).raise_for_status().json()


def content(directory: Path, pattern: str = "*") -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob(pattern) if path.is_file())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_sessions_outlive_the_server(start: Serve, tiny: Path, tmp_path: Path, number: signal.Signals) -> None:
    first = serve_store(start, tiny, tmp_path / "store")
    url = first.ready()["url"]
    ask(url)
    shown = get(url, "/v1/sessions")["data"]
    wait_for(lambda: get(url, "/v1/stats")["sessions"]["persist_commits"] > 0)
    first.process.send_signal(number)
    code, log = first.ended()
    assert (code == 0 or number == signal.SIGKILL) and "Traceback" not in log, log
    second = serve_store(start, tiny, tmp_path / "store")
    assert [one["id"] for one in get(second.ready()["url"], "/v1/sessions")["data"]] == [one["id"] for one in shown]
    private = [path.stat().st_mode & 0o077 for path in (tmp_path / "store").rglob("*")]
    assert private and not any(private)


def test_nothing_is_kept_without_a_store(start: Serve, tiny: Path, tmp_path: Path) -> None:
    server = start(tiny)
    url = server.ready()["url"]
    ask(url)
    assert httpx.get(f"{url}/v1/store", timeout=HANG_SECONDS).status_code == 404
    assert get(url, "/v1/stats")["sessions"].get("persist_on", 0) == 0


def test_a_second_owner_is_refused(start: Serve, tiny: Path, tmp_path: Path) -> None:
    first = serve_store(start, tiny, tmp_path / "store")
    url = first.ready()["url"]
    second = serve_store(start, tiny, tmp_path / "store")
    one_line_error(second, f"process {first.process.pid}", str(tmp_path / "store"), "--store DIR", "--no-store")
    assert get(url, "/health")["status"] == "ok"


def test_keys(start: Serve, tiny: Path, tmp_path: Path) -> None:
    for name, key in (("right", b"r" * 32), ("wrong", b"w" * 32), ("short", b"s")):
        (tmp_path / name).write_bytes(key)
    store = tmp_path / "store"
    first = serve_store(start, tiny, store, store_key_file=str(tmp_path / "right"))
    ask(first.ready()["url"], SECRET)
    first.process.terminate()
    assert first.ended()[0] == 0
    assert SECRET.encode() not in content(store)
    for name in ("wrong", "short", "none", ""):
        more = {"store_key_file": str(tmp_path / name)} if name else {}
        one_line_error(serve_store(start, tiny, store, **more), "--store-key-file")
    again = serve_store(start, tiny, store, store_key_file=str(tmp_path / "right"))
    assert len(get(again.ready()["url"], "/v1/sessions")["data"]) == 1


def test_a_store_that_cannot_be_used_stops_nothing(start: Serve, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    server = serve_store(start, tiny, tmp_path / "store")
    ask(server.ready()["url"])
    assert "not kept" in server.log.read_text()


@pytest.fixture
def real(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildServer]:
    """``ft serve`` with the real engine, its store in ``tmp_path / "server"``."""
    for name, value in child_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ("--model", str(tiny), "--kernels", "reference", "--threads", "1", "--no-idle-prefill")
    with ChildServer((*arguments, "--kv-bytes", "16m", "--checkpoint-bytes", "16m"), tmp_path / "server") as server:
        yield server


def store_command(server: ChildServer, store: Path, *arguments: str) -> Any:
    command = [sys.executable, "-P", "-m", "launchers.cli", "store", *arguments]
    flags = ["--store", str(store), "--url", server.url, "--json"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_state_outlives_the_worker_and_is_gone_when_forgotten(real: ChildServer, tmp_path: Path) -> None:
    """One session over three workers; another for whatever is not to be forgotten with it."""
    store = tmp_path / "server" / "store"
    mine, other = SECRET * 40, "something else entirely " * 40
    said = [ask(real.url, text).json()["choices"] for text in (mine, other)]
    for kill in (False, True):
        real.wait_until_stored()
        real.restart(kill=kill)
        again = ask(real.url, mine)
        assert again.json()["choices"] == said[0]
        assert reuse(again)["device"] == 0 and reuse(again)["disk"] > 1000 and reuse(again)["replayed"] <= 64
    stats = real.get("/v1/stats")
    assert stats["engine"]["restored_unused"] == 0 and stats["sessions"]["misses_without_cause"] == 0

    session = again.headers["x-ft-session"]
    encoded = b"".join(byte.to_bytes(4, "little") for byte in mine.encode()[:64])
    assert encoded in content(store, "*.seg")
    gone = httpx.delete(f"{real.url}/v1/sessions/{session}", timeout=HANG_SECONDS)
    assert gone.status_code == 200 and gone.json()["forgotten"] > 10
    store_command(real, store, "gc")
    assert encoded not in content(store, "*.seg")
    assert reuse(ask(real.url, other))["disk"] > 500
    assert reuse(ask(real.url, mine))["device"] < 64

    assert store_command(real, store, "forget", "--all")["forgotten"] > 10
    assert store_command(real, store, "stat")["server"]["extents"] == 0
    assert list(store.rglob("*.seg")) == []
    assert reuse(ask(real.url, other))["cause"] == "first_request"


def test_the_cause_is_the_fingerprint_where_the_weights_changed_and_only_there(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One conversation, asked of servers over one store: the same model in another folder and with another context,
    other weights, and the first ones again."""
    for name, value in (child_environment() | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(tiny, copy)
    make = [sys.executable, "-P", "-m", "engine.checkpoint", "tiny", "qwen3_5_moe", str(other), "--seed", "7"]
    subprocess.run(make, check=True, capture_output=True)
    told = []
    for model, context in ((tiny, "3000"), (copy, "4000"), (other, "3000"), (other, "3000"), (tiny, "3000")):
        small = ("--kernels", "reference", "--threads", "1", "--no-idle-prefill", "--kv-bytes", "16m")
        with ChildServer(("--model", str(model), "--context-length", context, *small), tmp_path / "server") as server:
            answer = ask(server.url, SECRET * 40)
            detail = get(server.url, f"/v1/sessions/{answer.headers['x-ft-session']}")
            told.append(reuse(answer)["cause"])
            assert detail["requests"][-1]["cause"] == told[-1]
            assert get(server.url, "/v1/stats")["sessions"][f"cause_{told[-1]}"] == 1
            server.wait_until_stored()
    assert told[0] == "first_request" and told[2] == "fingerprint"
    assert "fingerprint" not in (told[1], told[3], told[4])


def reuse(answer: httpx.Response) -> dict[str, Any]:
    parts = (part.strip().split("=", 1) for part in answer.headers["x-ft-reuse"].split(","))
    return {name: int(value) if value.isdigit() else value for name, value in parts}
