"""Which rows a program of a prefill kernel has: tiles of a batch's segments, found on the device.

Tiles end at absolute positions that are multiples of their size, so a sequence is cut alike however its rows come. The
grid follows from shapes: segment i's tiles are numbered from ``first row // TILE + 2 * i`` on, and some numbers have
none. Segments are in the order of their rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.launch import next_power_of_2
from engine.layers.ops import Batch


@triton.jit
def find_tile(segments, count, number, TILE: tl.constexpr, SEGMENTS: tl.constexpr):
    """A tile's segment, its first row in it, and how many rows it has; 0 or less for none."""
    index = tl.arange(0, SEGMENTS)
    first = tl.load(segments + index * 4, mask=index < count, other=0)
    before = (index < count) & (first // TILE + 2 * index <= number)
    mine = tl.sum(before.to(tl.int32)) - 1
    entry = segments + mine * 4
    rows, position = tl.load(entry + 1), tl.load(entry + 2)
    cell = (number - tl.load(entry) // TILE - 2 * mine) * TILE - position % TILE
    begin = tl.maximum(cell, 0)
    return mine, begin, tl.minimum(cell + TILE, rows) - begin


def tiles(rows: int, batch: Batch, tile: int) -> int:
    """Numbers that ``find_tile`` takes."""
    return rows // tile + 2 * batch.segments.shape[0]


def segments_of(batch: Batch) -> int:
    """``SEGMENTS``."""
    return next_power_of_2(batch.segments.shape[0])
