"""The gated delta rule for many rows (Gated DeltaNet, arXiv 2412.06464), in chunks of 64 absolute positions.

In a chunk, with G the running sum of log decays, S the state before it and u_i what row i adds to the state along its
key, (I + A) U = beta (V - exp(G) K S) for A_ti = beta_t exp(G_t - G_i) k_t k_i, i < t. With T = (I + A)^-1 beta and
P_ti = exp(G_t - G_i) q_t k_i, i <= t:

    W = T exp(G) K        U = T V - W S        O = exp(G) Q S + P U        S' = exp(G_last) S + (exp(G_last - G) K)^T U

``_normalise`` gives keys and queries length 1, ``_within`` computes W, T V and P, both for all chunks at once, and
``_along`` takes S through the chunks. What they hand on lies as chunks (tiles of ``engine.kernels.segments``), zeros
where a chunk has no row. Factors of products are float16: T, W and P come from contractions, so that none of their
numbers is above 1. Sums, decays and states are float32. Only differences of G that are not positive are exponentiated,
so no decay over- or underflows into the result. Results are within 1e-3 of exact ones, or 4e-3 where all keys are the
same and beta is near 1. A row that is no number makes those before it in its chunk none.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import recurrent
from engine.kernels.launch import cdiv, launch, next_power_of_2
from engine.kernels.limits import shared_memory
from engine.kernels.segments import find_tile, segments_of, tiles
from engine.layers.ops import Batch

LEVELS = 6
CHUNK = 1 << LEVELS
ROWS, VALUES = 16, 32
"""Of a program of ``_normalise``; dimensions that one of ``_along`` carries."""
SNAPSHOTS = 16
"""A kernel for that many, for the next power of two if there are more."""
LARGE = 200 << 10
"""Shared memory for three chunks at a time, of which two are on their way; two take 130 KB at the most."""
LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-128.0)
"""A log decay that leaves nothing of a float32."""


@triton.jit
def _inverse(a, CHUNK: tl.constexpr, LEVELS: tl.constexpr, HALF: tl.constexpr):
    """(I + a)^-1 of a strictly lower a, block by block: of diagonal blocks of 2 rows, of 4, ... and of all. With D the
    inverses of such blocks and L what lies between two of them, D - D L D are those of blocks twice as large."""
    i = tl.arange(0, CHUNK)
    row, column = i[:, None], i[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, a, 0.0)
    minus = (-a).to(HALF)
    for level in tl.static_range(1, LEVELS):
        below = (row >> level != column >> level) & (row >> level + 1 == column >> level + 1)
        change = tl.where(below, tl.dot(inverse.to(HALF), minus), 0.0)
        inverse = tl.dot(change.to(HALF), inverse.to(HALF), inverse)
    return inverse


@triton.jit
def _unit(x, scale, HALF: tl.constexpr):
    """Rows of length ``scale``."""
    x = x.to(tl.float32)
    return (x * (scale / tl.sqrt(tl.sum(x * x, axis=1) + 1e-6))[:, None]).to(HALF)


@triton.jit
def _normalise(
    q, k, units, segments, count, key_heads, key_dim, q_row, k_row, plane, scale,
    CHUNK: tl.constexpr, SEGMENTS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = units.dtype.element_ty
    tile, head = tl.program_id(0) // (CHUNK // ROWS), tl.program_id(1)
    sequence, begin, length = find_tile(segments, count, tile, CHUNK, SEGMENTS)
    if length > 0:
        i, key = tl.program_id(0) % (CHUNK // ROWS) * ROWS + tl.arange(0, ROWS), tl.arange(0, KEYS)
        inside = (i < length)[:, None] & (key < key_dim)[None, :]
        first = (tl.load(segments + sequence * 4) + begin).to(tl.int64)
        to = units + (tile * key_heads + head).to(tl.int64) * (CHUNK * KEYS) + i[:, None] * KEYS + key[None, :]
        keys = tl.load(k + first * k_row + head * key_dim + (i[:, None] * k_row + key), mask=inside, other=0.0)
        queries = tl.load(q + first * q_row + head * key_dim + (i[:, None] * q_row + key), mask=inside, other=0.0)
        tl.store(to, _unit(keys, 1.0, HALF))
        tl.store(to + plane, _unit(queries, scale, HALF))


@triton.jit
def _within(
    v, decay, beta, units, recalls, asks, added, totals, segments,
    count, group, heads, value_dim, v_row, plane,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, SEGMENTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = units.dtype.element_ty
    tile, head, key_head = tl.program_id(0), tl.program_id(1), tl.program_id(1) // group
    sequence, begin, length = find_tile(segments, count, tile, CHUNK, SEGMENTS)
    if length > 0:
        i, key, value = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.arange(0, VALUES)
        here = i < length
        first = (tl.load(segments + sequence * 4) + begin).to(tl.int64)
        to = units + (tile * (heads // group) + key_head).to(tl.int64) * (CHUNK * KEYS)
        to += i[:, None] * KEYS + key[None, :]
        keys, queries = tl.load(to), tl.load(to + plane)
        at = first * heads + head + i * heads
        strength = tl.load(beta + at, mask=here, other=0.0)
        # Base 2. Differences of large sums may be small: in float32 they would be off by 1e-4, so there are two parts.
        paces = tl.load(decay + at, mask=here, other=0.0)
        paces = tl.where(paces < NOTHING, NOTHING, paces)  # a scan's sums of huge ones need not fall from row to row
        exact = tl.cumsum(paces.to(tl.float64) * LOG2_E, axis=0)
        total = exact.to(tl.float32)
        rest = (exact - total).to(tl.float32)
        cell = tile * heads + head
        tl.store(totals + cell * CHUNK + i, total)
        since = total[:, None] - total[None, :] + (rest[:, None] - rest[None, :])
        since = tl.exp2(tl.where(i[:, None] >= i[None, :], since, float("-inf")))
        by_row = cell.to(tl.int64) * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
        tl.store(asks + by_row, (tl.dot(queries, tl.trans(keys)) * since).to(HALF))
        strict = tl.dot(keys, tl.trans(keys)) * since * strength[:, None]
        solved = _inverse(tl.where(i[:, None] > i[None, :], strict, 0.0), CHUNK, LEVELS, HALF) * strength[None, :]
        recalled = tl.dot((solved * tl.exp2(total)[None, :]).to(HALF), keys)
        tl.store(recalls + cell.to(tl.int64) * (CHUNK * KEYS) + i[:, None] * KEYS + key[None, :], recalled.to(HALF))
        inside = here[:, None] & (value < value_dim)[None, :]
        values = tl.load(v + first * v_row + head * value_dim + (i[:, None] * v_row + value), mask=inside, other=0.0)
        new = tl.dot(solved.to(HALF), values.to(HALF))
        tl.store(added + cell.to(tl.int64) * (CHUNK * VALUES) + i[:, None] * VALUES + value[None, :], new.to(HALF))


@triton.jit
def _along(
    units, recalls, asks, added, out, totals, states, segments, snapshots,
    count, group, heads, key_dim, value_dim, plane, slot_stride,
    CHUNK: tl.constexpr, SNAPSHOTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = units.dtype.element_ty
    sequence, head, key_head = tl.program_id(0), tl.program_id(1), tl.program_id(1) // group
    i, key, value = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    first, rows = tl.load(segments + sequence * 4), tl.load(segments + sequence * 4 + 1)
    offset, slot = tl.load(segments + sequence * 4 + 2) % CHUNK, tl.load(segments + sequence * 4 + 3).to(tl.int64)
    inside = (key < key_dim)[:, None] & (value < value_dim)[None, :]
    states += head * key_dim * value_dim
    cells = states + (key[:, None] * value_dim + value[None, :])
    memory = tl.load(cells + slot * slot_stride, mask=inside, other=0.0)
    number = tl.arange(0, SNAPSHOTS)
    mine = tl.load(snapshots + number * 3, mask=number < count, other=-1) == sequence
    wanted = tl.where(mine, tl.load(snapshots + number * 3 + 1, mask=number < count, other=0), rows)
    by_key, by_row = i[:, None] * KEYS + key[None, :], i[:, None] * CHUNK + i[None, :]
    by_value, to_value = i[:, None] * ALL + value[None, :], i[:, None] * (heads * value_dim) + value[None, :]
    tile, done = first // CHUNK + 2 * sequence, -1
    while done < rows:
        start = tl.where(done > 0, (done + offset) // CHUNK, 0)
        done = tl.min(tl.where(wanted > done, wanted, rows))
        for chunk in range(start, tl.where(done > 0, tl.cdiv(done + offset, CHUNK), 0)):
            cell = ((tile + chunk) * heads + head).to(tl.int64)
            unit = units + ((tile + chunk) * (heads // group) + key_head).to(tl.int64) * (CHUNK * KEYS)
            keys, queries = tl.load(unit + by_key), tl.load(unit + plane + by_key)
            recalled = tl.load(recalls + cell * (CHUNK * KEYS) + by_key)
            asked = tl.load(asks + cell * (CHUNK * CHUNK) + by_row)
            new = tl.load(added + cell * (CHUNK * ALL) + by_value)
            total = tl.load(totals + cell * CHUNK + i)
            last = tl.min(total)  # that of the last row: after it are zeros

            half = memory.to(HALF)
            new = new.to(tl.float32) - tl.dot(recalled, half)
            known = tl.dot(queries, half) * tl.exp2(total)[:, None]
            change = (new * tl.exp2(last - total)[:, None]).to(HALF)
            memory = tl.dot(tl.trans(keys), change, memory * tl.exp2(last))
            known = tl.dot(asked, new.to(HALF), known)
            begin, end = tl.maximum(chunk * CHUNK - offset, 0), tl.minimum(chunk * CHUNK - offset + CHUNK, rows)
            to = out + ((first + begin).to(tl.int64) * heads + head) * value_dim
            tl.store(to + to_value, known, mask=(begin + i < end)[:, None] & (value < value_dim)[None, :])
        for one in range(count):
            if (tl.load(snapshots + one * 3) == sequence) & (tl.load(snapshots + one * 3 + 1) == done):
                target = tl.load(snapshots + one * 3 + 2).to(tl.int64)
                tl.store(cells + target * slot_stride, memory, mask=inside)
    tl.store(cells + slot * slot_stride, memory, mask=inside)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch
) -> Tensor:  # fmt: skip
    """As ``Ops.gated_delta``, for any number of rows of any number of sequences; q, k, v and with v the result may be
    float16."""
    (rows, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    out = v.new_empty(v.shape)
    if not v.numel():
        return out
    half = torch.float16 if v.is_cuda else v.dtype  # whole factors on a CPU, as its other products have
    snapshots, taken = batch.snapshots, batch.snapshots.shape[0]
    if taken:
        snapshots, tails = _on_chunks(batch)
    group, numbers = heads // key_heads, tiles(rows, batch, CHUNK)
    wide, deep = max(16, next_power_of_2(key_dim)), max(VALUES, next_power_of_2(value_dim))
    units = v.new_empty(2, numbers, key_heads, CHUNK, wide, dtype=half)
    recalls, asks, added = (v.new_empty(numbers, heads, CHUNK, size, dtype=half) for size in (wide, CHUNK, deep))
    totals = decay.new_empty(numbers, heads, CHUNK)
    count, segments = batch.segments.shape[0], segments_of(batch)
    launch(
        _normalise, (numbers * (CHUNK // ROWS), key_heads),
        q, k, units, batch.segments, count, key_heads, key_dim, q.stride(0), k.stride(0), units.stride(0),
        key_dim**-0.5,
        CHUNK=CHUNK, SEGMENTS=segments, KEYS=wide, ROWS=ROWS, num_warps=4, early=False,
    )  # fmt: skip
    launch(
        _within, (numbers, heads),
        v, decay, beta, units, recalls, asks, added, totals, batch.segments,
        count, group, heads, value_dim, v.stride(0), units.stride(0),
        CHUNK=CHUNK, LEVELS=LEVELS, SEGMENTS=segments, KEYS=wide, VALUES=deep, num_warps=4, early=False,
    )  # fmt: skip
    launch(
        _along, (count, heads, cdiv(value_dim, VALUES)),
        units, recalls, asks, added, out, totals, state, batch.segments, snapshots,
        taken, group, heads, key_dim, value_dim, units.stride(0), state.stride(0),
        CHUNK=CHUNK, SNAPSHOTS=max(SNAPSHOTS, next_power_of_2(taken)), KEYS=wide, VALUES=VALUES, ALL=deep,
        num_warps=4, num_stages=3 if shared_memory(v.device) >= LARGE else 2, early=False,
    )  # fmt: skip
    if taken:
        recurrent.gated_delta(q, k, v, decay, beta, state, tails)
    return out


def _on_chunks(batch: Batch) -> tuple[Tensor, Batch]:
    """Snapshots where chunks or segments end, and a batch that takes those inside a chunk on from there: short
    segments of their own, in the snapshots' slots."""
    index, after, slot = batch.snapshots.unbind(1)
    first, rows, position, _ = batch.segments[index.long()].unbind(1)
    whole = ((position + after) // CHUNK * CHUNK - position).clamp(min=0)
    whole = torch.where(after == rows, after, whole)
    tails = torch.stack((first + whole, after - whole, position + whole, slot), dim=1)
    return torch.stack((index, whole, slot), dim=1), replace(batch, segments=tails, snapshots=batch.snapshots[:0])
