"""The supervisor over real worker processes without a model."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from engine.api import Done, EngineConfig, Failed, ModelInfo
from engine.client import EngineClient
from launchers import supervisor as supervisor_module
from launchers.display import Display
from launchers.runtime import EXIT_GAVE_UP, EXIT_REFUSED, ServeError
from launchers.supervisor import Supervisor, backoff
from tests.process.fake_worker import SLOW, SLOW_SECONDS
from tests.process.support import ENDLESS, FAKE_WORKER, HANG_SECONDS, asked, child_environment

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", child_environment()["PYTHONPATH"])


class Watched:
    """A supervisor, its client, and the process ids of the workers that came up."""

    def __init__(self, folder: Path, model: str = "fake", silence: float = 30.0) -> None:
        self.client = EngineClient()
        self.pids: list[int] = []
        self.socket = folder / "worker.sock"
        config = EngineConfig(model=model)
        self.supervisor = Supervisor(FAKE_WORKER, config, self.socket, self.client, Display(), self._started, silence)

    def _started(self, info: ModelInfo, pid: int) -> None:
        assert info.incarnation == str(pid)
        self.pids.append(pid)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_dead_worker_is_replaced(short_dir: Path) -> None:
    watched = Watched(short_dir)
    running = asyncio.create_task(watched.supervisor.run())
    client = watched.client
    for round_number in range(2):
        await client.ready(HANG_SECONDS)
        assert len(watched.pids) == round_number + 1
        stream = client.submit(asked(f"r{round_number}", max_tokens=ENDLESS))
        assert await stream.admitted(HANG_SECONDS)
        os.kill(watched.pids[-1], signal.SIGKILL)
        replies = [reply async for reply in stream]
        assert isinstance(replies[-1], Failed) and replies[-1].kind == "worker_lost"
        await client.disconnected()
    await client.ready(HANG_SECONDS)
    served = [reply async for reply in client.submit(asked("after"))]
    assert isinstance(served[-1], Done)
    assert client.lost == 2 and len(set(watched.pids)) == 3

    running.cancel()
    await asyncio.wait([running])
    assert not any(map(alive, watched.pids))
    assert not watched.socket.exists()
    await client.close()


async def test_a_stopped_worker_is_replaced(short_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watched = Watched(short_dir, silence=0.3)
    running = asyncio.create_task(watched.supervisor.run())
    client = watched.client
    await client.ready(HANG_SECONDS)
    stream = client.submit(asked("r", max_tokens=ENDLESS))
    assert await stream.admitted(HANG_SECONDS)
    os.kill(watched.pids[0], signal.SIGSTOP)
    replies = [reply async for reply in stream]
    assert isinstance(replies[-1], Failed) and replies[-1].kind == "worker_lost"
    await client.disconnected()
    await client.ready(HANG_SECONDS)
    running.cancel()
    await asyncio.wait([running])
    assert len(watched.pids) == 2 and not any(map(alive, watched.pids))
    await client.close()
    assert "has not answered for 0.3 s; killing it" in capfd.readouterr().err


async def test_a_worker_in_a_long_step_is_left_alone(short_dir: Path) -> None:
    watched = Watched(short_dir, silence=0.8 * SLOW_SECONDS)
    running = asyncio.create_task(watched.supervisor.run())
    client = watched.client
    await client.ready(HANG_SECONDS)
    stream = client.submit(asked("r", (SLOW,), max_tokens=1))
    stalled = 0.0
    while await stream.admitted(0.02) is None:
        stalled = max(stalled, client.stalled_seconds)
    assert stalled > 0.1
    assert isinstance([reply async for reply in stream][-1], Done)
    assert len(watched.pids) == 1 and client.lost == 0
    running.cancel()
    await asyncio.wait([running])
    await client.close()


async def test_a_model_that_cannot_be_served_is_tried_once(short_dir: Path) -> None:
    watched = Watched(short_dir, "unservable")
    with pytest.raises(ServeError, match="shard 2 of 3 is missing") as error:
        await watched.supervisor.run()
    assert error.value.code == EXIT_REFUSED
    assert watched.pids == []


async def test_a_worker_that_keeps_dying_at_load_is_given_up(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor_module, "backoff", lambda failures: 0.0)

    watched = Watched(short_dir, "crash")
    with pytest.raises(ServeError, match="exit code 1 while loading, 3 times in a row; giving up") as error:
        await watched.supervisor.run()
    assert error.value.code == EXIT_GAVE_UP
    assert capfd.readouterr().err.count("the loader crashed") == 3


async def test_it_also_gives_up_after_a_good_start(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "backoff", lambda failures: 0.0)
    (short_dir / "once").touch()

    watched = Watched(short_dir, str(short_dir / "once"))
    running = asyncio.create_task(watched.supervisor.run())
    await watched.client.ready(HANG_SECONDS)
    os.kill(watched.pids[0], signal.SIGTERM)
    with pytest.raises(ServeError, match="giving up"):
        await running


async def test_a_load_can_be_cancelled(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[asyncio.subprocess.Process] = []
    create = asyncio.create_subprocess_exec

    async def recorded(*args: str, **options: int | bool) -> asyncio.subprocess.Process:
        processes.append(await create(*args, **options))  # type: ignore[arg-type]
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recorded)

    watched = Watched(short_dir, "hang")
    running = asyncio.create_task(watched.supervisor.run())
    while not processes:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    assert processes[0].returncode is not None


def test_backoff() -> None:
    assert [backoff(n) for n in (-1, 0, 1, 2, 3, 10, 10_000)] == [0.0, 0.0, 0.5, 1.0, 2.0, 8.0, 8.0]
