"""Claude Code and Codex as people use them: in a terminal, with keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.checks import check_reuse
from tests.e2e.client import RUN_SECONDS, Client
from tests.e2e.scorecard import Scorecard
from tests.e2e.story import ADD, ADDED, LONG, TEST
from tests.e2e.terminal import DOWN, ENTER, ESCAPE

pytestmark = [pytest.mark.e2e, pytest.mark.wide, pytest.mark.timeout(1500)]

Start = Callable[..., Client]
TRUST = {"claude": (DOWN, ENTER), "codex": (ENTER,)}
"""What says that the project's folder is trusted."""
TRUST_ASKED = {"claude": "Yes, I trust this folder", "codex": "Trust and continue"}
ARGUMENTS = {"claude": (), "codex": ("--dangerously-bypass-approvals-and-sandbox",)}
READY = {"claude": "auto mode on", "codex": "for shortcuts"}
INTERRUPTED = {"claude": "What should Claude do instead?", "codex": "Conversation interrupted"}
EXIT = {"claude": "/exit", "codex": "/quit"}
GOODBYE = {"claude": "Resume this session with", "codex": "To continue this session, run"}


@pytest.mark.parametrize("driver", ["claude", "codex", "codex-http"])
def test_in_a_terminal(driver: str, client: Start, card: Scorecard) -> None:
    """Started, asked something, interrupted with the key, asked for work, and left."""
    one = client(driver)
    name, arguments = one.driver.harness.name, (*one.driver.always, *ARGUMENTS[one.driver.harness.name])
    with card.run(one, "terminal: interrupt key, work, exit"), one.terminal(*arguments) as terminal:
        terminal.wait_for(TRUST_ASKED[name])
        terminal.press(*TRUST[name])
        terminal.wait_for(READY[name])
        terminal.press(LONG, ENTER)
        one.wait_for_answer()
        terminal.press(ESCAPE)
        terminal.wait_for(INTERRUPTED[name])
        terminal.wait(lambda: not one.generating(), "the server to give up the answer")
        terminal.press(ADD, ENTER)
        terminal.wait_for(ADDED)
        terminal.press(EXIT[name], ENTER)
        assert terminal.ended(RUN_SECONDS) == 0
        assert GOODBYE[name] in terminal.text
        assert one.file("test_greet.py") == TEST
        requests = check_reuse(one)
        assert [request["complete"] for request in requests] == [False, True, True]
        stats = one.server.get("/v1/stats")
        assert stats["sessions"]["cause_side_request"] > 0, "a title, or what a call may do"
        assert (stats["server"]["sockets"] > 0) == (driver == "codex")
