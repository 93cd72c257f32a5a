"""The worker with its real scheduler and a tiny checkpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.api import Done, EngineConfig, Failed, Request, Sampling, Tokens
from engine.client import EngineClient
from engine.messages import LoadFailed, Loading, Ready, Status, config_to_json, parse_status
from engine.worker import EXIT_UNSERVABLE
from tests.process.support import HANG_SECONDS, child_environment, run_async


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "tiny"
    command = [sys.executable, "-P", "-m", "engine.checkpoint", "tiny", "qwen3_5_moe", str(folder)]
    subprocess.run(command, check=True, env=child_environment() | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    return folder


def launch(model: Path, socket: Path) -> subprocess.Popen[bytes]:
    config = EngineConfig(model=str(model), kernels="reference", threads=1, kv_bytes=1 << 24, checkpoint_bytes=1 << 24)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.worker", "--socket", str(socket), "--config", config_to_json(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment() | {"OMP_NUM_THREADS": "1"},
    )


def statuses(worker: subprocess.Popen[bytes]) -> list[Status]:
    """What the worker reports until its load has ended."""
    assert worker.stdout is not None
    found: list[Status] = []
    for line in worker.stdout:
        status = parse_status(line)
        assert status is not None, line
        found.append(status)
        if isinstance(status, Ready):
            break
    return found


async def generate(client: EngineClient, name: str, prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
    sampled: list[int] = []
    async for reply in client.submit(Request(name, prompt, sampling)):
        match reply:
            case Tokens(_, tokens):
                sampled.extend(tokens)
            case Done(_, reason, reuse):
                assert reason in ("length", "stop")
                assert reuse.resumed + reuse.replayed + reuse.new == len(prompt)
            case Failed():
                raise AssertionError(reply)
    return sampled


def test_real_tokens_over_a_real_socket(tiny: Path, short_dir: Path) -> None:
    worker = launch(tiny, short_dir / "s")

    async def scenario() -> None:
        client = EngineClient()
        info = await client.connect(str(short_dir / "s"))
        assert info.architecture == "qwen3_5_moe"
        prompt = tuple(i % 200 for i in range(150))
        greedy = Sampling(max_tokens=8, temperature=0.0)
        alone = await generate(client, "alone", prompt, greedy)
        assert len(alone) == 8 and all(0 <= token < info.vocab_size for token in alone)
        others = [tuple(range(n, n + 70)) for n in range(3)]
        together = await asyncio.gather(
            generate(client, "again", prompt, greedy),
            *(generate(client, f"o{n}", other, Sampling(max_tokens=8, seed=n)) for n, other in enumerate(others)),
        )
        assert together[0] == alone
        forced = Sampling(max_tokens=8, forced=(5, 6, 7))
        assert await generate(client, "forced", prompt, forced) == [5, 6, 7]
        too_long = client.submit(Request("long", (1,) * (info.context_length + 1), greedy))
        assert [getattr(reply, "kind", None) async for reply in too_long] == ["context_length"]
        assert (await client.stats()).values["running"] == 0
        await client.close()

    with worker:
        try:
            reports = statuses(worker)
            assert isinstance(reports[-1], Ready) and any(isinstance(report, Loading) for report in reports)
            run_async(scenario())
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(HANG_SECONDS) == 0
        finally:
            worker.kill()


def without_a_shard(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def of_another_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "perceptron"
    config["architectures"] = ["PerceptronForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))


def of_another_width(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["hidden_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))


def truncated(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (without_a_shard, "broken"),
        (of_another_architecture, "perceptron"),
        (of_another_width, "shape"),
        (truncated, "safetensors"),
    ],
)
def test_a_broken_checkpoint_is_one_clear_line(
    tiny: Path, tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    broken = shutil.copytree(tiny, tmp_path / "broken")
    damage(broken)
    with launch(broken, tmp_path / "s") as worker:
        last = statuses(worker)[-1]
        assert isinstance(last, LoadFailed), last
        assert named in last.message
        assert worker.wait(HANG_SECONDS) == EXIT_UNSERVABLE
