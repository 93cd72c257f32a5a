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
    them. ``attention_at`` and ``recurrent_at``: the layer of each attention layer and of each recurrent tensor,
    ascending; empty: the first layer's forward needs all of them. ``grid``: prefill checkpoints lie on multiples of
    it."""

    attention_layers: int
    kv_heads: int
    head_dim: int
    recurrent: tuple[tuple[int, ...], ...] = ()
    attention_at: tuple[int, ...] = ()
    recurrent_at: tuple[int, ...] = ()
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
    def page_layers(self) -> tuple[int, ...]:
        """The layer of each component of a page."""
        return tuple(layer for layer in self.attention_at or (0,) * self.attention_layers for _ in range(2))

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layer of each component of a state."""
        return self.recurrent_at or (0,) * len(self.recurrent)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one recurrent-state slot over all layers."""
        return sum(self.state_components)


Wait = Callable[[int], None]
"""Returns when the state of a layer, and of those before it, is there; may raise to end the forward."""


def all_there(layer: int) -> None:
    """No layer has to wait."""


@dataclass(frozen=True, repr=False)
class Cache:
    """All sequences' state. ``keys`` and ``values``: one [pages, 64, kv_heads, head_dim] per attention layer;
    ``states``: one [slots, ...] per entry of ``Manifest.recurrent``. A forward calls ``wait`` with the number of each
    layer, in order, before it reads or writes what the layer has here: it may still be on its way."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    states: tuple[Tensor, ...]
    wait: Wait = all_there


class Model(Protocol):
    """``forward`` returns float32 logits [m, vocab] of ``batch.logit_rows`` and updates ``cache`` in place."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def vocab_size(self) -> int: ...

    def forward(self, batch: Batch, cache: Cache) -> Tensor: ...
