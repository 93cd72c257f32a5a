"""What a model needs, known before anything of it is read: its own loading code, run over tensors without memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from engine.layers.loader import EMBEDDING, Loader
from engine.layers.ops import Ops
from engine.models.model import Manifest
from engine.models.registry import Architecture
from engine.weights.source import Source

_META = torch.device("meta")


@dataclass(frozen=True)
class Outline:
    """``dense``: bytes of all weights besides routed experts. ``layers`` have ``experts`` routed experts each, of size
    ``hidden`` x ``inner``; a row takes ``top_k`` of them."""

    manifest: Manifest
    dtype: torch.dtype
    dense: int
    layers: int
    experts: int
    hidden: int
    inner: int
    top_k: int


def outline(directory: Path, dtype: Any, architecture: Architecture, context: int) -> Outline:
    """Raises CheckpointError."""
    source = _Unread(directory, dtype)
    ops = Counting()
    model = architecture.build(Loader(source, cast(Ops, ops), _META), context, lambda *_: None)
    experts, hidden, inner = next(iter(ops.shapes), (0, 0, 0))
    return Outline(
        model.manifest, source.dtype, source.nbytes + ops.nbytes, ops.layers, experts, hidden, inner, architecture.top_k
    )


class _Unread(Source):
    """A checkpoint's tensors by their shapes alone. ``nbytes`` so far of those that operations do not pack."""

    nbytes = 0

    def matrix(self, name: str, *shape: int) -> Tensor:
        if name == EMBEDDING:
            return self._counted(shape, self.dtype)
        return torch.empty(shape, dtype=self.dtype, device=_META)

    def vector(self, name: str, *shape: int) -> Tensor:
        return self._counted(shape, torch.float32)

    def head(self, vocab: int, hidden: int) -> Tensor | None:
        return self.matrix("lm_head.weight", vocab, hidden)

    def experts(self, name: str, experts: int, inner: int, hidden: int) -> tuple[Tensor, Tensor]:
        gate_up = torch.empty(experts, 2 * inner, hidden, dtype=self.dtype, device=_META)
        return gate_up, torch.empty(experts, hidden, inner, dtype=self.dtype, device=_META)

    def _counted(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=_META)
        self.nbytes += tensor.nbytes
        return tensor


class Counting:
    """In place of operations while a model is loaded: takes all weights, and keeps none."""

    def __init__(self) -> None:
        self.layers = self.nbytes = 0
        self.shapes: set[tuple[int, int, int]] = set()
        """Experts, hidden and inner of each layer: the same for all."""

    def pack(self, weight: Tensor) -> None:
        """Into memory of its own, a tied head too."""
        self.nbytes += weight.nbytes

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> None:
        self.layers += 1
        self.shapes.add((down.shape[0], down.shape[1], down.shape[2]))

    def rope_table(self, context: int, rotary: int, theta: float) -> None:
        self.nbytes += 4 * context * rotary

    def __getattr__(self, name: str) -> Any:
        """Whatever else packs a weight."""
        return lambda *_, **__: None
