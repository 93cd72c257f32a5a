"""The application: routes, and what happens to errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from server import control, endpoint, errors, metrics, openapi, stored, upkeep, websocket
from server.auth import Guard
from server.dump import Json
from server.errors import ApiError
from server.protocols import chat, completions, responses
from server.protocols.anthropic import ANTHROPIC
from server.protocols.base import WireProtocol
from server.state import ServerState

_log = logging.getLogger(__name__)
_HTTP_KINDS: dict[int, errors.ErrorKind] = {404: "not_found", 405: "method"}

Handler = Callable[[Request], Awaitable[Response]]


def create_app(state: ServerState) -> Starlette:
    """The ASGI application around a running engine client. Starting and stopping the engine is its owner's business."""
    started = time.time()

    def generation(protocol: WireProtocol) -> Handler:
        async def handle(request: Request) -> Response:
            return await endpoint.answer(request, state, protocol)

        return handle

    def kept(ask: Callable[[ServerState, Request], Any]) -> Handler:
        async def handle(request: Request) -> Response:
            return Json(ask(state, request))

        return handle

    async def count_tokens(request: Request) -> Response:
        return await endpoint.count(request, state)

    async def socket(connection: WebSocket) -> None:
        await websocket.talk(connection, state, state.history)

    async def models(request: Request) -> Response:
        return Json(control.models(state, started))

    async def model(request: Request) -> Response:
        return Json(control.model(state, request.path_params["id"], started))

    async def health(request: Request) -> Response:
        return control.health(state)

    async def stats(request: Request) -> Response:
        return Json(await control.stats(state))

    async def numbers(request: Request) -> Response:
        text = metrics.exposition(await control.stats(state), state.family.name)
        return Response(text, media_type=metrics.MEDIA_TYPE)

    async def described(request: Request) -> Response:
        return Json(openapi.document())

    async def sessions(request: Request) -> Response:
        return Json(control.sessions(state, request.state.namespace))

    async def session(request: Request) -> Response:
        if request.method == "DELETE":
            return await upkeep.forget(state, request)
        return Json(control.session(state, request))

    async def pin(request: Request) -> Response:
        return await upkeep.pin(state, request, request.url.path.endswith("/pin"))

    async def export(request: Request) -> Response:
        return upkeep.export(state, request)

    async def take_in(request: Request) -> Response:
        return await upkeep.take_in(state, request)

    async def store(request: Request) -> Response:
        return await upkeep.store(state)

    async def tend_store(request: Request) -> Response:
        return await upkeep.tend_store(state, request)

    async def cache(request: Request) -> Response:
        return await (upkeep.divide(state, request) if request.method == "POST" else upkeep.cache(state))

    async def fail(request: Request, error: Exception) -> Response:
        state.counters.errors += 1
        return _error_response(request, error)

    async def gone(request: Request, error: Exception) -> Response:
        state.counters.disconnects += 1
        return Response(status_code=499)  # nobody is left to read it

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        _log.info("serving %s", ", ".join(state.settings.models))
        idle = asyncio.create_task(state.idle.run(), name="idle prefill")
        yield
        idle.cancel()
        await asyncio.wait([idle])
        state.sessions.close()
        _log.info("stopped; %d generations were open", state.counters.open_generations)

    token_bytes = state.family.tokenizer.token_bytes
    app = Starlette(
        routes=[  # those that are asked for most are looked at first
            Route("/v1/messages", generation(ANTHROPIC), methods=["POST"]),
            Route("/v1/responses", generation(responses.reader(state.history, state.logprobs)), methods=["POST"]),
            Route("/v1/chat/completions", generation(chat.reader(state.logprobs)), methods=["POST"]),
            Route("/v1/completions", generation(completions.reader(token_bytes)), methods=["POST"]),
            Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
            Route("/v1/responses", _no_upgrade, methods=["GET"]),
            WebSocketRoute("/v1/responses", socket),
            WebSocketRoute("/{path:path}", websocket.nowhere),
            Route("/v1/responses/{id}", kept(stored.get)),
            Route("/v1/responses/{id}", kept(stored.delete), methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", kept(stored.input_items)),
            Route("/v1/responses/{id}/cancel", kept(stored.cancel), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{id:path}", model),
            Route("/v1/sessions", sessions),
            Route("/v1/sessions/import", take_in, methods=["POST"]),
            Route("/v1/sessions/{id}", session, methods=["GET", "DELETE"]),
            Route("/v1/sessions/{id}/export", export),
            Route("/v1/sessions/{id}/pin", pin, methods=["POST"]),
            Route("/v1/sessions/{id}/unpin", pin, methods=["POST"]),
            Route("/v1/store", store),
            Route("/v1/store/{action}", tend_store, methods=["POST"]),
            Route("/v1/cache", cache, methods=["GET", "POST"]),
            Route("/v1/stats", stats),
            Route("/metrics", numbers),
            Route("/health", health),
            Route("/openapi.json", described),
        ],
        middleware=[Middleware(Guard, settings=state.settings, keys=state.keys)],
        exception_handlers={ApiError: fail, HTTPException: fail, ClientDisconnect: gone, Exception: fail},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a path with a slash too many is unknown, and said to be so in shape
    return app


async def _no_upgrade(request: Request) -> Response:
    raise ApiError("upgrade", "GET /v1/responses is for WebSockets; POST a request, or GET /v1/responses/ID")


def _error_response(request: Request, error: Exception) -> Response:
    """In the caller's protocol. What went wrong inside the server is for the log only, where the ASGI server writes the
    traceback."""
    path = request.url.path
    match error:
        case ApiError():
            ours = error
        case HTTPException():
            kind = _HTTP_KINDS.get(error.status_code, "invalid")
            hint = " (GET /openapi.json describes every operation)" if error.status_code in _HTTP_KINDS else ""
            ours = ApiError(kind, f"{request.method} {path}: {error.detail}{hint}")
        case _:
            ours = ApiError("internal", errors.INTERNAL_MESSAGE)
    shape = errors.shape_of(path, request.headers)
    level = logging.WARNING if errors.status(ours, shape) >= 500 else logging.INFO
    _log.log(level, "%s %r: %d %r", request.method, path, errors.status(ours, shape), ours.message)
    return errors.response(ours, shape)
