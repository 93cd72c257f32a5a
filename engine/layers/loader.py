"""Weights on their way from a checkpoint into the operations' own layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.layers.ops import CPU, Norm, Ops
from engine.weights.errors import BadConfig, MissingTensor
from engine.weights.source import Source

EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Loader:
    """``device`` is where the operations compute."""

    source: Source
    ops: Ops
    device: torch.device = CPU

    def linear(self, name: str, rows: int, columns: int) -> Any:
        """``name``.weight [rows, columns], packed."""
        return self.ops.pack(self.source.matrix(f"{name}.weight", rows, columns))

    def stacked(self, name: str, rows: Mapping[str, int], columns: int) -> Any:
        """Linear layers of the same input, ``rows`` of each by its name under ``name``, packed as one weight."""
        parts = [self.source.matrix(f"{name}.{part}.weight", size, columns) for part, size in rows.items()]
        return self.ops.pack(torch.cat(parts))

    def vector(self, name: str, *shape: int) -> Tensor:
        return self.source.vector(name, *shape).to(self.device)

    def norm(self, name: str, size: int, eps: float, offset: float = 0.0) -> Norm:
        return Norm(self.vector(f"{name}.weight", size), eps, offset)

    def bias(self, name: str, size: int, wanted: bool) -> Tensor | None:
        return self.vector(f"{name}.bias", size) if wanted else None

    def experts(self, name: str, experts: int, inner: int, hidden: int) -> Any:
        weights = self.source.experts(name, experts, inner, hidden)
        try:
            return self.ops.pack_experts(*weights)
        except ValueError as error:
            raise BadConfig(f"{name}: {error}; choose another --expert-format, or mend the checkpoint") from error

    def embedding(self, vocab: int, hidden: int) -> Tensor:
        return self.source.matrix(EMBEDDING, vocab, hidden).to(self.device)

    def head(self, embedding: Tensor, tied: bool) -> Any:
        """The output matrix [vocab, hidden], packed; the embedding where it is tied."""
        if tied:
            return self.ops.pack(embedding)
        head = self.source.head(embedding.shape[0], embedding.shape[1])
        if head is None:
            raise MissingTensor("lm_head.weight is missing and config.json does not say tie_word_embeddings")
        return self.ops.pack(head)
