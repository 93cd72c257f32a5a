"""The real clients, a tiny checkpoint with a real vocabulary, and a server that speaks by script."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from launchers.child_server import ChildServer
from tests.e2e import scorecard, story
from tests.e2e.client import E2E, Client, made_project
from tests.e2e.drivers import DRIVERS, Driver
from tests.e2e.scorecard import Scorecard

CARD = pytest.StashKey[Scorecard]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "e2e: runs a real client; run by `make e2e`")
    config.addinivalue_line("markers", "wide: of those, what CI has no time for")
    config.stash[CARD] = Scorecard()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[CARD].rows
    if rows:
        terminalreporter.section("harnesses")
        for line in scorecard.table(rows):
            terminalreporter.write_line(line)


@pytest.fixture
def card(request: pytest.FixtureRequest) -> Scorecard:
    return request.config.stash[CARD]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with room for the clients' long prompts."""
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    make = [sys.executable, "-P", "-m", "engine.checkpoint", "tiny", "qwen3_5_moe", str(path)]
    subprocess.run([*make, "--tokenizer", "qwen", "--context", "262144"], check=True)
    return path


@pytest.fixture
def client(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """Makes a client by name, with a home and a git project of its own, beside a server that runs ``lines``: a file of
    this folder, or the story told in the client's tools. ``flags`` are the server's."""
    with ExitStack() as stack:

        def start(name: str, *, lines: str = "", flags: Sequence[str] = ()) -> Client:
            driver = DRIVERS[name]
            check_installed(driver)
            (tmp_path / "home").mkdir()
            project = made_project(tmp_path / "project")
            script = tmp_path / "script.jsonl"
            if lines:
                text = Path(__file__).with_name(lines).read_text(encoding="utf-8").replace("PROJECT", str(project))
            else:
                text = story.script(driver, project)
            script.write_text(text, encoding="utf-8")
            arguments = ("--model", str(checkpoint), "--script", str(script), *flags)
            server = stack.enter_context(ChildServer(arguments, tmp_path / "server"))
            return Client(driver, server, tmp_path / "home", project)

        yield start


def check_installed(driver: Driver) -> None:
    program = E2E / driver.folders[0] / driver.harness.program
    if not program.exists():
        pytest.fail(f"{driver.harness.title} is not installed: run `make e2e`")
