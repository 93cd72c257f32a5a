"""What the runner needs to know of a model: its manifest, and one forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.api import PAGE
from engine.layers.ops import Batch

Progress = Callable[[str, int, int], None]
"""Told of loading as (what, done, total)."""


@dataclass(frozen=True)
class Manifest:
    """The state a sequence has. ``recurrent``: shapes of the float32 tensors of one slot, in the order the model uses
    them. ``grid``: prefill checkpoints lie on multiples of it."""

    attention_layers: int
    kv_heads: int
    head_dim: int
    recurrent: tuple[tuple[int, ...], ...] = ()
    grid: int = PAGE

    def page_components(self, dtype: torch.dtype) -> tuple[int, ...]:
        """Bytes of one page's keys and values, layer by layer."""
        return (PAGE * self.kv_heads * self.head_dim * dtype.itemsize,) * (2 * self.attention_layers)

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one page over all attention layers, keys and values."""
        return sum(self.page_components(dtype))

    @property
    def state_components(self) -> tuple[int, ...]:
        """Bytes of each tensor of one recurrent-state slot."""
        return tuple(4 * torch.Size(shape).numel() for shape in self.recurrent)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one recurrent-state slot over all layers."""
        return sum(self.state_components)


@dataclass(frozen=True)
class Cache:
    """All sequences' state. ``keys`` and ``values``: one [pages, 64, kv_heads, head_dim] per attention layer;
    ``states``: one [slots, ...] per entry of ``Manifest.recurrent``."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    states: tuple[Tensor, ...]


class Model(Protocol):
    """``forward`` returns float32 logits [m, vocab] of ``batch.logit_rows`` and updates ``cache`` in place."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def vocab_size(self) -> int: ...

    def forward(self, batch: Batch, cache: Cache) -> Tensor: ...
