"""A server of our own as a child process, for as long as a demonstration or a test needs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from launchers import keys
from launchers.running import ServerProblem

SERVE = (sys.executable, "-P", "-m", "launchers.cli", "serve")
POLL_SECONDS = 0.1
STOP_SECONDS = 30.0


class ChildServerError(ServerProblem):
    """The server ended or did not become ready; the message holds the end of its log."""


def wait_until_ready(process: subprocess.Popen[bytes], ready: Path, log: Path, seconds: float) -> None:
    """Until the server has written the file ``ready``. Raises ChildServerError."""
    deadline = time.monotonic() + seconds
    while not ready.exists():
        code = process.poll()
        if code is not None or time.monotonic() > deadline:
            end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
            what = f"is not ready after {seconds:.0f} s" if code is None else f"ended with exit code {code}"
            raise ChildServerError("\n".join([f"the server {what}; the end of its log {log}:", *end]))
        time.sleep(POLL_SECONDS)


class ChildServer:
    """``ft serve`` with ``arguments`` on a free loopback port, ready when the ``with`` block begins.

    ``directory`` gets its log, its ready file and its store, which a later one in the same folder finds again.
    ``ready_seconds`` covers building the embedded model on first use.
    """

    def __init__(self, arguments: Sequence[str], directory: Path, ready_seconds: float = 600.0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "server.log"
        self._ready = directory / "server.json"
        self._ready_seconds = ready_seconds
        self._command = [
            *SERVE,
            *("--port", "0", "--ready-file", str(self._ready), "--store", str(directory / "store"), *arguments),
        ]

    def __enter__(self) -> Self:
        self._ready.unlink(missing_ok=True)  # of one that was killed
        with self.log.open("ab") as log:
            environment = {name: value for name, value in os.environ.items() if name != keys.VARIABLE}
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        try:
            wait_until_ready(self._process, self._ready, self.log, self._ready_seconds)
        except BaseException:
            self._stop()
            raise
        self.url = str(self._state()["url"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def restart(self, *, kill: bool = False) -> None:
        """A new server over the same store, at another ``url``. ``kill``: the old one and its worker get no time."""
        if kill:
            worker = self.worker_pid
            self._process.kill()
            os.kill(worker, signal.SIGKILL)
        self._stop()
        self.__enter__()

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    @property
    def worker_pid(self) -> int:
        """The process id of the worker that was ready last."""
        return int(self._state()["worker_pid"])

    def wait_until_stored(self) -> None:
        """A pause in which all that is to be kept reaches the disk. Raises httpx.HTTPError."""
        while self.get("/v1/store")["queue_extents"] or self.get("/v1/stats")["sessions"]["persist_waiting"]:
            time.sleep(POLL_SECONDS)

    def get(self, path: str) -> Any:
        """The JSON that ``GET path`` answers. Raises httpx.HTTPError."""
        response = httpx.get(self.url + path, timeout=10.0, trust_env=False)
        response.raise_for_status()
        return response.json()

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._ready.read_text(encoding="utf-8"))
        return state

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
