"""``ft ctl`` and the look at a running server."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launchers import ctl
from launchers.cli import main
from launchers.running import RunningServer, ServerProblem, ask, find_server

if TYPE_CHECKING:
    from conftest import FakeServer

STATS = {
    "engine": {"pages_total": 4096, "pages_held": 12, "page_bytes": 1 << 20, "checkpoints_kept": 2, "rate": 0.5},
    "sessions": None,
    "server": {"requests": 1234, "max_body_bytes": 64 << 20, "ok": True},
}


def test_the_server_is_found_with_its_context(fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    server = find_server(fake_server.url + "/", "key")
    assert server == RunningServer(fake_server.url, "local-moe", 65536, "key")
    assert fake_server.headers[-1]["authorization"] == "Bearer key"
    fake_server.answers["/v1/models"][1]["data"][0]["reasoning_efforts"] = ["none", "high"]
    assert find_server(fake_server.url).efforts == ("none", "high")
    assert "authorization" not in fake_server.headers[-1]


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (500, {"error": {}}, "answered 500"),
        (403, {"error": {"message": "bad Host"}}, r"answered 403 \(bad Host\)"),
        (200, {"data": []}, "is not ft"),
        (200, {"data": [{"id": "llama"}]}, "no context length"),
        (200, {"data": [{"id": "local-moe", "context_length": 0}]}, "no worker yet.*ft ctl health"),
        (200, [1], "answered 200"),
        (200, b"<html>", "is not ft"),
    ],
)
def test_what_is_not_a_usable_server(fake_server: FakeServer, status: int, body: object, says: str) -> None:
    fake_server.answers["/v1/models"] = (status, body)
    with pytest.raises(ServerProblem, match=says):
        find_server(fake_server.url)


@pytest.mark.parametrize(("key", "says"), [("", "wants an API key"), ("old", "does not know the API key")])
def test_a_key_that_is_missing_or_wrong(fake_server: FakeServer, key: str, says: str) -> None:
    fake_server.answers["/v1/models"] = (401, {"error": {}})
    with pytest.raises(ServerProblem, match=f"{says}.*--api-key-file"):
        find_server(fake_server.url, key)


def test_a_server_that_is_busy_is_not_called_absent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ServerProblem) as raised:
        ask("POST", f"http://127.0.0.1:{silent.getsockname()[1]}", "/v1/cache", json={}, timeout=0.1)
    assert "0.1 seconds" in str(raised.value) and "no server" not in str(raised.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://[", "http://127.0.0.1:1"])
def test_a_wrong_url(url: str) -> None:
    with pytest.raises(ServerProblem, match="--url http://HOST:PORT"):
        find_server(url)


@pytest.mark.parametrize(("status", "body", "code"), [(200, {"status": "ok"}, 0), (503, {"status": "loading"}, 1)])
def test_health(
    fake_server: FakeServer, status: int, body: dict[str, str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_server.answers["/health"] = (status, body)
    assert main(["ctl", "health", "--url", fake_server.url]) == code
    assert capsys.readouterr().out.split() == ["status", body["status"]]


def test_stats_as_a_table(fake_server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.answers["/v1/stats"] = (200, STATS)
    assert main(["ctl", "stats", "--url", fake_server.url]) == 0
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "sessions null",
        "engine",
        "pages_total 4,096",
        "pages_held 12 of at most 4,096 (12.0 MiB of 4.0 GiB)",
        "page_bytes 1.0 MiB",
        "checkpoints_kept 2",
        "rate 0.500",
        "server",
        "requests 1,234",
        "max_body_bytes 64.0 MiB",
        "ok true",
    ]


def test_stats_as_json(fake_server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.answers["/v1/stats"] = (200, STATS)
    (tmp_path / "keys").write_text("first\nsecond\n")
    assert main(["ctl", "stats", "--json", "--url", fake_server.url, "--api-key-file", str(tmp_path / "keys")]) == 0
    assert json.loads(capsys.readouterr().out) == STATS
    assert fake_server.headers[-1]["authorization"] == "Bearer first"


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (5 << 50, "5120.0 TiB")]
)
def test_sizes(size: int, shown: str) -> None:
    assert ctl.in_bytes(size) == shown


def test_memory_is_shown_and_divided(fake_server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.answers["/v1/cache"] = (200, {"kv_tokens": 32768, "kv_bytes": 1 << 30, "prompt_hit_rate": 0.75})
    assert main(["ctl", "cache", "--url", fake_server.url]) == 0
    assert "32,768" in (shown := capsys.readouterr().out) and "1.0 GiB" in shown and "0.750" in shown
    assert main(["ctl", "cache", "--kv", "32k", "--experts", "12", "--url", fake_server.url, "--json"]) == 0
    assert fake_server.asked[-2][0] == "POST"
    assert json.loads(fake_server.asked[-2][2]) == {"experts": 12, "kv": 32768}
    fake_server.answers["/v1/cache"] = (400, {"error": {"message": "12 slots need 9 bytes, and there are 8"}})
    assert main(["ctl", "cache", "--kv", "2m", "--url", fake_server.url]) == 1
    assert "need 9 bytes, and there are 8" in capsys.readouterr().err
    assert main(["ctl", "cache", "--auto", "--kv", "1", "--url", fake_server.url]) == 1
    with pytest.raises(SystemExit):
        main(["ctl", "cache", "--kv", "many"])
