"""Attention of many rows by torch, that is cuDNN, over pages that are gathered first.

cuDNN prepares itself for each shape anew, which takes longer than the work, so that only few shapes are used: tiles of
rows at absolute positions that are multiples of ``GRID``, over runs of keys. What the runs give is merged by the sums
of their shares (as in FlashDecoding), the last keys first. What is left of a sequence is computed by
``engine.kernels.prefill_attention``. How it is cut depends on that sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.api import PAGE
from engine.kernels import prefill_attention
from engine.kernels.launch import cdiv, next_power_of_2
from engine.layers.ops import Batch

GRID = 1024
ROWS, KEYS = (4, 1), (32, 4, 1)
"""Sizes of tiles and of runs, in multiples of ``GRID``: they bound the room that is needed, too."""
HEADS = 8
"""Heads of rows that one program merges."""


@triton.jit
def _merge(
    out, levels, part, part_levels, count, heads, head_dim, part_head, part_row, level_head, level_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    at, dim = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, DIM)
    row, head = (at // heads).to(tl.int64), at % heads
    here = at < count
    inside = here[:, None] & (dim < head_dim)[None, :]
    level = tl.load(part_levels + head * level_head + row * level_row, mask=here, other=0.0)
    mixed = tl.load(part + (head * part_head + row * part_row)[:, None] + dim[None, :], mask=inside, other=0.0)
    mixed = mixed.to(tl.float32)
    to = out + at.to(tl.int64)[:, None] * head_dim + dim[None, :]
    if not FIRST:
        before = tl.load(levels + at, mask=here, other=0.0)
        top = tl.maximum(before, level)
        old, new = tl.exp(before - top), tl.exp(level - top)
        mixed = (tl.load(to, mask=inside, other=0.0) * old[:, None] + mixed * new[:, None]) / (old + new)[:, None]
        level = top + tl.log(old + new)
    tl.store(levels + at, level, mask=here)
    tl.store(to, mixed, mask=inside)


def attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float) -> Tensor:
    """As ``Ops.attention``. Reads on the host where sequences begin, and so waits for the device."""
    tiles, rest = cut(batch.segments.tolist())
    if not tiles or (q.is_cuda and k_pages.element_size() > 2):  # cuDNN takes 16-bit numbers
        return prefill_attention.attention(q, k_pages, v_pages, batch, scale)
    out, (_, heads, head_dim) = torch.empty_like(q, dtype=torch.float32), q.shape
    if rest:
        segments = torch.tensor([segment for _, segment in rest], dtype=torch.int32, device=q.device)
        table = batch.page_table[[sequence for sequence, _ in rest]]
        some = replace(batch, segments=segments, page_table=table)
        out = prefill_attention.attention(q, k_pages, v_pages, some, scale).float()
    for sequence, first, position, rows in tiles:
        queries = q[first : first + rows].to(k_pages.dtype).transpose(0, 1)[None]
        levels = out.new_empty(rows, heads)
        for start, end in runs(position, rows):
            pages = batch.page_table[sequence, start // PAGE : end // PAGE].long()
            keys, values = (each[pages].flatten(0, 1).transpose(0, 1)[None] for each in (k_pages, v_pages))
            part, its = _part(queries, keys, values, scale, causal=start == position)
            _merge[(cdiv(rows * heads, HEADS),)](
                out[first : first + rows], levels, part, its, rows * heads, heads, head_dim, part.stride(1),
                part.stride(2), its.stride(1), its.stride(2), HEADS=HEADS, DIM=next_power_of_2(head_dim),
                FIRST=start == position,
            )  # fmt: skip
    return out


def cut(segments: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, list[int]]]]:
    """Tiles as (sequence, first row, position, rows), and what is left as (sequence, segment), in order."""
    tiles, rest = [], []
    for sequence, (first, rows, position, slot) in enumerate(segments):
        start, end = -(-position // GRID) * GRID, (position + rows) // GRID * GRID
        if start >= end:
            start = end = position
        if start > position:
            rest.append((sequence, [first, start - position, position, slot]))
        while start < end:
            size = next(size * GRID for size in ROWS if size * GRID <= end - start)
            tiles.append((sequence, first + start - position, start, size))
            start += size
        if end < position + rows:
            rest.append((sequence, [first + end - position, position + rows - end, end, slot]))
    return tiles, rest


def runs(position: int, rows: int) -> Iterator[tuple[int, int]]:
    """Of the keys of a tile, the last first; that is the only one which not every row sees all of."""
    yield position, position + rows
    while position:
        size = next(size * GRID for size in KEYS if size * GRID <= position)
        yield position - size, position
        position -= size


def _part(queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """[1, heads, rows, dim], and the logarithms of the sums [1, heads, rows]."""
    if queries.is_cuda:
        mixed, levels, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            queries, keys, values, None, True, 0.0, causal, False, scale=scale
        )
        return mixed, levels.view(mixed.shape[:3])
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    mixed, levels = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, causal, scale=scale
    )
    return mixed, levels
