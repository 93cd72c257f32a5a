"""Server-sent events: one answer as a stream that ends with the connection, however that ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from anyio import CancelScope
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.answers import Answering
from server.dump import dump
from server.errors import INTERNAL_MESSAGE, ApiError
from server.protocols.base import Sse, Writer
from server.state import ServerState

_log = logging.getLogger(__name__)
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""No proxy may store the stream, or buffer it."""


class EventStream(StreamingResponse):
    """Writes a generation as it is made. Keep-alives come from the generation, as events that clients count.

    The generation is closed when the response ends: after the last event, when the client goes away (also before the
    first event) or stops reading, which ends its connection (``front``), or when the server shuts down; then ``ended``
    is called.
    """

    def __init__(
        self,
        state: ServerState,
        generation: Answering,
        writer: Writer,
        headers: Mapping[str, str],
        ended: Callable[[], None],
    ) -> None:
        super().__init__(self._frames(), headers={**headers, **_HEADERS}, media_type="text/event-stream")
        self._state = state
        self._generation = generation
        self._writer = writer
        self._ended = ended
        self._finished = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._finished:
                self._state.counters.disconnects += 1
            with CancelScope(shield=True):
                await self._generation.close()
            self._ended()

    async def _frames(self) -> AsyncIterator[bytes]:
        generation = self._generation
        async for events in told(self._state, generation, self._writer):
            yield frames(events)
        self._finished = True
        if generation.report is not None:
            yield f": x-ft-reuse {generation.report.header()}\n\n".encode()


async def told(state: ServerState, generation: Answering, writer: Writer) -> AsyncIterator[list[Sse]]:
    """All events of an answer in batches, as they become due, up to its end or its failure."""
    yield writer.begin(generation.usage)
    try:
        async for events in generation:
            yield [frame for event in events for frame in writer.write(event)]
    except ApiError as error:
        state.counters.errors += 1
        _log.warning("session=%s: stream ended with an error: %r", generation.session_id, error.message)
        yield writer.failed(error)
    except Exception:  # noqa: BLE001 (the headers are out: a bug, too, must end the stream as the protocol says)
        state.counters.errors += 1
        _log.exception("session=%s: stream failed", generation.session_id)
        yield writer.failed(ApiError("internal", INTERNAL_MESSAGE))


def frames(events: Iterable[Sse]) -> bytes:
    """Wire form of events. A str payload is sent as it is."""
    out = []
    for name, payload in events:
        data = payload.encode() if isinstance(payload, str) else dump(payload)
        out.append(b"%sdata: %s\n\n" % (f"event: {name}\n".encode() if name else b"", data))
    return b"".join(out)
