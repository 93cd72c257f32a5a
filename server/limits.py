"""How much each caller may ask for at once: one API key must not keep all others waiting."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from server.errors import ApiError

_RETRY_SECONDS = 2
"""When a refused client should ask again. Nobody knows when an answer will end and free a place."""


@dataclass
class _Caller:
    requests: int = 0
    refused: int = 0
    running: int = 0
    queue: deque[tuple[asyncio.Future[None], int]] = field(default_factory=deque)


class Limits:
    """At most ``running`` answers of one caller at a time (0: any number), ``waiting`` more requests in order of
    arrival and each for at most ``seconds``; the rest is refused."""

    def __init__(self, running: int, waiting: int, seconds: float) -> None:
        self._running = running
        self._waiting = waiting
        self._seconds = seconds
        self._callers: defaultdict[str, _Caller] = defaultdict(_Caller)

    async def enter(self, name: str, places: int = 1) -> Callable[[], None]:
        """Waits for ``places``, one for each answer. Returns the function that gives them back, to be called once.
        Raises ApiError."""
        caller = self._callers[name]
        caller.requests += 1
        if 0 < self._running < places:
            raise ApiError("invalid", f"{places} answers at once: this API key may have {self._running}", param="n")
        if self._fits(caller, places) and not caller.queue:
            caller.running += places
        else:
            await self._wait(caller, places)
        return lambda: self._leave(caller, places)

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

    def _fits(self, caller: _Caller, places: int) -> bool:
        return not self._running or caller.running + places <= self._running

    async def _wait(self, caller: _Caller, places: int) -> None:
        if len(caller.queue) >= self._waiting:
            raise self._refuse(caller, f"{caller.running} answers to this API key are running, {self._waiting} wait")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        caller.queue.append((place, places))
        try:
            async with asyncio.timeout(self._seconds):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self._leave(caller, places)  # they were ours just when we stopped waiting for them
            elif (place, places) in caller.queue:
                caller.queue.remove((place, places))
                self._leave(caller, 0)
            if isinstance(error, TimeoutError):
                raise self._refuse(caller, f"other requests of this API key took {self._seconds:g} s") from error
            raise

    def _refuse(self, caller: _Caller, why: str) -> ApiError:
        caller.refused += 1
        return ApiError("busy", f"{why}: try again later", retry_after=_RETRY_SECONDS)

    def _leave(self, caller: _Caller, places: int) -> None:
        """The places go to those who have waited longest."""
        caller.running -= places
        while caller.queue and self._fits(caller, caller.queue[0][1]):
            place, wanted = caller.queue.popleft()
            if not place.done():
                place.set_result(None)
                caller.running += wanted
