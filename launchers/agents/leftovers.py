"""Running a harness that leaves programs behind, and stopping those."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from launchers.agents.common import Launch, LaunchError, child_environment
from sessions.store.words import why

GRACE_SECONDS = 3.0
POLL_SECONDS = 0.05
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Sent to this process alone; what a terminal sends reaches the harness by itself."""


def run_and_stop_leftovers(launch: Launch, inherited: Mapping[str, str]) -> int:
    """The exit code of the harness, whose leftovers are stopped unless another one of the same home still runs.

    Raises LaunchError where there is no such program.
    """
    assert launch.leftovers is not None  # noqa: S101 (who calls this has looked)
    sys.stdout.flush()
    sys.stderr.flush()
    children: list[subprocess.Popen[bytes]] = []
    with signals_to(children):
        try:
            child = subprocess.Popen(launch.command, env=child_environment(launch, inherited))
        except OSError as error:
            raise LaunchError(f"cannot run {launch.command[0]} ({why(error)})") from error
        children.append(child)
        code = child.wait()
    left = list(running_below(launch.leftovers))
    if left and not others_use(launch.environment, left):
        stop(left, launch.leftovers)
    return code if code >= 0 else 128 - code


@contextmanager
def signals_to(children: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(number: int, _: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    before |= {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def running_below(folder: Path) -> Iterator[int]:
    """The process ids of programs whose file is in ``folder``; a deleted file's path keeps its beginning."""
    start = f"{folder.resolve()}/"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                program = str((entry / "exe").readlink())
            except OSError:
                continue  # it has ended, or is somebody else's
            if program.startswith(start):
                yield int(entry.name)


def others_use(environment: Mapping[str, str], left: list[int]) -> bool:
    """Whether a process besides ``left`` was started with the same home, which the environment names."""
    marks = {f"{name}={value}".encode() for name, value in environment.items() if name.endswith("_HOME")}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in (*left, os.getpid()):
            try:
                found = set((entry / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue
            if marks and marks <= found:
                return True
    return False


def stop(processes: list[int], folder: Path) -> None:
    """Asks them to end, and ends those that do not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + GRACE_SECONDS
        while (processes := [one for one in running_below(folder) if one in processes]) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if not processes:
            return
