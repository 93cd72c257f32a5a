"""OpenAI Responses over a WebSocket: the client sends ``response.create`` and gets the events of a stream, each in a
message of its own.

A socket answers one request after the other. It knows its last responses, stored or not: a request may name one of
them and send only what is new. What cannot be begun is told in an ``error`` event, and the socket goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from anyio import CancelScope
from starlette.websockets import WebSocket, WebSocketDisconnect

from server import endpoint, errors
from server.auth import UNKNOWN_KEY
from server.dump import dump
from server.errors import INTERNAL_MESSAGE, ApiError
from server.protocols.base import Inbound, invalid
from server.protocols.responses import History, reader
from server.sse import told
from server.state import ServerState

_log = logging.getLogger(__name__)

_REMEMBERED = 4
"""Responses that a socket knows; a client continues the last, or the one before it."""
_WAITING = 16
"""Requests that may wait for the one that is being answered."""
_REFUSED = 1008


async def talk(websocket: WebSocket, state: ServerState) -> None:
    """Until the client goes away, which ends what is being answered within a step."""
    await websocket.accept()
    state.counters.sockets += 1
    requests = _Requests(state.settings.max_body_bytes)
    socket = _Socket(websocket, state)
    answering = asyncio.create_task(socket.answer_all(requests))
    reading = asyncio.create_task(_read(websocket, requests))
    try:
        await asyncio.wait((answering, reading), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (answering, reading):
            task.cancel()
        await asyncio.wait((answering, reading))
    for task in (answering, reading):
        if not task.cancelled():
            task.result()


async def nowhere(websocket: WebSocket) -> None:
    """A path that has no sockets."""
    path = websocket.url.path
    error = ApiError("not_found", f"{path}: no WebSocket begins here; GET /v1/responses does")
    await websocket.send_denial_response(errors.response(error, errors.shape_of(path, websocket.headers)))


async def _read(websocket: WebSocket, requests: _Requests) -> None:
    while (message := await websocket.receive())["type"] != "websocket.disconnect":
        if not requests.put(message.get("text") or message.get("bytes") or ""):
            await websocket.close(_REFUSED, "too many requests wait")
            return


class _Requests:
    """Requests that wait, in order. All together may have the size that one may have."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._waiting: deque[str | bytes] = deque()
        self._arrived = asyncio.Event()

    def put(self, text: str | bytes) -> bool:
        """False when it is too much."""
        full = len(self._waiting) >= _WAITING or 0 < self._size > self._most - len(text)
        if not full:
            self._waiting.append(text)
            self._size += len(text)
            self._arrived.set()
        return not full

    async def get(self) -> str | bytes:
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        text = self._waiting.popleft()
        self._size -= len(text)
        return text


class _Known:
    """The responses that one socket remembers, in front of those that are stored. A conversation longer than a request
    may be is not remembered: the client has to send all of it, and is told that it is too long."""

    def __init__(self, stored: History, most: int) -> None:
        self.size = 0
        """Bytes of the request that is being answered."""
        self._stored = stored
        self._most = most
        self._known: OrderedDict[str, tuple[list[Any], int]] = OrderedDict()
        self._before = 0

    def find(self, namespace: str, id: str) -> list[Any] | None:
        items, self._before = self._known.get(id, (None, 0))
        return self._stored.find(namespace, id) if items is None else items

    def keep(self, namespace: str, session: str, response: dict[str, Any], items: list[Any]) -> None:
        self._stored.keep(namespace, session, response, items)
        size = self._before + self.size
        if size <= self._most:
            self._known[response["id"]] = [*items, *response["output"]], size
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def begin(self, size: int) -> None:
        self.size, self._before = size, 0


class _Socket:
    def __init__(self, websocket: WebSocket, state: ServerState) -> None:
        self._websocket = websocket
        self._state = state
        self._known = _Known(state.history, state.settings.max_body_bytes)
        self._protocol = reader(self._known, state.logprobs)

    async def answer_all(self, requests: _Requests) -> None:
        while True:
            text = await requests.get()
            self._state.counters.requests += 1
            if not self._state.keys.admits(self._websocket.state.key):
                self._state.counters.errors += 1
                await self._send(error_event(ApiError("unauthorized", UNKNOWN_KEY)))
                await self._websocket.close(_REFUSED, "the API key is no longer good")
                return
            try:
                await self._answer(text)
            except ApiError as error:
                self._state.counters.errors += 1
                _log.info("websocket %r: %r", self._websocket.url.path, error.message)
                await self._send(error_event(error))
            except WebSocketDisconnect:
                self._state.counters.disconnects += 1
                return
            except Exception:  # noqa: BLE001 (nobody else would tell the client, who waits)
                self._state.counters.errors += 1
                _log.exception("websocket %r failed", self._websocket.url.path)
                await self._send(error_event(ApiError("internal", INTERNAL_MESSAGE)))

    async def _answer(self, text: str | bytes) -> None:
        websocket, state = self._websocket, self._state
        self._known.begin(len(text))
        inbound = self._inbound(text)
        endpoint.check_model(state, inbound.meta.model)
        with ExitStack() as place:
            place.callback(await state.limits.enter(websocket.state.caller))
            generation = await endpoint.begin(state, inbound)
            try:
                async for events in told(state, generation, inbound.writer):
                    for _, payload in events:
                        await self._send(payload)
            except asyncio.CancelledError:
                state.counters.disconnects += 1
                raise
            finally:
                with CancelScope(shield=True):
                    await generation.close()

    def _inbound(self, text: str | bytes) -> Inbound:
        """Raises ApiError."""
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return endpoint.read(self._state, data, self._protocol, self._websocket.state.namespace, self._headers)

    def _headers(self, body: object) -> Mapping[str, str]:
        """What Codex says of a request, over HTTP in headers, is in its ``client_metadata`` here. Raises ApiError."""
        if not isinstance(body, dict) or body.get("type") != "response.create":
            raise invalid("type: the messages of this protocol are of type response.create", "type")
        told_here = body.get("client_metadata")
        headers = dict(self._websocket.headers)
        if isinstance(told_here, dict):
            headers |= {name.lower(): value for name, value in told_here.items() if isinstance(value, str)}
        return headers

    async def _send(self, payload: Mapping[str, Any] | str) -> None:
        """Raises WebSocketDisconnect."""
        text = payload if isinstance(payload, str) else dump(payload).decode()
        try:
            await self._websocket.send_text(text)
        except RuntimeError as error:  # the client has closed just now, and the reading task is about to learn it
            raise WebSocketDisconnect(1006) from error


def error_event(error: ApiError) -> dict[str, Any]:
    """With what an HTTP answer would have said."""
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
    return {
        "type": "error",
        "status": errors.status(error, "openai"),
        "headers": headers,
        **errors.body(error, "openai"),
    }
