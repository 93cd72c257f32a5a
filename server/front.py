"""HTTP/1.1 in front of the application, with an end to patience: whoever connects and says nothing, speaks too slowly,
or does not read, is let go."""

from __future__ import annotations

import asyncio
import gc
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from server import errors
from server.dump import dump
from server.errors import ApiError

BACKLOG = 1024
DRAIN_SECONDS = 5
"""How long ended streams get to reach their clients."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the pauses between an agent's requests, so that its pooled connections are rarely closed under it."""
MAX_HEAD_BYTES = 64 << 10
COLLECT_AFTER = 20_000
"""New objects until garbage is looked for: some requests, and not twice in each."""


@dataclass(frozen=True)
class Patience:
    """``head_seconds``: how long the head of a request may take, ``send_seconds``: how long a client may read nothing
    of what waits for it, ``connections``: how many may be open."""

    head_seconds: float = 20.0
    send_seconds: float = 120.0
    connections: int = 4096


@dataclass(frozen=True)
class Tls:
    certificate: Path
    key: Path

    def check(self) -> None:
        """Raises OSError (of which ssl.SSLError is one) when they cannot be used."""
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)


class FrontConfig(uvicorn.Config):
    def __init__(self, app: ASGIApp, patience: Patience, tls: Tls | None = None, **options: Any) -> None:
        super().__init__(
            app,
            http=Http,
            ws=Socket,
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else str(tls.key),
            **options,
        )
        self.patience = patience


def settle() -> None:
    """What is loaded by now stays: collections of garbage need not look at all the vocabulary again, which takes as
    long as a request. Nor is one worth its time after 700 new objects: each looks at every token of the prompts in
    flight. For a process that serves, and does nothing else."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 10, 10)


class _Reading:
    """Lets go of a client that reads nothing of what waits for it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end: asyncio.TimerHandle | None = None

    def expect(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        if self._end is None:
            self._end = loop.call_later(self._seconds, transport.abort)

    def seen(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None


class Socket(WebSocketsSansIOProtocol):
    def __init__(self, config: uvicorn.Config, *rest: Any, **named: Any) -> None:
        super().__init__(config, *rest, **named)
        patience = config.patience if isinstance(config, FrontConfig) else Patience()
        self._reading = _Reading(patience.send_seconds)

    async def send(self, message: ASGISendEvent) -> None:
        """A refusal ends the handshake, too; uvicorn would call it an error of the application."""
        await super().send(message)
        self.handshake_complete = self.handshake_complete or self.close_sent

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.seen()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.expect(self.loop, self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading.seen()


class Http(H11Protocol):
    def __init__(self, config: uvicorn.Config, *rest: Any, **named: Any) -> None:
        super().__init__(config, *rest, **named)
        self._patience = config.patience if isinstance(config, FrontConfig) else Patience()
        self._head: asyncio.TimerHandle | None = None
        self._reading = _Reading(self._patience.send_seconds)
        self._upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self._patience.connections:
            transport.abort()
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._upgraded:
            self._stop_waiting()
        elif self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()
        else:
            self._stop_waiting()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.expect(self.loop, self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading.seen()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP has no path, and so no protocol; it gets the shape that most clients read. An answer that has
        begun is only cut off."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = dump(errors.body(ApiError("invalid", msg), "openai"))
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        self.transport.write(head + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """The connection is another protocol's from here on, which closes it itself."""
        self._upgraded = True
        super().handle_websocket_upgrade(event)

    def _wait_for_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(self._patience.head_seconds, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
