"""A worker process: one model, one scheduler, one socket. ``python -P -m engine.worker --socket PATH --config JSON``

It lives as long as its stdin stays open, so that it never outlives the process that started it. While loading it
reports on stdout (``messages.Status``); everything a human may want to read goes to stderr.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty
from typing import Protocol

from engine.api import Abort, Done, EngineConfig, Failed, GetStats, ModelInfo, Reply, Request, Shutdown, Stats
from engine.endpoint import NOBODY, Endpoint, Gone, Incoming
from engine.messages import LoadFailed, Loading, MessageError, Ready, Status, config_from_json, status_line

EXIT_UNSERVABLE = 3
"""The model cannot be served; a restart would not help. Told by ``LoadFailed`` on stdout."""
EXIT_ENGINE = 4
"""A step failed; the requests were told, and a fresh worker is needed."""
EXIT_ORPHAN = 5
"""Whoever started this worker is gone, and the engine did not come to a stop by itself."""

_ORPHAN_SECONDS = 5.0
_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""


class Scheduler(Protocol):
    """What a worker needs of ``engine.scheduler.Scheduler``."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def idle(self) -> bool: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Reply]: ...
    def stats(self) -> Stats: ...


class Unservable(Exception):
    """The checkpoint or the configuration is at fault; the text is one line for a human."""


MakeScheduler = Callable[[EngineConfig, Progress], Scheduler]
"""Loads a model. Raises Unservable."""


def load_scheduler(config: EngineConfig, progress: Progress) -> Scheduler:
    """The real thing. torch is imported here, so that a worker can say at once that it is alive."""
    progress("starting", 0, 1)
    from engine.scheduler import Scheduler as TheScheduler
    from engine.weights.errors import CheckpointError

    try:
        return TheScheduler.load(config, progress)
    except CheckpointError as error:
        raise Unservable(str(error)) from error


class Worker:
    """The engine's thread: takes commands between steps, steps, hands out replies."""

    def __init__(self, scheduler: Scheduler, endpoint: Endpoint) -> None:
        self._scheduler = scheduler
        self._endpoint = endpoint
        self._owners: dict[str, int] = {}
        """The connection of each open request; ``NOBODY`` when it has ended."""
        self._stopping = False

    def stop(self) -> None:
        """Ends ``run`` after the current step. May be called from any thread and from a signal handler."""
        self._endpoint.inbox.put(Incoming(NOBODY, Shutdown()))

    def run(self) -> int:
        """Serves until told to stop; returns the exit code."""
        stepped: list[Reply] = []
        try:
            while True:
                self._take(wait=self._scheduler.idle and not stepped)
                if self._stopping:
                    return 0
                self._endpoint.step_began = time.monotonic()
                stepped = self._scheduler.step()
                self._endpoint.step_began = None
                self._send(stepped)
        except Exception:  # noqa: BLE001 - whatever it was, this engine's state can no longer be trusted
            _log.exception("the engine failed; this worker ends")
            self._fail_all()
            return EXIT_ENGINE

    def _take(self, wait: bool) -> None:
        """Carries out the commands that have arrived, after waiting for the first of them if there is nothing to do."""
        inbox = self._endpoint.inbox
        if wait:
            self._handle(inbox.get())
        while not self._stopping:
            try:
                self._handle(inbox.get_nowait())
            except Empty:
                return

    def _handle(self, event: Incoming | Gone) -> None:
        match event:
            case Gone(connection):
                for request_id in [key for key, owner in self._owners.items() if owner == connection]:
                    self._owners[request_id] = NOBODY
                    self._scheduler.abort(request_id)
            case Incoming(connection, Request() as request):
                if request.id in self._owners:
                    failed = Failed(request.id, "invalid", f"request {request.id} is open already")
                    self._endpoint.send(connection, [failed])
                    return
                self._owners[request.id] = connection
                self._scheduler.submit(request)
            case Incoming(connection, Abort(request_id)):
                if self._owners.get(request_id) == connection:
                    self._scheduler.abort(request_id)
            case Incoming(connection, GetStats()):
                self._endpoint.send(connection, [self._scheduler.stats()])
            case Incoming(_, Shutdown()):
                self._stopping = True

    def _send(self, replies: Sequence[Reply]) -> None:
        batches: dict[int, list[Reply]] = {}
        for reply in replies:
            if isinstance(reply, ModelInfo | Stats) or reply.id not in self._owners:
                continue
            batches.setdefault(self._owners[reply.id], []).append(reply)
            if isinstance(reply, Done | Failed):
                del self._owners[reply.id]
        for connection, batch in batches.items():
            self._endpoint.send(connection, batch)

    def _fail_all(self) -> None:
        message = "the engine failed while computing; it restarts, and the request may be sent again"
        for request_id, connection in self._owners.items():
            self._endpoint.send(connection, [Failed(request_id, "internal", message)])


def main(argv: Sequence[str] | None = None, make_scheduler: MakeScheduler = load_scheduler) -> int:
    """Runs a worker until it is told to stop; returns its exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    faulthandler.enable()
    parser = argparse.ArgumentParser(prog="python -P -m engine.worker", description="Serves one model on a socket.")
    parser.add_argument("--socket", required=True, type=Path, metavar="PATH", help="unix socket to listen on")
    parser.add_argument("--config", required=True, metavar="JSON", help="engine.api.EngineConfig")
    arguments = parser.parse_args(argv)
    parent = _Lifeline()
    report = _reporter()
    try:
        config = config_from_json(arguments.config)
        scheduler = make_scheduler(config, lambda what, done, total: report(Loading(what, done, total)))
    except (MessageError, Unservable) as error:
        report(LoadFailed(" ".join(str(error).split())))
        return EXIT_UNSERVABLE
    arguments.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    endpoint = Endpoint(arguments.socket, scheduler.info)
    worker = Worker(scheduler, endpoint)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    signal.signal(signal.SIGINT, lambda *_: worker.stop())
    parent.on_loss(worker.stop)
    endpoint.start()
    report(Ready())
    try:
        return worker.run()
    finally:
        endpoint.close()


class _Lifeline:
    """Watches stdin: its end means that the parent process is gone."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        threading.Thread(target=self._watch, name="parent watch", daemon=True).start()

    def on_loss(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def _watch(self) -> None:
        try:
            while os.read(0, 1024):
                pass
        except OSError:
            pass
        if self._stop is not None:
            self._stop()
            time.sleep(_ORPHAN_SECONDS)
        os._exit(EXIT_ORPHAN)


def _reporter() -> Callable[[Status], None]:
    """Keeps stdout for reports alone: what libraries print goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lambda status: print(status_line(status), file=stream, flush=True)


if __name__ == "__main__":
    sys.exit(main())
