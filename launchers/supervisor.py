"""Keeps one worker process running: starts it, follows its load, connects the client, starts it again when it dies."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

from engine.api import EngineConfig, ModelInfo
from engine.client import EngineClient, WorkerUnavailable
from engine.messages import LoadFailed, Loading, Ready, config_to_json, parse_status
from launchers.display import Display
from launchers.runtime import EXIT_GAVE_UP, ServeError

WORKER_COMMAND = (sys.executable, "-P", "-m", "engine.worker")

MAX_FAILED_LOADS = 3
"""A worker that dies this often in a row before it is ready is not started again."""
STEADY_SECONDS = 60.0
"""A worker that lived this long is restarted at once when it dies."""
SILENCE_SECONDS = 30.0
"""A worker that answers no ping for this long is killed. Its answers do not wait for the engine's steps."""
PINGS = 6
"""So many must go unanswered, one after the other: a stop of our own process costs one of them, not the worker."""
MAX_BACKOFF_SECONDS = 8.0
"""Well below the time that requests wait for a worker."""
STOP_SECONDS = 27.0
"""More than a worker takes to write what its store must keep, and to end by itself when it cannot."""
_STATUS_LIMIT = 1 << 20


class Supervisor:
    """``started`` is called with the model and the worker's process id each time a worker is ready."""

    def __init__(
        self,
        command: Sequence[str],
        config: EngineConfig,
        socket: Path,
        client: EngineClient,
        display: Display,
        started: Callable[[ModelInfo, int], None],
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self._command = [*command, "--socket", str(socket), "--config", config_to_json(config)]
        self._socket = socket
        self._client = client
        self._display = display
        self._started = started
        self._silence = silence

    async def run(self) -> None:
        """Runs workers, one after the other, until cancelled. Raises ServeError when that is hopeless."""
        failed_loads = early_deaths = 0
        while True:
            problem = ""
            async with _process(self._command) as worker:
                try:
                    info = await self._load(worker)
                except WorkerUnavailable as error:
                    problem = str(error)
                else:
                    began = time.monotonic()
                    self._started(info, worker.pid)
                    watching = asyncio.create_task(self._watch(worker), name="worker watch")
                    await self._client.disconnected()
                    watching.cancel()
            if problem:
                failed_loads += 1
                if failed_loads == MAX_FAILED_LOADS:
                    raise ServeError(f"{problem}, {failed_loads} times in a row; giving up", EXIT_GAVE_UP)
                delay = backoff(failed_loads)
            else:
                failed_loads = 0
                early_deaths = early_deaths + 1 if time.monotonic() - began < STEADY_SECONDS else 0
                delay = backoff(early_deaths - 1)
                problem = f"the worker {_how(worker)}"
            self._display.note(f"{problem}; starting a new one{f' in {delay:g} s' if delay else ''}")
            await asyncio.sleep(delay)

    async def _watch(self, worker: Process) -> None:
        """Kills the worker once it has been silent for too long."""
        missed = 0
        while missed < PINGS:
            try:
                async with asyncio.timeout(self._silence / PINGS):
                    await self._client.ping()
            except TimeoutError:
                missed += 1
            except WorkerUnavailable:
                return
            else:
                missed = 0
                await asyncio.sleep(self._silence / PINGS)
        self._display.note(f"the worker has not answered for {self._silence:g} s; killing it")
        with suppress(ProcessLookupError):
            worker.kill()

    async def _load(self, worker: Process) -> ModelInfo:
        """Follows the load to its end. Raises ServeError for a model that cannot be served, WorkerUnavailable when the
        worker died on the way."""
        stdout = cast(asyncio.StreamReader, worker.stdout)
        with self._display.loading() as show:
            while line := await stdout.readline():
                match parse_status(line):
                    case Loading(what, done, total):
                        show(what, done, total)
                    case LoadFailed(message):
                        raise ServeError(message)
                    case Ready():
                        return await self._client.connect(str(self._socket))
        await worker.wait()
        raise WorkerUnavailable(f"the worker {_how(worker)} while loading")


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row: none, then 0.5, 1, 2, 4, and always 8."""
    return min(MAX_BACKOFF_SECONDS, 0.5 * 2.0 ** min(failures - 1, 10)) if failures > 0 else 0.0


@asynccontextmanager
async def _process(command: Sequence[str]) -> AsyncIterator[Process]:
    """A worker process; it has ended when the block has. It lives in a session of its own, so that Ctrl-C reaches the
    supervisor alone; an open stdin tells it that the supervisor lives."""
    worker = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, limit=_STATUS_LIMIT, start_new_session=True
    )
    try:
        yield worker
    finally:
        await _stop(worker)


async def _stop(worker: Process) -> None:
    """Ends a worker by closing its stdin. A signal would first be preceded by a poll that may reap a worker that has
    just died, and asyncio would then never learn how."""
    cast(asyncio.StreamWriter, worker.stdin).close()
    try:
        await asyncio.wait_for(worker.wait(), STOP_SECONDS)
    except TimeoutError:
        with suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()


def _how(worker: Process) -> str:
    """How a process ended, in words."""
    code = worker.returncode
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


async def build_embedded(cache: Path | None) -> Path:
    """The folder of the embedded model, built on first use by a process that may import torch. Raises ServeError."""
    where = ["--cache", str(cache)] if cache else []
    builder = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "engine.embedded", *where, stdin=DEVNULL, stdout=PIPE
    )
    try:
        output, _ = await builder.communicate()
    finally:
        if builder.returncode is None:
            builder.terminate()
            await builder.wait()
    if builder.returncode != 0:
        raise ServeError("the embedded model could not be built (see above); `ft serve --model DIR` serves another")
    return Path(output.decode().splitlines()[-1])
