"""``ft sessions``: the list, the timeline, and what is asked of the server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from launchers.cli import main
from launchers.sessions_cmd import BAR, bar

if TYPE_CHECKING:
    from conftest import FakeServer

IDS = ("3fa2" + "0" * 28, "3fb7" + "0" * 28)


def summary(id: str, **more: Any) -> dict[str, Any]:
    return {
        "id": id, "client_id": "", "harness": "codex", "created": 0.0, "last_used": time.time() - 7200,
        "requests": 1234, "branches": 1, "prompt": 20000, "kept_bytes": 30 << 10, "pinned": False, **more,
    }  # fmt: skip


def request(number: int, cause: str = "none", **sources: int) -> dict[str, Any]:
    counts = {"device": 0, "host": 0, "disk": 0, "replayed": 0, "new": 0} | sources
    return {
        "number": number, "time": 0.0, "branch": "main", "kind": "main", "prompt": sum(counts.values()), "cause": cause,
        "resumed": counts["device"] + counts["host"] + counts["disk"], "sampled": 5, "complete": True, **counts,
    }  # fmt: skip


@pytest.fixture
def server(fake_server: FakeServer) -> FakeServer:
    requests = [request(1, "first_request", new=1000), request(2, disk=960, new=64, replayed=1)]
    fake_server.answers |= {
        "/v1/sessions": (200, {"data": [summary(IDS[0]), summary(IDS[1], pinned=True)]}),
        f"/v1/sessions/{IDS[0]}": (200, {"summary": summary(IDS[0]), "branches": ["main"], "requests": requests}),
        f"/v1/sessions/{IDS[0]}/export": (200, b"the archive\n"),
        f"/v1/sessions/{IDS[0]}/pin": (200, {"id": IDS[0], "pinned": True, "checkpoints": 1.0}),
        "/v1/sessions/import": (200, {"id": IDS[1]}),
    }
    return fake_server


def ft(server: FakeServer, *arguments: str) -> int:
    return main(["sessions", *arguments, "--url", server.url])


def test_list(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert ft(server, "list") == 0
    _, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert first == [IDS[0][:12], "codex", "2", "h", "ago", "1,234", "20,000", "30.0", "KiB"]
    assert second[-1] == "pinned"
    assert ft(server, "list", "--json") == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)] == list(IDS)


def test_the_timeline(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert ft(server, "show", "3fa") == 0
    session, *_, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert session[3:5] == ["1,234", "requests,"]
    assert first[4:] == ["·" * BAR, "0", "1,000", "first_request"]
    assert second[4:] == ["▒" * 15 + "x" + "·", "1", "64", "none"]
    server.answers[f"/v1/sessions/{IDS[0]}"][1]["summary"]["requests"] = 1
    assert ft(server, "show", "3fa") == 0
    assert ", 1 request, " in capsys.readouterr().out


def test_a_bar_is_to_scale_and_hides_nothing() -> None:
    shown = bar(request(1, device=500, host=250, disk=125, replayed=1, new=124), longest=1000)
    assert shown.plain == "█" * 8 + "▓" * 4 + "▒" * 2 + "x" + "·" * 2
    assert bar(request(1, new=5), longest=1000).plain == "·"
    assert bar(request(1), longest=1000).plain == ""


@pytest.mark.parametrize(("name", "says"), [("3f", "2 sessions begin"), ("4", "no session begins"), ("", "no session")])
def test_names_that_are_none(server: FakeServer, name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ft(server, "show", name) == 1
    assert says in (error := capsys.readouterr().err) and "ft sessions list" in error


def test_an_archive_is_private_and_replaces_nothing(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "session.jsonl"
    assert ft(server, "export", "3fa2", str(file)) == 0
    assert file.read_bytes() == b"the archive\n" and file.stat().st_mode & 0o777 == 0o600
    assert ft(server, "export", "3fa2", str(file)) == 1
    assert "exists: name another" in capsys.readouterr().err
    assert ft(server, "import", str(file)) == 0
    assert server.asked[-1] == ("POST", "/v1/sessions/import", b"the archive\n")
    assert ft(server, "import", str(tmp_path / "none")) == 1
    assert "cannot read" in capsys.readouterr().err


def test_pin_and_forget(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert ft(server, "pin", "3fa2") == 0
    assert server.asked[-1][:2] == ("POST", f"/v1/sessions/{IDS[0]}/pin")
    server.answers[f"/v1/sessions/{IDS[0]}"] = (200, {"id": IDS[0], "deleted": True, "forgotten": 9.0})
    assert ft(server, "forget", "3fa2") == 0
    assert server.asked[-1][:2] == ("DELETE", f"/v1/sessions/{IDS[0]}")
    assert "9 pieces" in capsys.readouterr().out


def test_refusals_are_told_in_the_servers_words(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers[f"/v1/sessions/{IDS[0]}/pin"] = (503, {"error": {"message": "no worker can do this now"}})
    assert ft(server, "pin", "3fa2") == 1
    assert capsys.readouterr().err == "ft sessions pin: error: no worker can do this now\n"
    server.answers["/v1/sessions"] = (401, {})
    assert ft(server, "list") == 1
    assert "--api-key-file" in capsys.readouterr().err
