"""Claude Code and Codex, as they are, through a session of tools, failures, a restarted server and a compaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.e2e.client import Client

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(480)]

PAGE = 64
GREET = """import sys


def greet(name: str) -> str:
    return f"Hello, {name}!"


if __name__ == "__main__":
    print(greet(sys.argv[1]))
"""
TEST = """from greet import greet


def test_greet():
    assert greet("you") == "Hello, you!"
"""
KINDS = [*["main"] * 8, "compaction", "main"]
"""Requests in order: a tool loop of six, a second user turn of two, the compaction, and the turn after it."""
LOOP_STEPS = (1, 2, 3, 4, 5, 7)
"""Those that only bring tool outputs."""
RESTARTED = 6
"""The first request to a new server, the second user turn."""

Start = Callable[[str], Client]


def test_claude_code(client: Start) -> None:
    claude = client("claude")
    skip = "--dangerously-skip-permissions"
    assert "The greeting tool works." in claude.run("-p", "Build a greeting tool", skip)
    check_counters(claude)
    claude.server.restart()
    assert "The test is in test_greet.py." in claude.run("-c", "-p", "Add a test", skip)
    claude.run("-c", "-p", "/compact", skip)
    assert "Nothing is left to do." in claude.run("-c", "-p", "What is left", skip)
    check_files(claude)
    check_reuse(claude)


def test_codex(client: Start) -> None:
    codex = client("codex")
    flags = ("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
    compact_now = ("-c", "model_auto_compact_token_limit=1000")
    assert "The greeting tool works." in codex.run("exec", *flags, "Build a greeting tool")
    check_counters(codex)
    codex.server.wait_until_stored()
    codex.server.restart(kill=True)
    assert "The test is in test_greet.py." in codex.run("exec", "resume", "--last", *flags, "Add a test")
    last = codex.run("exec", "resume", "--last", *flags, *compact_now, "What is left")
    assert "Nothing is left to do." in last
    check_files(codex)
    check_reuse(codex)


def check_files(client: Client) -> None:
    """Written, edited, and the long output kept."""
    assert client.file("greet.py") == GREET
    assert client.file("test_greet.py") == TEST
    assert client.file("greetings.txt").splitlines() == [f"Hello, reader-{n}!" for n in range(1, 401)]


def check_counters(client: Client) -> None:
    """Those that must be 0 whatever happens."""
    stats = client.server.get("/v1/stats")
    assert stats["server"]["script_misses"] == 0
    assert stats["sessions"]["misses_without_cause"] == 0
    assert stats["engine"]["restored_unused"] == 0


def check_reuse(client: Client) -> None:
    """What the server had to compute again, and why. Of a request to a new server, all that it resumes was stored."""
    check_counters(client)
    requests = session_requests(client)
    told = "\n".join(map(str, requests))
    assert [request["kind"] for request in requests] == KINDS, told
    assert requests[0]["cause"] == "first_request", told
    for request in requests[1:]:
        assert request["replayed"] <= PAGE, told
        assert request["cause"] != "none" or request["replayed"] == 0, told
    restarted = requests[RESTARTED]
    assert restarted["disk"] > 0 and restarted["device"] == 0, told
    for step in LOOP_STEPS:
        assert (requests[step]["replayed"], requests[step]["cause"]) == (0, "none"), told


def session_requests(client: Client) -> Sequence[dict[str, Any]]:
    """The requests of the only session, side requests left out."""
    (session,) = client.server.get("/v1/sessions")["data"]
    detail = client.server.get(f"/v1/sessions/{session['id']}")
    return [request for request in detail["requests"] if request["kind"] != "side"]
