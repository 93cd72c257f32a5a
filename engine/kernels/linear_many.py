"""Linear layers of 2 to 16 rows, on the tensor cores: as fast as memory gives the weights, whatever the number of rows.

A first kernel makes of each input a sum of two 16-bit numbers, which keeps 22 of its 24 bits, or 16 beside weights of
bfloat16: they are two columns of a product, so that a weight is read once for all. A program of the second kernel goes
through the inner dimension of its outputs. Where that makes few programs, several share the inner dimension, and the
last of them to end adds up what all have found, in their order. So a row's result is the same bits in any company;
columns of rows that are not there hold anything. float32 weights are multiplied to about float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.around import GATED_NORM, NORM, finish, load_beside, load_factor, load_inputs
from engine.kernels.launch import LINE, begin, cdiv, launch, next_power_of_2, prefetch, wait
from engine.kernels.recurrent import sequences, slide, window

ROWS, FEW = 16, 8
"""A product has columns for as many rows: the tensor cores read weights from shared memory only beside 16 columns."""
LOW = tl.constexpr(2048)
"""What an input's rest is multiplied by, so that float16 holds it."""
PIECE = 1024
"""Inputs of a program of the first kernel, but of NORM, where it has a whole row."""
OUTPUTS, BYTES, STAGES = 64, 256, 4
"""Outputs of a program, and how many bytes of an output's weights are a block; blocks on their way and at work."""
AHEAD = 512
"""Bytes of an output's weights that a program asks for before it waits."""
PROGRAMS, SHARES = 128, 4
"""As many as a large GPU has processors: with fewer, up to so many share the inner dimension."""


@triton.jit
def _prepare(
    x, gate, norm, to, normed, inner, stride, eps, offset, unit,
    KIND: tl.constexpr, HEAD: tl.constexpr, NORMED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < inner
    factor = load_factor(norm, k, inside, offset, KIND, HEAD)
    wait()
    values, plain = load_inputs(x, gate, factor, row, k, inside, KIND, HEAD)
    if KIND == NORM:
        values *= 1.0 / tl.sqrt(tl.sum(plain * plain) / inner + eps)
    if KIND == GATED_NORM:
        squares = tl.sum(tl.reshape(plain * plain, (BLOCK // HEAD, HEAD)), axis=1)
        scales = (1.0 / tl.sqrt(squares / HEAD + eps))[:, None]
        values *= tl.reshape(tl.broadcast_to(scales, (BLOCK // HEAD, HEAD)), (BLOCK,))
    if NORMED:
        tl.store(normed + row * inner + k, values, mask=inside)
    values *= unit
    high = values.to(to.dtype.element_ty)
    to += PARTS * row * stride + k
    tl.store(to, high, mask=inside)
    if PARTS == 2:
        tl.store(to + stride, ((values - high.to(tl.float32)) * LOW).to(high.dtype), mask=inside)


@triton.jit
def _product(
    x, weight, after, conv, out, shared, counts, rows, columns, inner, stride, share,
    BIAS: tl.constexpr, BASE: tl.constexpr, RANKS: tl.constexpr, WHOLE: tl.constexpr, WIDTH: tl.constexpr,
    SEGMENTS: tl.constexpr, PARTS: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr, LINES: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    row, part, k = tl.arange(0, ROWS), tl.arange(0, ROWS * PARTS), tl.arange(0, BLOCK)
    column, start = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * share
    present, here = row < rows, column < columns
    matrix = weight + column[:, None].to(tl.int64) * inner
    if WIDTH:
        live = sequences(conv, row, SEGMENTS)
    near = tl.minimum(start + tl.arange(0, LINES) * NEXT, inner - 1)[None, :]
    prefetch(weight + tl.minimum(column, columns - 1)[:, None].to(tl.int64) * inner + near)
    wait()
    beside = load_beside(
        after, row[None, :], column[:, None], present[None, :], here[:, None], columns,
        BIAS, BASE, RANKS, WHOLE,
    )  # fmt: skip
    if WIDTH:
        past = window(conv, live, column, columns, row, WIDTH)
    total = tl.zeros((OUTPUTS, ROWS * PARTS), tl.float32)
    for first in range(start, tl.minimum(start + share, inner), BLOCK):
        at = first + k
        tile = tl.load(matrix + at[None, :], mask=here[:, None] & (at < inner)[None, :], other=0.0)
        inputs = tl.load(x + part[None, :] * stride + at[:, None], mask=(at < inner)[:, None], other=0.0)
        total = tl.dot(tile, inputs, total, input_precision="tf32x3")
    begin()  # earlier, programs of the next product would be where there is room, not one beside the other
    if PARTS == 2:
        high, low = tl.split(tl.reshape(total, (OUTPUTS, ROWS, 2)))
        total = high + low * (1 / LOW)
    last = SHARES == 1
    if SHARES > 1:
        cells = shared + tl.program_id(0) * (SHARES * OUTPUTS * ROWS)
        cells += tl.arange(0, OUTPUTS)[:, None] + row[None, :] * OUTPUTS
        tl.store(cells + tl.program_id(1) * (OUTPUTS * ROWS), total)
        tl.debug_barrier()
        last = tl.atomic_add(counts + tl.program_id(0), 1, sem="acq_rel") == SHARES - 1
    if last:
        if SHARES > 1:
            total = tl.zeros((OUTPUTS, ROWS), tl.float32)
            for one in tl.static_range(SHARES):
                total += tl.load(cells + one * (OUTPUTS * ROWS), cache_modifier=".cg")
            tl.store(counts + tl.program_id(0), 0)
        total = finish(total, beside, BIAS, BASE, RANKS)
        tl.store(out + row[None, :] * columns + column[:, None], total, mask=present[None, :] & here[:, None])
        if WIDTH:
            slide(total, out, conv, live, column, columns, row, columns, past, WIDTH)


def many(
    weight: Tensor, counts: Tensor, inputs: tuple[Any, ...], after: tuple[Any, ...], rows: int,
    scales: tuple[float, float, float], before: dict[str, Any], options: dict[str, Any], normed: bool,
) -> None:  # fmt: skip
    """``inputs``: x, gate and norm, ``before``: what ``load_inputs`` does with them; ``after``: what stands beside, the
    convolution, where outputs and normed inputs go; ``counts`` int32 [ceil(out / OUTPUTS)]: zeros, before and after."""
    (columns, inner), parts = weight.shape, 1 if weight.dtype == torch.float32 else 2
    few = FEW if rows <= FEW and weight.is_cuda else ROWS  # numpy's products of other widths are other bits
    beside, conv, out, to = after
    stride, piece = cdiv(inner, 16) * 16, next_power_of_2(inner)
    if before["KIND"] != NORM.value:
        piece = min(piece, max(PIECE, before["HEAD"]) if before["KIND"] == GATED_NORM.value else PIECE)
    prepared = torch.empty((few * parts, stride), dtype=weight.dtype, device=weight.device)
    launch(
        _prepare, (rows, cdiv(inner, piece)), *inputs, prepared, to, inner, stride, *scales,
        NORMED=normed, PARTS=parts, BLOCK=piece, num_warps=max(1, min(16, piece // 256)), **before,
    )  # fmt: skip
    block, blocks = BYTES // weight.element_size(), cdiv(columns, OUTPUTS)
    shares = max(1, min(SHARES, next_power_of_2(cdiv(PROGRAMS, blocks)), next_power_of_2(inner // block)))
    share = cdiv(cdiv(inner, block), shares) * block
    shared = torch.empty((blocks, shares, few, OUTPUTS) if shares > 1 else 1, device=weight.device)
    launch(
        _product, (blocks, shares), prepared, weight, beside, conv, out, shared, counts,
        rows, columns, inner, stride, share,
        PARTS=parts, SHARES=shares, ROWS=few, OUTPUTS=OUTPUTS, BLOCK=block, LINES=AHEAD // LINE,
        NEXT=LINE // weight.element_size(), num_warps=4, num_stages=STAGES,
        **options | {"SEGMENTS": few if options["WIDTH"] else 1},
    )  # fmt: skip
