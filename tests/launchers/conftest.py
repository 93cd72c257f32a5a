from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


class FakeServer:
    """Answers requests from ``answers`` (path -> status and body) and keeps the headers and bodies it was sent."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {
            "/v1/models": (200, {"data": [{"id": "local-moe", "context_length": 65536}]}),
        }
        self.headers: list[dict[str, str]] = []
        self.asked: list[tuple[str, str, bytes]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                sent = self.rfile.read(int(self.headers.get("content-length", 0)))
                fake.asked.append((self.command, self.path, sent))
                fake.headers.append({name.lower(): value for name, value in self.headers.items()})
                status, body = fake.answers.get(self.path, (404, {}))
                payload = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_POST = do_DELETE = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of its own, with the configuration of both clients in it, and no XDG directories."""
    home = tmp_path / "home"
    for name in (".claude/settings.json", ".claude.json", ".codex/config.toml", ".codex/auth.json"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"the user's {name}")
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    return home
