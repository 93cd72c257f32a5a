"""A checkpoint's tensors by canonical names, whoever wrote the files.

Canonical names are relative to the text model (``layers.0.self_attn.q_proj.weight``). Published multimodal releases
prefix them with ``model.language_model.``, text-only ones with ``model.``. Experts are read fused
(``mlp.experts.gate_up_proj`` [experts, 2 * inner, hidden]) or one by one (``mlp.experts.7.gate_proj.weight``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.weights.errors import MissingTensor
from engine.weights.shards import Shards

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


class Source:
    """``dtype`` is what matrices are held in; ``auto`` follows the embedding table (float16 becomes float32)."""

    def __init__(self, directory: Path, dtype: Literal["auto", "float32", "bfloat16"]) -> None:
        self.shards = Shards(directory)
        self._prefix = self._find_prefix()
        if dtype == "auto":
            stored = self.shards.entries[f"{self._prefix}embed_tokens.weight"].dtype
            dtype = "bfloat16" if stored == "BF16" else "float32"
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32

    def has(self, name: str) -> bool:
        return self._prefix + name in self.shards.entries

    def matrix(self, name: str, *shape: int) -> Tensor:
        """A weight in the dtype matrices are held in."""
        return self.shards.read(self._prefix + name, shape).to(self.dtype)

    def vector(self, name: str, *shape: int) -> Tensor:
        """A small tensor (norm, bias, convolution), always float32."""
        return self.shards.read(self._prefix + name, shape).float()

    def head(self, vocab: int, hidden: int) -> Tensor | None:
        """The output matrix, or None where it is not stored apart from the embedding."""
        for name in HEADS:
            if name in self.shards.entries:
                return self.shards.read(name, (vocab, hidden)).to(self.dtype)
        return None

    def experts(self, name: str, experts: int, inner: int, hidden: int) -> tuple[Tensor, Tensor]:
        """gate_up [experts, 2 * inner, hidden], gate rows first, and down [experts, hidden, inner]."""
        if self.has(f"{name}.gate_up_proj"):
            gate_up = self.matrix(f"{name}.gate_up_proj", experts, 2 * inner, hidden)
            return gate_up, self.matrix(f"{name}.down_proj", experts, hidden, inner)
        for expert in range(experts):
            self.shards.find(f"{self._prefix}{name}.{expert}.gate_proj.weight", (inner, hidden))
        gate_up = torch.empty(experts, 2 * inner, hidden, dtype=self.dtype)
        down = torch.empty(experts, hidden, inner, dtype=self.dtype)
        for expert in range(experts):
            gate_up[expert, :inner] = self.matrix(f"{name}.{expert}.gate_proj.weight", inner, hidden)
            gate_up[expert, inner:] = self.matrix(f"{name}.{expert}.up_proj.weight", inner, hidden)
            down[expert] = self.matrix(f"{name}.{expert}.down_proj.weight", hidden, inner)
        return gate_up, down

    def _find_prefix(self) -> str:
        for prefix in PREFIXES:
            if f"{prefix}embed_tokens.weight" in self.shards.entries:
                return prefix
        raise MissingTensor(
            f"{self.shards.directory} has no embed_tokens.weight under {', '.join(PREFIXES)}; these are not "
            "a supported model's weights"
        )
