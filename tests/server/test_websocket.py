"""Responses over a WebSocket, with the official SDK and with bare messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from engine.api import Request
from parsers.load import Family
from server.keys import ApiKey
from tests.server.front_support import connected, ended, shaped
from tests.server.support import Answer, Server, serving
from tests.server.test_front import WEBSOCKET, narrow
from tests.server.test_responses import EXEC, THOUGHT, call

pytestmark = pytest.mark.anyio

LOOK = f"{THOUGHT}Look.\n\n{call('exec_command', cmd='ls')}<|im_end|>"
HELLO = f"{THOUGHT}Hello<|im_end|>"


UPGRADE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


class Talk:
    """One socket, message by message."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def create(self, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": "response.create", "model": "local-moe", **fields}))

    async def until_end(self) -> list[dict[str, Any]]:
        got: list[dict[str, Any]] = []
        while not got or got[-1]["type"] not in (
            "response.completed",
            "response.incomplete",
            "response.failed",
            "error",
        ):
            got.append(json.loads(await self.socket.recv()))
        return got

    async def ask(self, **fields: Any) -> dict[str, Any]:
        """The last event of the answer."""
        await self.create(**fields)
        return (await self.until_end())[-1]

    async def respond(self, **fields: Any) -> dict[str, Any]:
        last = await self.ask(**fields)
        assert last["type"] == "response.completed", last
        response: dict[str, Any] = last["response"]
        return response


@asynccontextmanager
async def talking(server: Server, **headers: str) -> AsyncIterator[Talk]:
    url = f"ws{server.url.removeprefix('http')}/v1/responses"
    async with connect(url, additional_headers=headers, max_size=None, proxy=None) as socket:
        yield Talk(socket)


def outputs(response: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": one["call_id"], "output": "a b"} for one in calls]


async def test_each_request_brings_only_what_is_new(family: Family) -> None:
    answers = [Answer(""), Answer(LOOK), Answer(HELLO)]
    async with (
        serving(family, lambda request: answers.pop(0)) as server,
        talking(server, **{"x-session-id": "s"}) as talk,
    ):
        warm = await talk.respond(generate=False, input=[{"role": "developer", "content": "Be brief."}], tools=[EXEC])
        first = await talk.respond(previous_response_id=warm["id"], input="Hi", tools=[EXEC])
        await talk.respond(previous_response_id=first["id"], input=outputs(first), tools=[EXEC])
        prepared, before, after = server.worker.requests
        (session,) = server.state.sessions.list()
    assert warm["output"] == []
    assert warm["usage"]["input_tokens"] == len(prepared.tokens)
    assert warm["usage"]["output_tokens"] == 0
    assert prepared.sampling.max_tokens == 0
    assert prepared.session == before.session == after.session == session.id
    assert session.requests == 2
    assert prepared.anchors[-1].position == len(prepared.tokens) and prepared.anchors[-1].pinned
    head = family.tokenizer.decode(prepared.tokens)
    assert "exec_command" in head and "Be brief." in head and "user" not in head.rsplit("Be brief.", 1)[1]
    assert before.tokens[: len(prepared.tokens)] == prepared.tokens
    sampled = family.encode_raw(LOOK)
    assert after.tokens[: len(before.tokens) + len(sampled)] == before.tokens + sampled
    assert "a b" in family.tokenizer.decode(after.tokens)


async def test_the_whole_input_works_as_well_and_says_the_same(family: Family) -> None:
    answers = [Answer(LOOK), Answer(HELLO), Answer(HELLO)]
    async with serving(family, lambda request: answers.pop(0)) as server, talking(server) as talk:
        first = await talk.respond(input="Hi", tools=[EXEC], store=False)
        await talk.respond(previous_response_id=first["id"], input=outputs(first), tools=[EXEC], store=False)
        whole = [{"role": "user", "content": "Hi"}, *first["output"], *outputs(first)]
        last = await talk.respond(input=whole, tools=[EXEC], store=False)
        _, short, long = server.worker.requests
    assert short.tokens == long.tokens
    assert last["previous_response_id"] is None


async def test_the_sdk_talks_over_a_socket(family: Family) -> None:
    async with serving(family, HELLO) as server:
        async with server.openai().responses.connect() as connection:
            await connection.response.create(model="local-moe", input="Hi")
            kinds = []
            async for event in connection:
                kinds.append(event.type)
                if event.type == "response.completed":
                    assert event.response.output_text == "Hello"
                    break
        over_http = await server.openai().responses.create(model="local-moe", input="Hi", stream=True)
        assert kinds == [event.type async for event in over_http]


async def test_what_cannot_be_begun_is_an_event_and_the_socket_goes_on(family: Family) -> None:
    async with serving(family, HELLO, context_length=300) as server, talking(server) as talk:
        unknown = await talk.ask(previous_response_id="resp_other", input="Hi")
        model = await talk.ask(model="gpt-9", input="Hi")
        long = await talk.ask(input="word " * 400)
        wrong = await talk.ask(input=[{"type": "function_call"}])
        await talk.socket.send("{")
        broken = (await talk.until_end())[-1]
        await talk.socket.send('{"type": "response.steer"}')
        steered = (await talk.until_end())[-1]
        assert (await talk.respond(input="Hi"))["status"] == "completed"
        await server.idle()
    told = [(event["type"], event["status"], event["error"]["code"]) for event in (unknown, model, long)]
    assert told == [
        ("error", 400, "previous_response_not_found"),
        ("error", 404, "model_not_found"),
        ("error", 400, "context_length_exceeded"),
    ]
    assert unknown["error"]["param"] == "previous_response_id"
    assert wrong["error"]["param"].startswith("input.0")
    assert "JSON" in broken["error"]["message"]
    assert "response.create" in steered["error"]["message"]


async def test_a_failing_engine_fails_the_response_and_the_socket_goes_on(family: Family) -> None:
    answers = [Answer("", refuse=("overloaded", "full")), Answer(HELLO, reason="error"), Answer(HELLO)]
    async with serving(family, lambda request: answers.pop(0)) as server, talking(server) as talk:
        busy = await talk.ask(input="Hi")
        failed = await talk.ask(input="Hi")
        await talk.respond(input="Hi")
    assert (busy["status"], busy["headers"]) == (429, {"retry-after": "1"})
    assert failed["type"] == "response.failed"


async def test_one_answer_after_the_other(family: Family) -> None:
    held = Answer(HELLO, hold_at=3)
    answers = [held, Answer(HELLO)]
    async with serving(family, lambda request: answers.pop(0)) as server, talking(server) as talk:
        await talk.create(input="One")
        await talk.create(input="Two")
        while not server.worker.requests:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert len(server.worker.requests) == 1
        held.release.set()
        one, two = await talk.until_end(), await talk.until_end()
    assert len({event["response"]["id"] for event in (one[0], one[-1], two[0], two[-1])}) == 2
    assert one[-1]["type"] == two[-1]["type"] == "response.completed"


async def test_who_asks_too_much_at_once_is_let_go(family: Family) -> None:
    async with serving(family, Answer(HELLO, hold_at=0)) as server, talking(server) as talk:
        with pytest.raises(ConnectionClosed) as caught:
            for _ in range(40):
                await talk.create(input="Hi")
                await asyncio.sleep(0)
            while True:
                await talk.socket.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1008
        await server.idle()


@pytest.mark.parametrize("prepare", [False, True])
async def test_a_client_that_goes_away_ends_the_answer(family: Family, prepare: bool) -> None:
    answer = Answer(HELLO, hold_at=0 if not prepare else -1, admit=not prepare)
    async with serving(family, answer, admission_seconds=0.01) as server:
        async with talking(server) as talk:
            await talk.create(input="Hi", generate=not prepare)
            while json.loads(await talk.socket.recv())["type"] != "response.in_progress":
                pass
        await server.worker.abort_seen.wait()
        await server.idle()
        assert server.state.counters.disconnects == 1


async def test_signs_of_life(family: Family) -> None:
    held = Answer(HELLO, hold_at=3)
    async with serving(family, held, keepalive_seconds=0.02) as server, talking(server) as talk:
        await talk.create(input="Hi")
        beats = 0
        while beats < 4:
            beats += json.loads(await talk.socket.recv())["type"] == "response.in_progress"
        held.release.set()
        assert (await talk.until_end())[-1]["type"] == "response.completed"


async def test_an_upgrade_is_checked_like_any_request(family: Family, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(family, HELLO, api_keys=("secret",)) as server:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer secret", "origin": "https://evil.example"}, 403),
        ):
            with pytest.raises(InvalidStatus) as caught:
                async with talking(server, **headers):
                    pass
            response = caught.value.response
            assert response.status_code == status
            assert json.loads(response.body or b"")["error"]["message"]
        async with server.http() as http:
            rebound = {**UPGRADE, "authorization": "Bearer secret", "host": "evil.example"}
            assert (await http.get("/v1/responses", headers=rebound)).status_code == 403
        async with talking(server, authorization="Bearer secret") as talk:
            await talk.respond(input="Hi")
    assert "handshake" not in caplog.text


@pytest.mark.parametrize("left", [(), ("other",), ({"name": "new", "secret": "secret"},)])
async def test_a_key_that_is_no_longer_good_ends_the_socket(family: Family, left: Any) -> None:
    """Not the answer that is being made, but whatever would come after it. Without any keys everybody may come in."""
    async with serving(family, HELLO, api_keys=("secret", "other")) as server:
        async with talking(server, authorization="Bearer secret") as talk:
            await talk.respond(input="Hi")
            server.state.keys.replace([ApiKey.model_validate(one) for one in left])
            last = await talk.ask(input="Hi")
            if not left:
                assert last["type"] == "response.completed"
                return
            assert (last["type"], last["status"], last["error"]["code"]) == ("error", 401, "invalid_api_key")
            with pytest.raises(ConnectionClosed):
                await talk.socket.recv()
            assert talk.socket.close_code == 1008
        assert len(server.worker.requests) == 1


async def test_a_key_that_is_needed_from_now_on_is_missed(family: Family) -> None:
    async with serving(family, HELLO) as server, talking(server) as talk:
        await talk.respond(input="Hi")
        server.state.keys.replace([ApiKey(secret="secret")])
        assert (await talk.ask(input="Hi"))["error"]["code"] == "invalid_api_key"


async def test_a_response_of_another_socket_is_not_known(family: Family) -> None:
    async with serving(family, HELLO) as server:
        async with talking(server) as talk:
            first = await talk.respond(input="Hi", store=False)
        async with talking(server) as talk:
            last = await talk.ask(previous_response_id=first["id"], input="More")
    assert last["error"]["code"] == "previous_response_not_found"


async def test_messages_are_compressed_and_large_ones_refused(family: Family) -> None:
    async with serving(family, HELLO, max_body_bytes=4096) as server, talking(server) as talk:
        assert "permessage-deflate" in talk.socket.response.headers["sec-websocket-extensions"]  # type: ignore[union-attr]
        await talk.respond(input="Hi")
        await talk.create(input="x" * 5000)
        with pytest.raises(ConnectionClosed) as caught:
            await talk.socket.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009


async def test_a_plain_get_is_told_so(family: Family) -> None:
    async with serving(family) as server, server.http() as http:
        assert (await http.get("/v1/responses")).status_code == 426


async def test_what_codex_says_in_its_metadata_counts(family: Family) -> None:
    metadata = {
        "x-codex-turn-metadata": json.dumps({"request_kind": "compaction", "thread_source": "user"}),
        "thread-id": "t",
    }
    codex = {"session-id": "s", "thread-id": "t", "user-agent": "codex_exec/0.169.0"}
    seen: list[Request] = []

    def answer(request: Request) -> Answer:
        seen.append(request)
        return Answer(HELLO)

    async with serving(family, answer) as server, talking(server, **codex) as talk:
        await talk.respond(input="Hi", tools=[EXEC], prompt_cache_key="s")
        await talk.respond(input="Hi", tools=[], prompt_cache_key="s", client_metadata=metadata)
        (session,) = server.state.sessions.list()
        detail = server.state.sessions.get(session.id)
    assert detail is not None
    assert [record.kind for record in detail.requests] == ["main", "compaction"]
    assert "exec_command" in family.tokenizer.decode(seen[1].tokens)


KEY = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        (KEY, b"", 400),
        (KEY, KEY * 2, 400),
        (KEY, b"sec-websocket-key: \xe9\r\n", 400),
        (b"version: 13", b"version: 8", 400),
        (KEY, KEY + b"sec-websocket-extensions: ;;\r\n", 400),
        (KEY, KEY + b"content-length: 2\r\n", 400),
        (KEY, KEY + b"transfer-encoding: chunked\r\n", 400),
        (b"GET", b"POST", 405),
        (b"/v1/responses", b"/v1/messages", 404),
        (b"/v1/responses", b"/v1/%ff", 404),
    ],
)
async def test_what_is_no_handshake_is_told_in_shape(
    family: Family, old: bytes, new: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(family) as server, connected(server) as (reader, writer):
        writer.write(WEBSOCKET.replace(old, new))
        shaped(await ended(reader), status)
    assert not caplog.records


@pytest.mark.parametrize("more", [b"x: " + b"y" * 20_000 + b"\r\n", b"x: y\r\n" * 300])
async def test_a_long_head_is_no_reason_to_be_silent(family: Family, more: bytes) -> None:
    """Codex says much in its headers."""
    async with serving(family) as server, connected(server) as (reader, writer):
        writer.write(WEBSOCKET.replace(KEY, KEY + more))
        assert (await reader.readline()).startswith(b"HTTP/1.1 101")


def frame(first: int, payload: bytes) -> bytes:
    """``first``: FIN and the opcode. The mask is of zeros."""
    return bytes((first, 0x80 | len(payload))) + bytes(4) + payload


@pytest.mark.parametrize(
    "text",
    [
        frame(0x81, b"\xff"),
        frame(0x01, b"\xc3") + frame(0x80, b"("),
        frame(0x81, b"\xed\xa0\x80"),
        frame(0x81, b"\xff") * 2,
    ],
)
async def test_a_text_that_is_no_utf8_ends_the_socket(
    family: Family, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(family, HELLO) as server:
        async with connected(server) as (reader, writer):
            writer.write(WEBSOCKET + text)
            await reader.readuntil(b"\r\n\r\n")
            answer = await ended(reader)
        assert (answer[0], int.from_bytes(answer[2:4], "big")) == (0x88, 1007)
        async with talking(server) as talk:
            await talk.respond(input="Hi \u00e9")
    assert not caplog.records


async def test_answers_to_pings_do_not_pile_up(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads none of them is not read either."""
    narrow(monkeypatch)
    pings = frame(0x89, b"x" * 100) * 500
    async with serving(family) as server, connected(server) as (_, writer):
        writer.write(WEBSOCKET)
        with pytest.raises(TimeoutError):
            for _ in range(200):  # far more than the system keeps for us
                writer.write(pings)
                await asyncio.wait_for(writer.drain(), 0.5)
        writer.transport.abort()
