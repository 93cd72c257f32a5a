"""A real client as a user starts it, and what the server says about its requests."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launchers.child_server import ChildServer

CLIENTS = Path(__file__).resolve().parents[2] / ".e2e" / "node_modules" / ".bin"
CLOSED = "http://127.0.0.1:9"
"""A proxy that refuses: whatever the client tries to reach besides the server fails at once."""
RUN_SECONDS = 240


@dataclass(frozen=True)
class Client:
    """One client with an isolated home, in one project."""

    name: str
    server: ChildServer
    home: Path
    project: Path

    def run(self, *arguments: str) -> str:
        """One process of the client, by ``ft launch``; what it printed. Fails unless it ends with exit code 0."""
        launch = [sys.executable, "-P", "-m", "launchers.cli", "launch", self.name, "--url", self.server.url]
        done = subprocess.run(
            [*launch, "--", *arguments],
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

    def file(self, name: str) -> str:
        return (self.project / name).read_text(encoding="utf-8")

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.pathsep.join((str(CLIENTS), os.environ["PATH"])),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "IS_SANDBOX": "1",
            "HTTP_PROXY": CLOSED,
            "HTTPS_PROXY": CLOSED,
        }
