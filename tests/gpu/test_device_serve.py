"""Serving from a device: the whole scheduler over offloaded experts says what the CPU's engine says."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, cast

import numpy as np
import pytest
import torch
from device_double import LateLanes
from device_support import bench, machine, round_experts, use_twins
from engine_support import GREEDY, Bench, Outcome, Sampling, prompt, replace
from safetensors.torch import load_file, save_file

from engine.api import EngineConfig, Failed, Request, Shutdown, StoreSettings, Tokens
from engine.checkpoint import write_tiny
from engine.device.driver import DriverError
from engine.device.fake import FakeDriver
from engine.device.graph import DecodeSteps
from engine.device.machine import find_machine
from engine.device.outline import outline
from engine.device.plan import working_bytes
from engine.device.watchdog import Watchdog
from engine.endpoint import Endpoint, Incoming
from engine.experts.executor import Executor
from engine.experts.layout import FORMATS, Layout
from engine.experts.pool import Pool
from engine.experts.prefill import Prefill
from engine.models.fields import read_config
from engine.models.registry import find_architecture
from engine.weights.errors import BadConfig
from engine.worker import EXIT_ENGINE, Worker

SEQUENCES = 3
ROOM: dict[str, Any] = {"kv_bytes": 1 << 20, "checkpoint_bytes": 1 << 19}
MODES: dict[str, dict[str, Any]] = {
    "device": {"experts": "device"},
    "one slot, all fetched": {"experts": "offload", "slots": 1},
    "few slots, all fetched": {"experts": "offload", "slots": 5},
    "all slots": {"experts": "offload"},
    "all on the CPU": {"experts": "cpu"},
    "a fixed split": {"experts": "hybrid", "split": 0.4, "slots": 5},
    "a split that is found": {"experts": "hybrid", "slots": 7},
    "as the engine likes": {"slots": 7},
}


IN_DEPTH = ("one slot, all fetched", "all slots", "a fixed split")


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_twins(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no bandwidth profile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, str], Path] = {}

    def make(arch: str, name: str = "int8") -> Path:
        if (arch, name) not in made:
            made[arch, name] = write_tiny(arch, tmp_path_factory.mktemp(arch) / name, layers=4)
            round_experts(made[arch, name], name)
        return made[arch, name]

    return make


def on_device(name: str = "int8", slots: int | None = None, **options: Any) -> dict[str, Any]:
    """Settings of an engine with room for so many experts besides the scratch slot; None: for all of them."""
    return {"device": "cuda", "expert_format": name, "slots": slots, "machine": machine(), **options}


def limited(directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The same settings, with ``gpu_bytes`` for as many ``slots``."""
    options = dict(options)
    slots = options.pop("slots", None)
    if slots is not None:
        what = outline(directory, "auto", find_architecture(read_config(directory)), 8192)
        stride = -(-Layout(FORMATS[options["expert_format"]], what.hidden, what.inner).nbytes // 256) * 256
        config = EngineConfig("", **ROOM)
        pages = config.kv_bytes // what.manifest.page_bytes(what.dtype) * what.manifest.page_bytes(what.dtype)
        size = what.manifest.slot_bytes
        states = (1 + SEQUENCES + (config.checkpoint_bytes // size if size else 0)) * size
        options["gpu_bytes"] = what.dense + pages + states + (slots + 1) * stride
        options["gpu_bytes"] += working_bytes(what, options.setdefault("chunk_tokens", 12), options["machine"])
    return options


def conversation(made: Bench) -> list[Outcome]:
    """Sequences that join and leave, a long one that goes on from what is kept, one that is aborted, sampled ones."""
    names = [made.submit(prompt(1, 20), replace(GREEDY, max_tokens=9))]
    for _ in range(3):
        made.step()
    sampled = Sampling(max_tokens=5, temperature=0.8, top_k=20, top_p=0.9, seed=3, presence_penalty=0.5)
    names += [made.submit(prompt(2, 3), sampled), made.submit(prompt(3, 70), replace(GREEDY, logprobs=2))]
    aborted = made.submit(prompt(4, 5), replace(GREEDY, max_tokens=50))
    made.run(lambda: len(made.outcomes[aborted].tokens) > 2)
    made.scheduler.abort(aborted)
    made.run()
    long = [*prompt(3, 70), *made.outcomes[names[2]].tokens]
    names.append(made.submit(long, Sampling(max_tokens=4, temperature=1.0, seed=5)))
    made.run()
    return [made.outcomes[name] for name in names]


def same(got: list[Outcome], wanted: list[Outcome]) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.failed is None and ours.tokens == theirs.tokens and ours.reuse == theirs.reuse
        for at, logits in ours.logits.items():
            np.testing.assert_allclose(logits, theirs.logits[at], rtol=1e-3, atol=1e-4)
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=1e-4)


def serve(directory: Path, mode: dict[str, Any], name: str = "int8") -> tuple[list[Outcome], dict[str, float]]:
    with bench(directory, max_sequences=SEQUENCES, **limited(directory, on_device(name, **mode))) as made:
        return conversation(made), made.stats()


@pytest.fixture(scope="module")
def on_cpu(model: Callable[..., Path]) -> Callable[..., list[Outcome]]:
    known: dict[tuple[str, str], list[Outcome]] = {}

    def make(arch: str, name: str = "int8") -> list[Outcome]:
        if (arch, name) not in known:
            with bench(model(arch, name), max_sequences=SEQUENCES) as made:
                known[arch, name] = conversation(made)
        return known[arch, name]

    return make


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[pytest.mark.deep] * (mode in IN_DEPTH)) for mode in MODES])
def test_where_experts_are_changes_no_token(
    model: Callable[..., Path], on_cpu: Callable[..., list[Outcome]], mode: str
) -> None:
    got, stats = serve(model("qwen3_5_moe"), MODES[mode])
    same(got, on_cpu("qwen3_5_moe"))
    assert stats["graph_steps"] > 10
    if mode not in ("a split that is found", "as the engine likes"):
        assert (stats["brought_steps"] > 0) == (mode in ("few slots, all fetched", "all slots"))
    if MODES[mode].get("experts") in ("offload", "cpu", "hybrid"):
        fetched, on_the_cpu = stats["experts_fetched"], stats["experts_on_cpu"]
        assert (fetched > 0) == (MODES[mode]["experts"] != "cpu") and (on_the_cpu > 0) != (mode == "all slots")


@pytest.mark.parametrize(
    "arch, name", [("qwen3_moe", "mxfp4"), pytest.param("qwen2_moe", "int8", marks=pytest.mark.deep)]
)
def test_architectures_and_formats(
    model: Callable[..., Path], on_cpu: Callable[..., list[Outcome]], arch: str, name: str
) -> None:
    got, _ = serve(model(arch, name), {"experts": "hybrid", "slots": 6}, name)
    same(got, on_cpu(arch, name))


def test_columns_that_fill_no_block(tmp_path: Path) -> None:
    directory = write_tiny("qwen2_moe", tmp_path / "narrow", layers=2)
    path, columns = directory / "model.safetensors", 20
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            kept = tensor.unflatten(1, (2, -1))[:, :, :columns].flatten(1, 2)
        elif name.endswith("experts.down_proj"):
            kept = tensor[:, :, :columns]
        else:
            continue
        tensors[name] = kept.bfloat16().float().contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text()) | {"moe_intermediate_size": columns}
    (directory / "config.json").write_text(json.dumps(config))
    with bench(directory, max_sequences=SEQUENCES) as made:
        wanted = conversation(made)
    options = on_device("bf16", experts="hybrid", split=0.5, slots=None)
    with bench(directory, max_sequences=SEQUENCES, **limited(directory, options)) as made:
        same(conversation(made), wanted)


def offloading(model: Callable[..., Path], **options: Any) -> dict[str, Any]:
    options = on_device(**{"experts": "hybrid", "split": 0.5, "slots": 5, **ROOM, **options})
    return limited(model("qwen3_moe"), options)


@pytest.mark.parametrize("mode", [{"experts": "device", "split": None, "slots": None}, {}])
def test_host_memory_holds_experts_only_where_they_are_needed(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    pools = list[weakref.ref[Pool]]()

    def made_pool(*given: Any) -> Pool:
        made = Pool(*given)
        pools.append(weakref.ref(made))
        return made

    monkeypatch.setattr("engine.device.load.Pool", made_pool)
    with bench(model("qwen3_moe"), **offloading(model, **mode)):
        gc.collect()
        assert [pool() is None for pool in pools] == [bool(mode)]


class Outbox:
    """An endpoint that nobody is connected to."""

    step_began: float | None = None

    def __init__(self, *commands: Any) -> None:
        self.inbox: Queue[Any] = Queue()
        self.sent: list[Any] = []
        for command in commands:
            self.inbox.put(Incoming(1, command))

    def send(self, connection: int, replies: list[Any]) -> None:
        self.sent += replies


def test_a_dead_executor_ends_the_worker_and_all_its_requests(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.experts.offload.Watchdog", partial(Watchdog, tick=0.01))
    made = Bench(model("qwen3_moe"), **offloading(model))
    monkeypatch.setattr("engine.experts.executor.Executor.stalled", lambda *_: True)
    requests = [Request(f"r{number}", tuple(prompt(number, 4)), GREEDY) for number in range(2)]
    endpoint = Outbox(*requests)
    assert Worker(made.scheduler, cast(Endpoint, endpoint)).run() == EXIT_ENGINE
    failed = [reply for reply in endpoint.sent if isinstance(reply, Failed)]
    assert [one.id for one in failed] == ["r0", "r1"] and all("restarts" in one.message for one in failed)
    assert "have not answered" in caplog.text
    made.scheduler.close(1.0)


def test_what_was_drawn_goes_out_while_the_next_is_computed(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not lost if the worker is to stop before. The CPU's threads are awake by then."""
    made, order = Bench(model("qwen3_moe"), **offloading(model)), list[str]()
    for of, name in ((Executor, "rouse"), (DecodeSteps, "launch"), (DecodeSteps, "wait"), (Prefill, "settle")):
        does = getattr(of, name)
        monkeypatch.setattr(
            of, name, lambda *at, does=does, name=name, **how: (order.append(name), does(*at, **how))[1]
        )
    endpoint = Outbox(Request("r0", tuple(prompt(1, 4)), GREEDY))

    def send(connection: int, replies: list[Any]) -> None:
        order.append("send")
        endpoint.sent += replies
        if sum(isinstance(reply, Tokens) for reply in endpoint.sent) == 3:
            endpoint.inbox.put(Incoming(1, Shutdown()))

    monkeypatch.setattr(endpoint, "send", send)
    assert Worker(made.scheduler, cast(Endpoint, endpoint)).run() == 0
    assert order[:4] == ["rouse", "send", "settle", "settle"]  # the prompt
    assert order[-9:] == [*("launch", "rouse", "send", "wait") * 2, "send"]
    assert sum(isinstance(reply, Tokens) for reply in endpoint.sent) == 4
    made.scheduler.close(1.0)


def test_every_engine_after_it_says_the_same(model: Callable[..., Path]) -> None:
    runs = []
    for _ in range(2):
        with bench(model("qwen3_moe"), **offloading(model)) as made:
            runs.append(made.ask(prompt(1, 9), Sampling(max_tokens=6, temperature=0.7, top_k=20, seed=1)).tokens)
    assert runs[0] == runs[1]


class Limited(FakeDriver):
    """Pins ``most`` bytes at once, and after what is asked for first, a mailbox, so many altogether."""

    def __init__(self, limit: int = 1 << 40, most: int = 1 << 40) -> None:
        super().__init__()
        self.limit, self.most = limit, most

    def register(self, address: int, nbytes: int) -> int:
        later = sum(list(self._registered.values())[1:]) + nbytes if self._registered else 0
        if later > self.limit or nbytes > self.most:
            raise DriverError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")
        return super().register(address, nbytes)


@pytest.mark.parametrize("limit, layers", [(0, 0), (1 << 17, 2)])
def test_memory_that_cannot_be_pinned(
    model: Callable[..., Path], caplog: pytest.LogCaptureFixture, limit: int, layers: int
) -> None:
    """Is left to the CPU: slower, and the same tokens."""
    answers = []
    for driver in (FakeDriver(), Limited(limit)):
        with bench(model("qwen3_moe"), **offloading(model, machine=machine(driver=driver))) as made:
            answers.append(made.ask(prompt(1, 40)).tokens)
    assert answers[0] == answers[1]
    assert f"the experts of {layers} of 4 layers can be pinned" in caplog.text and "RLIMIT_MEMLOCK" in caplog.text


@pytest.mark.parametrize("options, words", [
    ({"gpu_bytes": 1 << 40}, r"--gpu-bytes 1099511627776: no GPU has 2147483648 bytes free"),
    ({"gpu_bytes": 1 << 20}, r"of 1048576 bytes on no GPU, dense weights take \d+, and pages .* has no room for two"),
    ({"experts": "device", "split": None}, r"32 experts take \d+ bytes, and \d+ of --gpu-bytes \d+ are left"),
    ({"experts": "auto"}, "--split 0.5 is for --experts hybrid, not auto"),
    ({"expert_format": "auto"}, "not served from a GPU in float32; choose --dtype bfloat16 or --expert-format"),
    ({"kernels": "reference"}, "--kernels reference are not served from a GPU; or serve with --device cpu"),
    ({"device": "cpu"}, "--experts hybrid is for a GPU"),
    ({"split": 1.5}, "--split 1.5 is not from 0 to 1"),
    ({"kv_bytes": 1000}, "--kv-bytes 1000 is below two pages"),
])  # fmt: skip
def test_what_cannot_be_served_is_known_before_it_is_read(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("engine.weights.shards.Shards.read", None)
    made = offloading(model)
    with pytest.raises(BadConfig, match=words):
        Bench(model("qwen3_moe"), **{**made, **options})


def test_without_a_gpu(model: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BadConfig, match=r"torch finds no NVIDIA GPU; one takes its driver.* --device cpu"):
        Bench(model("qwen3_moe"), device="cuda", expert_format="int8")
    with pytest.raises(BadConfig, match="torch finds no NVIDIA GPU"):  # which was asked for something
        Bench(model("qwen3_moe"), device="auto", experts="hybrid")
    with caplog.at_level("INFO"), bench(model("qwen3_moe"), device="auto") as made:
        assert len(made.ask(prompt(1, 5)).tokens) == 8
    assert "serving from the CPU: torch finds no NVIDIA GPU" in caplog.text


def test_a_gpu_that_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nIt was all taken.")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "A GPU")
    monkeypatch.setattr("torch.zeros", full)
    monkeypatch.setattr("engine.device.machine.find_spec", lambda _: None)
    with pytest.raises(BadConfig, match=r"^A GPU needs the package triton, .*`pip install triton`$"):
        find_machine()
    monkeypatch.setattr("engine.device.machine.find_spec", lambda _: True)
    with pytest.raises(BadConfig, match=r"^A GPU cannot be used: CUDA out of memory; see nvidia-smi$"):
        find_machine()


def test_little_that_is_free_is_no_negative_size(model: Callable[..., Path]) -> None:
    options = offloading(model, machine=replace(machine(), free=1 << 20))
    with pytest.raises(BadConfig, match=r"^of 0 bytes on no GPU"):
        Bench(model("qwen3_moe"), **{**options, "gpu_bytes": 0})


def test_what_leaves_the_device_is_kept_in_host_memory(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much of it as can be pinned."""
    monkeypatch.setattr("engine.device.hosted.RING", 1 << 20)
    driver = Limited(most=1 << 26)
    here, directory = replace(machine(driver=driver), lanes=partial(LateLanes, 1, 0.3)), model("qwen3_moe")
    room = {"max_sequences": 1, "kv_bytes": 4 << 17, "checkpoint_bytes": 0}
    device = {"device": "cuda", "experts": "device", "expert_format": "int8", "machine": here}
    with bench(directory, **room) as on_cpu, bench(directory, **room, **device) as made:
        for turn in range(2):
            for seed in (1, 2):
                outcome = made.ask(prompt(seed, 140))
                assert outcome.tokens == on_cpu.ask(prompt(seed, 140)).tokens
                assert outcome.reuse.resumed == 139 * turn and (outcome.reuse.host > 0) == bool(turn)
    for size, words in ((1 << 20, "no room for a page and a state"), (1 << 62, "cannot be had: .* of host memory")):
        with pytest.raises(BadConfig, match=rf"{words}.*--host-cache"):
            Bench(directory, store_settings=StoreSettings("unused", host_bytes=size), **room, **device)


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["qwen3_5_moe", "qwen3_moe"])
def test_with_the_kernels_themselves(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, arch: str, tmp_path: Path
) -> None:
    """In Triton's interpreter, which takes seconds for a token."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    greedy = replace(GREEDY, max_tokens=2)
    options = limited(model(arch), on_device(experts="hybrid", split=0.5, slots=5, **ROOM))
    with bench(model(arch)) as on_cpu, bench(model(arch), max_sequences=SEQUENCES, **options) as made:
        names = [(one.submit(prompt(1, 3), greedy), one.submit(prompt(2, 2), greedy)) for one in (on_cpu, made)]
        on_cpu.run()
        made.run()
        same([made.outcomes[name] for name in names[1]], [on_cpu.outcomes[name] for name in names[0]])
