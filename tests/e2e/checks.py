"""What must be true after any run of any client."""

from __future__ import annotations

from typing import Any

from tests.e2e.client import Client
from tests.e2e.story import GREET, TEST

PAGE = 64


def check_work(client: Client) -> None:
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


def check_reuse(client: Client) -> list[dict[str, Any]]:
    """All requests, of which none had to compute much again, and none anything without a reason."""
    check_counters(client)
    requests = client.requests()
    told = "\n".join(map(str, requests))
    assert requests, "the client asked for nothing"
    for request in requests:
        assert request["cause"] != "none" or request["replayed"] == 0, told
        # What a conversation's first request, or one with a prompt of its own, shares with others is nobody's promise.
        in_conversation = request["kind"] == "main" and request["cause"] not in ("first_request", "subagent")
        assert request["replayed"] <= PAGE or not in_conversation, told
    return requests
