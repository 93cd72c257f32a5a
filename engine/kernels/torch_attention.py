"""Attention of many rows by torch, that is cuDNN, over pages that are gathered first.

cuDNN prepares itself for each shape anew, which takes longer than the work, so that only few shapes are used: tiles of
``GRID`` rows and more, powers of two, at absolute positions that are multiples of ``GRID``, over runs of keys of such
sizes; their results are merged by their sums (FlashDecoding's way), the last keys first. What is left of a sequence is
computed by ``engine.kernels.prefill_attention``. How it is cut depends on that sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.api import PAGE
from engine.kernels import prefill_attention
from engine.layers.ops import Batch

GRID = 1024
MOST_ROWS, MOST_KEYS = 8 * GRID, 32 * GRID


def attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float) -> Tensor:
    """As ``Ops.attention``. Reads on the host where sequences begin, and so waits for the device."""
    segments = batch.segments.tolist()
    tiles, rest = cut(segments)
    if not tiles:
        return prefill_attention.attention(q, k_pages, v_pages, batch, scale)
    out = torch.empty_like(q)
    if rest:
        small = torch.tensor([segment for _, segment in rest], dtype=torch.int32, device=q.device)
        table = batch.page_table[[sequence for sequence, _ in rest]]
        out = prefill_attention.attention(q, k_pages, v_pages, replace(batch, segments=small, page_table=table), scale)
    for sequence, first, position, rows in tiles:
        pages = batch.page_table[sequence, : (position + rows) // PAGE].long()
        keys, values = (each[pages].flatten(0, 1).transpose(0, 1)[None] for each in (k_pages, v_pages))
        queries = q[first : first + rows].to(keys.dtype).transpose(0, 1)[None]
        mixed, level = _part(queries, keys[:, :, position:], values[:, :, position:], scale, causal=True)
        for start, end in runs(position):
            more, its_level = _part(queries, keys[:, :, start:end], values[:, :, start:end], scale, causal=False)
            mixed = torch.lerp(mixed, more, torch.sigmoid(its_level - level))
            level = torch.logaddexp(level, its_level)
        out[first : first + rows] = mixed[0].transpose(0, 1)
    return out


def cut(segments: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, list[int]]]]:
    """Tiles as (sequence, first row, position, rows), and what is left as (sequence, segment), in order."""
    tiles, rest = [], []
    for sequence, (first, rows, position, slot) in enumerate(segments):
        at, end = -(-position // GRID) * GRID, (position + rows) // GRID * GRID
        if at >= end:
            rest.append((sequence, [first, rows, position, slot]))
            continue
        if at > position:
            rest.append((sequence, [first, at - position, position, slot]))
        while at < end:
            size = min(MOST_ROWS, 1 << ((end - at).bit_length() - 1))
            tiles.append((sequence, first + at - position, at, size))
            at += size
        if at < position + rows:
            rest.append((sequence, [first + at - position, position + rows - at, at, slot]))
    return tiles, rest


def runs(position: int) -> Iterator[tuple[int, int]]:
    """Of the keys before a tile, the last first."""
    while position:
        size = min(MOST_KEYS, 1 << (position.bit_length() - 1))
        yield position - size, position
        position -= size


def _part(queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """float32, and the logarithm of the sum of each row [1, heads, rows, 1]."""
    if queries.is_cuda:
        mixed, level, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            queries, keys, values, None, True, 0.0, causal, False, scale=scale
        )
    else:
        group = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        mixed, level = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, causal, scale=scale
        )
    return mixed.float(), level.reshape(*mixed.shape[:3], 1)
