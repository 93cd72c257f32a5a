"""What this machine can do at most: reading memory, and torch's own matrix products.

Probes are sampled between the steps that are measured, so that both see the same machine, busy or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from engine.native.ops import NativeOps

READ_BYTES = 1 << 30
"""Far more than any cache holds."""


@dataclass
class Probe:
    """Something that does ``amount`` of work (bytes or floating-point operations), timed again and again."""

    amount: int
    work: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    def sample(self) -> None:
        """The first sample only warms up."""
        start = time.perf_counter()
        self.work()
        self.seconds.append(time.perf_counter() - start)

    @property
    def rate(self) -> float:
        """The median rate, per second; needs two samples."""
        return self.amount / median(self.seconds[1:])


def read_probe(ops: NativeOps, size: int = READ_BYTES) -> Probe:
    """All of the engine's threads together reading ``size`` bytes of memory."""
    memory = ops.room(size).fill_(1)
    return Probe(size, lambda: ops.read(memory))


def matmul_probe(dtype: torch.dtype, rows: int = 512, inner: int = 2048, out: int = 8192) -> Probe:
    """torch's x [rows, inner] @ weight [out, inner].T, with as many threads as torch is set to."""
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(out, inner).to(dtype)
    return Probe(2 * rows * inner * out, lambda: x @ weight.T)
