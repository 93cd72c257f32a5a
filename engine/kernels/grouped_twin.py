"""The grouped expert kernels in torch, in the precision of their inputs, for tests and checks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.experts.layout import Layout
from engine.kernels.grouped import Groups
from engine.kernels.pairs import Ordered


def sort_pairs(ids: Tensor, experts: int) -> Ordered:
    flat = ids.flatten().tolist()
    known = [expert if expert >= 0 else experts for expert in flat]
    order = sorted(range(len(flat)), key=lambda pair: (known[pair], pair))
    known.sort()
    start = [bisect_left(known, expert) for expert in range(experts + 1)]
    first = torch.tensor(start, dtype=torch.int32)
    return Ordered(torch.tensor(order, dtype=torch.int32), first, first.diff())


def arrange(x: Tensor, _layout: Layout, dtype: torch.dtype) -> Tensor:
    """In any order, as long as all take the same one."""
    return x.to(dtype)


def gate_up(x: Tensor, slots: Tensor, layout: Layout, groups: Groups, out: Tensor) -> None:
    ranks = groups.order.shape[0] // x.shape[0]
    for pairs, slot in _present(groups):
        weights, _ = layout.decode(slots[slot, : layout.nbytes])
        rows = x[groups.order[pairs].long() // ranks]
        gate, up = (rows @ weights.to(x).T).chunk(2, dim=1)
        out[pairs] = gate * torch.sigmoid(gate) * up


def down(h: Tensor, slots: Tensor, layout: Layout, groups: Groups, out: Tensor) -> None:
    for pairs, slot in _present(groups):
        _, weights = layout.decode(slots[slot, : layout.nbytes])
        out[groups.order[pairs].long()] = h[pairs] @ weights.to(h).T


def combine_pairs(out: Tensor, ids: Tensor, slot: Tensor, weights: Tensor, y: Tensor, *, add: bool = False) -> None:
    if not add:
        y.zero_()
    for rank in range(ids.shape[1]):
        here = (ids[:, rank] >= 0) & (slot[ids[:, rank].clamp(min=0).long()] >= 0)
        part = weights[:, rank, None] * out.view(*ids.shape, -1)[:, rank]
        y += torch.where(here[:, None], part, 0.0)


def _present(groups: Groups) -> Iterator[tuple[slice, int]]:
    """Where an expert's pairs are in the order, and its slot."""
    start = groups.start.tolist()
    for expert, slot in enumerate(groups.slot.tolist()):
        if slot >= 0 and start[expert] < start[expert + 1]:
            yield slice(start[expert], start[expert + 1]), slot
