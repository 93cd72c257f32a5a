"""Claude Code and Codex, as they are, through a session of tools, failures, a restarted server and a compaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.e2e.checks import PAGE, check_counters, check_work
from tests.e2e.client import Client
from tests.e2e.scorecard import Scorecard

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

KINDS = [*["main"] * 8, "compaction", "main"]
"""Requests in order: a tool loop of six, a second user turn of two, the compaction, and the turn after it."""
LOOP_STEPS = (1, 2, 3, 4, 5, 7)
"""Those that only bring tool outputs."""
RESTARTED = 6
"""The first request to a new server, the second user turn."""

SCENARIO = "tool loop, restart, resume, compaction"

Start = Callable[..., Client]


def test_claude_code(client: Start, card: Scorecard) -> None:
    claude = client("claude", lines="claude.jsonl")
    with card.run(claude, SCENARIO):
        assert "The greeting tool works." in claude.start("Build a greeting tool")
        check_counters(claude)
        claude.server.restart()
        assert "The test is in test_greet.py." in claude.go_on("Add a test")
        claude.run(*claude.driver.compact)
        assert "Nothing is left to do." in claude.go_on("What is left")
        check_work(claude)
        check_reuse(claude)


def test_codex(client: Start, card: Scorecard) -> None:
    codex = client("codex", lines="codex.jsonl")
    compact_now = ("-c", "model_auto_compact_token_limit=1000")
    over_http = ("-c", "model_providers.ft.supports_websockets=false")
    with card.run(codex, SCENARIO):
        assert "The greeting tool works." in codex.start("Build a greeting tool")
        check_counters(codex)
        assert sockets(codex) > 0
        codex.server.wait_until_stored()
        codex.server.restart(kill=True)
        assert "The test is in test_greet.py." in codex.go_on("Add a test")
        before = sockets(codex)
        assert before > 0
        last = codex.run(*codex.driver.again[:-1], *over_http, *compact_now, "What is left")
        assert sockets(codex) == before
        assert "Nothing is left to do." in last
        check_work(codex)
        check_reuse(codex)


def sockets(client: Client) -> int:
    """How many the server has talked over since its start."""
    return int(client.server.get("/v1/stats")["server"]["sockets"])


def check_reuse(client: Client) -> None:
    """What the server had to compute again, and why. Of a request to a new server, all that it resumes was stored, but
    for what the client had prepared before its request."""
    check_counters(client)
    requests = session_requests(client)
    told = "\n".join(map(str, requests))
    assert [request["kind"] for request in requests] == KINDS, told
    assert requests[0]["cause"] == "first_request", told
    for request in requests[1:]:
        assert request["replayed"] <= PAGE, told
        assert request["cause"] != "none" or request["replayed"] == 0, told
    restarted = requests[RESTARTED]
    assert restarted["disk"] > 0 and restarted["device"] <= requests[0]["resumed"], told
    for step in LOOP_STEPS:
        assert (requests[step]["replayed"], requests[step]["cause"]) == (0, "none"), told


def session_requests(client: Client) -> Sequence[dict[str, Any]]:
    """The requests of the only session, side requests left out."""
    (session,) = client.server.get("/v1/sessions")["data"]
    detail = client.server.get(f"/v1/sessions/{session['id']}")
    return [request for request in detail["requests"] if request["kind"] != "side"]
