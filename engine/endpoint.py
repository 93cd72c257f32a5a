"""The worker's end of the socket: one thread with an event loop, so that the engine never waits for a peer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from engine.api import Abort, Admin, Command, GetStats, ModelInfo, Ping, Pong, Reply, Request, Shutdown
from engine.messages import MessageError, encode, read_message

NOBODY = 0
"""No connection has this number; what is sent to it is dropped."""

_FLUSH_SECONDS = 2.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Incoming:
    """A command, and the number of the connection it came by."""

    connection: int
    command: Command


@dataclass(frozen=True)
class Gone:
    """A connection has ended; nobody waits for its requests any more."""

    connection: int


class Endpoint:
    """Listens on a unix socket (0600) for one client at a time; a new connection replaces the one before.

    ``inbox`` is the only way from this thread to the engine's. Replies go the other way through ``send``; what the
    client does not read at once is buffered here, bounded by what the open requests may produce. ``step_began`` is the
    engine's heartbeat: the monotonic time at which its current step began, None between steps.
    """

    def __init__(self, path: Path, info: ModelInfo) -> None:
        """Binds and listens; raises OSError. Connections are served from ``start`` on."""
        self.inbox: SimpleQueue[Incoming | Gone] = SimpleQueue()
        self.step_began: float | None = None
        self._path = path
        self._hello = encode(info)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine socket", daemon=True)
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._connection = NOBODY
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        umask = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(umask)
        self._socket.listen()

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def send(self, connection: int, replies: Sequence[Reply]) -> None:
        """Sends one batch, in one write; dropped when that connection has ended. Raises MessageError."""
        frames = b"".join([encode(reply) for reply in replies])
        self._loop.call_soon_threadsafe(self._write, connection, frames)

    def introduce(self, info: ModelInfo) -> None:
        """What the model is to be known by from now on, to who is connected and to who will be."""
        self._loop.call_soon_threadsafe(self._introduce, encode(info))

    def close(self) -> None:
        """Sends what is still buffered, then removes the socket."""
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._path.unlink(missing_ok=True)

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, sock=self._socket)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            self._writer.close()
        self._connection += 1
        connection, self._writer = self._connection, writer
        try:
            writer.write(self._hello)
            while True:
                message = await read_message(reader)
                if isinstance(message, Ping):
                    began = self.step_began
                    writer.write(encode(Pong(0.0 if began is None else time.monotonic() - began)))
                    continue
                if not isinstance(message, Request | Abort | GetStats | Admin | Shutdown):
                    raise MessageError(f"unexpected {type(message).__name__}")
                self.inbox.put(Incoming(connection, message))
        except (EOFError, OSError):
            _log.info("connection %d ended", connection)
        except MessageError as error:
            _log.warning("connection %d closed: %s", connection, error)
        finally:
            if self._writer is writer:
                self._writer = None
            writer.close()
            self.inbox.put(Gone(connection))

    def _introduce(self, frame: bytes) -> None:
        self._hello = frame
        self._write(self._connection, frame)

    def _write(self, connection: int, frames: bytes) -> None:
        if connection == self._connection and self._writer is not None:
            self._writer.write(frames)

    async def _finish(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            with contextlib.suppress(OSError, TimeoutError):
                self._writer.close()
                await asyncio.wait_for(self._writer.wait_closed(), _FLUSH_SECONDS)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
