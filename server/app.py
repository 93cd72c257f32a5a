"""The application: routes, and what happens to errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from server import control, endpoint, errors, stored, upkeep, websocket
from server.auth import Guard
from server.errors import ApiError
from server.protocols import chat, completions, responses
from server.protocols.anthropic import ANTHROPIC
from server.protocols.base import WireProtocol
from server.state import ServerState

_log = logging.getLogger(__name__)
_HTTP_KINDS: dict[int, errors.ErrorKind] = {404: "not_found", 405: "method"}

Handler = Callable[[ServerState, Request], Awaitable[Response]]


def create_app(state: ServerState) -> Starlette:
    """The ASGI application around a running engine client. Starting and stopping the engine is its owner's business."""

    def route(path: str, **handlers: Handler) -> Route:
        """``handlers`` by method."""

        async def handle(request: Request) -> Response:
            handler = handlers.get(request.method) or handlers["GET"]  # for HEAD too
            return await handler(state, request)

        return Route(path, handle, methods=[*handlers])

    def generation(path: str, protocol: WireProtocol) -> Route:
        return route(path, POST=partial(endpoint.answer, protocol=protocol))

    token_bytes = state.family.tokenizer.token_bytes
    fail = partial(_fail, state)
    app = Starlette(
        routes=[  # matched in order: the most frequent first
            generation("/v1/messages", ANTHROPIC),
            generation("/v1/responses", responses.reader(state.history, state.logprobs)),
            generation("/v1/chat/completions", chat.reader(state.logprobs)),
            generation("/v1/completions", completions.reader(token_bytes)),
            route("/v1/messages/count_tokens", POST=endpoint.count),
            route("/v1/responses", GET=_no_upgrade),
            WebSocketRoute("/v1/responses", partial(websocket.talk, state=state)),
            WebSocketRoute("/{path:path}", websocket.nowhere),
            route("/v1/responses/{id}", GET=stored.get, DELETE=stored.delete),
            route("/v1/responses/{id}/input_items", GET=stored.input_items),
            route("/v1/responses/{id}/cancel", POST=stored.cancel),
            route("/v1/models", GET=control.models),
            route("/v1/models/{id:path}", GET=control.model),
            route("/v1/sessions", GET=control.sessions),
            route("/v1/sessions/import", POST=upkeep.take_in),
            route("/v1/sessions/{id}", GET=control.session, DELETE=upkeep.forget),
            route("/v1/sessions/{id}/export", GET=upkeep.export),
            route("/v1/sessions/{id}/pin", POST=partial(upkeep.pin, pinned=True)),
            route("/v1/sessions/{id}/unpin", POST=partial(upkeep.pin, pinned=False)),
            route("/v1/store", GET=upkeep.store),
            route("/v1/store/{action}", POST=upkeep.tend_store),
            route("/v1/cache", GET=upkeep.cache, POST=upkeep.divide),
            route("/v1/stats", GET=control.stats),
            route("/metrics", GET=control.metrics),
            route("/health", GET=control.health),
            route("/openapi.json", GET=control.described),
        ],
        middleware=[Middleware(Guard, settings=state.settings, keys=state.keys)],
        exception_handlers={
            ApiError: fail,
            HTTPException: fail,
            ClientDisconnect: partial(_gone, state),
            Exception: fail,
        },
        lifespan=partial(_lifespan, state),
    )
    app.router.redirect_slashes = False  # a path with a slash too many is unknown, and answered as such
    return app


@asynccontextmanager
async def _lifespan(state: ServerState, app: Starlette) -> AsyncIterator[None]:
    _log.info("serving %s", ", ".join(state.settings.models))
    idle = asyncio.create_task(state.idle.run(), name="idle prefill")
    yield
    idle.cancel()
    await asyncio.wait([idle])
    state.sessions.close()
    _log.info("stopped; %d generations were open", state.counters.open_generations)


async def _fail(state: ServerState, request: Request, error: Exception) -> Response:
    state.counters.errors += 1
    return _error_response(request, error)


async def _gone(state: ServerState, request: Request, error: Exception) -> Response:
    state.counters.disconnects += 1
    return Response(status_code=499)  # nobody is left to read it


async def _no_upgrade(state: ServerState, request: Request) -> Response:
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
