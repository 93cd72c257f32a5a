"""Raw connections to a server, and what is left of them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.server.support import Server

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Pipe]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Everything until the server closes, however it does."""
    out = bytearray()
    try:
        while data := await asyncio.wait_for(reader.read(1 << 16), 30):
            out += data
    except ConnectionResetError:
        pass
    return bytes(out)


def request(path: str, body: dict[str, Any], *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def shaped(answer: bytes, status: int) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode(), answer[:200]
    assert json.loads(body)["error"]["message"]


async def alive(server: Server) -> None:
    async with server.http() as http:
        assert (await http.get("/v1/models")).status_code == 200


def live(kind: type) -> int:
    """How many there are. Not by ``isinstance``: proxies load what they stand for when they are asked what it is."""
    gc.collect()
    return sum(issubclass(type(thing), kind) for thing in gc.get_objects())
