"""Clients that are many, and stay: everybody is served, and nothing is left of those that went."""

from __future__ import annotations

import asyncio
import resource
import tracemalloc

import httpx
import pytest

from parsers.load import Family
from server.front import Http, Patience
from server.generation import Generation
from server.sse import EventStream
from tests.server.front_support import alive, ended, live
from tests.server.support import Answer, Server, serving
from tests.server.test_lifecycle import BODIES, TEXT

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


def allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= count
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


async def test_a_thousand_connections(family: Family) -> None:
    """None is cut off meanwhile, however long they take to open here."""
    allow_files(4096)
    async with serving(family, "Hi<|im_end|>", patience=Patience(head_seconds=600.0)) as server:
        port = int(server.url.rpartition(":")[2])
        pipes = [await asyncio.open_connection("127.0.0.1", port) for _ in range(1000)]
        for _, writer in pipes[::2]:
            writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: loc")
        await alive(server)
        for reader, writer in pipes[1::100]:
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, writer in pipes:
            writer.close()
        while live(Http):
            await asyncio.sleep(0.05)
        await alive(server)


async def test_more_connections_than_allowed_are_cut_off(family: Family) -> None:
    async with serving(family, patience=Patience(connections=8)) as server:
        port = int(server.url.rpartition(":")[2])
        pipes = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
        for reader, _ in pipes[8:]:
            assert await ended(reader) == b""
        for _, writer in pipes:
            writer.close()
        while live(Http):
            await asyncio.sleep(0.02)
        await alive(server)


async def idle_streams(server: Server, count: int) -> None:
    """Opens streams that say nothing, sees each kept alive, and leaves."""
    path = "/v1/messages"
    already = len(server.worker.requests)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=600, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as http:

        async def watch() -> None:
            async with http.stream("POST", path, json={**BODIES[path], "stream": True}) as response:
                async for line in response.aiter_lines():
                    if line == "event: ping":
                        seen.append(1)

        seen: list[int] = []
        tasks = [asyncio.create_task(watch()) for _ in range(count)]
        while len(server.worker.requests) < already + count or len(seen) < count:
            await asyncio.sleep(0.02)
        assert server.state.counters.open_generations == count
        await alive(server)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await server.idle()


def held() -> tuple[int, int, int]:
    return live(Generation), live(EventStream), live(Http)


async def test_two_hundred_idle_streams_come_and_go(family: Family) -> None:
    allow_files(4096)
    answer = Answer(TEXT, hold_at=4)
    async with serving(family, answer, max_open=250, keepalive_seconds=0.5) as server:
        await idle_streams(server, 200)
        while held() != (0, 0, 0):
            await asyncio.sleep(0.05)
        assert len(server.worker.aborted) == 200
        assert server.client.open == 0


@pytest.mark.deep
@pytest.mark.timeout(0)  # tracing makes it slow, and a loaded machine slower
async def test_streams_leave_no_memory_behind(family: Family) -> None:
    allow_files(4096)
    sizes = []
    async with serving(family, Answer(TEXT, hold_at=4), max_open=250, keepalive_seconds=0.5) as server:
        tracemalloc.start()
        for _ in range(6):
            await idle_streams(server, 200)
            while held() != (0, 0, 0):
                await asyncio.sleep(0.05)
            server.worker.requests.clear()
            server.worker.aborted.clear()
            for session in server.state.sessions.list():
                server.state.sessions.forget(session.id)
            server.state.forget_texts()
            sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert max(sizes[3:]) < sizes[2] + (1 << 20), sizes
