"""Paged attention, and writing the pages.

Flash decoding (arXiv 2205.14135, split over keys): a program for a row, a key head and ranges of keys at fixed
absolute positions reads each range once for all query heads that share it; a second kernel adds the ranges up in order.
What a row gives depends on its own length only. Long prefill is right but reads the keys again for every row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.api import PAGE
from engine.kernels.linear import dot
from engine.layers.ops import Batch


@dataclass(frozen=True)
class Tiling:
    """``split``: keys of a range, whole pages. ``tile``: keys in one step of a range; divides a page. ``stages`` is for
    16-bit pages; two of float32 would not fit into every GPU's shared memory."""

    split: int = 4 * PAGE
    tile: int = 32
    warps: int = 4
    stages: int = 3


TILING = Tiling()
RANGES = 16
"""Ranges added up in one step."""
ROWS = 16
"""Rows in one launch: bounds the room for what the ranges give."""
PROGRAMS = 2048
"""In one launch; a table may have room for many more ranges than its sequences have."""
LOG2_E = 1.4426950408889634


@triton.jit
def _sequence(segments, row, count, SEGMENTS: tl.constexpr):
    """The sequence that a row belongs to, -1 for none, and the row's position."""
    index = tl.arange(0, SEGMENTS)
    first = tl.load(segments + index * 4, mask=index < count, other=0)
    rows = tl.load(segments + index * 4 + 1, mask=index < count, other=0)
    start = tl.load(segments + index * 4 + 2, mask=index < count, other=0)
    mine = (first <= row) & (row < first + rows)
    return tl.max(tl.where(mine, index, -1)), tl.sum(tl.where(mine, start + row - first, 0))


@triton.jit
def _ranges(
    q, k_pages, v_pages, segments, table, partial, highest, sums,
    first_row, count, width, splits, heads, kv_heads, head_dim, scale,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, SEGMENTS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    local, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, position = _sequence(segments, first_row + local, count, SEGMENTS)
    length = tl.where(sequence < 0, 0, position + 1)
    group = heads // kv_heads
    member, dim = tl.arange(0, GROUP), tl.arange(0, DIM)
    head = kv_head * group + member
    here = (member < group)[:, None] & (dim < head_dim)[None, :]
    at = (first_row + local).to(tl.int64) * heads + head
    queries = tl.load(q + at[:, None] * head_dim + dim[None, :], mask=here, other=0.0) * scale
    for split in range(tl.program_id(2), tl.cdiv(length, SPLIT), tl.num_programs(2)):
        begin = split * SPLIT
        best = tl.full((GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        mixed = tl.zeros((GROUP, DIM), tl.float32)
        for start in range(begin, min(begin + SPLIT, length), TILE):
            page = tl.load(table + sequence * width + start // PAGE).to(tl.int64)
            key = tl.arange(0, TILE)
            inside = start + key < length
            token = ((page * PAGE + start % PAGE + key) * kv_heads + kv_head) * head_dim
            keys = tl.load(
                k_pages + token[None, :] + dim[:, None], mask=inside[None, :] & (dim < head_dim)[:, None], other=0.0
            )
            values = tl.load(
                v_pages + token[:, None] + dim[None, :], mask=inside[:, None] & (dim < head_dim)[None, :], other=0.0
            )
            scores = dot(queries, keys, tl.zeros((GROUP, TILE), tl.float32))
            scores = tl.where(inside[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            shares = tl.exp2(scores - new_best[:, None])
            fade = tl.exp2(best - new_best)
            total = total * fade + tl.sum(shares, axis=1)
            mixed = dot(shares, values, mixed * fade[:, None])
            best = new_best
        to = (local * heads + head) * splits + split
        tl.store(highest + to, best, mask=member < group)
        tl.store(sums + to, total, mask=member < group)
        tl.store(partial + to.to(tl.int64)[:, None] * head_dim + dim[None, :], mixed, mask=here)


@triton.jit
def _combine(
    partial, highest, sums, out, segments, first_row, count, splits, heads, head_dim,
    SPLIT: tl.constexpr, RANGES: tl.constexpr, SEGMENTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    local, head = tl.program_id(0), tl.program_id(1)
    dim = tl.program_id(2) * DIM + tl.arange(0, DIM)
    here = dim < head_dim
    sequence, position = _sequence(segments, first_row + local, count, SEGMENTS)
    ranges = tl.where(sequence < 0, 0, position // SPLIT + 1)
    base = ((local * heads + head) * splits).to(tl.int64)
    best, total = float("-inf"), 0.0
    mixed = tl.zeros((DIM,), tl.float32)
    for start in range(0, ranges, RANGES):
        split = start + tl.arange(0, RANGES)
        live = split < ranges
        tops = tl.load(highest + base + split, mask=live, other=float("-inf"))
        new_best = tl.maximum(best, tl.max(tops))
        shares, fade = tl.exp2(tops - new_best), tl.exp2(best - new_best)
        total = total * fade + tl.sum(shares * tl.load(sums + base + split, mask=live, other=0.0))
        parts = tl.load(
            partial + (base + split)[:, None] * head_dim + dim[None, :], mask=live[:, None] & here[None, :], other=0.0
        )
        mixed = mixed * fade + tl.sum(parts * shares[:, None], axis=0)
        best = new_best
    to = ((first_row + local).to(tl.int64) * heads + head) * head_dim + dim
    tl.store(out + to, tl.where(ranges > 0, mixed / total, 0.0), mask=here)


def attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float, tiling: Tiling = TILING
) -> Tensor:  # fmt: skip
    out, (rows, heads, head_dim) = torch.empty_like(q), q.shape
    kv_heads, (count, width) = k_pages.shape[2], batch.page_table.shape
    splits = triton.cdiv(width * PAGE, tiling.split)
    segments, dim = triton.next_power_of_2(max(1, count)), max(16, triton.next_power_of_2(head_dim))
    narrow = min(64, dim)
    room = min(rows, ROWS)
    partial = q.new_empty((room, heads, splits, head_dim))
    highest, sums = q.new_empty((room, heads, splits)), q.new_empty((room, heads, splits))
    for first in range(0, rows, ROWS):
        some = min(ROWS, rows - first)
        _ranges[(some, kv_heads, min(splits, triton.cdiv(PROGRAMS, some * kv_heads)))](
            q, k_pages, v_pages, batch.segments, batch.page_table, partial, highest, sums,
            first, count, width, splits, heads, kv_heads, head_dim, scale * LOG2_E,
            PAGE=PAGE, SPLIT=tiling.split, TILE=tiling.tile, SEGMENTS=segments,
            GROUP=max(16, triton.next_power_of_2(heads // kv_heads)), DIM=dim,
            num_warps=tiling.warps, num_stages=1 if k_pages.dtype == torch.float32 else tiling.stages,
        )  # fmt: skip
        _combine[(some, heads, triton.cdiv(head_dim, narrow))](
            partial, highest, sums, out, batch.segments, first, count, splits, heads, head_dim,
            SPLIT=tiling.split, RANGES=RANGES, SEGMENTS=segments, DIM=narrow, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _write_pages(
    k, v, k_pages, v_pages, segments, table, count, width, size, k_row, v_row,
    PAGE: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sequence, position = _sequence(segments, row, count, SEGMENTS)
    page = tl.load(table + tl.maximum(sequence, 0) * width + position // PAGE).to(tl.int64)
    here = at < tl.where(tl.minimum(sequence, page) < 0, 0, size)
    to = (page * PAGE + position % PAGE) * size + at
    tl.store(k_pages + to, tl.load(k + row * k_row + at, mask=here, other=0.0).to(k_pages.dtype.element_ty), mask=here)
    tl.store(v_pages + to, tl.load(v + row * v_row + at, mask=here, other=0.0).to(v_pages.dtype.element_ty), mask=here)


def write_pages(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> None:
    """Rows of no sequence are left out."""
    rows, (count, width) = k.shape[0], batch.page_table.shape
    size = k.shape[1] * k.shape[2]
    block = min(1024, triton.next_power_of_2(size))
    if k.numel():
        _write_pages[(rows, triton.cdiv(size, block))](
            k, v, k_pages, v_pages, batch.segments, batch.page_table, count, width, size, k.stride(0), v.stride(0),
            PAGE=PAGE, SEGMENTS=triton.next_power_of_2(max(1, count)), BLOCK=block,
        )  # fmt: skip
    return None
