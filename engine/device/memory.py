"""The device's memory beside the dense weights: slots of experts, attention pages, recurrent states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.api import PAGE
from engine.models.model import Cache, Manifest


@dataclass(frozen=True)
class Sizes:
    """``slots`` for experts, besides the scratch slot; attention ``pages``; ``states``, recurrent ones."""

    slots: int
    pages: int
    states: int

    def nbytes(self, manifest: Manifest, dtype: torch.dtype, stride: int) -> int:
        """``stride``: bytes from one slot to the next."""
        pages, states = self.pages * manifest.page_bytes(dtype), self.states * manifest.slot_bytes
        return (self.slots + 1) * stride + pages + states


@dataclass(frozen=True, repr=False)
class DeviceMemory:
    """``slots`` uint8 [slots + 1, stride], the scratch slot last; ``keys`` and ``values`` [pages, 64, kv_heads,
    head_dim] of each attention layer; ``states`` float32 [states, ...] for each entry of ``Manifest.recurrent``."""

    slots: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    states: tuple[Tensor, ...]

    @property
    def cache(self) -> Cache:
        return Cache(self.keys, self.values, self.states)


def allocate(manifest: Manifest, dtype: torch.dtype, stride: int, sizes: Sizes, device: torch.device) -> DeviceMemory:
    """As much as ``sizes`` says, at once. Raises RuntimeError where the device has not so much."""
    shape = (sizes.pages, PAGE, manifest.kv_heads, manifest.head_dim)
    layers = range(manifest.attention_layers)
    return DeviceMemory(
        slots=torch.empty(sizes.slots + 1, stride, dtype=torch.uint8, device=device),
        keys=tuple(torch.empty(shape, dtype=dtype, device=device) for _ in layers),
        values=tuple(torch.empty(shape, dtype=dtype, device=device) for _ in layers),
        states=tuple(torch.empty(sizes.states, *each, device=device) for each in manifest.recurrent),
    )
