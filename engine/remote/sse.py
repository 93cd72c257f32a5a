"""Server-sent events, as both kinds of servers write them: one line of JSON each, the last one ``[DONE]``."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

_LONGEST = 64 << 20
"""Bytes of an event: some have the whole answer, with its log probabilities."""


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each event. Raises httpx.RequestError, ValueError."""
    rest = b""
    async for part in response.aiter_bytes():
        # At line feeds alone: JSON may hold other ends of lines as they are, U+2028 for one.
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _LONGEST:
            raise ValueError("an event that does not end")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip().decode()
            if data == "[DONE]":
                return
            yield data
