"""Uses quiet moments to compute what the user's next message is expected to continue.

At most one such request runs, and only while no other is open. A new request ends it at once, and the engine does not
make that one wait for it: a background request is preempted within a step.
"""

from __future__ import annotations

import asyncio
import logging
from uuid import uuid4

from anyio import CapacityLimiter, to_thread

from engine.api import Anchor, Done, Request, Sampling
from engine.client import Engine, EngineError
from parsers.load import RenderError
from server.settings import ServerSettings
from sessions.idle import Followup, Prediction
from sessions.tracker import Sessions

_log = logging.getLogger(__name__)

_MOST = 16
"""Finished turns that may wait. Each keeps its conversation in memory."""


class Idle:
    """All calls come from the event loop. ``preempted`` counts requests that were ended for another."""

    def __init__(self, engine: Engine, sessions: Sessions, settings: ServerSettings, limiter: CapacityLimiter) -> None:
        self.preempted = 0
        self._engine = engine
        self._sessions = sessions
        self._settings = settings
        self._limiter = limiter
        self._waiting: dict[str, Followup] = {}
        """By session, the newest last."""
        self._offered = asyncio.Event()
        self._requests = 0
        self._current: Followup | None = None
        self._current_id = ""

    def offer(self, followup: Followup) -> None:
        """A turn has ended: what will continue it may be computed."""
        if self._settings.idle_prefill and followup.waits_for_user:
            self._requests += 1
            self._put(followup)

    def interrupt(self, session: str) -> None:
        """A request of ``session`` has come."""
        self._requests += 1
        self._waiting.pop(session, None)
        if self._current is not None:
            self._engine.abort(self._current_id)
            if self._current.session == session:
                self._current = None

    def forget(self) -> None:
        self._waiting.clear()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._offered.wait()
            if not self._waiting:
                self._offered.clear()
            elif await self._quiet() and self._waiting:
                _, self._current = self._waiting.popitem()
                try:
                    await self._compute(self._current)
                finally:
                    self._current = None

    def _put(self, followup: Followup) -> None:
        self._waiting.pop(followup.session, None)
        self._waiting[followup.session] = followup
        if len(self._waiting) > _MOST:
            del self._waiting[next(iter(self._waiting))]
        self._offered.set()

    async def _quiet(self) -> bool:
        """True when nothing happens for a while."""
        before = self._requests
        await asyncio.sleep(self._settings.idle_seconds)
        return before == self._requests and self._engine.open == 0

    async def _compute(self, followup: Followup) -> None:
        """A followup that had to give way to another session's request waits for the next quiet moment."""
        before = self._requests
        try:
            prediction = await to_thread.run_sync(self._sessions.predict(followup), limiter=self._limiter)
        except RenderError as error:
            _log.info("nothing is computed ahead for session %s: %s", followup.session, error)
            return
        info = self._engine.info
        if prediction is None or info is None or len(prediction.tokens) >= info.context_length:
            return
        done = await self._prefill(prediction) if before == self._requests else None
        if done is not None and done.reason in ("stop", "length"):
            self._sessions.predicted(prediction, done.reuse.new + done.reuse.replayed)
        elif before != self._requests:
            self.preempted += 1
            if self._current is followup:
                self._put(followup)

    async def _prefill(self, prediction: Prediction) -> Done | None:
        """None when the engine failed, or could not take it."""
        anchors = tuple(map(Anchor._make, prediction.anchors))
        request = prefill_request(prediction.tokens, anchors, prediction.session, prediction.namespace, background=True)
        try:
            stream = self._engine.submit(request)
        except EngineError as error:
            _log.info("nothing is computed ahead for session %s: %s", prediction.session, error)
            return None
        self._current_id = request.id
        async for reply in stream:
            if isinstance(reply, Done):
                return reply
        return None


def prefill_request(
    tokens: tuple[int, ...], anchors: tuple[Anchor, ...], session: str, namespace: str, *, background: bool = False
) -> Request:
    """Computes tokens and samples none."""
    sampling = Sampling(max_tokens=0, temperature=0.0)
    return Request(uuid4().hex, tokens, sampling, anchors, session=session, namespace=namespace, background=background)
