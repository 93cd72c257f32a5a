"""Host memory of a pool for the device: all of it, or whole layers from the first on, as far as the system lets them be
pinned. Experts of the other layers are computed by the CPU and never fetched.

Nor are they staged through pinned buffers: a byte is read, written and read again for that, by threads that compute
nothing meanwhile, at a third of memory's rate; a decode step's experts are computed at three quarters of it or more.
Calls of thousands of rows, which the CPU computes far slower than it could stage, would gain.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from engine.device.driver import Driver, DriverError
from engine.experts.pool import Pool, Progress

PIECE = 1 << 30
"""Bytes pinned at once: enough to take little time beside them, few enough to show progress."""


@dataclass(frozen=True)
class Pinned:
    """``pointer``: the pool's beginning for the device, 0 when nothing of it is there. ``layers``: so many of the first
    ones. ``why`` there are not more; None when all are."""

    pointer: int
    layers: int
    why: DriverError | None
    pieces: tuple[int, ...]

    def unpin(self, driver: Driver) -> None:
        """Nothing may read them any more."""
        for address in self.pieces:
            driver.unregister(address)


def pin(driver: Driver, pool: Pool, progress: Progress = lambda done, total: None, piece: int = PIECE) -> Pinned:
    """As many layers as can be. ``progress`` in layers."""
    base, pointer, pieces, layers = pool.address(0), 0, list[int](), 0
    step = max(1, piece * pool.layers // pool.nbytes)
    why: DriverError | None = None
    while layers < pool.layers:
        last = min(layers + step, pool.layers)
        start, end = _page(pool, layers), _page(pool, last)
        if end > start:
            try:
                there = driver.register(base + start, end - start)
            except DriverError as error:
                if step == 1:
                    why = error
                    break
                step //= 2
                continue
            pieces.append(base + start)
            pointer = pointer or there - start
            if there != pointer + start:  # a fetch goes by the number of an expert, from the first one
                why = DriverError("the driver maps pieces of host memory apart from one another")
                break
        layers = last
        progress(layers, pool.layers)
    return Pinned(pointer if layers else 0, layers, why, tuple(pieces))


def _page(pool: Pool, layer: int) -> int:
    """Where the pages end that hold what is before a layer. Pieces that are pinned must not share one."""
    return -(-layer * pool.experts * pool.stride // mmap.PAGESIZE) * mmap.PAGESIZE
