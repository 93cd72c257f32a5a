"""``serve()`` as a process of its own: its start, its end, and everything that can go wrong with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.process.support import HANG_SECONDS, ROOT, child_environment

FAKE_SERVE = Path(__file__).with_name("fake_serve.py")


class Served:
    """A server process; ``url`` and ``worker_pid`` are known once it is ready."""

    def __init__(self, folder: Path, model: Path, **settings: Any) -> None:
        self.ready_file = folder / "ready.json"
        self.log = folder / "log"
        settings = {"port": 0, "runtime_dir": str(folder / "run"), "ready_file": str(self.ready_file), **settings}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(FAKE_SERVE), json.dumps({"model": str(model), **settings})],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
            )

    def ready(self) -> dict[str, Any]:
        wait_for(lambda: self.ready_file.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        state: dict[str, Any] = json.loads(self.ready_file.read_text())
        assert state["pid"] == self.process.pid
        return state

    def ended(self) -> tuple[int, str]:
        """Exit code and log."""
        return self.process.wait(HANG_SECONDS), self.log.read_text()


Serve = Callable[..., Served]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Neither gone nor waiting to be reaped by somebody who never will."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def start(short_dir: Path) -> Iterator[Serve]:
    servers: list[Served] = []

    def start(model: Path, **settings: Any) -> Served:
        folder = short_dir / str(len(servers))
        folder.mkdir()
        servers.append(Served(folder, model, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()
        print(server.log.read_text())


def chat(url: str, max_tokens: int, **body: Any) -> dict[str, Any]:
    return {
        "url": f"{url}/v1/chat/completions",
        "json": {
            "model": "local-moe",
            "max_tokens": max_tokens,
            "messages": [{"role": "user", "content": "hello"}],
            **body,
        },
        "timeout": HANG_SECONDS,
    }


def one_line_error(server: Served, *parts: str) -> None:
    """The server refused with code 2 and one line that says what to do, without a traceback."""
    code, log = server.ended()
    assert code == 2, log
    assert "Traceback" not in log
    line = log.strip().splitlines()[-1]
    assert line.startswith("ft serve: error: ")
    for part in parts:
        assert part in line
    assert not server.ready_file.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_from_start_to_end(start: Serve, tiny: Path, number: signal.Signals) -> None:
    server = start(tiny)
    state = server.ready()
    assert httpx.get(f"{state['url']}/health", timeout=HANG_SECONDS).status_code == 200
    answer = httpx.post(**chat(state["url"], 5))
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
    os.kill(server.process.pid, number)
    code, log = server.ended()
    assert code == 0, log
    assert "Traceback" not in log and state["url"] in log and "ft launch claude" in log
    assert not alive(state["worker_pid"])
    assert not server.ready_file.exists()
    assert list((server.ready_file.parent / "run").iterdir()) == []


def test_a_killed_worker_ends_the_stream_and_is_replaced(start: Serve, tiny: Path) -> None:
    server = start(tiny)
    state = server.ready()
    with httpx.stream("POST", **chat(state["url"], 100_000, stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(state["worker_pid"], signal.SIGKILL)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "error" in events[-1]
    answer = httpx.post(**chat(state["url"], 5))
    assert answer.status_code == 200, answer.text
    wait_for(lambda: server.ready()["worker_pid"] != state["worker_pid"])
    assert "killed by SIGKILL" in server.log.read_text()


def test_open_streams_end_when_the_server_does(start: Serve, tiny: Path) -> None:
    server = start(tiny)
    url = server.ready()["url"]
    with httpx.stream("POST", **chat(url, 100_000, stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.terminate()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "error" in events[-1]
    code, log = server.ended()
    assert code == 0 and "Traceback" not in log, log


def test_no_worker_outlives_a_killed_server(start: Serve, tiny: Path) -> None:
    server = start(tiny)
    state = server.ready()
    server.process.kill()
    wait_for(lambda: not alive(state["worker_pid"]))


def test_what_a_killed_server_left_is_gone_at_the_next_start(start: Serve, tiny: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    ready.write_text("{}")
    server = start(shutil.copytree(tiny, tmp_path / "hang"), ready_file=str(ready))
    wait_for(lambda: "loading: weights" in server.log.read_text())
    assert not ready.exists()


def test_an_upgrade_is_nothing_to_warn_about(start: Serve, tiny: Path) -> None:
    server = start(tiny)
    headers = {"connection": "upgrade", "upgrade": "websocket"}
    answer = httpx.get(f"{server.ready()['url']}/v1/responses", headers=headers, timeout=HANG_SECONDS)
    assert answer.status_code == 400  # no key
    assert httpx.get(f"{server.ready()['url']}/v1/responses", timeout=HANG_SECONDS).status_code == 426
    server.process.terminate()
    code, log = server.ended()
    assert code == 0
    assert "pip install" not in log and "upgrade" not in log


def test_a_stop_while_loading(start: Serve, tiny: Path, tmp_path: Path) -> None:
    server = start(shutil.copytree(tiny, tmp_path / "hang"))
    wait_for(lambda: "loading: weights" in server.log.read_text())
    server.process.terminate()
    code, log = server.ended()
    assert code == 0 and "Traceback" not in log, log


def test_a_port_in_use(start: Serve, tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = start(tiny, port=port)
        one_line_error(server, f"port {port}", "in use", "--port 0")
        assert "loading" not in server.log.read_text()


def test_a_second_server(start: Serve, tiny: Path, short_dir: Path) -> None:
    first = start(tiny, runtime_dir=str(short_dir / "run"))
    port = int(first.ready()["url"].rsplit(":", 1)[1])
    second = start(tiny, runtime_dir=str(short_dir / "run"), port=port)
    one_line_error(second, "another ft serve", f"kill {first.process.pid}", "--port")
    assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=HANG_SECONDS).status_code == 200


def test_a_model_the_worker_refuses(start: Serve, tiny: Path, tmp_path: Path) -> None:
    model, store = shutil.copytree(tiny, tmp_path / "unservable"), tmp_path / "store"
    one_line_error(start(model, store=str(store)), "shard 2 of 3 is missing")
    assert not store.exists()
    store.mkdir()
    one_line_error(start(model, store=str(store)), "shard 2 of 3 is missing")
    assert store.exists()


def test_other_settings_that_cannot_be_served(start: Serve, tiny: Path, tmp_path: Path) -> None:
    one_line_error(start(tmp_path / "absent"), "absent", "not a folder", "--model")
    one_line_error(start(tiny, host="0.0.0.0"), "0.0.0.0", "API key", "--host")
    one_line_error(start(tiny, script=str(tmp_path / "absent.jsonl")), "absent.jsonl")
    (tmp_path / "empty").mkdir()
    one_line_error(start(tmp_path / "empty"), "empty")
    broken = shutil.copytree(tiny, tmp_path / "broken")
    (broken / "generation_config.json").write_text('{"temperature": "hot"}')
    one_line_error(start(broken), "generation_config.json", "damaged")


def test_another_machine_may_come_in_with_a_key(start: Serve, tiny: Path) -> None:
    server = start(tiny, host="0.0.0.0", api_keys=["secret"])
    url = server.ready()["url"]
    assert url.startswith("http://127.0.0.1:")
    assert httpx.post(**chat(url, 5)).status_code == 401
    assert httpx.post(**chat(url, 5), headers={"authorization": "Bearer secret"}).status_code == 200


def test_keys_change_while_the_server_runs(start: Serve, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann sk-1\n")
    server = start(tiny, api_keys=[{"name": "ann", "secret": "sk-1"}], api_key_file=str(file))
    url = server.ready()["url"]

    def status(key: str) -> int:
        return httpx.get(f"{url}/v1/models", headers={"x-api-key": key}, timeout=HANG_SECONDS).status_code

    assert (status("sk-1"), status("sk-2")) == (200, 401)
    file.write_text("ann sk-2\n")
    wait_for(lambda: status("sk-2") == 200)
    assert status("sk-1") == 401
    file.write_text("\n")
    wait_for(lambda: "the API keys stay as they were" in server.log.read_text())
    assert status("sk-2") == 200
    assert "sk-" not in server.log.read_text()


def test_https(start: Serve, tiny: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    server = start(tiny, tls_cert=str(cert), tls_key=str(key))
    url = server.ready()["url"]
    assert url.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=cert)
    assert httpx.get(f"{url}/health", verify=trusted, timeout=HANG_SECONDS).status_code == 200
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{url}/health", timeout=HANG_SECONDS)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{url.replace('https', 'http')}/health", timeout=HANG_SECONDS)
    one_line_error(start(tiny, tls_cert=str(cert)), "--tls-key")
    one_line_error(start(tiny, tls_cert=str(cert), tls_key=str(cert)), "--tls-cert", "certificate")


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for this machine, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return folder / "cert.pem", folder / "key.pem"


def test_the_supervisor_is_torch_free() -> None:
    script = "import sys, launchers.serve; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], env=child_environment(), cwd=ROOT, check=True)
