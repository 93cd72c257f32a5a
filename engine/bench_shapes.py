"""Models of published sizes with random weights, for benches: right in sizes and operations, meaningless in values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.models.fields import Rope
from engine.models.qwen3_5_moe import FULL, LINEAR, Qwen35MoeConfig
from engine.weights.source import Source


def _hybrid(layers: int, **sizes: int) -> Qwen35MoeConfig:
    """Three Gated DeltaNet layers to one of attention; the mixers of Qwen3.6-35B-A3B unless ``sizes`` says so."""
    return Qwen35MoeConfig(
        kinds=tuple(FULL if (layer + 1) % 4 == 0 else LINEAR for layer in range(layers)),
        eps=1e-6,
        rope=Rope(1e7, sizes.pop("rotary", 64)),
        context=1 << 18,
        tied=False,
        **{
            "vocab": 248320,
            "heads": 16,
            "kv_heads": 2,
            "head_dim": 256,
            "conv_width": 4,
            "key_heads": 16,
            "key_dim": 128,
            "value_heads": 32,
            "value_dim": 128,
            "experts": 256,
            **sizes,
        },
    )


def qwen36(layers: int = 0) -> Qwen35MoeConfig:
    """Qwen3.6-35B-A3B."""
    return _hybrid(layers or 40, hidden=2048, expert_inner=512, shared_inner=512, top_k=8)


def deepseek_v4(layers: int = 0) -> Qwen35MoeConfig:
    """Experts as of DeepSeek-V4-Flash, 8 times as large; the mixers are not its own."""
    return _hybrid(layers or 43, hidden=4096, expert_inner=2048, shared_inner=2048, top_k=6)


def tiny(layers: int = 0) -> Qwen35MoeConfig:
    """For tests."""
    return _hybrid(
        layers or 4, hidden=64, expert_inner=128, shared_inner=64, top_k=2, vocab=96, heads=4, kv_heads=2, head_dim=16,
        key_heads=2, key_dim=16, value_heads=4, value_dim=16, experts=8, rotary=8,
    )  # fmt: skip


# Layers 0: as many as the model has.
SHAPES: Mapping[str, Callable[[int], Qwen35MoeConfig]] = {"qwen3.6": qwen36, "deepseek-v4": deepseek_v4, "tiny": tiny}


class RandomSource(Source):
    """Random tensors in place of a checkpoint's. Experts are on the meta device: whoever packs them brings its own."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 1) -> None:
        self.dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def has(self, name: str) -> bool:
        return True

    def matrix(self, name: str, *shape: int) -> Tensor:
        return self._normal(shape, self.dtype).mul_(shape[-1] ** -0.5)

    def vector(self, name: str, *shape: int) -> Tensor:
        return self._normal(shape, torch.float32).mul_(0.1)

    def head(self, vocab: int, hidden: int) -> Tensor:
        return self.matrix("lm_head.weight", vocab, hidden)

    def experts(self, name: str, experts: int, inner: int, hidden: int) -> tuple[Tensor, Tensor]:
        gate_up = torch.empty(experts, 2 * inner, hidden, dtype=self.dtype, device="meta")
        return gate_up, torch.empty(experts, hidden, inner, dtype=self.dtype, device="meta")

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self._device, generator=self._generator)
