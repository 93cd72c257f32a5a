"""A worker process: one model, one scheduler, one socket. ``python -P -m engine.worker --socket PATH --config JSON``

It lives as long as its stdin stays open, so that it never outlives the process that started it. While loading it
reports on stdout (``messages.Status``); everything a human may want to read goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Protocol, cast

from engine.api import (
    Abort,
    Admin,
    AdminReply,
    Done,
    EngineConfig,
    Failed,
    GetStats,
    ModelInfo,
    Reply,
    Request,
    Shutdown,
    Stats,
    StoreSettings,
)
from engine.endpoint import NOBODY, Endpoint, Gone, Incoming
from engine.messages import LoadFailed, Loading, MessageError, Ready, Status, config_from_json, status_line

if TYPE_CHECKING:
    from engine.memory.store import StateStore

EXIT_UNSERVABLE = 3
"""The model cannot be served; a restart would not help. Told by ``LoadFailed`` on stdout."""
EXIT_ENGINE = 4
"""A step failed; the requests were told, and a fresh worker is needed."""
EXIT_ORPHAN = 5
"""Whoever started this worker is gone, and the engine did not come to a stop by itself."""

IDLE_SECONDS = 0.5
"""How often an idle engine looks after its store and its memory."""
FLUSH_SECONDS = 10.0
"""What the store has to write when the worker ends, it has to write within about as long."""
BUSY_SECONDS = 10.0
"""How long to wait for a store that another process, most likely one that is ending, still owns."""

_ORPHAN_SECONDS = 10.0
"""How long the engine of an orphan may take to come to a stop: to end its step. Then it has its time to flush."""
_CLOSE_SECONDS = FLUSH_SECONDS + 5.0
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
    def step(self, meanwhile: Callable[[], None]) -> list[Reply]: ...
    def stats(self) -> Stats: ...
    def admin(self, command: Admin) -> Callable[[], AdminReply]:
        """What is returned may take long; it is called in another thread."""

    def close(self, timeout: float) -> None: ...


class Unservable(Exception):
    """The checkpoint or the configuration is at fault; the text is one line for a human."""


MakeScheduler = Callable[[EngineConfig, Progress], Scheduler]
"""Loads a model. Raises Unservable."""


def load_scheduler(config: EngineConfig, progress: Progress) -> Scheduler:
    """The real thing. torch is imported here, so that a worker can say at once that it is alive."""
    progress("starting", 0, 1)
    from engine.grammar import Vocabulary
    from engine.scheduler import Scheduler as TheScheduler
    from engine.weights.errors import CheckpointError

    settings = config.store

    def open_store(fingerprint: str, page: tuple[int, ...], state: tuple[int, ...], hosted: bool) -> StateStore | None:
        if settings is None:
            return None
        return open_worker_store(replace(settings, host_bytes=0) if hosted else settings, fingerprint, page, state)

    def vocabulary() -> Vocabulary:
        from parsers.tokens import Tokenizer

        tokenizer = Tokenizer.load(Path(config.model))
        tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        return Vocabulary(tokens, frozenset(tokenizer.control.values()))

    try:
        return TheScheduler.load(config, progress, open_store=open_store, vocabulary=vocabulary)
    except CheckpointError as error:
        raise Unservable(str(error)) from error


def open_worker_store(
    settings: StoreSettings,
    fingerprint: str,
    page: tuple[int, ...],
    state: tuple[int, ...],
    patience: float = BUSY_SECONDS,
) -> StateStore | None:
    """The store, or None when it cannot be used and serving goes on without. Raises Unservable for what only its owner
    can solve: another process has it, or the key is wrong."""
    from sessions.store.config import StoreBusy, StoreConfig, StoreError, StoreKeyError
    from sessions.store.store import open_store

    try:
        key = Path(settings.key_file).read_bytes() if settings.key_file else None
    except OSError as error:
        raise Unservable(f"--store-key-file cannot be read: {error}") from error
    config = StoreConfig(
        directory=Path(settings.directory) / "state",
        fingerprint=fingerprint,
        page_components=page,
        state_components=state,
        quota_bytes=settings.quota_bytes,
        host_bytes=settings.host_bytes,
        daily_write_bytes=settings.daily_write_bytes,
        retention_days=settings.retention_days,
        key=key,
    )
    until = time.monotonic() + patience
    while True:
        try:
            # Refs are opaque here and given back as they were, so that the narrower types of the store's own are safe.
            return cast("StateStore", open_store(config))
        except StoreBusy as error:
            if time.monotonic() > until:
                raise Unservable(f"{error} (--store DIR), or serve without one (--no-store)") from error
            time.sleep(0.2)
        except StoreKeyError as error:
            raise Unservable(f"{error}; see --store-key-file, --store DIR and --no-store") from error
        except (StoreError, OSError) as error:
            _log.warning("serving without a store: %s", error)
            return None


class Worker:
    """The engine's thread: takes commands between steps, steps, hands out what the step before replied."""

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
                    self._send(stepped)
                    return 0
                self._endpoint.step_began = time.monotonic()
                stepped = self._scheduler.step(partial(self._send, stepped))
                self._endpoint.step_began = None
        except Exception:  # noqa: BLE001 - whatever it was, this engine's state can no longer be trusted
            _log.exception("the engine failed; this worker ends")
            self._fail_all()
            return EXIT_ENGINE

    def _take(self, wait: bool) -> None:
        """Carries out the commands that have arrived, after waiting a while for the first of them if there is nothing
        to do."""
        inbox = self._endpoint.inbox
        if wait:
            with contextlib.suppress(Empty):
                self._handle(inbox.get(timeout=IDLE_SECONDS))
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
            case Incoming(connection, Admin() as command):
                before = self._scheduler.info
                work = self._scheduler.admin(command)
                if self._scheduler.info != before:
                    self._endpoint.introduce(self._scheduler.info)
                threading.Thread(target=self._answer, args=(connection, command.id, work), daemon=True).start()
            case Incoming(_, Shutdown()):
                self._stopping = True

    def _answer(self, connection: int, command: str, work: Callable[[], AdminReply]) -> None:
        try:
            reply = work()
        except Exception as error:  # noqa: BLE001 - whoever asked is to learn of it, whatever it was
            _log.exception("a command failed")
            reply = AdminReply(command, False, {}, f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the endpoint may have closed in the meantime
            self._endpoint.send(connection, [reply])

    def _send(self, replies: Sequence[Reply]) -> None:
        batches: dict[int, list[Reply]] = {}
        for reply in replies:
            if isinstance(reply, ModelInfo | Stats | AdminReply) or reply.id not in self._owners:
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
    logging.getLogger("engine.device").setLevel(logging.INFO)  # once: what was put where
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
    gc.collect()
    gc.freeze()  # what is loaded stays: to go through it again would stop every answer for tenths of a second
    arguments.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    endpoint = Endpoint(arguments.socket, scheduler.info)
    worker = Worker(scheduler, endpoint)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    signal.signal(signal.SIGINT, lambda *_: worker.stop())
    parent.on_loss(worker.stop)
    endpoint.start()
    report(Ready())
    try:
        code = worker.run()
    finally:
        endpoint.close()
    if code != EXIT_ENGINE:
        parent.stopped()
        scheduler.close(FLUSH_SECONDS)
    return code


class _Lifeline:
    """Watches stdin: its end means that the parent process is gone."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="parent watch", daemon=True).start()

    def on_loss(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def stopped(self) -> None:
        """The engine has come to a stop; what is left is to write what the store must keep."""
        self._stopped.set()

    def _watch(self) -> None:
        try:
            while os.read(0, 1024):
                pass
        except OSError:
            pass
        if self._stop is not None:
            self._stop()
            if self._stopped.wait(_ORPHAN_SECONDS):
                time.sleep(_CLOSE_SECONDS)
        os._exit(EXIT_ORPHAN)


def _reporter() -> Callable[[Status], None]:
    """Keeps stdout for reports alone: what libraries print goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lambda status: print(status_line(status), file=stream, flush=True)


if __name__ == "__main__":
    sys.exit(main())
