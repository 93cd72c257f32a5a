"""Clients that are slow or broken: they are let go, and everybody else is served."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import pytest

from parsers.load import Family
from server.front import MAX_HEAD_BYTES, Http, Patience
from tests.server.front_support import alive, connected, ended, live, request, shaped
from tests.server.support import Answer, serving
from tests.server.test_bad_input import check_shape
from tests.server.test_lifecycle import BODIES, PATHS, TEXT

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

HASTE = Patience(head_seconds=0.1, send_seconds=0.2)


@pytest.mark.parametrize("said", [b"", b"POST /v1/mess", b"GET / HTTP/1.1\r\nhost: local"])
async def test_a_head_that_never_ends_is_not_waited_for(family: Family, said: bytes) -> None:
    async with serving(family, patience=HASTE) as server, connected(server) as (reader, writer):
        writer.write(said)
        assert await ended(reader) == b""
        await alive(server)


async def test_a_head_that_drips_is_not_waited_for(family: Family) -> None:
    """Each byte in time is not enough; nor is a good request before."""
    async with serving(family, patience=HASTE) as server, connected(server) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        dripping = asyncio.create_task(drip(writer))
        await ended(reader)
        dripping.cancel()
        await alive(server)


async def drip(writer: asyncio.StreamWriter) -> None:
    for byte in b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.01)


async def test_connections_live_on_between_requests(family: Family) -> None:
    """Patience is with heads, not with whoever has nothing to ask."""
    async with serving(family, patience=HASTE) as server, connected(server) as (reader, writer):
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await reader.readexactly(length)
            await asyncio.sleep(0.3)


async def test_nothing_is_left_of_a_connection_that_was_reset(family: Family) -> None:
    """Not even until it would have been closed for saying nothing."""
    async with serving(family) as server:
        async with connected(server) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.05)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        async with asyncio.timeout(30):
            while live(Http):
                await asyncio.sleep(0.05)


@PATHS
async def test_a_body_that_never_ends_is_408(family: Family, path: str) -> None:
    async with serving(family, body_seconds=0.05) as server, connected(server) as (reader, writer):
        whole = request(path, BODIES[path])
        writer.write(whole[:-9])
        head, body = await reader.readuntil(b"\r\n\r\n"), json.loads((await reader.read(1 << 16)) or b"null")
        assert head.split()[1] == b"408"
        assert "send it faster" in check_shape(path, body)
        assert not server.worker.requests
        await alive(server)


async def test_a_slow_body_that_goes_on_is_read(family: Family) -> None:
    """32 KiB buy two seconds more."""
    body = {**BODIES["/v1/messages"], "padding": "x" * (32 << 10)}
    async with serving(family, "Hi<|im_end|>", body_seconds=0.2) as server, connected(server) as (reader, writer):
        whole = request("/v1/messages", body)
        writer.write(whole[:-1])
        await asyncio.sleep(0.5)
        writer.write(whole[-1:])
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [True, False])
@PATHS
async def test_a_half_closed_socket_is_a_client_that_left(family: Family, path: str, stream: bool) -> None:
    async with serving(family, Answer(TEXT, hold_at=4)) as server, connected(server) as (reader, writer):
        writer.write(request(path, {**BODIES[path], "stream": stream}))
        while not server.worker.requests:
            await asyncio.sleep(0.005)
        writer.write_eof()
        await ended(reader)
        await asyncio.wait_for(server.worker.abort_seen.wait(), 20)
        await server.idle()
        await alive(server)


async def test_a_socket_half_closed_in_its_body(family: Family) -> None:
    async with serving(family) as server, connected(server) as (reader, writer):
        writer.write(request("/v1/messages", BODIES["/v1/messages"])[:-9])
        writer.write_eof()
        await ended(reader)
        assert not server.worker.requests
        await alive(server)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: a\r\n" * MAX_HEAD_BYTES + b"\r\n",
        b"GET /" + b"a" * (2 * MAX_HEAD_BYTES) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx y: a\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"\0" * 100 + b"\r\n\r\n",
    ],
)
async def test_heads_that_are_none(family: Family, head: bytes) -> None:
    async with serving(family) as server, connected(server) as (reader, writer):
        writer.write(head)
        answer = await ended(reader)
        if answer:  # a reset may overtake it while there is more to send
            shaped(answer, 400)
        await alive(server)


async def test_a_chunk_that_is_none(family: Family) -> None:
    async with serving(family) as server, connected(server) as (reader, writer):
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")
        shaped(await ended(reader), 400)
        await alive(server)


@pytest.mark.parametrize("begin", ["", "0\r\n", "1;", "1\r\nx\r\n0\r\n"])
async def test_what_has_no_end_is_cut_off(family: Family, begin: str) -> None:
    """A head, a trailer, and what may stand beside the size of a chunk."""
    head = "POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    async with serving(family) as server, connected(server) as (reader, writer):
        writer.write(head.encode() + (b"\r\n" + begin.encode() if begin else b"") + b"x-more: ")
        for _ in range(3 * MAX_HEAD_BYTES >> 10):
            writer.write(b"a" * 1024)
            await asyncio.sleep(0)
        answer = await ended(reader)
        if answer:
            shaped(answer, 400)
        assert not server.worker.requests
        await alive(server)


async def test_another_protocol_that_nobody_speaks_here_is_passed_over(family: Family) -> None:
    """Some clients ask for HTTP/2 with their first request, and take HTTP/1.1."""
    async with serving(family, "Hi<|im_end|>") as server, connected(server) as (reader, writer):
        writer.write(request("/v1/messages", BODIES["/v1/messages"], "connection: upgrade, x", "upgrade: h2c"))
        writer.write(request("/v1/messages", BODIES["/v1/messages"]))
        writer.write(b"GET /nothing HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = await ended(reader)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404"]


async def test_whoever_leaves_with_requests_behind_the_first_ends_that(family: Family) -> None:
    async with serving(family, Answer(TEXT, hold_at=4)) as server, connected(server) as (_, writer):
        writer.write(request("/v1/messages", {**BODIES["/v1/messages"], "stream": True}) * 3)
        while not server.worker.requests:
            await asyncio.sleep(0.005)
        writer.close()
        await asyncio.wait_for(server.worker.abort_seen.wait(), 20)
        await server.idle()
        assert len(server.worker.requests) == 1


async def test_pipelined_requests_are_answered_in_turn(family: Family) -> None:
    async with serving(family, "Hi<|im_end|>") as server, connected(server) as (reader, writer):
        writer.write(request("/v1/messages", BODIES["/v1/messages"]) * 2)
        writer.write(b"GET /nothing HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = await ended(reader)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404"]


WEBSOCKET = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)
CHUNKED = b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("behind", [b"no request\r\n\r\n", CHUNKED + b"zz\r\n", b"x" * (2 * MAX_HEAD_BYTES), WEBSOCKET])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_wrong_behind_a_request_gets_none_of_its_answer(
    family: Family, behind: bytes, stream: bool
) -> None:
    """Whole requests are answered to the end, and nothing else is."""
    answer = Answer(TEXT, hold_at=4)
    async with serving(family, answer) as server, connected(server) as (reader, writer):
        writer.write(request("/v1/messages", {**BODIES["/v1/messages"], "stream": stream}))
        while not server.worker.requests:
            await asyncio.sleep(0.005)
        writer.write(b"GET /nothing HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n\r\n" * 2 + behind)
        await asyncio.sleep(0.05)
        answer.release.set()
        _, first, *others = (await ended(reader)).split(b"HTTP/1.1 ")
        assert first.startswith(b"200") and [other[:3] for other in others] == [b"404", b"404"]
        assert b"message_stop" in first if stream else json.loads(first.partition(b"\r\n\r\n")[2])["stop_reason"]
        await alive(server)


@pytest.mark.parametrize("behind", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_an_answer_with_requests_behind_it_ends_it(
    family: Family, stream: bool, behind: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is read of the client meanwhile, so nothing that it sends says so."""
    answer = Answer(TEXT, hold_at=4)
    async with serving(family, answer) as server:
        async with connected(server) as (_, writer):
            body = request("/v1/messages", {**BODIES["/v1/messages"], "stream": stream})
            writer.write(body)
            while not server.worker.requests:
                await asyncio.sleep(0.005)
            writer.write(body * behind)
            await asyncio.sleep(0.05)
        await asyncio.wait_for(server.worker.abort_seen.wait(), 30)
        await server.idle()
        assert len(server.worker.requests) == server.state.counters.disconnects == 1
        while live(Http):
            await asyncio.sleep(0.02)
        await alive(server)
    assert not caplog.records


async def test_what_is_wrong_in_a_body_that_was_refused_gets_no_second_answer(family: Family) -> None:
    async with serving(family, max_body_bytes=10) as server, connected(server) as (reader, writer):
        writer.write(CHUNKED + b"10\r\n" + b"x" * 16 + b"\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")
        writer.write(b"zz\r\n")
        assert b"HTTP/1.1" not in await ended(reader)
        await alive(server)


async def test_whoever_was_not_told_to_send_its_body_is_not_waited_for(family: Family) -> None:
    """What it sends next is no body."""
    async with serving(family) as server, connected(server) as (reader, writer):
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n")
        writer.write(b"content-length: 999999999\r\n\r\n")
        answer = await ended(reader)
        assert b"connection: close" in answer
        shaped(answer, 413)


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
@pytest.mark.parametrize("refused", [b"POST /v1/messages ", b"POST /v1/models ", b"POST no-path "])
async def test_who_sends_more_than_is_read_gets_the_answer(family: Family, version: bytes, refused: bytes) -> None:
    """A client that reads when all is sent, as many do. Closed with something unread, a connection is reset, and what
    was on its way is lost."""
    size = 4 << 20
    async with serving(family, max_body_bytes=1000) as server:

        def ask() -> bytes:
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 30) as client:
                head = b"%b%b\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
                client.sendall(head % (refused, version, size) + b"x" * size)
                answer = b""
                while data := client.recv(1 << 16):
                    answer += data
                return answer

        status = {b"POST /v1/messages ": 413, b"POST /v1/models ": 405, b"POST no-path ": 400}[refused]
        shaped(await asyncio.to_thread(ask), status)
        await alive(server)


async def test_an_old_client_gets_a_stream_without_chunks(family: Family) -> None:
    async with serving(family, "Hi<|im_end|>") as server, connected(server) as (reader, writer):
        body = {**BODIES["/v1/messages"], "stream": True}
        writer.write(request("/v1/messages", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, answer = (await ended(reader)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head
    assert answer.startswith(b"event: message_start\n") and answer.rstrip().splitlines()[-1].startswith(b": x-ft-reuse")


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/v1/models", ("host: localhost", "host: evil.example")),
        ("/v1/models", ("host: localhost", "origin: http://localhost", "origin: http://evil.example")),
        ("http://evil.example/v1/models", ("host: localhost",)),
        ("http://localhost@evil.example/v1/models", ("host: localhost",)),
        ("/v1/models", ()),
    ],
)
async def test_every_name_that_a_request_has_is_looked_at(
    family: Family, target: str, headers: tuple[str, ...]
) -> None:
    async with serving(family, allowed_hosts=("localhost",)) as server:
        for names, status in ((headers, 403), (("host: localhost",), 200)):
            path = target if status == 403 else "http://localhost/v1/models"
            async with connected(server) as (reader, writer):
                writer.write("\r\n".join((f"GET {path} HTTP/1.1", *names, "connection: close", "", "")).encode())
                assert (await ended(reader)).split()[1] == str(status).encode()


async def test_whoever_does_not_read_is_let_go(family: Family) -> None:
    names = tuple(f"a-model-with-a-name-of-some-length-{n}" for n in range(20_000))
    async with serving(family, patience=HASTE, model_aliases=names) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            while not live(Http):
                await asyncio.sleep(0.01)
            while live(Http):
                await asyncio.sleep(0.05)
        await alive(server)


def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system keeps little of what the server sends."""
    made = Http.connection_made

    def narrowed(http: Http, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(http, transport)

    monkeypatch.setattr(Http, "connection_made", narrowed)


@PATHS
async def test_whoever_does_not_read_its_stream_is_let_go(
    family: Family, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sockets hold so little that they are full long before the answer's end."""
    narrow(monkeypatch)
    monkeypatch.setattr("server.generation.PACE", 0.0)  # an event for each token, so that there is enough to send
    async with serving(family, Answer("x" * 7000, hold_at=6900), patience=HASTE) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            client.sendall(request(path, {**BODIES[path], "stream": True} | lengthy(path)))
            await asyncio.wait_for(server.worker.abort_seen.wait(), 60)
        await server.idle()
        assert server.state.counters.disconnects == 1
        await alive(server)


def lengthy(path: str) -> dict[str, int]:
    return {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 7000}
