"""``ft serve``: one API process (this one) and one worker process, from the first check to the last clean-up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError

from engine.api import ModelInfo
from engine.client import EngineClient
from engine.remote.client import RemoteClient
from launchers import keys, remote
from launchers.display import Display
from launchers.runtime import (
    Claim,
    ServeError,
    claim_port,
    clear_ready_file,
    in_use,
    is_loopback,
    runtime_root,
    write_ready_file,
)
from launchers.settings import ServeSettings
from launchers.supervisor import WORKER_COMMAND, Supervisor, build_embedded
from parsers.load import Family, FamilyError, load_family
from server.app import create_app
from server.front import BACKLOG, FrontConfig, Patience, Tls, settle
from server.history import Stored
from server.script import Script, ScriptError
from server.settings import LOOPBACK_HOSTS, ServerSettings
from server.state import ServerState
from sessions.persist import Persist, PersistConfig
from sessions.store.config import StoreBusy, StoreError
from sessions.store.words import why
from sessions.tracker import Sessions

Started = Callable[[ModelInfo, int], None]
"""Called each time an engine is ready, with the process id of a worker, 0 for a remote engine."""
Keep = Callable[[Started], Coroutine[Any, Any, None]]
"""Keeps an engine running until it is cancelled."""

_MOST_FILES, _OUR_FILES = 16_384, 256

_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "default_output_tokens",
}
"""What is read of a checkpoint's generation_config.json, and the setting that it becomes."""


def serve(settings: ServeSettings, worker_command: Sequence[str] = WORKER_COMMAND) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code: 0, 2 when the settings cannot be served, 1 when the
    worker keeps dying. Problems are told in one line on stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    display = Display()
    try:
        asyncio.run(_until_stopped(settings, worker_command, display))
    except ServeError as error:
        display.note(f"error: {error}")
        return error.code
    return 0


async def _until_stopped(settings: ServeSettings, worker_command: Sequence[str], display: Display) -> None:
    """The first signal ends everything in order. The second ends it at once: the worker follows its closed stdin."""
    running = asyncio.create_task(_run(settings, worker_command, display))
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if stopping:
            os._exit(128 + signal.SIGINT)
        stopping = True
        display.note("stopping")
        running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await asyncio.wait([running])
    if not running.cancelled():
        running.result()


async def _run(settings: ServeSettings, worker_command: Sequence[str], display: Display) -> None:
    if not is_loopback(settings.host) and not settings.api_keys:
        raise ServeError(
            f"{settings.host} can be reached from other machines: set an API key with --api-key-file, "
            "or serve this machine alone with --host 127.0.0.1"
        )
    if settings.engine is not None:
        remote.refuse_others(settings)
    script, tls = _load_script(settings.script), _tls(settings)
    with contextlib.ExitStack() as stack:
        root = settings.runtime_dir or runtime_root()
        claim = stack.enter_context(claim_port(settings.host, settings.port, root, "https" if tls else "http"))
        if settings.ready_file is not None:
            clear_ready_file(settings.ready_file)
        api: _Api | None = None
        store = settings.store
        fresh = store is not None and not store.exists()
        persist = _open_persist(store, settings.store_key_file)
        if store is not None and persist is not None:
            if fresh:
                stack.callback(lambda: None if api is not None and api.started else _remove(store))
            stack.callback(persist.close)
        model = settings.model if settings.model is not None else await build_embedded(settings.cache)
        family = _load_family(model, settings.family)
        engine: EngineClient | RemoteClient
        if settings.engine is None:
            engine = client = EngineClient(max_open=settings.max_sequences + settings.queue)
            keep = _worker(settings, worker_command, display, claim, model, client)
        else:
            engine = far = await remote.connect(settings, family, model, display)
            keep = _remote(far)
        state = ServerState(
            engine=engine,
            family=family,
            sessions=Sessions(family, max_sessions=settings.max_sessions, persist=persist),
            settings=_server_settings(settings, model),
            script=script,
            history=Stored(persist),
        )
        patience = Patience(connections=_connections())
        settle()
        api = _Api(FrontConfig(create_app(state), patience, tls, ws_max_size=settings.max_body))
        watching = asyncio.create_task(keys.watch(settings.api_key_file, settings.api_keys, state.keys), name="keys")
        stack.callback(watching.cancel)
        await _supervise(settings, display, claim, engine, keep, api)


def _worker(
    settings: ServeSettings,
    worker_command: Sequence[str],
    display: Display,
    claim: Claim,
    model: Path,
    client: EngineClient,
) -> Keep:
    """Keeps a worker of ours."""

    def keep(started: Started) -> Coroutine[Any, Any, None]:
        return Supervisor(
            worker_command,
            settings.worker(model),
            claim.worker_socket,
            client,
            display,
            started,
            settings.worker_silence_seconds,
        ).run()

    return keep


def _remote(client: RemoteClient) -> Keep:
    """Keeps the connection to a remote engine, which is there."""

    async def keep(started: Started) -> None:
        started(await client.ready(0), 0)
        await client.run(lambda info: started(info, 0))

    return keep


async def _supervise(
    settings: ServeSettings,
    display: Display,
    claim: Claim,
    engine: EngineClient | RemoteClient,
    keep: Keep,
    api: _Api,
) -> None:
    """Has the model loaded, then answers requests, until one of the two is cancelled or fails."""
    first: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
    worker_pid = 0

    def announce() -> None:
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, claim.url, worker_pid)

    def started(info: ModelInfo, pid: int) -> None:
        nonlocal worker_pid
        worker_pid = pid
        if api.started:
            announce()
            display.note("a new worker is ready" if pid else "the remote engine is back")
        elif not first.done():
            first.set_result(info)

    supervising = asyncio.create_task(keep(started), name="supervisor")
    serving: asyncio.Task[None] | None = None
    try:
        await _first_of(supervising, first)
        try:
            claim.listener.listen(BACKLOG)
        except OSError as error:
            raise in_use(claim.host, claim.port) from error
        serving = asyncio.create_task(api.serve(sockets=[claim.listener]), name="api")
        await _first_of(supervising, serving, asyncio.ensure_future(api.up.wait()))
        announce()
        display.ready(claim.url, settings.model_name, first.result(), wants_key=bool(settings.api_keys))
        await _first_of(supervising, serving)
    finally:
        api.should_exit = True
        supervising.cancel()
        await engine.close()
        await asyncio.wait({supervising} if serving is None else {supervising, serving})
        if settings.ready_file is not None:
            settings.ready_file.unlink(missing_ok=True)


async def _first_of(*awaited: asyncio.Future[Any]) -> None:
    """Waits for the first to end; raises what it raised."""
    done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    for future in done:
        future.result()


def _tls(settings: ServeSettings) -> Tls | None:
    """Raises ServeError."""
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise ServeError("a certificate and its key belong together: give both --tls-cert and --tls-key")
    tls = Tls(settings.tls_cert, settings.tls_key)
    try:
        tls.check()
    except OSError as error:
        raise ServeError(f"the certificate cannot be used ({why(error)}): check --tls-cert and --tls-key") from error
    return tls


def _connections() -> int:
    """How many connections the limit on open files allows, less the files of our own. Raises that limit first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if most > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most - _OUR_FILES, _OUR_FILES)


class _Api(uvicorn.Server):
    """uvicorn that leaves signals to the supervisor and says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


def _load_script(path: Path | None) -> Script | None:
    if path is None:
        return None
    try:
        return Script.load(path)
    except ScriptError as error:
        raise ServeError(f"{error}: check --script") from error


def _open_persist(store: Path | None, key_file: Path | None) -> Persist | None:
    """What is to be kept of sessions, if anything. The worker opens the rest of the store."""
    if store is None:
        return None
    try:
        key = key_file.read_bytes() if key_file is not None else None
    except OSError as error:
        raise ServeError(f"cannot read the store's key in {key_file} ({why(error)}): check --store-key-file") from error
    with contextlib.suppress(OSError):  # without the folder nothing is kept, and that is told
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return Persist(PersistConfig(directory=store / "sessions", key=key))
    except StoreBusy as error:
        raise ServeError(f"{error} with --store DIR, or keep nothing with --no-store") from error
    except StoreError as error:
        raise ServeError(
            f"the store in {store} cannot be used: {error} (its key: --store-key-file FILE; another store: --store "
            "DIR; none: --no-store)"
        ) from error


def _remove(store: Path) -> None:
    """Takes a new store away again, if nothing was ever served from it."""
    shutil.rmtree(store, ignore_errors=True)


def _load_family(model: Path, name: str | None) -> Family:
    if not model.is_dir():
        raise ServeError(f"{model} is not a folder: --model names a folder with config.json and safetensors files")
    try:
        return load_family(model, name)
    except FamilyError as error:
        raise ServeError(str(error)) from error


def _names(settings: ServeSettings) -> tuple[str, ...]:
    """The host names that requests may use. A server for other machines has names that we do not know; it has keys."""
    if not is_loopback(settings.host):
        return settings.allowed_hosts
    return tuple({*LOOPBACK_HOSTS, settings.host, *settings.allowed_hosts})


def _server_settings(settings: ServeSettings, model: Path) -> ServerSettings:
    """Sampling defaults come from the checkpoint, where it has any."""
    path = model / "generation_config.json"
    try:
        defaults = json.loads(path.read_bytes()) if path.is_file() else {}
        return ServerSettings(
            model_name=settings.model_name,
            max_output_tokens=settings.max_output_tokens,
            keepalive_seconds=settings.keepalive_seconds,
            idle_prefill=settings.idle_prefill and settings.engine is None,
            store=None if settings.store is None or settings.engine else settings.store.absolute(),
            context_length=settings.context_length,
            api_keys=settings.api_keys,
            share_cache=settings.share_cache,
            key_running=settings.key_running,
            key_waiting=settings.key_waiting,
            max_body_bytes=settings.max_body,
            allowed_hosts=_names(settings),
            **{ours: defaults[theirs] for theirs, ours in _DEFAULTS.items() if defaults.get(theirs) is not None},
        )
    except (OSError, ValueError, AttributeError, ValidationError) as error:
        raise ServeError(f"{path} is damaged ({' '.join(str(error).split())}): get it again, or remove it") from error
