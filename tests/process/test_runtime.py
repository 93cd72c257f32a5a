"""Ports, locks and folders of a server."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launchers.runtime import ServeError, claim_port, clear_ready_file, is_loopback, runtime_root, write_ready_file
from tests.process.support import child_environment

HOST = "127.0.0.1"

HOLD = """
import sys
from pathlib import Path
from launchers.runtime import claim_port
with claim_port("127.0.0.1", 0, Path(sys.argv[1])) as claim:
    print(claim.port, flush=True)
    sys.stdin.read()
"""


def test_a_claim_leaves_nothing_behind(short_dir: Path) -> None:
    with claim_port(HOST, 0, short_dir / "run") as claim:
        assert claim.url == f"http://127.0.0.1:{claim.port}"
        assert claim.worker_socket.parent == short_dir / "run"
        assert stat.S_IMODE((short_dir / "run").stat().st_mode) == 0o700
        claim.worker_socket.touch()
    assert list((short_dir / "run").iterdir()) == []
    with claim_port(HOST, claim.port, short_dir / "run") as again:
        assert again.port == claim.port


def test_a_free_port_refuses_until_it_listens(short_dir: Path) -> None:
    with claim_port(HOST, 0, short_dir) as claim, socket.socket() as client:
        assert client.connect_ex((HOST, claim.port)) != 0


def test_a_port_of_another_program(short_dir: Path) -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ServeError, match=rf"port {port} .* in use by another program: .*--port"):
            claim_port(HOST, port, short_dir).__enter__()


@pytest.mark.parametrize("listening", [False, True])
def test_a_second_server_is_told_about_the_first(short_dir: Path, listening: bool) -> None:
    with claim_port(HOST, 0, short_dir) as claim:
        if listening:
            claim.listener.listen()
        with pytest.raises(ServeError, match=rf"another ft serve \(process {os.getpid()}\) has port {claim.port}: "):
            claim_port(HOST, claim.port, short_dir).__enter__()
        assert (short_dir / f"{claim.port}.lock").exists()


def test_a_server_that_was_killed_holds_nothing(short_dir: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(short_dir)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment()
    ) as first:
        assert first.stdout is not None
        port = int(first.stdout.readline())
        with pytest.raises(ServeError, match=f"kill {first.pid}"):
            claim_port(HOST, port, short_dir).__enter__()
        first.kill()
        first.wait()
        assert (short_dir / f"{port}.lock").exists()
        with claim_port(HOST, port, short_dir) as claim:
            assert claim.port == port


def test_the_next_server_removes_what_killed_ones_left(short_dir: Path) -> None:
    with claim_port(HOST, 0, short_dir) as living:
        living.worker_socket.touch()
        for name in ("1.lock", "1.sock", "2.lock"):
            (short_dir / name).touch()
        with claim_port(HOST, 0, short_dir) as claim:
            left = {entry.name for entry in short_dir.iterdir()}
            assert left == {f"{claim.port}.lock", f"{living.port}.lock", f"{living.port}.sock"}


def test_a_folder_of_others_is_refused(short_dir: Path) -> None:
    short_dir.chmod(0o755)
    with pytest.raises(ServeError, match="not ours alone"):
        claim_port(HOST, 0, short_dir).__enter__()
    link = short_dir / "link"
    link.symlink_to(short_dir)
    with pytest.raises(ServeError, match="not ours alone"):
        claim_port(HOST, 0, link).__enter__()


def test_paths_that_do_not_work(short_dir: Path) -> None:
    with pytest.raises(ServeError, match="too long"):
        claim_port(HOST, 0, short_dir / ("x" * 100)).__enter__()
    (short_dir / "file").touch()
    with pytest.raises(ServeError, match="--runtime-dir"):
        claim_port(HOST, 0, short_dir / "file" / "run").__enter__()
    with pytest.raises(ServeError, match="--ready-file"):
        write_ready_file(short_dir / "absent" / "ready", "http://x", 1)
    with pytest.raises(ServeError, match=r"No such file.*--ready-file"):  # and before anything is loaded
        clear_ready_file(short_dir / "absent" / "ready")


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_hosts_that_are_not_ours(short_dir: Path, host: str) -> None:
    with pytest.raises(ServeError, match="--host"):
        claim_port(host, 0, short_dir).__enter__()


def test_the_ready_file(short_dir: Path) -> None:
    path = short_dir / "ready.json"
    write_ready_file(path, "http://127.0.0.1:1", 7)
    write_ready_file(path, "http://127.0.0.1:1", 8)
    assert json.loads(path.read_text()) == {"url": "http://127.0.0.1:1", "pid": os.getpid(), "worker_pid": 8}
    assert [entry.name for entry in short_dir.iterdir()] == ["ready.json"]


def test_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "192.0.2.1", "example.org", ""]))


def test_the_runtime_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert runtime_root() == Path("/run/user/1/ft")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert runtime_root().name == f"ft-{os.getuid()}"
