"""Paged attention of many rows (FlashAttention, arXiv 2205.14135): a program has a tile of one sequence's rows, for the
query heads that share a key head, and goes through that sequence's pages once.

Scores and sums are float32; products take their factors in the precision of the pages, as queries and shares are
rounded to it: a relative 3e-3 of the result for bfloat16. Few tiles are cut along the keys as well, so that they keep a
GPU busy behind a long history, and the parts are added up in order by a second kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.api import PAGE
from engine.kernels.attention import LOG2_E
from engine.kernels.launch import cdiv, launch, next_power_of_2
from engine.kernels.limits import shared_memory
from engine.kernels.segments import find_tile, segments_of, tiles
from engine.layers.ops import Batch


@dataclass(frozen=True)
class Tiling:
    """``rows``: tokens times query heads of one key head, together. ``keys`` at a time; divides a page."""

    rows: int
    keys: int
    warps: int
    stages: int


LARGE, SMALL, WHOLE = Tiling(128, 64, 8, 2), Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 1)
"""At a head_dim of 256 these take 192 KB of shared memory, 96 KB, and, for float32 pages, 68 KB."""
PROGRAMS = 264
"""That a large GPU is to have at least, if there are keys enough: ..."""
LEAST = 8
"""... pages for each of them."""
SUMS = 8
"""Heads of rows whose parts one program adds up."""


@triton.jit
def _add_keys(
    queries, best, total, mixed, k_pages, v_pages, table, start, end, position, kv_head, kv_heads, head_dim, scale,
    PAGE: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    key, dim = tl.arange(0, KEYS), tl.arange(0, queries.shape[1])
    page = tl.load(table + start // PAGE).to(tl.int64)
    base = ((page * PAGE + start % PAGE) * kv_heads + kv_head) * head_dim
    step, wide = kv_heads * head_dim, dim < head_dim
    keys = tl.load(k_pages + base + (key[None, :] * step + dim[:, None]), mask=wide[:, None], other=0.0)
    scores = tl.dot(queries, keys, input_precision="ieee")
    inside = wide[None, :]
    if MASKED:
        # What lies beyond the sequence is not even multiplied by zero: it may be NaN.
        inside = inside & (start + key < end)[:, None]
        own = position + tl.arange(0, queries.shape[0]) // GROUP
        scores = tl.where((start + key)[None, :] <= own[:, None], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1) * scale)
    level = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row may have no key among these
    shares = tl.exp2(scores * scale - level[:, None])
    fade = tl.exp2(best - level)
    total = total * fade + tl.sum(shares, axis=1)
    values = tl.load(v_pages + base + (key[:, None] * step + dim[None, :]), mask=inside, other=0.0)
    mixed = tl.dot(shares.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
    return new_best, total, mixed


@triton.jit(do_not_specialize=["count", "width", "all_rows"])
def _attend(
    q, k_pages, v_pages, segments, table, partial, highest, sums, out,
    count, width, all_rows, heads, kv_heads, head_dim, scale,
    PAGE: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, SEGMENTS: tl.constexpr,
    DIM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # Later tiles have more keys: they begin first.
    number, kv_head, part = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, begin, length = find_tile(segments, count, number, TOKENS, SEGMENTS)
    if length > 0:
        first, position = tl.load(segments + sequence * 4) + begin, tl.load(segments + sequence * 4 + 2) + begin
        token, member = tl.arange(0, TOKENS * GROUP) // GROUP, tl.arange(0, TOKENS * GROUP) % GROUP
        dim, group = tl.arange(0, DIM), heads // kv_heads
        here = (token < length) & (member < group)
        inside = here[:, None] & (dim < head_dim)[None, :]
        at = first.to(tl.int64) * heads + kv_head * group
        within = token * heads + member
        queries = tl.load(q + at * head_dim + (within[:, None] * head_dim + dim[None, :]), mask=inside, other=0.0)

        end = position + length
        low, high = 0, end
        if SPLIT:
            share = tl.cdiv(tl.cdiv(end, PAGE), tl.num_programs(2)) * PAGE
            low = part * share
            high = tl.minimum(low + share, end)
        best = tl.full((TOKENS * GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((TOKENS * GROUP,), tl.float32)
        mixed = tl.zeros((TOKENS * GROUP, DIM), tl.float32)
        seen = tl.minimum((position + 1) // KEYS * KEYS, high)  # keys before that are before all rows
        table += sequence * width
        for start in range(low, seen, KEYS):
            best, total, mixed = _add_keys(
                queries, best, total, mixed, k_pages, v_pages, table, start, end, position, kv_head, kv_heads,
                head_dim, scale, PAGE, KEYS, GROUP, False,
            )  # fmt: skip
        for start in range(tl.maximum(low, seen), high, KEYS):
            best, total, mixed = _add_keys(
                queries, best, total, mixed, k_pages, v_pages, table, start, end, position, kv_head, kv_heads,
                head_dim, scale, PAGE, KEYS, GROUP, True,
            )  # fmt: skip
        to = at * head_dim + (within[:, None] * head_dim + dim[None, :])
        if SPLIT:
            before = part.to(tl.int64) * all_rows * heads
            tl.store(partial + before * head_dim + to, mixed, mask=inside)
            tl.store(highest + before + at + within, best, mask=here)
            tl.store(sums + before + at + within, total, mask=here)
        else:
            tl.store(out + to, mixed / total[:, None], mask=inside)


@triton.jit(do_not_specialize=["size", "parts"])
def _add_up(partial, highest, sums, out, size, parts, head_dim, ROWS: tl.constexpr, DIM: tl.constexpr):
    row, dim = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    here = row < size
    inside = here[:, None] & (dim < head_dim)[None, :]
    best, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    for part in range(parts):
        at = row + part * size
        top = tl.load(highest + at, mask=here, other=0.0)
        new_best = tl.maximum(best, top)
        fade, share = tl.exp2(best - new_best), tl.exp2(top - new_best)
        total = total * fade + share * tl.load(sums + at, mask=here, other=0.0)
        values = tl.load(partial + at[:, None] * head_dim + dim[None, :], mask=inside, other=0.0)
        mixed = mixed * fade[:, None] + values * share[:, None]
        best = new_best
    tl.store(out + row[:, None] * head_dim + dim[None, :], mixed / total[:, None], mask=inside)


def attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float, tiling: Tiling | None = None
) -> Tensor:  # fmt: skip
    """As ``Ops.attention``, for any rows of any number of sequences; rows of none are left unwritten. Of q of 16
    bits the result is float16."""
    whole, (rows, heads, head_dim) = q.dtype == torch.float32, q.shape
    out = q.new_empty(q.shape, dtype=torch.float32 if whole else torch.float16)
    if not q.numel():
        return out
    kv_heads, (count, width) = k_pages.shape[2], batch.page_table.shape
    tiling = tiling or _tiling(k_pages)
    group, dim = next_power_of_2(heads // kv_heads), max(16, next_power_of_2(head_dim))
    tokens = max(1, tiling.rows // group)
    numbers = tiles(rows, batch, tokens)
    parts = max(1, min(PROGRAMS // (numbers * kv_heads), width // LEAST))
    partial = highest = sums = out
    if parts > 1:
        partial = q.new_empty(parts, rows, heads, head_dim, dtype=torch.float32)
        highest, sums = partial.new_empty(2, parts, rows, heads)
    launch(
        _attend, (numbers, kv_heads, parts),
        q.to(k_pages.dtype), k_pages, v_pages, batch.segments, batch.page_table, partial, highest, sums, out,
        count, width, rows, heads, kv_heads, head_dim, scale * LOG2_E,
        PAGE=PAGE, KEYS=tiling.keys, TOKENS=tokens, GROUP=group, SEGMENTS=segments_of(batch),
        DIM=dim, SPLIT=parts > 1,
        num_warps=tiling.warps, num_stages=tiling.stages, early=False,
    )  # fmt: skip
    if parts > 1:
        launch(
            _add_up, (cdiv(rows * heads, SUMS),), partial, highest, sums, out, rows * heads, parts, head_dim,
            ROWS=SUMS, DIM=dim, num_warps=4, early=False,
        )  # fmt: skip
    return out


def _tiling(pages: Tensor) -> Tiling:
    whole = pages.element_size() == 4
    return WHOLE if whole else LARGE if shared_memory(pages.device) >= 200 << 10 else SMALL
