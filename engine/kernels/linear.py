"""Linear layers of few rows: one pass over the weight, whatever the number of rows up to ``ROWS``.

Every shape runs the same tile of ``ROWS`` rows on the tensor cores, absent rows as zeros, and how the inner dimension
is cut depends on the weight's shape alone: a row's result is the same bits alone and in company. float32 activations
meet 16-bit weights as the sum of two 16-bit numbers, which keeps 16 of their 24 bits or more; float32 weights are
multiplied in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@dataclass(frozen=True)
class Tiling:
    """``programs``: as many as keep a large GPU's memory busy; weights of fewer output blocks are cut along the inner
    dimension too. Constants, so that results do not depend on the GPU."""

    block_n: int = 32
    block_k: int = 128
    programs: int = 256
    warps: int = 4
    stages: int = 4


TILING = Tiling()


@dataclass(frozen=True)
class DeviceWeight:
    """A linear weight [out, inner] on the device. ``arrived`` int32 [blocks]: zero between calls."""

    matrix: Tensor
    tiling: Tiling
    splits: int
    arrived: Tensor


def pack(weight: Tensor, tiling: Tiling = TILING) -> DeviceWeight:
    blocks = triton.cdiv(weight.shape[0], tiling.block_n)
    splits = min(triton.cdiv(weight.shape[1], 2 * tiling.block_k), max(1, tiling.programs // blocks))
    return DeviceWeight(weight, tiling, splits, torch.zeros(blocks, dtype=torch.int32, device=weight.device))


@triton.jit
def dot(a, b, total):
    """total + a @ b: a float32, b of any float type, to about float32."""
    if b.dtype == tl.float32:
        total = tl.dot(a, b, total, input_precision="ieee")
    else:
        high = a.to(b.dtype)
        low = (a - high.to(tl.float32)).to(b.dtype)
        total = tl.dot(low, b, total)
        total = tl.dot(high, b, total)
    return total


@triton.jit
def _linear(
    x, weight, bias, out, partial, arrived, rows, columns, inner, per_split,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, ROWS), block * BLOCK_N + tl.arange(0, BLOCK_N)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    weight_rows = weight + column.to(tl.int64)[None, :] * inner
    begin = split * per_split
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(begin, min(begin + per_split, inner), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tile = tl.load(weight_rows + k[:, None], mask=(k < inner)[:, None] & (column < columns)[None, :], other=0.0)
        part = tl.load(
            x + row[:, None] * inner + k[None, :], mask=(row < rows)[:, None] & (k < inner)[None, :], other=0.0
        )
        total = dot(part, tile, total)
    where = row[:, None] * columns + column[None, :]
    last = True
    if SPLITS > 1:
        # Whichever program of a block comes last adds all parts up, in their order.
        tl.store(partial + split * ROWS * columns + where, total, mask=here)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.store(arrived + block, 0)
            total = tl.zeros((ROWS, BLOCK_N), tl.float32)
            for number in range(SPLITS):
                total += tl.load(partial + number * ROWS * columns + where, mask=here, other=0.0)
        if HAS_BIAS:
            total += tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
        tl.store(out + where, total, mask=here)


def linear(x: Tensor, weight: DeviceWeight, bias: Tensor | None) -> Tensor:
    """x float32 [rows <= ROWS, inner] -> float32 [rows, out]."""
    rows, (columns, inner), tiling = x.shape[0], weight.matrix.shape, weight.tiling
    out = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
    if not rows:
        return out
    partial = out if weight.splits == 1 else out.new_empty((weight.splits, ROWS, columns))
    per_split = triton.cdiv(triton.cdiv(inner, tiling.block_k), weight.splits) * tiling.block_k
    _linear[(triton.cdiv(columns, tiling.block_n), weight.splits)](
        x, weight.matrix, out if bias is None else bias, out, partial, weight.arrived, rows, columns, inner, per_split,
        HAS_BIAS=bias is not None, SPLITS=weight.splits, ROWS=ROWS, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out


def matmul(x: Tensor, weight: DeviceWeight, bias: Tensor | None) -> Tensor:
    """Any number of rows, in the weight's own precision with float32 sums."""
    matrix = weight.matrix.t()
    if x.is_cuda and matrix.dtype != torch.float32:
        out = torch.mm(x.to(matrix.dtype), matrix, out_dtype=torch.float32)
    else:
        out = x @ matrix.float()
    return out if bias is None else out + bias
