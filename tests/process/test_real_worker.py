"""The worker with its real scheduler and a tiny checkpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.api import Done, EngineConfig, Failed, Request, Reuse, Sampling, StoreSettings, Tokens
from engine.client import EngineClient
from engine.messages import LoadFailed, Loading, Ready, Status, config_to_json, parse_status
from engine.worker import EXIT_UNSERVABLE, Unservable, open_worker_store
from tests.process.support import HANG_SECONDS, child_environment

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "tiny"
    command = [sys.executable, "-P", "-m", "engine.checkpoint", "tiny", "qwen3_5_moe", str(folder)]
    subprocess.run(command, check=True, env=child_environment() | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    return folder


def launch(
    model: Path, socket: Path, store: StoreSettings | None = None, **options: Any
) -> subprocess.Popen[bytes]:  # fmt: skip
    config = EngineConfig(**{
        "model": str(model), "kernels": "reference", "threads": 1, "kv_bytes": 1 << 24, "checkpoint_bytes": 1 << 24,
        "store": store, **options,
    })  # fmt: skip
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


async def test_real_tokens_over_a_real_socket(tiny: Path, short_dir: Path) -> None:
    async def talk() -> None:
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

    with launch(tiny, short_dir / "s") as worker:
        try:
            reports = statuses(worker)
            assert isinstance(reports[-1], Ready) and any(isinstance(report, Loading) for report in reports)
            await talk()
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(HANG_SECONDS) == 0
        finally:
            worker.kill()


async def reuse_of(client: EngineClient, name: str, tokens: tuple[int, ...]) -> Reuse:
    async for reply in client.submit(Request(name, tokens, Sampling(max_tokens=2, forced=(9, 9)), session="s")):
        if isinstance(reply, Done):
            return reply.reuse
        assert isinstance(reply, Tokens), reply
    raise AssertionError("no end")


async def test_state_outlives_the_worker(tiny: Path, tmp_path: Path, short_dir: Path) -> None:
    settings = StoreSettings(str(tmp_path / "store"), quota_bytes=1 << 28, host_bytes=1 << 24)
    prompt, known = tuple(i % 200 for i in range(300)), 0

    async def talk() -> None:
        client = EngineClient()
        await client.connect(str(short_dir / "s"))
        reuse = await reuse_of(client, "r", prompt)
        assert (reuse.disk, reuse.replayed) == (known, 0)
        assert (await client.admin("store_verify")).values["damaged"] == 0
        assert (await client.admin("store_stat")).ok and not (await client.admin("store_pin")).ok
        assert (await client.stats()).values["store_extents"] > 0
        await client.close()

    for how in ("sigterm", "end of stdin", "sigterm"):
        with launch(tiny, short_dir / "s", settings) as worker:
            try:
                assert isinstance(statuses(worker)[-1], Ready)
                await talk()
                if how == "sigterm":
                    worker.send_signal(signal.SIGTERM)
                else:
                    assert worker.stdin is not None
                    worker.stdin.close()
                assert worker.wait(HANG_SECONDS) == 0
            finally:
                worker.kill()
        prompt, known = (*prompt, 9, 9), len(prompt) + 1


async def test_state_of_experts_in_another_format_is_not_resumed(tiny: Path, tmp_path: Path, short_dir: Path) -> None:
    """And is there when the first format is back."""
    settings = StoreSettings(str(tmp_path / "store"), quota_bytes=1 << 28, host_bytes=1 << 24)
    first = tuple(i % 200 for i in range(300))
    second, tip = (*first, 9, 9), len(first) + 1
    for name, prompt, known in (("auto", first, 0), ("int8", second, 0), ("auto", second, tip)):
        with launch(tiny, short_dir / "s", settings, kernels="native", expert_format=name) as worker:
            try:
                assert isinstance(statuses(worker)[-1], Ready)
                client = EngineClient()
                await client.connect(str(short_dir / "s"))
                reuse = await reuse_of(client, "r", prompt)
                assert (reuse.disk, reuse.new) == (known, len(prompt) - known)
                await client.close()
                worker.send_signal(signal.SIGTERM)
                assert worker.wait(HANG_SECONDS) == 0
            finally:
                worker.kill()


def test_a_store_in_use_or_under_another_key_is_one_clear_line(tiny: Path, tmp_path: Path, short_dir: Path) -> None:
    keys = [tmp_path / "key 0", tmp_path / "key 1"]
    for number, path in enumerate(keys):
        path.write_bytes(bytes([number]) * 32)
    settings = StoreSettings(str(tmp_path / "store"), quota_bytes=1 << 28, key_file=str(keys[0]))
    with launch(tiny, short_dir / "s", settings) as worker:
        try:
            assert isinstance(statuses(worker)[-1], Ready)
            with pytest.raises(Unservable, match=rf"{worker.pid}.*--store DIR.*--no-store"):
                open_worker_store(settings, "f", (64,), (), patience=0.0)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(HANG_SECONDS) == 0
        finally:
            worker.kill()
    for wrong in (replace(settings, key_file=str(keys[1])), replace(settings, key_file="")):
        with pytest.raises(Unservable, match="--store-key-file"):
            open_worker_store(wrong, "f", (64,), (), patience=0.0)
    with pytest.raises(Unservable, match="cannot be read"):
        open_worker_store(replace(settings, key_file=str(tmp_path / "none")), "f", (64,), (), patience=0.0)


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
