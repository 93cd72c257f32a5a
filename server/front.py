"""HTTP/1.1 in front of the application, with time limits: clients that connect and say nothing, send too slowly, or do
not read are disconnected."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from server import errors
from server.dump import dump
from server.errors import ApiError, ErrorKind

BACKLOG = 1024
DRAIN_SECONDS = 5
"""How long ended streams get to reach their clients."""
UNREAD_SECONDS = 5
"""How long a refused client may go on sending: if the connection were closed at once, it would lose the answer."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the pauses between an agent's requests, so that its pooled connections are rarely closed under it."""
MAX_HEAD_BYTES = 64 << 10
"""Of a request's head, and of anything else without a declared length: sizes of chunks, trailers."""
LOOK_SECONDS = 0.1
"""How often it is checked whether a client is still there while nothing is read from it."""
_GONE = (7, 8)
"""TCP_CLOSE and TCP_CLOSE_WAIT, of Linux."""
_ANY_HEAD = b"GET / HTTP/1.1\r\n\r\n"
COLLECT_AFTER = 20_000
"""New objects until the next collection: those of some requests, instead of two collections in each."""


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
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else str(tls.key),
            **options,
        )
        self.patience = patience


def settle() -> None:
    """Tunes the garbage collector of a process that serves and does nothing else. What is loaded by now stays: going
    through the vocabulary again would take as long as a request. Collections become rarer than after every 700 new
    objects, because each goes through every token of the prompts in flight."""
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
        self._rest = b""
        self.conn.reject = _no_handshake  # type: ignore[method-assign]

    def begin(self, request: Request, rest: bytes) -> None:
        """With a head that was read already: the library would not answer one that it finds too long. ``rest`` came
        behind it, and may be looked at once the handshake is complete."""
        self._rest = rest
        self.conn.receive_data(_ANY_HEAD)
        self.conn.events_received()
        self.handle_connect(request)

    async def send(self, message: ASGISendEvent) -> None:
        """A refusal ends the handshake, too; uvicorn would call it an error of the application."""
        await super().send(message)
        self.handshake_complete = self.handshake_complete or self.close_sent
        if self._rest and not self.close_sent:
            rest, self._rest = self._rest, b""
            self.data_received(rest)

    def send_receive_event_to_app(self) -> None:
        """Bytes, whatever they came as. Text that is none ends the connection; it is no error of ours."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            self.frames = [b"".join(self.frames)]
            try:
                self.frames[0].decode()
            except UnicodeDecodeError:
                self.conn.fail(CloseCode.INVALID_DATA, "the text is no UTF-8")
                self.handle_parser_exception()
                return
            self.curr_msg_data_type = "bytes"
        super().send_receive_event_to_app()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.seen()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Nothing more is read meanwhile: each ping would be one more answer that waits."""
        super().pause_writing()
        self.transport.pause_reading()
        self._reading.expect(self.loop, self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()
        self._reading.seen()


def _no_handshake(status: HTTPStatus | int, text: str) -> Response:
    """Why, in the library's words, in the shape of the one protocol that has sockets."""
    kinds: dict[int, ErrorKind] = {405: "method", 426: "upgrade", 500: "internal"}
    body = dump(errors.body(ApiError(kinds.get(status, "invalid"), text.partition("\n")[0]), "openai"))
    headers = Headers({"connection": "close", "content-type": "application/json", "content-length": str(len(body))})
    return Response(int(status), HTTPStatus(status).phrase, headers, body)


class Http(HttpToolsProtocol):
    def __init__(self, config: uvicorn.Config, *rest: Any, **named: Any) -> None:
        super().__init__(config, *rest, **named)
        self._patience = config.patience if isinstance(config, FrontConfig) else Patience()
        self._head: asyncio.TimerHandle | None = None
        self._reading = _Reading(self._patience.send_seconds)
        self._upgraded = False
        self._in_head, self._in_body, self._unread = False, False, 0
        """``_unread``: bytes that came since anything whole did."""
        self._looking: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._over = False
        """Nothing more is read of it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self._patience.connections:
            transport.abort()
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._unset_keepalive_if_required()
        if self._looking is not None:
            self._looking.cancel()
        self.resume_writing()
        super().connection_lost(exc)
        if (cycle := self._answering) is not None and not cycle.response_complete:  # another may wait behind it
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._unread += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self._upgrade(data[upgrade.args[0] :])
            else:
                self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._unread > MAX_HEAD_BYTES and not (self._over or self._upgraded):
            self.send_400_response("Too much of it has no end.")
        self._wait()

    def _wait(self) -> None:
        """For what comes next."""
        if self._upgraded:
            self._stop_waiting()
        elif self._over:
            return
        elif self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()
        else:
            self._stop_waiting()
            if self.flow.read_paused and self._looking is None:
                self._look()

    def _look(self) -> None:
        """While a request waits behind another nothing more is read, not even that the client goes away: the system
        knows."""
        self._looking = None
        if self.flow.read_paused and not self.transport.is_closing():
            pipe = self.transport.get_extra_info("socket")
            if pipe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _GONE:
                self.transport.abort()
            else:
                self._looking = self.loop.call_later(LOOK_SECONDS, self._look)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.expect(self.loop, self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading.seen()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP. It has no path, and so no protocol: it gets the shape that most clients read. Whole
        requests before it still get their answers, and nothing follows them. If the answer to the broken request has
        begun, it is only cut off."""
        self._over = True
        self._stop_waiting()
        if (cycle := self._answering) is not None:
            answering = not cycle.response_complete
            if answering and not cycle.more_body:
                whole = [one for one in self.pipeline if not one[0].more_body]  # the last one first
                (whole[0][0] if whole else cycle).keep_alive = False
                self.pipeline = deque(whole)
                return
            if cycle.response_started if answering else self._in_body:
                self.transport.abort()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = dump(errors.body(ApiError("invalid", msg), "openai"))
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        self.transport.write(head + b"connection: close\r\n\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._head = self.loop.call_later(UNREAD_SECONDS, self.transport.close)

    def on_message_begin(self) -> None:
        self._in_head, self._in_body = True, False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES or self.parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError
        if self._ignored():
            return
        self._in_head, self._in_body, self._unread = False, True, 0
        if b"://" in self.url[:8]:  # the name in it counts for more than the header
            self.headers[:] = [one for one in self.headers if one[0] != b"host"]
            _, _, host, *path = self.url.split(b"/", 3)
            self.headers.append((b"host", host))
            self.url = b"/" + b"".join(path)
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # not behind the body: the application has begun
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ignored():
            self._in_body, self._unread = False, 0
            super().on_message_complete()

    def _ignored(self) -> bool:
        """Is this a head that asks for a protocol which nobody speaks here?"""
        return self.parser.should_upgrade() and not self._should_upgrade()

    def _upgrade(self, rest: bytes) -> None:
        """The connection is the socket's from here on, so nobody may wait for an answer on it."""
        if self._answering is not None and not self._answering.response_complete:
            self.send_400_response("A WebSocket begins behind an answer, not in it.")
            return
        headers = Headers((name.decode("ascii"), value.decode("latin-1")) for name, value in self.scope["headers"])
        if "content-length" in headers or "transfer-encoding" in headers:
            self.send_400_response("A WebSocket begins without a body.")
            return
        self._upgraded = True
        self.connections.discard(self)
        talking = Socket(self.config, self.server_state, self.app_state)
        talking.connection_made(self.transport)
        self.transport.set_protocol(talking)
        talking.begin(Request(self.url.decode("ascii"), headers, self.scope["method"]), rest)

    def _without_upgrade(self, rest: bytes) -> None:
        """The request as if it did not ask for that; the parser would have nothing behind its head."""
        headers = [b"%b: %b\r\n" % one for one in self.headers if one[0] != b"upgrade"]
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self.data_received(b"".join((line, *headers, b"\r\n", rest)))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        plain = cycle.keep_alive and not cycle.waiting_for_100_continue
        super()._start_asgi_task(cycle, app if plain else _ended(cycle, app))

    def _wait_for_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(self._patience.head_seconds, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


def _ended(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """For answers that end with the connection: HTTP/1.0 knows no chunks, and a client that was not told to send its
    body may send something else instead. What is left of the request is read first."""

    async def answered(scope: Any, receive: Any, send: Any) -> None:
        told = True

        async def put(message: Any) -> None:
            if scope["http_version"] == "1.0":
                cycle.chunked_encoding, cycle.expected_content_length = False, len(message.get("body", b""))
            await send(message)

        async def sent(message: Any) -> None:
            nonlocal told
            if cycle.waiting_for_100_continue and cycle.more_body:
                told = cycle.keep_alive = False
            ends = message["type"] == "http.response.body" and not message.get("more_body")
            if ends and told and cycle.more_body and not cycle.keep_alive:
                await put({**message, "more_body": True})
                await _drained(cycle)
                message = {"type": "http.response.body"}
            await put(message)

        await app(scope, receive, sent)

    return answered


async def _drained(cycle: RequestResponseCycle) -> None:
    """Reads what is left of the request."""
    with suppress(TimeoutError):
        async with asyncio.timeout(UNREAD_SECONDS):
            while cycle.more_body and not cycle.disconnected:
                await cycle.receive()
