"""Streams that wait, break, or are left alone: nothing hangs, nothing leaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from engine.client import WorkerUnavailable
from parsers.load import Family
from server.blocks import Assembler
from server.errors import INTERNAL_MESSAGE
from server.script import Script
from tests.server.support import Answer, Server, events, serving

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

USER: Any = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "local-moe", "max_tokens": 400, "messages": [USER]},
    "/v1/responses": {"model": "local-moe", "input": "Hi", "reasoning": {"effort": "none"}},
    "/v1/chat/completions": {"model": "local-moe", "messages": [USER], "reasoning_effort": "none"},
    "/v1/completions": {"model": "local-moe", "prompt": "Say it once more, please.", "max_tokens": 400},
}
TEXT = "Some words that take a while<|im_end|>"
PATHS = pytest.mark.parametrize("path", list(BODIES))


async def lines_until(lines: AsyncIterator[str], mark: str) -> list[str]:
    seen = []
    async for line in lines:
        seen.append(line)
        if mark in line:
            return seen
    raise AssertionError(f"{mark!r} never came: {seen}")


@PATHS
async def test_silence_is_filled_with_events(family: Family, path: str) -> None:
    marks = {
        "/v1/messages": "event: ping",
        "/v1/responses": "event: response.in_progress",
        "/v1/chat/completions": '"delta":{}',
        "/v1/completions": '"text":""',
    }
    answer = Answer(TEXT, hold_at=4)
    async with (
        serving(family, answer, keepalive_seconds=0.02) as server,
        server.http() as http,
        http.stream("POST", path, json={**BODIES[path], "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        for _ in range(4):
            await lines_until(lines, marks[path])
        answer.release.set()
        rest = [line async for line in lines]
    frames = events("\n".join(rest))
    assert frames
    for _, data in frames:
        assert data == "[DONE]" or json.loads(data)


@PATHS
async def test_headers_do_not_wait_for_admission_for_ever(family: Family, path: str) -> None:
    answer = Answer(TEXT, admit=False)
    async with serving(family, answer, admission_seconds=0.02) as server, server.http() as http:
        async with http.stream("POST", path, json={**BODIES[path], "stream": True}) as response:
            assert response.headers["x-ft-reuse"] == "pending"
            answer.release.set()
            body = "".join([text async for text in response.aiter_text()])
        assert server.state.sessions.list()
    assert ": x-ft-reuse resumed=0" in body


@PATHS
@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_aborts_the_engine_s_work(family: Family, path: str, stream: bool) -> None:
    answer = Answer(TEXT, hold_at=9)
    async with serving(family, answer) as server:
        await leave(server, path, {**BODIES[path], "stream": stream})
        await asyncio.wait_for(server.worker.abort_seen.wait(), 10)
        await server.idle()
        assert server.worker.aborted == [server.worker.requests[0].id]
        assert server.state.counters.disconnects == 1


async def leave(server: Server, path: str, body: dict[str, Any]) -> None:
    """A client that goes away once the engine has its request."""
    async with server.http() as http:
        posting = asyncio.create_task(_read(http, path, body))
        while not server.worker.requests:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)


async def _read(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    async with http.stream("POST", path, json=body) as response:
        async for _ in response.aiter_lines():
            pass


async def test_a_disconnect_before_admission_aborts_too(family: Family) -> None:
    async with serving(family, Answer(TEXT, admit=False)) as server:
        await leave(server, "/v1/messages", {**BODIES["/v1/messages"], "stream": True})
        await asyncio.wait_for(server.worker.abort_seen.wait(), 10)
        await server.idle()


async def test_partial_text_of_an_interrupted_answer_is_spliced(family: Family) -> None:
    async with serving(family, Answer(TEXT, hold_at=9)) as server:
        body = {**BODIES["/v1/messages"], "stream": True}
        async with server.http() as http, http.stream("POST", "/v1/messages", json=body) as response:
            text = ""
            async for line in response.aiter_lines():
                if line.startswith("data: ") and (delta := json.loads(line[6:]).get("delta")):
                    text += delta["text"]
                if len(text) >= 9:
                    break
        await server.idle()
        history = [USER, {"role": "assistant", "content": text}, {"role": "user", "content": "[interrupted]"}]
        posted = asyncio.create_task(
            server.anthropic().messages.create(model="local-moe", max_tokens=9, messages=history)
        )
        while len(server.worker.requests) < 2:
            await asyncio.sleep(0.005)
        posted.cancel()
        assert server.state.sessions.stats()["echo_exact"] == 1


async def test_many_disconnects_leave_nothing_open(family: Family) -> None:
    async with serving(family, lambda _: Answer(TEXT, hold_at=9), max_open=40) as server:
        async with server.http() as http:
            tasks = [
                asyncio.create_task(_read(http, path, {**BODIES[path], "stream": True}))
                for path in BODIES
                for _ in range(10)
            ]
            while len(server.worker.requests) < len(tasks):
                await asyncio.sleep(0.005)
            assert server.state.counters.open_generations == len(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(server.idle(), 20)
        assert len(server.worker.aborted) == len(tasks)


async def test_a_lost_worker_ends_a_messages_stream_with_an_error(family: Family) -> None:
    answer = Answer(TEXT, hold_at=4, die=True)
    async with serving(family, answer) as server:
        asyncio.get_running_loop().call_later(0.05, answer.release.set)
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with server.anthropic().messages.stream(**BODIES["/v1/messages"]) as stream:
                async for _ in stream:
                    pass
        await server.idle()
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "overloaded_error"
    assert "worker died" in caught.value.body["error"]["message"]


async def test_a_lost_worker_ends_a_responses_stream_with_an_error(family: Family) -> None:
    answer = Answer(TEXT, hold_at=4, die=True)
    async with serving(family, answer) as server:
        asyncio.get_running_loop().call_later(0.05, answer.release.set)
        stream = await server.openai().responses.create(model="local-moe", input="Hi", stream=True)
        got: list[Any] = [event async for event in stream]
    assert got[-1].type == "response.failed"
    assert got[-1].response.status == "failed"
    assert got[-1].response.error.code == "server_error"


async def test_a_lost_worker_ends_a_chat_stream_with_an_error(family: Family) -> None:
    answer = Answer(TEXT, hold_at=4, die=True)
    async with serving(family, answer) as server:
        asyncio.get_running_loop().call_later(0.05, answer.release.set)
        stream = await server.openai().chat.completions.create(model="local-moe", messages=[USER], stream=True)
        with pytest.raises(openai.APIError, match="worker died"):
            async for _ in stream:
                pass


@PATHS
async def test_after_a_lost_worker_the_next_one_serves(family: Family, path: str) -> None:
    answer = Answer(TEXT, hold_at=4, die=True)
    answer.release.set()
    async with serving(family, answer) as server, server.http() as http:
        lost = await http.post(path, json=BODIES[path])
        assert lost.status_code == (529 if path == "/v1/messages" else 503)
        assert lost.headers["retry-after"] == "1"
        waiting = asyncio.create_task(http.post(path, json=BODIES[path]))
        answer.hold_at = -1
        await server.client.connect(server.socket)
        assert (await waiting).status_code == 200
        session = server.state.sessions.list()[0]
        detail = server.state.sessions.get(session.id)
    assert detail is not None
    assert detail.requests[-1].cause in ("worker_restart", "first_request", "none")


@PATHS
async def test_requests_that_wait_for_a_worker_are_told_when_the_server_stops(family: Family, path: str) -> None:
    async with serving(family, connect=False) as server, server.http() as http:
        waiting = asyncio.create_task(http.post(path, json=BODIES[path]))
        while not server.state.counters.requests:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        await server.client.close()
        response = await asyncio.wait_for(waiting, 10)
    assert response.status_code == (529 if path == "/v1/messages" else 503)
    assert "shutting down" in response.json()["error"]["message"]


@PATHS
async def test_a_request_lost_before_it_began_goes_to_the_next_worker(family: Family, path: str) -> None:
    answer = Answer(TEXT, admit=False)
    async with serving(family, answer) as server, server.http() as http:
        waiting = asyncio.create_task(http.post(path, json=BODIES[path]))
        while not server.worker.requests:
            await asyncio.sleep(0.005)
        server.worker.hang_up()
        await server.client.disconnected()
        answer.admit = True
        await server.client.connect(server.socket)
        assert (await waiting).status_code == 200
        assert len(server.worker.requests) == 2
        await server.idle()


async def test_stats_do_not_wait_for_a_stopped_worker(family: Family) -> None:
    async with serving(family) as server:
        server.worker.deaf = True
        with pytest.raises(WorkerUnavailable, match="did not answer"):
            await server.client.stats(timeout=0.01)


@PATHS
async def test_a_refused_request_leaves_no_session(family: Family, path: str) -> None:
    async with serving(family, context_length=20) as server, server.http() as http:
        assert (await http.post(path, json=BODIES[path])).status_code == 400
        assert server.state.sessions.list() == []
    async with serving(family, Answer("", refuse=("context_length", "no"))) as server, server.http() as http:
        assert (await http.post(path, json=BODIES[path])).status_code == 400
        assert server.state.sessions.list() == []
        assert server.state.sessions.stats()["session_prefix_keys"] == 0


@PATHS
async def test_without_a_worker_requests_are_told_to_come_back(family: Family, path: str) -> None:
    async with serving(family, connect=False, worker_seconds=0.01) as server, server.http() as http:
        response = await http.post(path, json=BODIES[path])
    assert response.status_code == (529 if path == "/v1/messages" else 503)
    assert response.headers["retry-after"] == "1"


@PATHS
async def test_a_full_queue_is_429(family: Family, path: str) -> None:
    answer = Answer(TEXT, hold_at=4)
    async with serving(family, answer, max_open=1) as server, server.http() as http:
        first = asyncio.create_task(http.post(path, json=BODIES[path]))
        while not server.worker.requests:
            await asyncio.sleep(0.005)
        second = await http.post(path, json=BODIES[path])
        answer.release.set()
        assert (await first).status_code == 200
    assert second.status_code == 429
    assert int(second.headers["retry-after"]) >= 1


@PATHS
async def test_what_failed_inside_the_engine_is_not_told(family: Family, path: str) -> None:
    answer = Answer("", refuse=("internal", "secret path /srv/x"))
    async with serving(family, answer) as server, server.http() as http:
        response = await http.post(path, json=BODIES[path])
    assert response.status_code == 500
    assert "secret" not in response.text


async def test_the_script_speaks_and_its_misses_are_counted(family: Family, tmp_path: Path) -> None:
    rules = tmp_path / "script.jsonl"
    rules.write_text('{"when": {"after_user": "^Hi", "step": 0}, "say": [{"text": "Scripted."}]}\n', encoding="utf-8")
    async with serving(family, script=Script.load(rules)) as server:
        client = server.anthropic()
        message = await client.messages.create(**BODIES["/v1/messages"])
        with pytest.raises(anthropic.InternalServerError, match="no script rule matches"):
            await client.messages.create(
                model="local-moe", max_tokens=9, messages=[{"role": "user", "content": "Other"}]
            )
        stats = (await server.http().get("/v1/stats")).json()
    assert [block.text for block in message.content if block.type == "text"] == ["Scripted."]
    assert stats["server"]["script_misses"] == 1


@PATHS
async def test_a_bug_ends_a_stream_as_the_protocol_says(
    family: Family, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(Assembler, "feed", bug)
    async with serving(family, TEXT) as server, server.http() as http:
        whole = await http.post(path, json=BODIES[path])
        streamed = await http.post(path, json={**BODIES[path], "stream": True})
        await server.idle()
    assert (whole.status_code, streamed.status_code) == (500, 200)
    assert "secret" not in whole.text + streamed.text
    _, last = events(streamed.text)[-1]
    error = json.loads(last).get("error") or json.loads(last)["response"]["error"]
    assert error["message"] == INTERNAL_MESSAGE


async def test_four_answers_at_once_do_not_mix(family: Family) -> None:
    texts = iter(["AAAA" * 9, "BBBB" * 9, "CCCC" * 9, "DDDD" * 9])
    async with serving(family, lambda _: Answer(f"{next(texts)}<|im_end|>")) as server:
        client = server.anthropic()
        messages = await asyncio.gather(*(client.messages.create(**BODIES["/v1/messages"]) for _ in range(4)))
    got = {block.text for message in messages for block in message.content if block.type == "text"}
    assert got == {"AAAA" * 9, "BBBB" * 9, "CCCC" * 9, "DDDD" * 9}
