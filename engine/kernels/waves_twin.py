"""In torch, for tests and checks: what ``engine.kernels.waves`` does besides deciding."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.experts.waves import Fetches, Waves


def fetch(pool: Tensor, slots: Tensor, fetches: Fetches, nbytes: int) -> None:
    """``pool`` uint8 [layers * experts, stride]."""
    for slot, flat, _ in fetches.fetch[: int(fetches.counts[0])].tolist():
        slots[slot, :nbytes] = pool[flat, :nbytes]


def move(slots: Tensor, waves: Waves) -> None:
    for source, target in waves.moves[: int(waves.moved)].tolist():
        slots[target] = slots[source]


def left(ids: Tensor, waves: Waves) -> Tensor:
    chosen = waves.on_cpu[ids.clamp(min=0).long()].bool() & (ids >= 0)
    return torch.stack((torch.where(chosen, ids, -1), torch.zeros_like(ids)), dim=2)
