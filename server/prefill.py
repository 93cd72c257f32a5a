"""Requests without an answer: they have the beginning of a conversation computed ahead of its next request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Literal

from engine.api import Done, Failed
from engine.client import EngineStream
from parsers.conversation import Conversation
from server import generate
from server.answers import Finished, GenerationEvent, Options, Progress, Usage
from server.errors import ApiError
from server.generation import by_origin
from server.idle import prefill_request
from server.state import ServerState
from sessions.idle import opening
from sessions.tracker import RequestMeta

_log = logging.getLogger(__name__)


async def start(state: ServerState, meta: RequestMeta, conversation: Conversation, options: Options) -> Prefill:
    """Renders and submits what every continuation of the conversation begins with. Leaves no trace in its session.
    Raises ApiError; the caller must ``close`` what it gets."""
    info = await generate.worker(state)
    visit = state.sessions.begin(meta, conversation, info.incarnation, info.fingerprint)
    state.idle.interrupt(visit.session_id)
    asked = visit.conversation
    begin = await generate.rendered(
        state, asked, partial(opening, state.family, asked, options.thinking, options.effort)
    )
    most = generate.context_limit(state, info) - 1
    if len(begin.tokens) > most:
        raise ApiError.prompt_too_long(len(begin.tokens), most)
    if not begin.tokens:
        return Prefill(state, visit.session_id, None, 0)
    request = prefill_request(begin.tokens, generate.engine_anchors(begin.anchors), visit.session_id, meta.namespace)
    stream = generate.submit(state, request)
    return Prefill(state, visit.session_id, stream, len(begin.tokens))


class Prefill:
    """Iterates and closes as a generation does, with no event but its end. Without ``stream`` there is nothing to
    compute."""

    report: Literal[None] = None

    def __init__(self, state: ServerState, session_id: str, stream: EngineStream | None, tokens: int) -> None:
        self.session_id = session_id
        self.usage = Usage(tokens)
        self._state = state
        self._stream = stream
        self._open, self._ended = True, stream is None
        state.counters.open_generations += 1

    @property
    def headers(self) -> dict[str, str]:
        return {"x-ft-session": self.session_id}

    async def __aiter__(self) -> AsyncIterator[list[GenerationEvent]]:
        if self._stream is None:
            yield [Finished("stop", "", self.usage, self.session_id)]
            return
        while True:
            try:
                async with asyncio.timeout(self._state.settings.keepalive_seconds):
                    reply = await anext(self._stream)
            except TimeoutError:
                yield [Progress()]
                continue
            match reply:
                case Failed():
                    self._ended = True
                    _log.warning("request %s failed: %s: %r", reply.id, reply.kind, reply.message)
                    raise ApiError.from_engine(reply.kind, reply.message)
                case Done():
                    if reply.reason in ("error", "abort"):
                        raise ApiError("internal", f"the engine ended the request: {reply.reason}")
                    self._ended = True
                    self.usage = Usage.of(self.usage.prompt, reply.reuse.resumed, reply.checkpoints)
                    self._state.counters.count(by_origin(reply.reuse))
                    yield [Finished("stop", "", self.usage, self.session_id)]
                    return

    async def close(self) -> None:
        """Idempotent. Before the end it aborts the engine's request."""
        if self._open:
            self._open = False
            self._state.counters.open_generations -= 1
            if self._stream is not None and not self._ended:
                await self._stream.abort()
