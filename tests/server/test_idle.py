"""Quiet moments are used, and end at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.api import Request
from parsers.load import Family
from tests.server.support import Answer, Server, serving

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

ANSWER = "Let me see.\n</think>\n\nA rather long answer with many words.<|im_end|>"
CALL = "</think>\n\n<tool_call>\n<function=look>\n</function>\n</tool_call><|im_end|>"
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
BRISK: Any = {"idle_prefill": True, "idle_seconds": 0.01}


def message(role: str, text: str) -> Any:
    return {"role": role, "content": text}


async def ask(server: Server, *messages: Any, session: str = "one", **more: Any) -> Any:
    """The answer's text and headers."""
    raw = await server.openai().chat.completions.with_raw_response.create(
        model="local-moe", messages=list(messages), extra_headers={"x-session-id": session}, **more
    )
    return raw.parse().choices[0].message, raw.headers


async def requests(server: Server, count: int) -> list[Request]:
    """The first ``count`` that the worker gets."""
    while len(server.worker.requests) < count:
        await asyncio.sleep(0.005)
    return server.worker.requests


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def numbers(server: Server) -> tuple[int, ...]:
    stats = server.state.sessions.stats()
    return tuple(int(stats[f"idle_{name}"]) for name in ("prefills", "hits", "waste"))


async def test_what_the_next_message_continues_is_computed_ahead(family: Family) -> None:
    seen: list[Request] = []

    def answers(request: Request) -> Answer:
        seen.append(request)
        if request.background:
            return Answer("", resumed=8)
        ahead = [r.tokens for r in seen if r.background and r.tokens == request.tokens[: len(r.tokens)]]
        resumed = max(map(len, ahead), default=0)
        return Answer(ANSWER, resumed=resumed, host=resumed // 2, disk=resumed // 4)

    async with serving(family, answers, **BRISK) as server:
        first = message("user", "Hello there")
        said, _ = await ask(server, first)
        _, ahead = await requests(server, 2)
        assert (ahead.background, ahead.sampling.max_tokens, ahead.watches) == (True, 0, ())
        assert ahead.session == seen[0].session
        assert ahead.anchors[-1].position == len(ahead.tokens)
        await until(lambda: server.state.sessions.stats()["idle_prefills"])
        _, headers = await ask(server, first, message("assistant", said.content), message("user", "And now?"))
        size = len(ahead.tokens)
        assert seen[2].tokens[:size] == ahead.tokens
        expected = f"resumed={size}, device={size - size // 2 - size // 4}, host={size // 2}, disk={size // 4}, "
        assert headers["x-ft-reuse"] == f"{expected}replayed=0, new={len(seen[2].tokens) - size}, cause=none"
        assert (await numbers(server))[1:] == (1, 0)
        async with server.http() as http:
            shown = (await http.get(f"/v1/sessions/{seen[0].session}")).json()["requests"][1]
            counted = (await http.get("/v1/stats")).json()["server"]
        assert (shown["host"], shown["disk"]) == (size // 2, size // 4)
        assert (counted["host_tokens"], counted["disk_tokens"]) == (size // 2, size // 4)


async def test_a_new_request_ends_it_at_once(family: Family) -> None:
    def answers(request: Request) -> Answer:
        return Answer("", admit=False) if request.background else Answer(ANSWER)

    async with serving(family, answers, **BRISK) as server:
        first = message("user", "Hello there")
        said, _ = await ask(server, first)
        _, ahead = await requests(server, 2)
        await ask(server, first, message("assistant", said.content), message("user", "And now?"))
        assert server.worker.aborted == [ahead.id]
        await until(lambda: server.state.idle.preempted == 1)
        assert (await numbers(server))[0] == 0
        _, _, _, later = await requests(server, 4)
        assert later.background and len(later.tokens) > len(ahead.tokens), "its turn has ended too"


async def test_another_session_only_puts_it_off(family: Family) -> None:
    release = asyncio.Event()

    def answers(request: Request) -> Answer:
        return Answer("", admit=False, release=release) if request.background else Answer(ANSWER)

    async with serving(family, answers, **BRISK) as server:
        await ask(server, message("user", "Hello there"))
        _, ahead = await requests(server, 2)
        release.set()
        _, _ = await ask(server, message("user", "Something else"), session="two")
        await until(lambda: server.state.sessions.stats()["idle_prefills"] >= 2 - server.state.idle.preempted)
        await until(lambda: server.state.sessions.stats()["idle_prefills"] == 2)
        background = [request.session for request in server.worker.requests if request.background]
        assert set(background) == {ahead.session, server.worker.requests[2].session}


async def test_nothing_is_computed_while_a_tool_runs_or_when_it_is_off(family: Family) -> None:
    for text, more, settings in ((CALL, {"tools": TOOLS}, BRISK), (ANSWER, {}, {**BRISK, "idle_prefill": False})):
        async with serving(family, text, **settings) as server:
            await ask(server, message("user", "Hello there"), **more)
            await asyncio.sleep(0.05)
            assert len(server.worker.requests) == 1


async def test_only_when_nothing_else_is_open(family: Family) -> None:
    release = asyncio.Event()

    def answers(request: Request) -> Answer:
        long = request.session == held and not request.background
        return Answer(ANSWER, hold_at=3, release=release) if long else Answer("" if request.background else ANSWER)

    held = ""
    async with serving(family, answers, **{**BRISK, "idle_seconds": 0.05}) as server:
        await ask(server, message("user", "Hi"), session="long", reasoning_effort="none")
        held = server.worker.requests[0].session
        running = asyncio.create_task(ask(server, message("user", "Hello"), session="long"))
        await until(lambda: server.client.open == 1)
        await ask(server, message("user", "Hello there"), session="short")
        before = len(server.worker.requests)
        await asyncio.sleep(0.1)
        assert len(server.worker.requests) == before
        release.set()
        await running
        await until(lambda: any(request.background for request in server.worker.requests))


async def test_a_worker_that_fails_at_it_does_no_harm(family: Family) -> None:
    def answers(request: Request) -> Answer:
        return Answer("", refuse=("internal", "cannot")) if request.background else Answer(ANSWER)

    async with serving(family, answers, **BRISK) as server:
        await ask(server, message("user", "Hello there"))
        await requests(server, 2)
        await until(lambda: server.client.open == 0)
        assert (await numbers(server))[0] == 0
        await ask(server, message("user", "Hello there"), session="two")
