"""For checks on a GPU: a model of Qwen3.6's layers with random weights, and the scheduler that serves it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.api import Done, EngineConfig, Failed, Request, Sampling, StoreSettings, Tokens
from engine.bench_shapes import RandomSource, qwen36
from engine.device.machine import Machine
from engine.device.outline import Counting
from engine.layers.loader import Loader
from engine.layers.ops import Ops
from engine.loading import OpenStore, load_engine
from engine.models.qwen3_5_moe import Qwen35Moe, Qwen35MoeConfig
from engine.scheduler import Scheduler

LAYERS = 4
SEQUENCES = 16
"""As many as a step decodes."""
ROOM: dict[str, Any] = {
    "kv_bytes": 256 << 20, "checkpoint_bytes": 64 << 20, "max_sequences": SEQUENCES,
    "store": StoreSettings("", host_bytes=1 << 28),
}  # fmt: skip


def model_config(quick: bool) -> Qwen35MoeConfig:
    """Half of the experts and a quarter of the tokens: what is random need not be large."""
    return replace(qwen36(LAYERS), experts=64 if quick else 128, vocab=1 << 16, context=1 << 16)


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


def room_for(config: Qwen35MoeConfig, share: float) -> int:
    """Bytes of the device for so many of the experts and, roughly, the rest: twice the embedding; mixers, pages,
    states, a step's work."""
    experts = len(config.kinds) * config.experts * 3 * config.hidden * config.expert_inner * 2
    return int(share * experts) + 4 * config.vocab * config.hidden + (7 << 28)


@dataclass
class Served:
    """A scheduler, what it answered by request, and the seconds of its steps that gave tokens. ``after``: to be done
    after such a step, and not timed."""

    scheduler: Scheduler
    answers: dict[str, list[int]] = field(default_factory=dict)
    done: dict[str, Done] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    after: Callable[[], None] = lambda: None

    def submit(self, name: str, prompt: Sequence[int], sampling: Sampling, **options: Any) -> None:
        self.answers[name] = []
        self.scheduler.submit(Request(name, tuple(prompt), sampling, **options))

    def step(self) -> None:
        start = time.perf_counter()
        replies = self.scheduler.step()
        if any(isinstance(reply, Tokens) for reply in replies):
            self.steps.append(time.perf_counter() - start)
            self.after()
        for reply in replies:
            if isinstance(reply, Tokens):
                self.answers[reply.id] += reply.tokens
            elif isinstance(reply, Done):
                self.done[reply.id] = reply
            elif isinstance(reply, Failed):
                raise RuntimeError(f"{reply.id} failed: {reply.message}")

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while not (self.scheduler.idle or until()):
            self.step()

    def count(self, name: str) -> int:
        """One of the scheduler's counters."""
        return int(self.scheduler.stats().values.get(name, 0))

    def ask(self, name: str, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
        """The answer of one request, the most probable tokens, when all are answered."""
        self.submit(name, prompt, Sampling(max_tokens=count, temperature=0.0), **options)
        self.run()
        return self.answers[name]


@contextmanager
def served(
    folder: Path, machine: Machine | None, open_store: OpenStore | None = None, **options: Any
) -> Iterator[Served]:
    """``machine`` None: by the CPU, unless ``options`` say otherwise."""
    config = EngineConfig(str(folder), **{**ROOM, **options})
    scheduler = Scheduler(load_engine(config, lambda *_: None, open_store, machine), config)
    try:
        yield Served(scheduler)
    finally:
        scheduler.close(30.0)  # what is pinned would stay so


def prompt(number: int, count: int, vocab: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(number).integers(0, vocab, count).tolist()
    return tokens


Conversation = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""Prompt and answer, by request."""
