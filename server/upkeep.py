"""Looking after what is kept: pins, archives, forgetting, the store. Sessions of other API keys do not exist."""

from __future__ import annotations

from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from engine.api import AdminAction, AdminReply
from engine.client import EngineError, WorkerUnavailable
from server.control import found_session
from server.dump import Json
from server.endpoint import read_body, read_bytes
from server.errors import ApiError
from server.state import ServerState
from sessions.archive import ArchiveError

_ERASING_SECONDS = 60.0
"""How long a request to forget waits until the data is overwritten. The overwriting goes on after that."""


async def forget(state: ServerState, request: Request) -> Response:
    """Forgets a session, and what the engine's store holds for it alone. Without a worker nothing is forgotten."""
    session = found_session(state, request).summary.id
    forgotten = 0.0
    if state.settings.store is not None:
        reply = await _ask(state, "store_forget", session=session)
        forgotten = float(reply.values.get("forgotten", 0))
    state.sessions.forget(session, request.state.namespace)
    state.history.forget(session)
    state.forget_texts()
    await to_thread.run_sync(state.sessions.flush, _ERASING_SECONDS)
    return Json({"id": session, "deleted": True, "forgotten": forgotten})


async def pin(state: ServerState, request: Request, *, pinned: bool) -> Response:
    """A pinned session is never dropped for its age or for another; nor is what the store has of it."""
    session = found_session(state, request).summary.id
    checkpoints = 0.0
    if state.settings.store is not None:
        reply = await _ask(state, "store_pin" if pinned else "store_unpin", session=session)
        checkpoints = float(reply.values.get("checkpoints", 0))
    state.sessions.pin(session, pinned)
    return Json({"id": session, "pinned": pinned, "checkpoints": checkpoints})


async def export(state: ServerState, request: Request) -> Response:
    session = found_session(state, request).summary.id
    return Response(state.sessions.export(session), media_type="application/x-ndjson")


async def take_in(state: ServerState, request: Request) -> Response:
    """Imports an exported session, in place of one with the same id. It belongs to the API key that sends it."""
    data = await read_bytes(request, state.settings)
    try:
        session = state.sessions.import_archive(data.decode(), request.state.namespace)
    except (ArchiveError, UnicodeDecodeError) as error:
        raise ApiError("invalid", f"the session cannot be taken in: {error}") from error
    return Json({"id": session})


async def store(state: ServerState, request: Request) -> Response:
    """What the store holds, and what it has counted since the worker's start."""
    reply = await _store(state, "store_stat")
    return Json({"directory": str(state.settings.store), **reply.values})


async def tend_store(state: ServerState, request: Request) -> Response:
    """POST verify reads everything; gc frees what nobody needs; forget, with {"all": true}, everything."""
    match request.path_params["action"]:
        case "verify":
            return _answer(await _store(state, "store_verify"))
        case "gc":
            return _answer(await _store(state, "store_gc"))
        case "forget":
            body = await read_body(request, state.settings)
            return await _forget_all(state, body)
        case other:
            raise ApiError("not_found", f"nothing is called /v1/store/{other}; there are verify, gc and forget")


async def _forget_all(state: ServerState, body: Any) -> Response:
    if body != {"all": True}:
        raise ApiError("invalid", 'this forgets everything: say {"all": true}, or DELETE /v1/sessions/{id} for one')
    if state.keys.callers > 1:
        raise ApiError("forbidden", "several API keys share the store: forget sessions one by one")
    ours = "store" not in state.engine.lacks  # what a remote engine keeps is its own; sessions are ours all the same
    reply = await _store(state, "store_forget") if ours else None
    state.history.forget_all()
    sessions = state.sessions.forget_all()
    state.forget_texts()
    await to_thread.run_sync(state.sessions.flush, _ERASING_SECONDS)
    if ours:
        await _store(state, "store_gc")
    return Json({**(reply.values if reply else {}), "sessions": sessions})


async def cache(state: ServerState, request: Request) -> Response:
    """How the engine's memory is divided, and what that has found."""
    reply = await _cache(state, "cache_stat")
    try:
        values = (await state.engine.stats()).values
    except EngineError:
        values = {}
    prompt, resumed = (values.get(name, 0.0) for name in ("prompt_tokens", "resumed_tokens"))
    return Json({**reply.values, "prompt_hit_rate": resumed / prompt if prompt else 0.0})


async def divide(state: ServerState, request: Request) -> Response:
    """{"experts": N, "kv": tokens, "states": N}, one of them or more: all or nothing. {"auto": true}: the engine
    decides by itself again."""
    body = await read_body(request, state.settings)
    if state.keys.callers > 1:
        raise ApiError("forbidden", "several API keys share the memory: it is set when the server is started")
    if body == {"auto": True}:
        arguments = {}
    elif isinstance(body, dict) and body and all(type(value) is int and value >= 0 for value in body.values()):
        arguments = {name: str(value) for name, value in body.items()}
    else:
        raise ApiError("invalid", 'say how many: {"experts": N, "kv": tokens, "states": N}, or {"auto": true}')
    return Json({**(await _cache(state, "cache_set", **arguments)).values})


async def _cache(state: ServerState, action: AdminAction, **arguments: str) -> AdminReply:
    if (why := state.engine.lacks.get("store")) is not None:
        raise ApiError("not_found", f"this server's memory is not its own: {why}")
    reply = await _ask(state, action, **arguments)
    if not reply.ok:
        raise ApiError("invalid", reply.message)
    return reply


def _answer(reply: AdminReply) -> Response:
    return Json({"ok": reply.ok, **reply.values})


async def _store(state: ServerState, action: AdminAction) -> AdminReply:
    if state.settings.store is None:
        why = state.engine.lacks.get("store", "it was started with --no-store")
        raise ApiError("not_found", f"this server has no store: {why}")
    return await _ask(state, action)


async def _ask(state: ServerState, action: AdminAction, **arguments: str) -> AdminReply:
    """What the worker answered; it may have had to go on without the store, which is then empty."""
    try:
        return await state.engine.admin(action, **arguments)
    except WorkerUnavailable as error:
        raise ApiError("unavailable", f"no worker can do this now ({error}); try again", retry_after=1) from error
