"""A request that wants no answer, only that what it begins with lies computed when the next one comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Literal
from uuid import uuid4

from anyio import to_thread

from engine.api import Done, Failed, Request, Reuse, Sampling
from engine.client import EngineStream
from parsers.conversation import Conversation
from parsers.load import RenderError
from server import generate
from server.answers import Finished, GenerationEvent, Options, Progress, Usage
from server.errors import ApiError
from server.state import ServerState
from sessions.idle import Opening, opening
from sessions.tracker import RequestMeta

_log = logging.getLogger(__name__)


async def start(state: ServerState, meta: RequestMeta, conversation: Conversation, options: Options) -> Prefill:
    """Renders and submits what every continuation of the conversation begins with. Leaves no trace in its session.
    Raises ApiError; the caller must ``close`` what it gets."""
    info = await generate.worker(state)
    visit = state.sessions.begin(meta, conversation, info.incarnation, info.fingerprint)
    state.idle.interrupt(visit.session_id)
    most = generate.context_limit(state, info) - 1

    def work() -> Opening:
        least = state.family.least_tokens(visit.conversation)
        if least > most:
            raise ApiError.prompt_too_long(least, most, counted=False)
        return opening(state.family, visit.conversation, options.thinking, options.effort)

    try:
        begin = await to_thread.run_sync(work, limiter=state.render_limiter)
    except RenderError as error:
        raise ApiError("invalid", str(error)) from error
    if len(begin.tokens) > most:
        raise ApiError.prompt_too_long(len(begin.tokens), most)
    if not begin.tokens:
        return Prefill(state, visit.session_id, None, 0)
    request = Request(
        id=uuid4().hex,
        tokens=begin.tokens,
        sampling=Sampling(max_tokens=0, temperature=0.0),
        anchors=generate.engine_anchors(begin.anchors),
        session=visit.session_id,
        namespace=meta.namespace,
    )
    stream = generate.submit(state, request)
    return Prefill(state, visit.session_id, stream, len(begin.tokens))


class Prefill:
    """Iterates and closes as a generation does, and has nothing to say but its end. Without ``stream`` there is nothing
    that every continuation begins with."""

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
                    self.usage = self._counted(reply.reuse, reply.checkpoints)
                    yield [Finished("stop", "", self.usage, self.session_id)]
                    return

    async def close(self) -> None:
        """Idempotent. Before the end it aborts the engine's request."""
        if self._open:
            self._open = False
            self._state.counters.open_generations -= 1
            if self._stream is not None and not self._ended:
                await self._stream.abort()

    def _counted(self, reuse: Reuse, checkpoints: tuple[int, ...]) -> Usage:
        size = self.usage.prompt
        counters = self._state.counters
        counters.prompt_tokens += size
        counters.resumed_tokens += reuse.resumed
        counters.host_tokens += reuse.host
        counters.disk_tokens += reuse.disk
        counters.replayed_tokens += reuse.replayed
        kept = min(size, max(checkpoints, default=0))
        return replace(self.usage, cached=reuse.resumed, written=max(0, kept - reuse.resumed))
