"""Every harness, as it is, through what a day with it brings."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.checks import PAGE, check_counters, check_reuse, check_work
from tests.e2e.client import Client, package_folder
from tests.e2e.drivers import DRIVERS
from tests.e2e.scorecard import Scorecard
from tests.e2e.story import (
    ADD,
    ADDED,
    ANSWERED,
    ASK,
    BREAK,
    BUILD,
    BUILT,
    DELEGATE,
    DELEGATED,
    GREET,
    LONG,
    MENDED,
    TEST,
)

pytestmark = [pytest.mark.e2e, pytest.mark.wide, pytest.mark.timeout(1500)]

Start = Callable[..., Client]
CORE = ("claude", "codex")
"""Their long session is in test_real_clients.py."""
LOOPS = [driver.name for driver in DRIVERS.values() if driver.loops]
OTHERS = [name for name in LOOPS if name not in CORE]
INTERRUPTED = [driver.name for driver in DRIVERS.values() if driver.interrupts]
WITH_AGENTS = [driver.name for driver in DRIVERS.values() if driver.agent]
LACKING = [driver.name for driver in DRIVERS.values() if driver.lacks]
SMALL = {driver.name: driver.small_context for driver in DRIVERS.values() if driver.small_context}


@pytest.mark.parametrize("name", OTHERS)
def test_session_over_a_restart(name: str, client: Start, card: Scorecard) -> None:
    """A tool loop, a new server, and a second message in a new process of the client."""
    one = client(name)
    with card.run(one, "tool loop, restart, resume"):
        assert BUILT in one.start(BUILD)
        check_counters(one)
        one.server.wait_until_stored()
        one.server.restart(kill=True)
        assert ADDED in one.go_on(ADD)
        check_work(one)
        requests = check_reuse(one)
        after = next(request for request in requests if request["number"] and not request["device"] and request["disk"])
        assert after["disk"] > 0


def test_aider(client: Start, card: Scorecard) -> None:
    """It has no tools: each message has one answer with what is to be changed, and another request words the commit."""
    one = client("aider")
    with card.run(one, "two messages, commits, restart"):
        assert BUILT in one.start(BUILD)
        check_counters(one)
        one.server.wait_until_stored()
        one.server.restart(kill=True)
        assert ADDED in one.go_on(ADD)
        assert (one.file("greet.py"), one.file("test_greet.py")) == (GREET, TEST)
        log = subprocess.run(["git", "log", "--format=%s"], cwd=one.project, capture_output=True, text=True, check=True)
        assert log.stdout.splitlines() == ["Work on the greeting tool", "Work on the greeting tool", "Start"]
        check_reuse(one)


@pytest.mark.parametrize("name", INTERRUPTED)
def test_interrupt(name: str, client: Start, card: Scorecard) -> None:
    one = client(name)
    with card.run(one, "interrupt"):
        one.interrupt(LONG)
        assert ADDED in one.go_on(ADD)
        assert one.file("test_greet.py") == TEST
        check_reuse(one)


@pytest.mark.parametrize("name", LOOPS)
def test_malformed_calls(name: str, client: Start, card: Scorecard) -> None:
    one = client(name)
    with card.run(one, "malformed calls"):
        assert MENDED in one.start(BREAK)
        assert one.file("test_greet.py") == TEST
        check_reuse(one)


@pytest.mark.parametrize("name", LACKING)
def test_what_a_harness_lacks(name: str) -> None:
    """It says so itself, in the version that is tested."""
    for lack in DRIVERS[name].lacks.values():
        assert lack.says in (package_folder(DRIVERS[name]) / lack.file).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", WITH_AGENTS)
def test_subagent(name: str, client: Start, card: Scorecard) -> None:
    one = client(name)
    with card.run(one, "sub-agent"):
        assert DELEGATED in one.start(DELEGATE)
        requests = check_reuse(one)
        assert len(branches(requests)) > 1, requests


@pytest.mark.parametrize("name", SMALL)
def test_compaction(name: str, client: Start, card: Scorecard) -> None:
    """In a context so small that the client has to shorten the conversation."""
    one = client(name, flags=("--context-length", str(SMALL[name])))
    with card.run(one, "compaction, memory flush" if one.driver.flushes else "compaction"):
        assert BUILT in one.start(BUILD)
        assert ADDED in one.go_on(ADD)
        assert ANSWERED in one.go_on(ASK)
        check_work(one)
        requests = check_reuse(one)
        kinds = [request["kind"] for request in requests]
        assert "compaction" in kinds, requests
        own = Counter(request["session"] for request in requests if request["kind"] == "main")
        assert not one.driver.flushes or min(own.values()) == 1, requests
        assert requests[-1]["prompt"] < max(request["prompt"] for request in requests)


def branches(requests: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(request["session"], request["branch"]) for request in requests if request["kind"] != "side"}


def test_what_changes_in_the_opening(client: Start, card: Scorecard) -> None:
    """Qwen Code writes the state of the repository into the middle of its system text, and does so anew when it goes on
    in a new process: there is a checkpoint before it."""
    one = client("qwen")
    assert ANSWERED in one.start(ASK)
    before = len(one.requests())
    (one.project / "new.txt").write_text("new\n", encoding="utf-8")
    with card.run(one, "resume after changes"):
        assert ANSWERED in one.go_on(ASK)
        check_counters(one)
    changed = [request for request in one.requests()[before:] if request["kind"] == "main"]
    assert max(request["new"] for request in changed) > 0
    assert max(request["replayed"] for request in changed) < 3 * PAGE, changed
