"""From an HTTP request to an answer, for every wire protocol alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from anyio import CancelScope
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from server import errors, generate, prefill
from server.answers import Answering
from server.dump import Json
from server.errors import ApiError
from server.protocols import anthropic
from server.protocols.base import Inbound, WireProtocol
from server.settings import ServerSettings
from server.sse import EventStream
from server.state import ServerState

_T = TypeVar("_T")
_SLOWEST = 16 << 10
"""Bytes per second at which a body may come."""


async def answer(state: ServerState, request: Request, *, protocol: WireProtocol) -> Response:
    """Answers one generation request, as a stream or whole. Raises ApiError, and ClientDisconnect."""
    state.counters.requests += 1
    data = await read_bytes(request, state.settings)
    # A dict, because they are looked up often. Of several of one name the first counts.
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(request.headers.raw)}
    inbound = read(state, data, protocol, request.state.namespace, lambda _: headers)
    check_model(state, inbound.meta.model)
    return await _unless_disconnected(request, _answer(state, inbound, request.state.caller))


def read(
    state: ServerState,
    data: bytes,
    protocol: WireProtocol,
    namespace: str,
    headers: Callable[[object], Mapping[str, str]],
) -> Inbound:
    """``headers`` that come with a body. Raises ApiError."""
    field = protocol.field
    try:
        body, entry = state.bodies.read(data, (namespace, protocol.shape), field)
    except ValueError as error:
        raise ApiError("invalid", f"request body is not valid JSON: {error}") from error
    try:
        inbound = protocol.read(body, headers(body), namespace)
    except ValidationError as error:
        raise ApiError.from_validation(error, body) from error
    if entry is not None and inbound.request is not None:
        state.bodies.keep(entry, getattr(inbound.request, field), getattr(inbound.request, "tools", None))
    return inbound


async def _answer(state: ServerState, inbound: Inbound, caller: str) -> Response:
    with ExitStack() as place:
        place.callback(await state.limits.enter(caller, inbound.choices))
        generation = await begin(state, inbound)
        request_headers = errors.request_id_headers(errors.new_request_id())
        if inbound.stream:
            headers = {**request_headers, **generation.headers}
            return EventStream(state, generation, inbound.writer, headers, place.pop_all().close)
        try:
            body = await _whole(generation, inbound)
        finally:
            with CancelScope(shield=True):
                await generation.close()
        headers = {**request_headers, **generation.headers}
        return Json(body, headers=headers)


async def begin(state: ServerState, inbound: Inbound) -> Answering:
    """Raises ApiError. The caller must ``close`` what it gets."""
    if not inbound.answered:
        return await prefill.start(state, inbound.meta, inbound.conversation, inbound.options)
    return await generate.start(state, inbound.meta, inbound.raw or inbound.conversation, inbound.options)


async def _whole(generation: Answering, inbound: Inbound) -> dict[str, Any]:
    async for events in generation:
        for event in events:
            inbound.writer.write(event)
    return inbound.writer.body()


async def read_body(request: Request, settings: ServerSettings) -> object:
    """The parsed JSON body. Raises ApiError, also when it is no JSON."""
    data = await read_bytes(request, settings)
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError("invalid", f"request body is not valid JSON: {error}") from error


async def read_bytes(request: Request, settings: ServerSettings) -> bytes:
    """The body. Raises ApiError as soon as it shows to be larger than is accepted, or comes too slowly."""
    limit, seconds = settings.max_body_bytes, settings.body_seconds
    too_large = ApiError("too_large", f"request body is larger than the {limit} bytes this server accepts")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ApiError("invalid", f"content-encoding {encoding!r} is not supported")
    chunks, size = list[bytes](), 0
    deadline = asyncio.get_running_loop().time() + seconds
    try:
        async with asyncio.timeout_at(deadline) as patience:
            async for chunk in request.stream():
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    raise too_large
                patience.reschedule(deadline + size / _SLOWEST)
    except TimeoutError as error:
        raise ApiError("slow", f"the request body took more than {seconds:g} s: send it faster") from error
    return b"".join(chunks)


def check_model(state: ServerState, model: str) -> None:
    if model not in state.settings.models:
        raise ApiError(
            "model",
            f"model {model!r} does not exist; this server has {', '.join(state.settings.models)}",
            param="model",
        )


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, which is cancelled when the client goes away first: that raises ClientDisconnect."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for side in (task, gone):
            side.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if task.cancelled():
        raise ClientDisconnect
    return task.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def count(state: ServerState, request: Request) -> Json:
    """Anthropic's ``count_tokens``: the prompt is rendered and nothing else happens, to no session either."""
    body = await read_body(request, state.settings)
    try:
        meta, conversation, thought = anthropic.read_count(body, request.headers, request.state.namespace)
    except ValidationError as error:
        raise ApiError.from_validation(error, body) from error
    check_model(state, meta.model)
    prompt = await generate.render(state, state.sessions.normalise(meta, conversation), *thought)
    return Json({"input_tokens": len(prompt)}, headers=errors.request_id_headers(errors.new_request_id()))
