"""A real client as a user starts it, and what the server says about its requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.child_server import ChildServer
from tests.e2e.drivers import Driver
from tests.e2e.terminal import Terminal

E2E = Path(__file__).resolve().parents[2] / ".e2e"
CLOSED = "http://127.0.0.1:9"
"""A proxy that refuses: whatever the client tries to reach besides the server fails at once."""
RUN_SECONDS = 400
POLL_SECONDS = 0.05
ANSWER_SECONDS = 240.0
ANSWER_TOKENS = 200
ABORT_SECONDS = 15.0
PRESSES = 3


def made_project(path: Path) -> Path:
    """A repository with one commit."""
    commit = ("-c", "user.name=ft", "-c", "user.email=ft@localhost", "commit", "--quiet", "--allow-empty")
    path.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=path, check=True)
    subprocess.run(["git", *commit, "--message", "Start"], cwd=path, check=True)
    return path


def package_folder(driver: Driver) -> Path:
    """Of one that npm installs."""
    return (E2E / driver.folders[0]).parent / driver.harness.package.name


@dataclass(frozen=True)
class Client:
    """One client with an isolated home, in one project."""

    driver: Driver
    server: ChildServer
    home: Path
    project: Path

    def start(self, prompt: str) -> str:
        """A new conversation in a process of its own."""
        return self.run(*(part.replace("PROMPT", prompt) for part in self.driver.first))

    def go_on(self, prompt: str) -> str:
        """The next message of that conversation, in a new process."""
        return self.run(*(part.replace("PROMPT", prompt) for part in self.driver.again))

    def run(self, *arguments: str) -> str:
        """One process of the client, by ``ft launch``; what it printed. Fails unless it ends with exit code 0."""
        done = subprocess.run(
            self._command(arguments),
            cwd=self.project,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        log = self.server.log.read_text(encoding="utf-8", errors="replace")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\nThe server's log:\n{log}"
        return done.stdout

    def terminal(self, *arguments: str) -> Terminal:
        """The client as a person sees it."""
        return Terminal(self._command(arguments), self.project, self._environment())

    def interrupt(self, prompt: str) -> float:
        """A new conversation, interrupted as a terminal does it when the answer has begun; the seconds until the server
        had given it up after the client was asked to."""
        arguments = [part.replace("PROMPT", prompt) for part in self.driver.first]
        with subprocess.Popen(
            self._command(arguments),
            cwd=self.project,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as child:
            try:
                self.wait_for_answer()
                seconds = self._press_until_given_up(child.pid)
                child.wait(RUN_SECONDS)
            finally:
                child.kill()
        return seconds

    def _press_until_given_up(self, group: int) -> float:
        """Again after a while, as people do: opencode does not hear it in its first moments."""
        for _ in range(PRESSES):
            os.killpg(group, signal.SIGINT)
            start = time.monotonic()
            while time.monotonic() - start < ABORT_SECONDS:
                if not self.generating():
                    return time.monotonic() - start
                time.sleep(POLL_SECONDS)
        raise AssertionError("the server goes on with what nobody waits for, or the client does not stop")

    def requests(self) -> list[dict[str, Any]]:
        """All requests of all its sessions, in order."""
        found = []
        for session in self.server.get("/v1/sessions")["data"]:
            detail = self.server.get(f"/v1/sessions/{session['id']}")
            found += [{**request, "session": session["id"]} for request in detail["requests"]]
        return sorted(found, key=lambda request: float(request["time"]))

    def file(self, name: str) -> str:
        return (self.project / name).read_text(encoding="utf-8")

    def version(self) -> str:
        """As its package says."""
        package = self.driver.harness.package
        if package.registry == "npm":
            text = (package_folder(self.driver) / "package.json").read_text(encoding="utf-8")
            return str(json.loads(text)["version"])
        python = E2E / self.driver.folders[0] / "python"
        ask = f"from importlib.metadata import version; print(version({package.name!r}))"
        return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()

    def wait_for_answer(self) -> None:
        """Until more of it was said than a title has words. A worker that is busy tells nothing of itself."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while (self.server.get("/v1/stats")["engine"] or {}).get("decoded_tokens", 0) < ANSWER_TOKENS:
            assert time.monotonic() < deadline, "the client asked for nothing"
            time.sleep(POLL_SECONDS)

    def generating(self) -> int:
        """How many answers the server is at."""
        return int(self.server.get("/v1/stats")["server"]["open_generations"])

    def _command(self, arguments: Sequence[str]) -> list[str]:
        launch = [
            sys.executable,
            "-P",
            "-m",
            "launchers.cli",
            "launch",
            self.driver.harness.name,
            "--url",
            self.server.url,
        ]
        return [*launch, "--", *arguments]

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.pathsep.join((*(str(E2E / folder) for folder in self.driver.folders), os.environ["PATH"])),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "HTTP_PROXY": CLOSED,
            "HTTPS_PROXY": CLOSED,
            **self.driver.environment,
        }
