"""A real worker process on a real socket, with a scheduler that has no model."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from engine.api import Done, EngineConfig, Failed, Tokens
from engine.client import EngineClient, EngineError, EngineStream, QueueFull, WorkerUnavailable
from engine.messages import LoadFailed, config_to_json, encode, parse_status
from engine.worker import _CLOSE_SECONDS, _ORPHAN_SECONDS, EXIT_ENGINE, EXIT_UNSERVABLE, FLUSH_SECONDS
from launchers.supervisor import STOP_SECONDS
from tests.process.fake_worker import BOOM, CONTEXT, DIE, token_at
from tests.process.support import ENDLESS, FAKE_WORKER, HANG_SECONDS, StartWorker, asked, child_environment

pytestmark = pytest.mark.anyio


async def collect(stream: EngineStream) -> tuple[list[int], Done | Failed]:
    tokens: list[int] = []
    async for reply in stream:
        if isinstance(reply, Tokens):
            tokens.extend(reply.tokens)
        else:
            return tokens, reply
    raise AssertionError("a stream ended without an end")


async def settle(client: EngineClient, running: int) -> None:
    """Waits until the worker runs exactly so many requests."""
    while (await client.stats()).values["running"] != running:
        await asyncio.sleep(0.005)


async def test_a_stream_from_admission_to_end(start_worker: StartWorker) -> None:
    worker = start_worker()

    client = EngineClient()
    info = await client.connect(str(worker.socket))
    assert client.info == info == await client.ready(0)
    request = asked("a", tuple(range(5000)), max_tokens=20)
    stream = client.submit(request)
    admitted = await stream.admitted(HANG_SECONDS)
    assert admitted is not None and admitted.reuse.new == 5000
    tokens, end = await collect(stream)
    assert tokens == [token_at(request.tokens, i) for i in range(20)]
    assert isinstance(end, Done) and end.reason == "length"
    assert [reply async for reply in stream] == []
    assert client.open == 0
    await client.close()


def test_the_socket_is_private(start_worker: StartWorker) -> None:
    worker = start_worker()
    assert stat.S_IMODE(worker.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(worker.socket.parent.stat().st_mode) == 0o700


async def test_two_hundred_streams_at_once(start_worker: StartWorker) -> None:
    worker = start_worker(max_sequences=16)

    client = EngineClient(max_open=200)
    await client.connect(str(worker.socket))
    requests = [asked(f"r{i}", (1, i), max_tokens=1 + i % 17) for i in range(200)]
    streams = [client.submit(request) for request in requests]
    with pytest.raises(QueueFull) as full:
        client.submit(asked("one too many"))
    assert full.value.kind == "overloaded" and full.value.limit == 200
    results = await asyncio.gather(*map(collect, streams))
    for request, (tokens, end) in zip(requests, results, strict=True):
        assert tokens == [token_at(request.tokens, i) for i in range(request.sampling.max_tokens)]
        assert isinstance(end, Done)
    assert client.open == 0
    await client.close()


async def test_a_slow_consumer_holds_up_nobody(start_worker: StartWorker) -> None:
    worker = start_worker()

    client = EngineClient()
    await client.connect(str(worker.socket))
    slow = client.submit(asked("slow", max_tokens=3000))
    assert await slow.admitted(HANG_SECONDS)
    await collect(client.submit(asked("quick", max_tokens=50)))
    await settle(client, running=0)
    tokens, end = await collect(slow)
    assert tokens == [token_at((1, 2, 3), i) for i in range(3000)]
    assert isinstance(end, Done)
    await client.close()


async def test_a_stopped_reader_does_not_stop_the_engine(start_worker: StartWorker) -> None:
    """A client that reads nothing from its socket at all: the worker computes on, then another client takes over."""
    worker = start_worker()

    deaf_reader, deaf_writer = await asyncio.open_unix_connection(str(worker.socket), limit=1)
    deaf_writer.write(b"".join(encode(asked(f"d{i}", max_tokens=20_000)) for i in range(8)))
    client = EngineClient()
    await asyncio.sleep(0.1)
    await client.connect(str(worker.socket))
    await collect(client.submit(asked("mine", max_tokens=5)))
    await settle(client, running=0)
    stats = (await client.stats()).values
    assert stats["aborted"] == 8 and stats["frozen"] > 1000  # what was loaded is not looked through again
    deaf_writer.close()
    await client.close()
    del deaf_reader


async def test_abort(start_worker: StartWorker) -> None:
    worker = start_worker(max_sequences=1)

    client = EngineClient()
    await client.connect(str(worker.socket))
    running = client.submit(asked("running", max_tokens=ENDLESS))
    waiting = client.submit(asked("waiting", max_tokens=ENDLESS))
    assert await running.admitted(HANG_SECONDS)
    assert await waiting.admitted(0) is None
    await waiting.abort()
    tokens, end = await collect(waiting)
    assert tokens == [] and isinstance(end, Done) and end.reason == "abort"
    assert await waiting.admitted(HANG_SECONDS) is None
    await running.abort()
    await running.abort()
    tokens, end = await collect(running)
    assert isinstance(end, Done) and end.reason == "abort"
    await running.abort()
    assert client.open == 0
    assert (await client.stats()).values["aborted"] == 2
    await client.close()


async def test_abandoned_streams_abort_themselves(start_worker: StartWorker) -> None:
    worker = start_worker()

    client = EngineClient()
    await client.connect(str(worker.socket))
    stream = client.submit(asked("a", max_tokens=ENDLESS))
    await anext(stream)
    consumer = asyncio.create_task(collect(client.submit(asked("b", max_tokens=ENDLESS))))
    await settle(client, running=2)
    del stream
    consumer.cancel()
    await asyncio.wait([consumer])
    del consumer
    gc.collect()
    await settle(client, running=0)
    assert client.open == 0
    await client.close()


async def test_requests_that_cannot_be(start_worker: StartWorker) -> None:
    worker = start_worker()

    client = EngineClient()
    with pytest.raises(WorkerUnavailable):
        client.submit(asked("early"))
    with pytest.raises(WorkerUnavailable):
        await client.ready(0.01)
    await client.connect(str(worker.socket))
    with pytest.raises(EngineError) as error:
        client.submit(asked("negative", (-1,)))
    assert error.value.kind == "invalid"
    stream = client.submit(asked("long", (1,) * (CONTEXT + 1)))
    with pytest.raises(EngineError) as error:
        await stream.admitted(HANG_SECONDS)
    assert error.value.kind == "context_length" and error.value.limit == CONTEXT
    assert [type(reply) for reply in [reply async for reply in stream]] == [Failed]
    twice = client.submit(asked("twice", max_tokens=ENDLESS))
    with pytest.raises(EngineError):
        client.submit(asked("twice"))
    await twice.abort()
    await client.close()


async def test_commands_are_answered_beside_the_streams(start_worker: StartWorker) -> None:
    worker = start_worker()

    client = EngineClient()
    await client.connect(str(worker.socket))
    stream = client.submit(asked("a", max_tokens=ENDLESS))
    slow = asyncio.create_task(client.admin("store_verify"))
    replies = await asyncio.gather(
        client.admin("store_pin", session="one"),
        client.admin("store_gc"),
        client.admin("store_unpin", session="two"),
    )
    assert [(reply.ok, reply.values["said"]) for reply in replies] == [(True, "one"), (False, ""), (True, "two")]
    assert (await slow).ok
    abandoned = asyncio.create_task(client.admin("store_verify"))
    await asyncio.sleep(0)
    abandoned.cancel()
    await settle(client, 1)
    waiting = asyncio.create_task(client.admin("store_verify"))
    await asyncio.sleep(0)
    worker.process.kill()
    with pytest.raises(WorkerUnavailable):
        await waiting
    with pytest.raises(WorkerUnavailable):
        await client.admin("store_stat")
    assert isinstance((await collect(stream))[1], Failed)


async def test_kill_9_fails_every_stream(start_worker: StartWorker) -> None:
    first = start_worker(max_sequences=4)

    client = EngineClient()
    await client.connect(str(first.socket))
    streams = [client.submit(asked(f"r{i}", max_tokens=ENDLESS)) for i in range(10)]
    consumers = [asyncio.create_task(collect(stream)) for stream in streams]
    assert await streams[3].admitted(HANG_SECONDS)
    stats = asyncio.create_task(client.stats())
    os.kill(first.process.pid, signal.SIGKILL)
    for _, end in await asyncio.gather(*consumers):
        assert isinstance(end, Failed) and end.kind == "worker_lost"
    with pytest.raises(EngineError, match="restarted"):
        await streams[9].admitted(0)
    await asyncio.gather(stats, return_exceptions=True)
    await client.disconnected()
    assert client.lost == 1 and client.info is None and client.open == 0
    with pytest.raises(WorkerUnavailable):
        await client.stats()

    waiting = asyncio.create_task(client.ready(HANG_SECONDS))
    second = start_worker()
    info = await client.connect(str(second.socket))
    assert await waiting == info and info.incarnation == str(second.process.pid)
    assert isinstance((await collect(client.submit(asked("r0"))))[1], Done)
    await client.close()
    assert client.lost == 1


@pytest.mark.parametrize(("fault", "kind", "code"), [(BOOM, "internal", EXIT_ENGINE), (DIE, "worker_lost", 9)])
async def test_a_failing_step_ends_the_worker(start_worker: StartWorker, fault: int, kind: str, code: int) -> None:
    worker = start_worker()

    client = EngineClient()
    await client.connect(str(worker.socket))
    bystander = client.submit(asked("bystander", max_tokens=ENDLESS))
    assert await bystander.admitted(HANG_SECONDS)
    culprit = client.submit(asked("culprit", (fault,)))
    for stream in (culprit, bystander):
        _, end = await collect(stream)
        assert isinstance(end, Failed) and end.kind == kind
    await client.disconnected()
    assert client.lost == 1
    assert worker.process.wait(HANG_SECONDS) == code


async def test_a_client_may_come_back(start_worker: StartWorker) -> None:
    worker = start_worker()

    client = EngineClient()
    for round_number in range(3):
        info = await client.connect(str(worker.socket))
        assert info.incarnation == str(worker.process.pid)
        left = client.submit(asked(f"left behind {round_number}", max_tokens=ENDLESS))
        assert await left.admitted(HANG_SECONDS)
        await settle(client, running=1)
        assert (await client.stats()).values["aborted"] == round_number
        await client.close()
        assert isinstance((await collect(left))[1], Failed)
    assert client.lost == 0


@pytest.mark.parametrize("nonsense", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<II", 4, 0) + b"null", b"\0" * 8])
async def test_nonsense_costs_a_peer_its_connection(start_worker: StartWorker, nonsense: bytes) -> None:
    worker = start_worker()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(HANG_SECONDS)
        peer.connect(str(worker.socket))
        peer.sendall(nonsense)
        while peer.recv(65536):
            pass

    client = EngineClient()
    await client.connect(str(worker.socket))
    await collect(client.submit(asked("fine")))
    await client.close()


async def test_a_peer_that_talks_nonsense_is_no_worker(short_dir: Path) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready for mail\r\n")
        writer.close()

    async with await asyncio.start_unix_server(greet, short_dir / "s"):
        client = EngineClient()
        with pytest.raises(WorkerUnavailable, match="introduce"):
            await client.connect(str(short_dir / "s"))
    with pytest.raises(WorkerUnavailable, match="listens"):
        await client.connect(str(short_dir / "absent"))
    assert client.info is None and client.lost == 0


async def test_sigterm_ends_cleanly(start_worker: StartWorker) -> None:
    worker = start_worker()

    client = EngineClient()
    await client.connect(str(worker.socket))
    stream = client.submit(asked("a", max_tokens=ENDLESS))
    assert await stream.admitted(HANG_SECONDS)
    worker.process.terminate()
    assert isinstance((await collect(stream))[1], Failed)
    assert worker.process.wait(HANG_SECONDS) == 0
    assert not worker.socket.exists()


def test_an_idle_worker_ends_on_sigterm(start_worker: StartWorker) -> None:
    worker = start_worker()
    worker.process.terminate()
    assert worker.process.wait(HANG_SECONDS) == 0


def test_a_worker_does_not_outlive_its_parent(start_worker: StartWorker) -> None:
    worker = start_worker()
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(HANG_SECONDS) == 0
    assert not worker.socket.exists()


def test_an_orphan_writes_what_its_store_must_keep(start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start_worker(str(tmp_path / "flush"))
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(HANG_SECONDS) == 0
    assert (tmp_path / "flush").exists()


def test_who_waits_for_a_worker_waits_for_its_store() -> None:
    assert STOP_SECONDS > _ORPHAN_SECONDS + _CLOSE_SECONDS and _CLOSE_SECONDS > FLUSH_SECONDS


def launch(model: str, config: str | None = None) -> subprocess.Popen[bytes]:
    config = config or config_to_json(EngineConfig(model=model))
    return subprocess.Popen(
        [*FAKE_WORKER, "--socket", "/nonexistent/s", "--config", config],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
    )


def test_a_loading_worker_does_not_outlive_its_parent() -> None:
    with launch("hang") as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdout.readline()
        worker.stdin.close()
        assert worker.wait(HANG_SECONDS) != 0


@pytest.mark.parametrize(
    ("config", "message"), [(None, "shard 2 of 3 is missing"), ("{}", "configuration"), ("no JSON", "JSON")]
)
def test_what_cannot_be_served_is_one_line_and_one_code(config: str | None, message: str) -> None:
    with launch("unservable", config) as worker:
        assert worker.stdout is not None
        status = parse_status(worker.stdout.read().splitlines()[-1])
        assert isinstance(status, LoadFailed) and message in status.message
        assert worker.wait(HANG_SECONDS) == EXIT_UNSERVABLE


def test_the_front_is_torch_free() -> None:
    script = "import sys, engine.client, engine.worker; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], env=child_environment(), check=True)
