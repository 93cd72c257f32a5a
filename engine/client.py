"""The API process's end of the socket to a worker: requests out, one stream of replies back per request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import uuid
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from engine.api import (
    Abort,
    Admin,
    AdminAction,
    AdminReply,
    Admitted,
    Done,
    ErrorKind,
    Failed,
    GetStats,
    ModelInfo,
    Ping,
    Pong,
    Request,
    Stats,
    Tokens,
)
from engine.messages import MessageError, encode, encode_parts, read_message

SEND_BUFFER = 4 << 20
"""Bytes that the socket takes at once (the kernel may allow less): a long prompt, with no turn of the event loop for
each piece of it."""


class EngineError(Exception):
    """A request could not be served; the fields are those of ``Failed``."""

    def __init__(self, kind: ErrorKind, message: str, limit: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.limit = limit


class WorkerUnavailable(EngineError):
    """No worker is connected."""

    def __init__(self, message: str = "no worker is running") -> None:
        super().__init__("worker_lost", message)


class QueueFull(EngineError):
    """As many requests are open as the worker may hold."""

    def __init__(self, limit: int) -> None:
        super().__init__("overloaded", f"{limit} requests are open already", limit)


class Owner(Protocol):
    """Of streams: ends their requests."""

    def abort(self, request_id: str) -> None: ...

    def abandon(self, request_id: str) -> None: ...


class Inbox:
    """What arrived for one request. The client holds it, so that replies to an abandoned stream have a place to go."""

    def __init__(self) -> None:
        self.items: deque[Tokens | Done | Failed] = deque()
        self.arrived = asyncio.Event()
        self.decided = asyncio.Event()
        self.over = asyncio.Event()
        self.admission: Admitted | None = None
        self.failure: Failed | None = None
        self.ended = False
        self.aborted = False
        self.abandoned = False

    def put(self, reply: Admitted | Tokens | Done | Failed) -> None:
        match reply:
            case Admitted():
                self.admission = reply
                self.decided.set()
                return
            case Failed():
                self.failure = reply
        if not isinstance(reply, Tokens):
            self.ended = True
            self.decided.set()
            self.over.set()
        if not self.abandoned:
            self.items.append(reply)
        self.arrived.set()


class EngineStream:
    """One request's replies. A stream that nobody holds any more aborts its request."""

    def __init__(self, client: Owner, request_id: str, inbox: Inbox) -> None:
        self.id = request_id
        self._client = client
        self._inbox = inbox
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _abandon, loop, client, request_id).atexit = False

    async def admitted(self, timeout: float) -> Admitted | None:
        """The reuse plan, or None when it is not known within ``timeout`` seconds or the request was aborted first.
        Raises EngineError when the request failed before it was admitted. May be called again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._inbox.decided.wait()
        failure = self._inbox.failure
        if self._inbox.admission is None and failure is not None:
            raise EngineError(failure.kind, failure.message, failure.limit)
        return self._inbox.admission

    def __aiter__(self) -> EngineStream:
        return self

    async def __anext__(self) -> Tokens | Done | Failed:
        inbox = self._inbox
        while not inbox.items:
            if inbox.ended:
                raise StopAsyncIteration
            inbox.arrived.clear()
            await inbox.arrived.wait()
        return inbox.items.popleft()

    async def some(self, soon: float, late: float) -> list[Tokens | Done | Failed]:
        """All that has come at ``soon`` in the loop's time, or at the end, if that is earlier; after ``soon``, what
        comes first. Nothing at ``late``. Raises StopAsyncIteration behind the end."""
        inbox, loop = self._inbox, asyncio.get_running_loop()
        if not inbox.items:
            if inbox.ended:
                raise StopAsyncIteration
            await _until(inbox.arrived, late)
        if loop.time() >= soon:
            return [inbox.items.popleft()] if inbox.items else []
        if not inbox.ended:
            await _until(inbox.over, soon)
        items, inbox.items = [*inbox.items], deque()
        return items

    async def abort(self) -> None:
        """Ask for the end; the stream then ends with ``Done(reason="abort")``. Without effect on an ended stream."""
        self._client.abort(self.id)


async def _until(event: asyncio.Event, end: float) -> None:
    """Waits for the event to be set, which it is at ``end`` in the loop's time at the latest."""
    loop = asyncio.get_running_loop()
    if loop.time() >= end:
        return
    event.clear()
    # Not asyncio.timeout: a mere alarm costs a fifth of that, for each event of an answer.
    alarm = loop.call_at(end, event.set)
    try:
        await event.wait()
    finally:
        alarm.cancel()


def _abandon(loop: asyncio.AbstractEventLoop, client: Owner, request_id: str) -> None:
    """The garbage collector may run in any thread, and after the loop has gone."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(client.abandon, request_id)


class Engine(Protocol):
    """What the server wants of whoever computes for it: a worker process of ours, or a remote engine."""

    lost: int
    max_open: int
    """Requests that may be open at once."""

    @property
    def info(self) -> ModelInfo | None: ...

    @property
    def open(self) -> int: ...

    @property
    def stalled_seconds(self) -> float: ...

    @property
    def about(self) -> Mapping[str, str]:
        """Of what kind it is, for people."""
        ...

    @property
    def lacks(self) -> Mapping[str, str]:
        """What it cannot do, by name, and why."""
        ...

    async def ready(self, timeout: float) -> ModelInfo: ...

    def submit(self, request: Request) -> EngineStream: ...

    def abort(self, request_id: str) -> None: ...

    async def stats(self) -> Stats: ...

    async def admin(self, action: AdminAction, **arguments: str) -> AdminReply: ...


class EngineClient:
    """One connection at a time to one worker after the other. Everything happens on one event loop.

    ``max_open``: requests that may be open at once (running and queued), aborted ones included until they have ended.
    """

    def __init__(self, max_open: int = 72) -> None:
        self.lost = 0
        """Workers lost so far."""
        self.max_open = max_open
        self._info: ModelInfo | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        """Set while there is a worker, and for good once there will be none."""
        self._closed = False
        self._open: dict[str, Inbox] = {}
        self._stats: asyncio.Future[Stats] | None = None
        self._pong: asyncio.Future[Pong] | None = None
        self._admin: dict[str, asyncio.Future[AdminReply]] = {}
        self._pinged = self._step_seconds = 0.0
        self._division: Mapping[str, str] = {}
        """How memory was divided by command, which goes for the next worker too."""

    @property
    def about(self) -> Mapping[str, str]:
        return {"kind": "worker", **({"runs_on": self._info.instruction_set} if self._info else {})}

    @property
    def lacks(self) -> Mapping[str, str]:
        return {}

    @property
    def info(self) -> ModelInfo | None:
        """What the connected worker serves; None while there is none."""
        return self._info

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def stalled_seconds(self) -> float:
        """For how long the worker has shown no progress: its socket silent since the last ping, or its engine in one
        step when it answered that; 0.0 without a worker."""
        silent = time.monotonic() - self._pinged if self._pong is not None else 0.0
        return max(silent, self._step_seconds)

    async def connect(self, path: str) -> ModelInfo:
        """Connects to the worker that listens on the unix socket ``path``. Raises WorkerUnavailable."""
        if self._writer is not None:
            raise ValueError("a worker is connected already")
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            raise WorkerUnavailable(f"no worker listens on {path}: {error}") from error
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        try:
            info = await read_message(reader)
        except (EOFError, OSError, MessageError) as error:
            writer.close()
            raise WorkerUnavailable(f"the worker on {path} did not introduce itself: {error}") from error
        if not isinstance(info, ModelInfo):
            writer.close()
            raise WorkerUnavailable(f"the worker on {path} did not introduce itself")
        self._info, self._writer = info, writer
        self._receiver = asyncio.create_task(self._receive(reader), name="engine replies")
        self._connected.set()
        if self._division:
            writer.write(encode(Admin(uuid.uuid4().hex, "cache_set", dict(self._division))))
        return info

    async def ready(self, timeout: float) -> ModelInfo:
        """Waits at most ``timeout`` seconds for a worker. Raises WorkerUnavailable."""
        try:
            async with asyncio.timeout(timeout):
                await self._connected.wait()
        except TimeoutError as error:
            raise WorkerUnavailable(f"no worker came up within {timeout:g} s") from error
        if self._info is None:
            raise WorkerUnavailable("the server is shutting down" if self._closed else "no worker is running")
        return self._info

    async def disconnected(self) -> None:
        """Returns when no worker is connected (any more)."""
        if self._receiver is not None:
            await asyncio.wait([self._receiver])

    def submit(self, request: Request) -> EngineStream:
        """Sends a request. Raises WorkerUnavailable, QueueFull, or EngineError("invalid") for one that has no wire
        form. Never blocks: what the socket does not take at once is buffered, at most ``max_open`` requests."""
        if self._writer is None:
            raise WorkerUnavailable
        if len(self._open) >= self.max_open:
            raise QueueFull(self.max_open)
        if request.id in self._open:
            raise EngineError("invalid", f"request {request.id} is open already")
        try:
            parts = encode_parts(request)
        except MessageError as error:
            raise EngineError("invalid", str(error)) from error
        for part in parts:
            self._writer.write(part)
        inbox = self._open[request.id] = Inbox()
        return EngineStream(self, request.id, inbox)

    def abort(self, request_id: str) -> None:
        """Asks the worker to end a request; without effect when it has ended."""
        inbox = self._open.get(request_id)
        if inbox is not None and self._writer is not None and not inbox.aborted:
            inbox.aborted = True
            self._writer.write(encode(Abort(request_id)))

    def abandon(self, request_id: str) -> None:
        """Ends a request whose replies nobody will read."""
        inbox = self._open.get(request_id)
        if inbox is not None:
            inbox.abandoned = True
            inbox.items.clear()
            self.abort(request_id)

    async def stats(self, timeout: float = 5.0) -> Stats:
        """The worker's counters. The worker answers between two steps. Raises WorkerUnavailable, also when there is no
        answer within ``timeout`` seconds. Who asks while an answer is due gets that one."""
        if self._writer is None:
            raise WorkerUnavailable
        if self._stats is None:
            self._stats = asyncio.get_running_loop().create_future()
            self._writer.write(encode(GetStats()))
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self._stats)
        except TimeoutError as error:
            raise WorkerUnavailable(f"the worker did not answer within {timeout:g} s") from error

    async def ping(self) -> Pong:
        """Whether the worker's process runs at all; it answers in the middle of a step too. Waits for the answer, of
        which only one is ever due. Raises WorkerUnavailable."""
        if self._writer is None:
            raise WorkerUnavailable
        if self._pong is None:
            self._pong = asyncio.get_running_loop().create_future()
            self._pinged = time.monotonic()
            self._writer.write(encode(Ping()))
        return await asyncio.shield(self._pong)

    async def admin(self, action: AdminAction, **arguments: str) -> AdminReply:
        """Has something done to the worker's store. Raises WorkerUnavailable. Some take as long as reading it all."""
        if self._writer is None:
            raise WorkerUnavailable
        command = Admin(uuid.uuid4().hex, action, arguments)
        answer: asyncio.Future[AdminReply] = asyncio.get_running_loop().create_future()
        self._admin[command.id] = answer
        self._writer.write(encode(command))
        try:
            reply = await answer
            if action == "cache_set" and reply.ok:
                self._division = {**self._division, **arguments} if arguments else {}
            return reply
        finally:
            self._admin.pop(command.id, None)

    async def close(self) -> None:
        """Leaves the worker (which aborts our requests), fails every open stream, and lets nobody wait for another."""
        self._closed = True
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.cancel()
            await asyncio.wait([receiver])
        self._disconnect("the server is shutting down")

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        reason = "the worker died; it is being restarted"
        try:
            while True:
                reply = await read_message(reader)
                if not self._dispatch(reply):
                    raise MessageError(f"unexpected {type(reply).__name__}")
        except (EOFError, OSError):
            pass
        except MessageError as error:
            reason = f"the worker sent nonsense ({error}); the connection was closed"
        self.lost += 1
        self._receiver = None
        self._disconnect(reason)

    def _dispatch(self, reply: object) -> bool:
        """False when this message has no business here."""
        match reply:
            case Admitted() | Tokens() | Done() | Failed():
                inbox = self._open.get(reply.id)
                if inbox is None:
                    return False
                inbox.put(reply)
                if inbox.ended:
                    del self._open[reply.id]
            case Stats() if self._stats is not None:
                self._stats.set_result(reply)
                self._stats = None
            case ModelInfo():
                self._info = reply
            case Pong() if self._pong is not None:
                self._pong.set_result(reply)
                self._pong, self._step_seconds = None, reply.step_seconds
            case AdminReply():
                waiting = self._admin.get(reply.id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
            case _:
                return False
        return True

    def _disconnect(self, reason: str) -> None:
        self._connected.clear()
        if self._closed:
            self._connected.set()
        self._info = None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        streams, self._open = self._open, {}
        for request_id, inbox in streams.items():
            inbox.put(Failed(request_id, "worker_lost", reason))
        answers: list[asyncio.Future[Any] | None] = [self._stats, self._pong, *self._admin.values()]
        for answer in answers:
            if answer is not None and not answer.done():
                answer.set_exception(WorkerUnavailable(reason))
                answer.exception()  # seen, even if nobody waits any more
        self._stats = self._pong = None
        self._step_seconds = 0.0
