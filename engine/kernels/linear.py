"""Linear layers of few rows: one pass over the weight, whatever the number of rows up to ``ROWS``.

Two kernels, and the weight's shape alone says which and how it is cut, so that a row's result is the same bits alone
and in company. Small weights are read straight into registers, all of them at once, and multiplied in float32: what
they take is one trip to memory. Large ones stream through the tensor cores, the weight as the left factor and the rows
as ``ROWS`` columns, absent ones as zeros; float32 activations meet 16-bit weights as the sum of two 16-bit numbers,
which keeps 16 of their 24 bits or more. float32 weights are multiplied in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@dataclass(frozen=True)
class Direct:
    """A program for ``block`` outputs and the whole inner dimension."""

    block: int = 4
    warps: int = 2


@dataclass(frozen=True)
class Stream:
    """``programs``: as many as a large GPU's memory wants; weights of fewer output blocks are cut along the inner
    dimension too, into ``splits`` at most: adding the pieces up takes time. Constants, so that results do not depend
    on the GPU. ``stages`` is for 16-bit weights: as many of float32 would not fit into every GPU's shared memory."""

    block_n: int = 64
    block_k: int = 128
    programs: int = 528
    splits: int = 8
    warps: int = 4
    stages: int = 3


DIRECT, STREAM, LONG_STREAM = Direct(), Stream(), Stream(splits=1, stages=4)
"""The last is for weights that need not be cut: fewer programs at a time, each further ahead."""
SMALL = 1 << 22
"""Most numbers of a weight that is read directly, ..."""
SHORT = 1 << 12
"""... and its largest inner dimension."""


@dataclass(frozen=True)
class DeviceWeight:
    """A linear weight [out, inner] on the device. ``arrived`` int32 [blocks]: zero between calls."""

    matrix: Tensor
    tiling: Direct | Stream
    splits: int
    arrived: Tensor


def pack(weight: Tensor, tiling: Direct | Stream | None = None) -> DeviceWeight:
    out, inner = weight.shape
    if tiling is None:
        if out * inner <= SMALL and inner <= SHORT:
            tiling = DIRECT
        else:
            tiling = STREAM if 2 * triton.cdiv(out, STREAM.block_n) <= STREAM.programs else LONG_STREAM
    blocks, splits = 1, 1
    if isinstance(tiling, Stream):
        blocks = triton.cdiv(out, tiling.block_n)
        splits = min(tiling.splits, triton.cdiv(inner, 2 * tiling.block_k), max(1, tiling.programs // blocks))
    return DeviceWeight(weight, tiling, splits, torch.zeros(blocks, dtype=torch.int32, device=weight.device))


@triton.jit
def dot(a, b, total):
    """total + a @ b, where one is float32 and the other of any float type, to about float32."""
    if a.dtype == b.dtype:
        total = tl.dot(a, b, total, input_precision="ieee")
    elif a.dtype == tl.float32:
        high = a.to(b.dtype)
        total = tl.dot((a - high.to(tl.float32)).to(b.dtype), b, total)
        total = tl.dot(high, b, total)
    else:
        high = b.to(a.dtype)
        total = tl.dot(a, (b - high.to(tl.float32)).to(a.dtype), total)
        total = tl.dot(a, high, total)
    return total


@triton.jit
def _stream(
    x, weight, bias, out, partial, arrived, rows, columns, inner, per_split,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, ROWS), block * BLOCK_N + tl.arange(0, BLOCK_N)
    here = (column < columns)[:, None] & (row < rows)[None, :]
    weight_rows = weight + column.to(tl.int64)[:, None] * inner
    begin = split * per_split
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(begin, min(begin + per_split, inner), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tile = tl.load(weight_rows + k[None, :], mask=(column < columns)[:, None] & (k < inner)[None, :], other=0.0)
        part = tl.load(
            x + row[None, :] * inner + k[:, None], mask=(row < rows)[None, :] & (k < inner)[:, None], other=0.0
        )
        total = dot(tile, part, total)
    where = row[None, :] * columns + column[:, None]
    last = True
    if SPLITS > 1:
        # Whichever program of a block comes last adds all parts up, in their order.
        tl.store(partial + split * ROWS * columns + where, total, mask=here)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.store(arrived + block, 0)
            total = tl.zeros((BLOCK_N, ROWS), tl.float32)
            for number in range(SPLITS):
                total += tl.load(partial + number * ROWS * columns + where, mask=here, other=0.0)
        if HAS_BIAS:
            total += tl.load(bias + column, mask=column < columns, other=0.0)[:, None]
        tl.store(out + where, total, mask=here)


@triton.jit
def _direct(
    x, weight, bias, out, rows, columns, inner,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    column, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, INNER)
    inside, here = k < inner, column < columns
    tile = tl.load(
        weight + column.to(tl.int64)[:, None] * inner + k[None, :], mask=here[:, None] & inside[None, :], other=0.0
    )
    added = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + column, mask=here, other=0.0)
    for row in tl.static_range(ROWS):  # unrolled: the reads of all rows are on their way at once
        values = tl.load(x + row * inner + k, mask=inside & (k * 0 + row < rows), other=0.0)
        total = tl.sum(tile.to(tl.float32) * values[None, :], axis=1) + added
        tl.store(out + row * columns + column, total, mask=here & (column * 0 + row < rows))


def linear(x: Tensor, weight: DeviceWeight, bias: Tensor | None) -> Tensor:
    """x float32 [rows <= ROWS, inner] -> float32 [rows, out]."""
    rows, (columns, inner), tiling = x.shape[0], weight.matrix.shape, weight.tiling
    out = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
    if not rows:
        return out
    with_bias = out if bias is None else bias
    if isinstance(tiling, Direct):
        _direct[(triton.cdiv(columns, tiling.block),)](
            x, weight.matrix, with_bias, out, rows, columns, inner, HAS_BIAS=bias is not None,
            ROWS=triton.next_power_of_2(rows), BLOCK=tiling.block, INNER=triton.next_power_of_2(inner),
            num_warps=tiling.warps,
        )  # fmt: skip
        return out
    partial = out if weight.splits == 1 else out.new_empty((weight.splits, ROWS, columns))
    per_split = triton.cdiv(triton.cdiv(inner, tiling.block_k), weight.splits) * tiling.block_k
    _stream[(triton.cdiv(columns, tiling.block_n), weight.splits)](
        x, weight.matrix, with_bias, out, partial, weight.arrived, rows, columns, inner, per_split,
        HAS_BIAS=bias is not None, SPLITS=weight.splits, ROWS=ROWS, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
        num_warps=tiling.warps, num_stages=tiling.stages if weight.matrix.dtype != torch.float32 else 2,
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
