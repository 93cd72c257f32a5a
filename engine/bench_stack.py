"""A few layers of a published shape with random weights on the CPU, and what a step through them costs at the least."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.api import PAGE
from engine.bench_shapes import SHAPES, RandomSource
from engine.layers.loader import Loader
from engine.layers.ops import CPU, Batch
from engine.models.model import Progress
from engine.models.qwen3_5_moe import Qwen35Moe
from engine.native.ops import NativeOps, PackedExperts, PackedWeight
from engine.runner import Rows, Runner

VOCAB = 1 << 12
"""Of a stack: its head is to take little of a step."""


@dataclass(frozen=True)
class Cost:
    """Of one step: bytes that must be read or written, and floating-point operations."""

    bytes: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


class CountedOps(NativeOps):
    """Adds up in ``cost`` what operations cost. Experts get random numbers."""

    cost = Cost()

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        parameters = weight.out * weight.inner
        self.cost += Cost(parameters * _itemsize(weight), 2 * x.shape[0] * parameters)
        return super().linear(x, weight, bias)

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> PackedExperts:
        count, hidden, inner = down.shape
        packed = self.room_for_experts(count, hidden, inner, down.dtype)
        for buffer in (packed.gate_up, packed.down):
            fill(buffer.view(down.dtype))
        return packed

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts) -> Tensor:
        parameters, read = 3 * experts.hidden * experts.inner, len(set(ids.flatten().tolist()))
        self.cost += Cost(read * parameters * _itemsize(experts), 2 * ids.numel() * parameters)
        return super().experts(x, ids, weights, experts)

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch
    ) -> Tensor:
        cells = state[0].numel()
        self.cost += Cost(2 * cells * state.itemsize * batch.segments.shape[0], 7 * cells * q.shape[0])
        return super().gated_delta(q, k, v, decay, beta, state, batch)

    def attention(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float) -> Tensor:
        ends = int((batch.segments[:, 1] + batch.segments[:, 2]).sum())
        pairs = int(batch.positions.sum()) + q.shape[0]
        key = k_pages[0, 0].numel() * k_pages.itemsize
        self.cost += Cost(2 * ends * key, 4 * pairs * q[0].numel())
        return super().attention(q, k_pages, v_pages, batch, scale)


class Stack:
    """``layers`` layers of this ``shape``, with room for ``sequences`` of ``context`` tokens, whose keys and values are
    random."""

    def __init__(
        self, ops: CountedOps, shape: str, layers: int, sequences: int, context: int, dtype: torch.dtype, tell: Progress
    ) -> None:
        config = replace(SHAPES[shape](layers), vocab=VOCAB)
        model = Qwen35Moe(config, Loader(RandomSource(dtype, CPU), ops, CPU), context, tell)
        pages = -(-context // PAGE)
        self._ops, self._tables = ops, [range(row * pages, (row + 1) * pages) for row in range(sequences)]
        self._runner = Runner(model, ops, dtype, pages=sequences * pages, slots=sequences)
        for page in (*self._runner.cache.keys, *self._runner.cache.values):
            fill(page.view(-1))
        for state in self._runner.cache.states:
            state.zero_()
        self._random = torch.Generator().manual_seed(2)

    def step(self, rows: int, position: int) -> tuple[float, Cost]:
        """Seconds of ``rows`` tokens of every sequence, from ``position`` on, and what they cost."""
        tokens = torch.randint(VOCAB, (len(self._tables), rows), generator=self._random).tolist()
        parts = [
            Rows(tokens[slot], position, table, slot, logits=True) for slot, table in enumerate(self._tables)
        ]  # fmt: skip
        self._ops.cost = Cost()
        start = time.perf_counter()
        self._runner.forward(parts)
        return time.perf_counter() - start, self._ops.cost


def fill(values: Tensor) -> None:
    """With random numbers: the same ones again and again, as drawing so many would take longer than all the rest."""
    some = (torch.randn(1 << 24, generator=torch.Generator().manual_seed(1)) * 0.02).to(values.dtype)
    for part in torch.split(values, len(some)):
        part.copy_(some[: len(part)])


def _itemsize(weight: PackedWeight | PackedExperts) -> int:
    return 2 if weight.bfloat else 4
