"""The CPU's operations with routed experts in a pool, maybe in fewer bits than a checkpoint has: a token reads less."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.experts.executor import Executor
from engine.experts.pool import Pool
from engine.native.ops import NativeOps

_ROWS = 512
"""Of one request to the executor."""


class PooledOps(NativeOps):
    """Layers are packed in order. A row's bits depend on nothing but the row here, too."""

    def __init__(self, pool: Pool, ranks: int, instruction_set: str = "auto", threads: int = 0) -> None:
        """``ranks``: experts of a row. Raises NativeLibraryError."""
        super().__init__(instruction_set, threads)
        self._pool, self._layers = pool, 0
        self._executor = Executor(pool, _ROWS, ranks, self.threads, instruction_set=instruction_set, shares=True)

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> int:  # type: ignore[override]
        """-> the layer's number."""
        layer, self._layers = self._layers, self._layers + 1
        self._pool.put_layer(layer, gate_up, down)
        return layer

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:  # type: ignore[override]
        plan = torch.stack((ids, torch.zeros_like(ids)), dim=2)  # all parts of each
        some = (slice(first, first + _ROWS) for first in range(0, x.shape[0], _ROWS))
        return torch.cat([self._executor.run(experts, x[at], plan[at], weights[at]) for at in some])
