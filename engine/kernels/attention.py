"""Paged attention, and what comes before it: norms and rotation of q and k, writing the pages.

Flash decoding (arXiv 2205.14135, split over keys): a program for a row, a key head and ranges of keys at fixed
absolute positions reads each range once for all query heads that share it; a second kernel adds the ranges up in order.
How long the ranges are, and so what a row gives, depends on its own length only. Long prefill is right but reads the
keys again for every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.api import PAGE
from engine.kernels.launch import LINE, begin, cdiv, launch, next_power_of_2, prefetch, wait
from engine.kernels.pointwise import strides, warps
from engine.layers.ops import Batch, Norm


@dataclass(frozen=True)
class Tiling:
    """``split``: keys of a range, whole pages; ``short_split`` for rows of up to ``short`` keys, which would give a GPU
    too few ranges. ``tile``: keys in one step of a range; divides a page. ``stages`` is for 16-bit pages; two of
    float32 would not fit into every GPU's shared memory. One leaves most room to the kernels before and behind."""

    split: int = 4 * PAGE
    short_split: int = PAGE
    short: int = 64 * PAGE
    tile: int = 32
    warps: int = 4
    stages: int = 1


TILING = Tiling()
RANGES = 16
"""Ranges added up in one step."""
ROWS = 16
"""Rows in one launch: bounds the room for what the ranges give."""
HEADS = 6
"""That a program turns, of more rows: so many programs of one would take longer to begin than to work."""
PROGRAMS = 2048
"""In one launch; a table may have room for many more ranges than its sequences have."""
LOG2_E = 1.4426950408889634


@triton.jit
def _cut(x, type: tl.constexpr):
    """float32 as the sum of two of a narrower type, which stand below each other: [2 * rows, columns]."""
    if type == tl.float32:
        result = x
    else:
        high = x.to(type)
        both = tl.join(high, (x - high.to(tl.float32)).to(type))
        result = tl.reshape(tl.permute(both, (2, 0, 1)), (2 * x.shape[0], x.shape[1]))
    return result


@triton.jit
def _product(cut, other, ROWS: tl.constexpr):
    """What ``_cut`` gave of ROWS rows times ``other``, to about float32."""
    total = tl.dot(cut, other, input_precision="ieee")
    if cut.shape[0] > ROWS:
        total = tl.sum(tl.reshape(total, (2, ROWS, other.shape[1])), axis=0)
    return total


@triton.jit
def _sequence(segments, row, count, SEGMENTS: tl.constexpr):
    """The sequence that a row belongs to, -1 for none; the row's position, and that of its sequence's first row."""
    index = tl.arange(0, SEGMENTS)
    first = tl.load(segments + index * 4, mask=index < count, other=0)
    rows = tl.load(segments + index * 4 + 1, mask=index < count, other=0)
    start = tl.load(segments + index * 4 + 2, mask=index < count, other=0)
    mine = (first <= row) & (row < first + rows)
    since = tl.sum(tl.where(mine, start, 0))
    return tl.max(tl.where(mine, index, -1)), since + tl.sum(tl.where(mine, row - first, 0)), since


@triton.jit
def _ask(
    k_pages, v_pages, table, first, length, kv_head, kv_heads, head_dim,
    PAGE: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """For the first KEYS of a range, in one page."""
    if first < length:
        page = tl.load(table + first // PAGE).to(tl.int64)
        token = ((page * PAGE + first % PAGE + tl.arange(0, KEYS)) * kv_heads + kv_head) * head_dim
        at = token[:, None] + tl.minimum(tl.arange(0, DIM // LINE) * LINE, head_dim - 1)[None, :]
        prefetch(k_pages + at)
        prefetch(v_pages + at)


@triton.jit(do_not_specialize=["count", "width", "splits"])
def _ranges(
    q, k_pages, v_pages, segments, table, partial, highest, sums,
    first_row, count, width, splits, heads, kv_heads, head_dim, scale,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, SHORT_SPLIT: tl.constexpr, SHORT: tl.constexpr, TILE: tl.constexpr,
    SEGMENTS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, LINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin()
    local, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, position, since = _sequence(segments, first_row + local, count, SEGMENTS)
    length = tl.where(sequence < 0, 0, position + 1)
    size = tl.where(length <= SHORT, SHORT_SPLIT, SPLIT)
    first, dim, key = tl.program_id(2) * size, tl.arange(0, DIM), tl.arange(0, TILE)
    table += sequence * width
    _ask(k_pages, v_pages, table, first, length, kv_head, kv_heads, head_dim, PAGE, min(PAGE, SHORT_SPLIT), DIM, LINE)
    early_keys, early_values = 0.0, 0.0
    if EARLY:
        page = tl.load(table + first // PAGE, mask=first < length, other=0).to(tl.int64)
        token = ((page * PAGE + first % PAGE + key) * kv_heads + kv_head) * head_dim
        old = first + key < tl.minimum(length, since)  # the others are written by the kernel before
        here = old[None, :] & (dim < head_dim)[:, None]
        early_keys = tl.load(k_pages + token[None, :] + dim[:, None], mask=here, other=0.0)
        here = old[:, None] & (dim < head_dim)[None, :]
        early_values = tl.load(v_pages + token[:, None] + dim[None, :], mask=here, other=0.0)
    wait()
    group = heads // kv_heads
    member = tl.arange(0, GROUP)
    head = kv_head * group + member
    here = (member < group)[:, None] & (dim < head_dim)[None, :]
    at = (first_row + local).to(tl.int64) * heads + head
    queries = tl.load(q + at[:, None] * head_dim + dim[None, :], mask=here, other=0.0) * scale
    queries = _cut(queries, k_pages.dtype.element_ty)
    for split in range(tl.program_id(2), tl.cdiv(length, size), tl.num_programs(2)):
        origin = split * size
        best = tl.full((GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        mixed = tl.zeros((GROUP, DIM), tl.float32)
        for start in range(origin, min(origin + size, length), TILE):
            page = tl.load(table + start // PAGE).to(tl.int64)
            inside = start + key < length
            late = inside
            if EARLY:
                late &= start + key >= tl.where(start == first, since, 0)
            token = ((page * PAGE + start % PAGE + key) * kv_heads + kv_head) * head_dim
            keys = tl.load(
                k_pages + token[None, :] + dim[:, None], mask=late[None, :] & (dim < head_dim)[:, None],
                other=early_keys,
            )  # fmt: skip
            values = tl.load(
                v_pages + token[:, None] + dim[None, :], mask=late[:, None] & (dim < head_dim)[None, :],
                other=early_values,
            )  # fmt: skip
            scores = _product(queries, keys, GROUP)
            scores = tl.where(inside[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            shares = tl.exp2(scores - new_best[:, None])
            fade = tl.exp2(best - new_best)
            total = total * fade + tl.sum(shares, axis=1)
            mixed = mixed * fade[:, None] + _product(_cut(shares, values.dtype), values, GROUP)
            best = new_best
        to = (local * heads + head) * splits + split
        tl.store(highest + to, best, mask=member < group)
        tl.store(sums + to, total, mask=member < group)
        tl.store(partial + to.to(tl.int64)[:, None] * head_dim + dim[None, :], mixed, mask=here)


@triton.jit(do_not_specialize=["count", "splits"])
def _combine(
    partial, highest, sums, out, segments, first_row, count, splits, heads, head_dim,
    SPLIT: tl.constexpr, SHORT_SPLIT: tl.constexpr, SHORT: tl.constexpr, RANGES: tl.constexpr,
    SEGMENTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    begin()
    local, head = tl.program_id(0), tl.program_id(1)
    dim = tl.program_id(2) * DIM + tl.arange(0, DIM)
    here = dim < head_dim
    sequence, position, _ = _sequence(segments, first_row + local, count, SEGMENTS)
    wait()
    ranges = tl.where(sequence < 0, 0, position // tl.where(position < SHORT, SHORT_SPLIT, SPLIT) + 1)
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
    keys = width * PAGE
    splits = max(cdiv(keys, tiling.split), cdiv(min(keys, tiling.short), tiling.short_split))
    sizes: dict[str, Any] = {"SPLIT": tiling.split, "SHORT_SPLIT": tiling.short_split, "SHORT": tiling.short}
    sizes["SEGMENTS"] = next_power_of_2(max(1, count))
    dim = max(16, next_power_of_2(head_dim))
    narrow = min(64, dim)
    room = min(rows, ROWS)
    partial = q.new_empty((room, heads, splits, head_dim))
    highest, sums = q.new_empty((room, heads, splits)), q.new_empty((room, heads, splits))
    for first in range(0, rows, ROWS):
        some = min(ROWS, rows - first)
        launch(
            _ranges, (some, kv_heads, min(splits, cdiv(PROGRAMS, some * kv_heads))),
            q, k_pages, v_pages, batch.segments, batch.page_table, partial, highest, sums,
            first, count, width, splits, heads, kv_heads, head_dim, scale * LOG2_E,
            PAGE=PAGE, TILE=tiling.tile, **sizes,
            GROUP=max(4 * k_pages.element_size(), next_power_of_2(heads // kv_heads)), DIM=dim,
            LINE=min(dim, LINE // k_pages.element_size()), EARLY=rows == 1,
            num_warps=tiling.warps, num_stages=1 if k_pages.dtype == torch.float32 else tiling.stages,
        )  # fmt: skip
        launch(
            _combine, (some, heads, cdiv(head_dim, narrow)),
            partial, highest, sums, out, batch.segments, first, count, splits, heads, head_dim,
            RANGES=RANGES, DIM=narrow, num_warps=4, **sizes,
        )  # fmt: skip
    return out


@triton.jit
def _token(segments, table, row, count, width, PAGE: tl.constexpr, SEGMENTS: tl.constexpr):
    """Where a row's keys are among all of the pages, in tokens; negative for none."""
    sequence, position, _ = _sequence(segments, row, count, SEGMENTS)
    page = tl.load(table + tl.maximum(sequence, 0) * width + position // PAGE).to(tl.int64)
    return tl.where(sequence < 0, -1, page * PAGE + position % PAGE)


@triton.jit(do_not_specialize=["count", "width"])
def _write_pages(
    k, v, k_pages, v_pages, segments, table, count, width, size, k_row, v_row,
    PAGE: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = _token(segments, table, row, count, width, PAGE, SEGMENTS)
    wait()
    here = at < tl.where(token < 0, 0, size)
    to = token * size + at
    tl.store(k_pages + to, tl.load(k + row * k_row + at, mask=here, other=0.0).to(k_pages.dtype.element_ty), mask=here)
    tl.store(v_pages + to, tl.load(v + row * v_row + at, mask=here, other=0.0).to(v_pages.dtype.element_ty), mask=here)


def write_pages(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> None:
    """Rows of no sequence are left out."""
    rows, (count, width) = k.shape[0], batch.page_table.shape
    size = k.shape[1] * k.shape[2]
    block = min(1024, next_power_of_2(size))
    if k.numel():
        launch(
            _write_pages, (rows, cdiv(size, block)),
            k, v, k_pages, v_pages, batch.segments, batch.page_table, count, width, size, k.stride(0), v.stride(0),
            PAGE=PAGE, SEGMENTS=next_power_of_2(max(1, count)), BLOCK=block,
        )  # fmt: skip


@triton.jit
def _turned(
    x, norm, dim, head_dim, half, cos, sin, eps, offset
):  # fmt: skip
    """A head, normalised and then rotated."""
    rotated, low = dim < 2 * half, dim < half
    other = tl.where(low, dim + half, dim - half)
    values = tl.load(x + dim, mask=dim < head_dim, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / head_dim + eps)
    values = values * scale * (offset + tl.load(norm + dim, mask=dim < head_dim, other=0.0))
    others = tl.load(x + other, mask=rotated, other=0.0) * scale
    others *= offset + tl.load(norm + other, mask=rotated, other=0.0)
    return tl.where(rotated, values * cos + tl.where(low, -others, others) * sin, values)


@triton.jit
def turn_heads(
    row, first,
    q, k, v, q_norm, k_norm, out, positions, angles, k_pages, v_pages, segments, table,
    count, width, heads, kv_heads, head_dim, half, q_row, q_head, k_row, k_head, v_row, v_head,
    q_eps, q_offset, k_eps, k_offset,
    PAGE: tl.constexpr, SEGMENTS: tl.constexpr, DIM: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """What a program of a kernel does that has begun: EACH heads of a row, from number ``first`` on."""
    dim = tl.arange(0, DIM)
    token = _token(segments, table, row, count, width, PAGE, SEGMENTS)
    angle = angles + (tl.load(positions + row).to(tl.int64) * half + dim % half) * 2
    cos = tl.load(angle, mask=dim < 2 * half, other=0.0)
    sin = tl.load(angle + 1, mask=dim < 2 * half, other=0.0)
    wait()
    for one in range(EACH):
        head = first + one
        if head < heads:
            turned = _turned(q + row * q_row + head * q_head, q_norm, dim, head_dim, half, cos, sin, q_eps, q_offset)
            tl.store(out + (row * heads + head) * head_dim + dim, turned, mask=dim < head_dim)
        elif head < heads + kv_heads:
            number = head - heads
            turned = _turned(k + row * k_row + number * k_head, k_norm, dim, head_dim, half, cos, sin, k_eps, k_offset)
            here = dim < tl.where(token < 0, 0, head_dim)
            to = (token * kv_heads + number) * head_dim + dim
            tl.store(k_pages + to, turned.to(k_pages.dtype.element_ty), mask=here)
            value = tl.load(v + row * v_row + number * v_head + dim, mask=here, other=0.0)
            tl.store(v_pages + to, value.to(v_pages.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["count", "width"])
def _qk_norm_rope(
    q, k, v, q_norm, k_norm, out, positions, angles, k_pages, v_pages, segments, table,
    count, width, heads, kv_heads, head_dim, half, q_row, q_head, k_row, k_head, v_row, v_head,
    q_eps, q_offset, k_eps, k_offset,
    PAGE: tl.constexpr, SEGMENTS: tl.constexpr, DIM: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    begin()
    turn_heads(
        tl.program_id(0).to(tl.int64), tl.program_id(1) * EACH,
        q, k, v, q_norm, k_norm, out, positions, angles, k_pages, v_pages, segments, table,
        count, width, heads, kv_heads, head_dim, half, q_row, q_head, k_row, k_head, v_row, v_head,
        q_eps, q_offset, k_eps, k_offset, PAGE, SEGMENTS, DIM, EACH,
    )  # fmt: skip


def rotation(
    q: Tensor, k: Tensor, v: Tensor, norms: tuple[Norm, Norm], out: Tensor, table: Tensor,
    k_pages: Tensor, v_pages: Tensor, batch: Batch,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """What ``turn_heads`` takes behind its place, and constants."""
    (_, heads, head_dim), kv_heads, (count, width), (q_norm, k_norm) = (
        q.shape, k.shape[1], batch.page_table.shape, norms,
    )  # fmt: skip
    arguments = (
        q, k, v, q_norm.weight, k_norm.weight, out, batch.positions, table, k_pages, v_pages, batch.segments,
        batch.page_table, count, width, heads, kv_heads, head_dim, table.shape[1], *strides(q), *strides(k),
        *strides(v), q_norm.eps, q_norm.offset, k_norm.eps, k_norm.offset,
    )  # fmt: skip
    return arguments, {
        "PAGE": PAGE, "SEGMENTS": next_power_of_2(max(1, count)), "DIM": next_power_of_2(head_dim),
    }  # fmt: skip


def qk_norm_rope(
    q: Tensor, k: Tensor, v: Tensor, norms: tuple[Norm, Norm], table: Tensor,
    k_pages: Tensor, v_pages: Tensor, batch: Batch, given: torch.dtype,
) -> Tensor:  # fmt: skip
    """As ``Ops.qk_norm_rope``, in the precision ``given``."""
    rows, heads, _ = q.shape
    out, each = q.new_empty(q.shape, dtype=given), 1 if rows <= ROWS else HEADS
    if rows:
        arguments, constants = rotation(q, k, v, norms, out, table, k_pages, v_pages, batch)
        launch(
            _qk_norm_rope, (rows, cdiv(heads + k.shape[1], each)), *arguments,
            EACH=each, num_warps=warps(constants["DIM"]), **constants,
        )  # fmt: skip
    return out
