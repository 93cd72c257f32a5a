"""The expert kernels in torch, in the precision of ``x``, for tests and checks on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.experts.layout import Layout
from engine.experts.residency import Decision


def fetch(pool: Tensor, slots: Tensor, decision: Decision, part_bytes: Tensor) -> None:
    """``pool`` uint8 [layers * experts, stride]."""
    for slot, flat, parts in decision.fetch[: int(decision.counts[0])].tolist():
        first, last = int(part_bytes[parts // 8]), int(part_bytes[parts % 8])
        slots[slot, first:last] = pool[flat, first:last]


def gate_up(x: Tensor, slots: Tensor, decision: Decision, layout: Layout, out: Tensor) -> None:
    for row, rank, slot, columns in _pairs(decision, layout):
        weights, _ = layout.decode(slots[slot, : layout.nbytes])
        gate, up = (weights.to(x.dtype) @ x[row]).view(2, layout.inner)[:, :columns]
        out[row, rank, :columns] = gate * torch.sigmoid(gate) * up


def down(h: Tensor, slots: Tensor, decision: Decision, layout: Layout, out: Tensor) -> None:
    for row, rank, slot, columns in _pairs(decision, layout):
        _, weights = layout.decode(slots[slot, : layout.nbytes])
        out[row, rank] = weights[:, :columns].to(h.dtype) @ h[row, rank, :columns]


def combine(out: Tensor, weights: Tensor, decision: Decision, y: Tensor) -> None:
    y.zero_()
    for rank in range(weights.shape[1]):
        here = decision.gpu_parts[:, rank : rank + 1] > 0
        y += torch.where(here, weights[:, rank : rank + 1] * out[:, rank], 0.0)


def _pairs(decision: Decision, layout: Layout) -> list[tuple[int, int, int, int]]:
    """Row, rank, slot and columns of all pairs that the device computes something of."""
    rows, ranks = decision.slot.shape
    return [
        (row, rank, int(decision.slot[row, rank]), layout.bounds[int(decision.gpu_parts[row, rank])])
        for row in range(rows)
        for rank in range(ranks)
        if decision.gpu_parts[row, rank]
    ]
