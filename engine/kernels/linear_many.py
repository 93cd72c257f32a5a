"""Linear layers of some rows, up to 16, on the tensor cores.

A program goes through blocks of outputs. Its warps share the inner dimension: each multiplies its chunk of a block's
weights on the tensor cores with the same chunk of the input, and the chunks are added up in their order, so that a
row's result is the same bits in any company. The input stays in registers from block to block, as the sum of two
16-bit numbers, which keeps 22 of its 24 bits, or 16 beside weights of bfloat16; rows that are not there are zeros.
float32 weights are multiplied to about float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.around import GATED_NORM, NORM, finish, give_normed, load_beside, load_factor, load_inputs
from engine.kernels.launch import ask, begin, cdiv, launch, next_power_of_2, wait
from engine.kernels.limits import shared_memory
from engine.kernels.recurrent import sequences, slide, window

GROUP = 8
"""Rows of a program; programs of other rows run beside it, and share its reads through the cache."""
CHUNKS, INNER = 16, 4096
"""Warps of a program, and how many bytes of an output's weights they have at a time, at the most. They set the order of
the sums, and so are the same on every GPU."""
BLOCK, PROGRAMS = 16, 132
"""Outputs of a block, and programs, as many as a large GPU has processors: one that goes on reads better than one that
begins."""
LOW = tl.constexpr(2048)
"""What an input's rest is multiplied by, so that float16 holds it."""
STAGES, ROOM = 3, 200 << 10
"""Blocks of 16-bit weights on their way and at work; bytes of shared memory without which one is at work, and a program
has fewer rows."""
AHEAD = 128 << 10
"""Bytes of its weights that a program asks for before it waits for the kernels ahead, at the most."""


@triton.jit
def _factors(
    x, gate, norm, row, k, here, eps, offset, unit, KIND: tl.constexpr, HEAD: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """[chunks, chunk, rows]: what meets the weight, as the sum of one of its type and one / LOW; and each row's sum of
    squares."""
    values, plain = load_inputs(
        x, gate, unit * load_factor(norm, k, here, offset, KIND, HEAD), row, k, here, KIND, HEAD
    )
    squares = tl.sum(tl.sum(plain * plain, axis=1), axis=0)
    if KIND == GATED_NORM:
        shape: tl.constexpr = values.shape
        heads = tl.reshape(plain * plain, (shape[0], shape[1] // HEAD, HEAD, shape[2]))
        scales = (1.0 / tl.sqrt(tl.sum(heads, axis=2) / HEAD + eps))[:, :, None, :]
        values *= tl.reshape(tl.broadcast_to(scales, (shape[0], shape[1] // HEAD, HEAD, shape[2])), shape)
    high = values.to(TYPE)
    return high, ((values - high.to(tl.float32)) * LOW).to(TYPE), squares


@triton.jit
def _linear(
    x, gate, norm, weight, after, conv, out, normed, rows, columns, inner, blocks, most, eps, offset,
    unit,
    KIND: tl.constexpr, HEAD: tl.constexpr, BIAS: tl.constexpr, BASE: tl.constexpr, RANKS: tl.constexpr,
    WHOLE: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, CHANNELS: tl.constexpr,
    NORMED: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    SIZE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(1) * FEW + tl.arange(0, FEW)
    present, first = row < rows, tl.program_id(0) * blocks
    count = tl.minimum(blocks, tl.cdiv(columns, BLOCK) - first)
    chunk = tl.arange(0, CHUNKS)[:, None, None] * CHUNK
    along, across = chunk + tl.arange(0, CHUNK)[None, None, :], chunk + tl.arange(0, CHUNK)[None, :, None]
    if WIDTH:
        live = sequences(conv, row, SEGMENTS)
    if tl.program_id(1) == 0:
        own = (first * BLOCK).to(tl.int64) * inner
        ask(weight + own, tl.minimum(tl.minimum(count * BLOCK, columns - first * BLOCK) * inner * SIZE, most))
    wait()
    if PARTS == 1:
        high, low, squares = _factors(
            x, gate, norm, row[None, None, :], across, (across < inner) & present[None, None, :], eps, offset, unit,
            KIND, HEAD, weight.dtype.element_ty,
        )  # fmt: skip
    else:
        high = tl.zeros((CHUNKS, CHUNK, FEW), weight.dtype.element_ty)
        low = high
        squares = tl.zeros((FEW,), tl.float32)
    total, lower = tl.zeros((CHUNKS, BLOCK, FEW), tl.float32), tl.zeros((CHUNKS, BLOCK, FEW), tl.float32)
    for step in range(count * PARTS):
        column, part = (first + step // PARTS) * BLOCK + tl.arange(0, BLOCK), step % PARTS * (CHUNKS * CHUNK)
        here = column < columns
        tile = weight + column[None, :, None].to(tl.int64) * inner + (part + along)
        tile = tl.load(tile, mask=here[None, :, None] & (part + along < inner), other=0.0)
        beside = load_beside(
            after, row[None, :], column[:, None], present[None, :], here[:, None], columns,
            BIAS, BASE, RANKS, WHOLE,
        )  # fmt: skip
        if PARTS > 1:  # noqa: SIM102 - Triton would bring in inputs ahead but for a branch, and has no room for them
            if rows > 0:
                k, inside = part + across, (part + across < inner) & present[None, None, :]
                high, low, more = _factors(
                    x, gate, norm, row[None, None, :], k, inside, eps, offset, unit, KIND, HEAD, high.dtype
                )
                squares = tl.where(part == 0, 0.0, squares) + more
        total, lower = tl.where(part == 0, 0.0, total), tl.where(part == 0, 0.0, lower)
        if tile.dtype == tl.float32:
            total = tl.dot(tile, high, total, input_precision="tf32x3")
        else:
            lower = tl.dot(tile, low, lower)
            total = tl.dot(tile, high, total)
        if step % PARTS == PARTS - 1:
            result = tl.sum(total + lower * (1 / LOW), axis=0)
            if KIND == NORM:
                result *= (1.0 / tl.sqrt(squares / inner + eps))[None, :]
            result = finish(result, beside, BIAS, BASE, RANKS)
            tl.store(out + row[None, :] * columns + column[:, None], result, mask=present[None, :] & here[:, None])
    if WIDTH:
        channel, end = first * BLOCK + tl.arange(0, CHANNELS), (first + count) * BLOCK
        past = window(conv, live, channel, end, row, WIDTH)
        slide(out, conv, live, channel, end, row, columns, past, WIDTH)
    if NORMED:
        give_normed(x, gate, norm, normed, row, present, squares, inner, eps, offset, KIND, HEAD, NORMED)


def group(device: torch.device) -> int:
    """Rows that a program has room for."""
    return GROUP // 4 if 0 < shared_memory(device) < ROOM else GROUP


def chunk(matrix: Tensor) -> int:
    """What a warp has of the inner dimension at a time."""
    inner = min(matrix.shape[1], INNER // matrix.element_size())
    return max(16, next_power_of_2(inner) // CHUNKS)


def many(
    weight: Tensor, inputs: tuple[Any, ...], after: tuple[Any, ...], rows: int, scales: tuple[float, float, float],
    normed: bool, options: dict[str, Any],
) -> None:  # fmt: skip
    (columns, inner), size, few = weight.shape, weight.element_size(), group(weight.device)
    piece, groups, total = chunk(weight), cdiv(rows, few), cdiv(columns, BLOCK)
    blocks = cdiv(total * groups, PROGRAMS)
    programs = cdiv(total, blocks)
    launch(
        _linear, (programs, groups), *inputs, *after,
        rows, columns, inner, blocks, AHEAD, *scales,
        NORMED=next_power_of_2(cdiv(inner, programs)) if normed else 0,
        FEW=few, CHANNELS=next_power_of_2(blocks * BLOCK), BLOCK=BLOCK, CHUNKS=CHUNKS, CHUNK=piece,
        SIZE=size, PARTS=cdiv(inner, piece * CHUNKS), num_warps=CHUNKS,
        num_stages=STAGES if size == 2 and few == GROUP else 1, **options,
    )  # fmt: skip
