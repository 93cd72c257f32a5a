"""Part ``serve`` of ``engine.device.check``: the whole scheduler on the GPU, against the CPU's.

A model of Qwen3.6's layers with random weights, written to a temporary folder, is served twice. What the GPU answered
is given to the CPU token by token; where it would have chosen another one, its two best scores must lie close together.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine import native
from engine.api import EngineConfig, Failed, Request, Sampling, Tokens
from engine.bench_shapes import RandomSource, qwen36
from engine.device.machine import Machine, find_machine
from engine.device.outline import Counting
from engine.device.runner import DeviceRunner
from engine.layers.loader import Loader
from engine.layers.ops import Ops
from engine.loading import load_engine
from engine.models.qwen3_5_moe import Qwen35Moe, Qwen35MoeConfig
from engine.sampling import Logits
from engine.scheduler import Scheduler

LAYERS = 4
PROMPT, ANSWER, LONG = 600, 200, 2000
"""Tokens."""
RESIDENT = 0.4
"""Of the experts."""
CLOSE = 3e-2
"""Of the scores' spread: two that lie closer than this may change places in bfloat16."""
TOLERANCE = 2e-2
"""Relative error of a row of logits."""
_WARM = 8
"""Steps that are not timed."""


def model_config(quick: bool) -> Qwen35MoeConfig:
    """Half of the experts and a quarter of the tokens: what is random need not be large."""
    return replace(qwen36(LAYERS), experts=64 if quick else 128, vocab=1 << 16, context=4096)


# ── a checkpoint ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Written(RandomSource):
    """Random tensors, remembered by the names that a checkpoint has."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.bfloat16, device)
        self.tensors: dict[str, Tensor] = {}

    def matrix(self, name: str, *shape: int) -> Tensor:
        return self._keep(name, super().matrix(name, *shape))

    def vector(self, name: str, *shape: int) -> Tensor:
        return self._keep(name, super().vector(name, *shape))

    def head(self, vocab: int, hidden: int) -> Tensor:
        self.tensors["lm_head.weight"] = self._normal((vocab, hidden), self.dtype).mul_(hidden**-0.5).cpu()
        return self.tensors["lm_head.weight"]

    def experts(self, name: str, experts: int, inner: int, hidden: int) -> tuple[Tensor, Tensor]:
        gate_up = self.matrix(f"{name}.gate_up_proj", experts, 2 * inner, hidden)
        return gate_up, self.matrix(f"{name}.down_proj", experts, hidden, inner)

    def _keep(self, name: str, tensor: Tensor) -> Tensor:
        self.tensors[f"model.{name}"] = tensor.cpu()
        return tensor


def write_model(config: Qwen35MoeConfig, folder: Path, device: torch.device) -> None:
    """As a checkpoint without a tokenizer."""
    source = _Written(device)
    Qwen35Moe(config, Loader(source, cast(Ops, Counting())), 64, lambda *_: None)
    save_file(source.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({
        "model_type": "qwen3_5_moe_text", "vocab_size": config.vocab, "hidden_size": config.hidden,
        "num_hidden_layers": len(config.kinds), "layer_types": config.kinds, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.eps,
        "linear_conv_kernel_dim": config.conv_width, "linear_num_key_heads": config.key_heads,
        "linear_key_head_dim": config.key_dim, "linear_num_value_heads": config.value_heads,
        "linear_value_head_dim": config.value_dim, "num_experts": config.experts,
        "num_experts_per_tok": config.top_k, "moe_intermediate_size": config.expert_inner,
        "shared_expert_intermediate_size": config.shared_inner, "max_position_embeddings": config.context,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": config.rope.theta,
            "partial_rotary_factor": config.rope.dims / config.head_dim,
        },
        "tie_word_embeddings": config.tied, "hidden_act": "silu",
    }))  # fmt: skip


# ── an engine ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Engine:
    """A scheduler, what it answered by request, and the seconds of its steps."""

    scheduler: Scheduler
    answers: dict[str, list[int]] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)

    def submit(self, name: str, prompt: list[int], sampling: Sampling) -> None:
        self.answers[name] = []
        self.scheduler.submit(Request(name, tuple(prompt), sampling))

    def step(self) -> None:
        start = time.perf_counter()
        replies = self.scheduler.step()
        self.steps.append(time.perf_counter() - start)
        for reply in replies:
            if isinstance(reply, Tokens):
                self.answers[reply.id] += reply.tokens
            elif isinstance(reply, Failed):
                raise RuntimeError(f"{reply.id} failed: {reply.message}")

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while not (self.scheduler.idle or until()):
            self.step()


Observer = Callable[[str, int, Logits], None]


@contextmanager
def engine(folder: Path, machine: Machine | None, observer: Observer | None = None, **options: Any) -> Any:
    config = EngineConfig(str(folder), kv_bytes=256 << 20, checkpoint_bytes=64 << 20, max_sequences=3, **options)
    made = load_engine(config, lambda *_: None, None, machine)
    scheduler = Scheduler(made, config, observer)
    yield Engine(scheduler)
    scheduler.close(1.0)


def prompt(number: int, count: int, vocab: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(number).integers(0, vocab, count).tolist()
    return tokens


def converse(made: Engine, vocab: int, answers: dict[str, list[int]] | None = None) -> None:
    """Three sequences that join and leave, and a long one. ``answers``: what each is to say."""

    def sampling(name: str, count: int) -> Sampling:
        forced = None if answers is None else tuple(answers[name])
        return Sampling(max_tokens=count, temperature=0.0, forced=forced)

    made.submit("first", prompt(1, PROMPT, vocab), sampling("first", ANSWER))
    made.run(lambda: len(made.answers["first"]) > 20)
    made.submit("second", prompt(2, 40, vocab), sampling("second", 60))
    made.run(lambda: len(made.answers["second"]) > 20)
    made.submit("third", prompt(3, 9, vocab), sampling("third", ANSWER))
    made.run()
    made.submit("long", prompt(4, 5, vocab), sampling("long", LONG))
    made.run()


def converse_at_length(config: Qwen35MoeConfig, folder: Path, machine: Machine, mode: dict[str, Any]) -> Any:
    """Answers and, told as they come, tok/s alone and the host's part of a step."""
    with engine(folder, machine, **mode) as made:
        converse(made, config.vocab)
        alone = made.steps[-LONG + _WARM :]
        step = median(alone)
        runner = made.scheduler.runner
        replay = runner.replay_seconds() if isinstance(runner, DeviceRunner) else float("nan")
        stats = made.scheduler.stats().values
        parts = [stats.get(f"experts_{name}", 0.0) for name in ("hit", "fetched", "on_cpu")]
        shares = ", ".join(f"{part / max(sum(parts), 1):.0%}" for part in parts)
        report(f"one sequence{f'; hit, fetched, CPU {shares}' if sum(parts) else ''}", f"{1 / step:.0f} tok/s")
        report(
            "a step; of it besides the graph",
            f"{1e3 * step:.2f} ms; {1e6 * (step - replay):.0f} us",
        )
        report("whole rows fetched", f"{stats['fetched_rows']:.0f} of {stats['graph_steps']:.0f} steps")
        return made.answers


# ── comparing ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Judge:
    """Compares what was answered with what other scores would have chosen."""

    chosen: dict[str, list[int]]
    prompts: dict[str, int]
    agreed: int = 0
    total: int = 0
    worst: float = 0.0
    """The largest distance from the best score to that of the token that was chosen, in spreads of scores."""
    rows: dict[tuple[str, int], Logits] = field(default_factory=dict)
    """Of the first request."""

    def observe(self, name: str, position: int, logits: Logits) -> None:
        at = position - self.prompts[name]
        if at >= len(self.chosen[name]):
            return
        token = self.chosen[name][at]
        self.total += 1
        self.agreed += int(logits.argmax()) == token
        self.worst = max(self.worst, float((logits.max() - logits[token]) / logits.std()))
        if name == "first":
            self.rows[name, position] = logits


def report(name: str, value: str, right: bool = True) -> bool:
    print(f"{name:58} {value:>28} {'' if right else '  WRONG'}", flush=True)
    return right


def check(folder: Path, machine: Machine, config: Qwen35MoeConfig) -> bool:
    layout_bytes = 3 * config.hidden * config.expert_inner * 2
    experts = len(config.kinds) * config.experts
    some = {"gpu_bytes": int(RESIDENT * experts * layout_bytes) + _rest(config), "experts": "hybrid"}
    right = True
    prompts = {"first": PROMPT, "second": 40, "third": 9, "long": 5}
    answers: dict[str, dict[str, list[int]]] = {}
    for name, mode in (("all experts on the device", {"experts": "device"}), ("hybrid", some)):
        print(f"{name}:", flush=True)
        answers[name] = converse_at_length(config, folder, machine, {"device": "cuda", **mode})
    same = sum(a == b for a, b in zip(*(each["long"] for each in answers.values()), strict=True))
    report("both ways, as far as they went alike", f"{same} of {LONG} tokens")
    chosen = answers["hybrid"]
    on_cpu, on_gpu = (Judge(chosen, prompts) for _ in range(2))
    with engine(folder, None, on_cpu.observe) as made:
        converse(made, config.vocab, chosen)
    with engine(folder, machine, on_gpu.observe, device="cuda", **some) as made:
        made.submit(
            "first", prompt(1, PROMPT, config.vocab), Sampling(max_tokens=ANSWER, forced=tuple(chosen["first"]))
        )
        made.run()
    off = max(
        float(np.linalg.norm(logits - on_cpu.rows[at]) / np.linalg.norm(on_cpu.rows[at]))
        for at, logits in on_gpu.rows.items()
    )
    right &= report("logits against the CPU's", f"off by {off:.1e}", off < TOLERANCE)
    right &= report(
        "the CPU chooses the same token, or two lie close",
        f"{on_cpu.agreed} of {on_cpu.total}; {on_cpu.worst:.1e} apart", on_cpu.worst < CLOSE,
    )  # fmt: skip
    return right


def _rest(config: Qwen35MoeConfig) -> int:
    """Bytes of the device for all but experts, roughly: twice the embedding; mixers, pages, states, a step's work."""
    return 4 * config.vocab * config.hidden + (7 << 28)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    native.__path__.append(str(options.library.parent))  # where the native library is looked for
    machine, config = find_machine(), model_config(options.quick)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        write_model(config, Path(folder), machine.device)
        report("model written", f"{time.perf_counter() - start:.1f} s")
        return 0 if check(Path(folder), machine, config) else 1


if __name__ == "__main__":
    sys.exit(main())
