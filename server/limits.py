"""How much each caller may ask for at once: one API key must not keep all others waiting."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from server.errors import ApiError

_RETRY_SECONDS = 2
"""Until somebody who was refused should ask again; places are free when answers end, which nobody knows."""


@dataclass
class _Caller:
    requests: int = 0
    refused: int = 0
    running: int = 0
    queue: deque[asyncio.Future[None]] = field(default_factory=deque)


class Limits:
    """At most ``running`` generations of one caller at a time (0: any number), ``waiting`` more in order of arrival and
    each for at most ``seconds``; the rest is refused."""

    def __init__(self, running: int, waiting: int, seconds: float) -> None:
        self._running = running
        self._waiting = waiting
        self._seconds = seconds
        self._callers: defaultdict[str, _Caller] = defaultdict(_Caller)

    async def enter(self, name: str) -> Callable[[], None]:
        """Waits for a place and gives what returns it, to be called once. Raises ApiError."""
        caller = self._callers[name]
        caller.requests += 1
        if not self._running or caller.running < self._running:
            caller.running += 1
        else:
            await self._wait(caller)
        return lambda: self._leave(caller)

    def stats(self) -> dict[str, dict[str, int]]:
        return {
            name: {
                "requests": caller.requests,
                "refused": caller.refused,
                "running": caller.running,
                "waiting": len(caller.queue),
            }
            for name, caller in self._callers.items()
        }

    async def _wait(self, caller: _Caller) -> None:
        if len(caller.queue) >= self._waiting:
            raise self._refuse(caller, f"{self._running} requests of this API key are running, {self._waiting} wait")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        caller.queue.append(place)
        try:
            async with asyncio.timeout(self._seconds):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self._leave(caller)  # it was ours just when we stopped waiting for it
            elif place in caller.queue:
                caller.queue.remove(place)
            if isinstance(error, TimeoutError):
                raise self._refuse(caller, f"other requests of this API key took {self._seconds:g} s") from error
            raise

    def _refuse(self, caller: _Caller, why: str) -> ApiError:
        caller.refused += 1
        return ApiError("busy", f"{why}: try again later", retry_after=_RETRY_SECONDS)

    def _leave(self, caller: _Caller) -> None:
        """The place goes to whoever has waited longest."""
        while caller.queue:
            place = caller.queue.popleft()
            if not place.done():
                place.set_result(None)
                return
        caller.running -= 1
