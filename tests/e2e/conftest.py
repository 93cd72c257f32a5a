"""The real clients, a tiny checkpoint with a real vocabulary, and a server that speaks by script."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from launchers.child_server import ChildServer
from tests.e2e.client import CLIENTS, Client


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "e2e: runs a real client; run by `make e2e`")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with room for the clients' long prompts."""
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    make = [sys.executable, "-P", "-m", "engine.checkpoint", "tiny", "qwen3_5_moe", str(path)]
    subprocess.run([*make, "--tokenizer", "qwen", "--context", "262144"], check=True)
    return path


@pytest.fixture
def client(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[[str], Client]]:
    """Makes a client by name, with a home and a git project of its own, beside a server that runs its script."""
    if not CLIENTS.is_dir():
        pytest.fail("the clients are not installed: run `make e2e`")
    with ExitStack() as stack:

        def start(name: str) -> Client:
            project = tmp_path / "project"
            (tmp_path / "home").mkdir()
            project.mkdir()
            commit = ("-c", "user.name=ft", "-c", "user.email=ft@localhost", "commit", "--quiet", "--allow-empty")
            subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)
            subprocess.run(["git", *commit, "--message", "Start"], cwd=project, check=True)
            script = tmp_path / "script.jsonl"
            text = Path(__file__).with_name(f"{name}.jsonl").read_text(encoding="utf-8")
            script.write_text(text.replace("PROJECT", str(project)), encoding="utf-8")
            arguments = ("--model", str(checkpoint), "--script", str(script))
            server = stack.enter_context(ChildServer(arguments, tmp_path / "server"))
            return Client(name, server, tmp_path / "home", project)

        yield start
