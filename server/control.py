"""Looking at the server: models, health, sessions, numbers, and its own description."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.client import EngineError
from server import openapi
from server.dump import Json
from server.errors import ApiError
from server.metrics import MEDIA_TYPE, exposition
from server.state import ServerState
from sessions.session import SessionDetail


async def models(state: ServerState, request: Request) -> Json:
    """One list that satisfies both SDKs."""
    entries = [_model(state, name) for name in state.settings.models]
    ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]}
    return Json({"object": "list", "data": entries, "has_more": False, **ends})


async def model(state: ServerState, request: Request) -> Json:
    name = request.path_params["id"]
    if name not in state.settings.models:
        raise ApiError("model", f"model {name!r} does not exist; see GET /v1/models")
    return Json(_model(state, name))


def _model(state: ServerState, name: str) -> dict[str, Any]:
    info = state.engine.info
    limits = [size for size in (state.settings.context_length, info.context_length if info else 0) if size]
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "owned_by": "local",
        "created": int(state.started),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(state.started)),
        "context_length": min(limits, default=0),
        "max_output_tokens": state.settings.max_output_tokens or min(limits, default=0),
        "reasoning_efforts": list(state.family.efforts),
    }


async def health(state: ServerState, request: Request) -> Json:
    """200 while a worker is connected and makes progress, else 503; the same fields in both cases."""
    info = state.engine.info
    stalled = state.engine.stalled_seconds > state.settings.stalled_seconds
    return Json(
        {
            "status": "no_worker" if info is None else "stalled" if stalled else "ok",
            "worker": "absent" if info is None else "stalled" if stalled else "ready",
            "incarnation": info.incarnation if info else None,
            "architecture": info.architecture if info else None,
            "model": state.settings.model_name,
            "workers_lost": state.engine.lost,
            "engine": {**state.engine.about, "lacks": dict(state.engine.lacks)},
        },
        status_code=503 if info is None or stalled else 200,
    )


async def stats(state: ServerState, request: Request) -> Json:
    return Json(await _numbers(state))


async def metrics(state: ServerState, request: Request) -> Response:
    return Response(exposition(await _numbers(state), state.family.name), media_type=MEDIA_TYPE)


async def _numbers(state: ServerState) -> dict[str, Any]:
    """Counters and gauges of the three rooms, what the parser let pass by rule, what the engine lacks, and what each
    API key asks for (one without a name where there are no keys). ``engine`` is null while there is no worker."""
    engine: Mapping[str, float] | None
    try:
        engine = (await state.engine.stats()).values
    except EngineError:
        engine = None
    return {
        "engine": engine,
        "sessions": state.sessions.stats(),
        "server": {
            **state.counters.values(),
            "idle_preempted": state.idle.preempted,
            "workers_lost": state.engine.lost,
            "max_body_bytes": state.settings.max_body_bytes,
        },
        "tolerated": dict(state.tolerated),
        "lacks": dict(state.engine.lacks),
        "keys": state.limits.stats(),
    }


async def described(state: ServerState, request: Request) -> Json:
    return Json(openapi.document())


async def sessions(state: ServerState, request: Request) -> Json:
    summaries = state.sessions.list(request.state.namespace)
    return Json({"object": "list", "data": [asdict(summary) for summary in summaries]})


async def session(state: ServerState, request: Request) -> Json:
    """The timeline: where each request's prompt came from, and why what was computed again was."""
    return Json(asdict(found_session(state, request)))


def found_session(state: ServerState, request: Request) -> SessionDetail:
    """The session that the path names. Those of other API keys do not exist. Raises ApiError."""
    name = request.path_params["id"]
    detail = state.sessions.get(name, request.state.namespace)
    if detail is None:
        raise ApiError("not_found", f"there is no session {name!r}; see GET /v1/sessions")
    return detail
