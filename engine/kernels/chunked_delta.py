"""The gated delta rule for many rows (Gated DeltaNet, arXiv 2412.06464), in chunks of 64 absolute positions.

In a chunk, with G the running sum of log decays, S the state before it and u_i what row i adds to the state along its
key, (I + A) U = beta (V - exp(G) K S) for A_ti = beta_t exp(G_t - G_i) k_t k_i, i < t. With T = (I + A)^-1 beta and
P_ti = exp(G_t - G_i) q_t k_i, i <= t:

    W = T exp(G) K        U = T V - W S        O = exp(G) Q S + P U        S' = exp(G_last) S + (exp(G_last - G) K)^T U

``_within`` computes W, T V and P, for all chunks at once; ``_along`` takes S through the chunks, transposed, so that
what becomes of it stays in registers. Factors of products are float16: keys and queries have length 1, and T, W and P
come from contractions, so that none of their numbers is above 1. Sums, decays and states are float32. Only differences
of G that are not positive are exponentiated, so no decay over- or underflows into the result. Results are within 1e-3
of exact ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
SNAPSHOTS = 16
"""A kernel for that many, for the next power of two if there are more."""


@dataclass(frozen=True)
class Tiling:
    """``values``: dimensions that a program of ``_along`` carries; ``stages`` - 1 chunks are on their way to it."""

    values: int
    stages: int
    warps: int = 4


LARGE, SMALL = Tiling(32, 3), Tiling(32, 1)
"""At a key_dim of 128 the first takes 185 KB of shared memory, the second 50."""


@triton.jit
def _inverse(a, CHUNK: tl.constexpr, LEVELS: tl.constexpr, HALF: tl.constexpr):
    """(I + a)^-1 of a strictly lower a: of its diagonal blocks of 2, 4, ... 64 rows, two of which make the next one.
    With D the inverse of the blocks and L what is below them in the larger blocks, that is D - D L D."""
    i = tl.arange(0, CHUNK)
    row, column = i[:, None], i[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, a, 0.0)
    half = a.to(HALF)
    for level in tl.static_range(1, LEVELS):
        below = (row >> level != column >> level) & (row >> level + 1 == column >> level + 1)
        change = tl.where(below, tl.dot(inverse.to(HALF), half), 0.0)
        inverse -= tl.dot(change.to(HALF), inverse.to(HALF))
    return inverse


@triton.jit
def _unit(x, HALF: tl.constexpr):
    x = x.to(tl.float32)
    return (x * (1.0 / tl.sqrt(tl.sum(x * x, axis=1) + 1e-6))[:, None]).to(HALF)


@triton.jit
def _within(
    q, k, v, decay, beta, units, recalls, asks, added, totals, segments,
    count, group, heads, key_dim, value_dim, q_row, k_row, v_row, plane, scale,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, SEGMENTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = units.dtype.element_ty
    tile, head, key_head = tl.program_id(0), tl.program_id(1), tl.program_id(1) // group
    sequence, begin, length = find_tile(segments, count, tile, CHUNK, SEGMENTS)
    if length > 0:
        i, key, value = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.arange(0, VALUES)
        here = i < length
        inside = here[:, None] & (key < key_dim)[None, :]
        first = (tl.load(segments + sequence * 4) + begin).to(tl.int64)
        keys = tl.load(k + first * k_row + key_head * key_dim + (i[:, None] * k_row + key), mask=inside, other=0.0)
        keys = _unit(keys, HALF)
        queries = tl.load(q + first * q_row + key_head * key_dim + (i[:, None] * q_row + key), mask=inside, other=0.0)
        queries = _unit(queries, HALF)
        if head % group == 0:
            to = units + (tile * (heads // group) + key_head).to(tl.int64) * (CHUNK * KEYS)
            to += i[:, None] * KEYS + key[None, :]
            tl.store(to, keys)
            tl.store(to + plane, queries)
        at = first * heads + head + i * heads
        strength = tl.load(beta + at, mask=here, other=0.0)
        # Differences of large sums may be small: in float32 they would be off by 1e-4.
        total = tl.cumsum(tl.load(decay + at, mask=here, other=0.0).to(tl.float64), axis=0)
        cell = tile * heads + head
        tl.store(totals + cell * CHUNK + i, total.to(tl.float32))
        since = (total[:, None] - total[None, :]).to(tl.float32)
        since = tl.exp(tl.where(i[:, None] >= i[None, :], since, float("-inf")))
        by_row = cell.to(tl.int64) * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
        tl.store(asks + by_row, (tl.dot(queries, tl.trans(keys)) * since * scale).to(HALF))
        strict = tl.dot(keys, tl.trans(keys)) * since * strength[:, None]
        solved = _inverse(tl.where(i[:, None] > i[None, :], strict, 0.0), CHUNK, LEVELS, HALF) * strength[None, :]
        recalled = tl.dot((solved * tl.exp(total.to(tl.float32))[None, :]).to(HALF), keys)
        tl.store(recalls + cell.to(tl.int64) * (CHUNK * KEYS) + i[:, None] * KEYS + key[None, :], recalled.to(HALF))
        inside = here[:, None] & (value < value_dim)[None, :]
        values = tl.load(v + first * v_row + head * value_dim + (i[:, None] * v_row + value), mask=inside, other=0.0)
        new = tl.dot(solved.to(HALF), values.to(HALF))
        tl.store(added + cell.to(tl.int64) * (CHUNK * VALUES) + i[:, None] * VALUES + value[None, :], new.to(HALF))


@triton.jit
def _along(
    units, recalls, asks, added, out, totals, states, segments, snapshots,
    count, group, heads, key_dim, value_dim, plane, slot_stride, scale,
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
            known = tl.dot(queries, half) * (tl.exp(total) * scale)[:, None]
            change = (new * tl.exp(last - total)[:, None]).to(HALF)
            memory = tl.dot(tl.trans(keys), change, memory * tl.exp(last))
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
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch,
    tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """As ``Ops.gated_delta``, for any number of rows of any number of sequences; q, k, v and with v the result may be
    float16."""
    (rows, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    out = v.new_empty(v.shape)
    if not v.numel():
        return out
    tiling = tiling or (LARGE if shared_memory(v.device) >= 200 << 10 else SMALL)
    half = torch.float16 if v.is_cuda else v.dtype  # whole factors on a CPU, as its other products have
    snapshots, taken = batch.snapshots, batch.snapshots.shape[0]
    if taken:
        snapshots, tails = _on_chunks(batch)
    group, numbers = heads // key_heads, tiles(rows, batch, CHUNK)
    wide, deep = max(16, next_power_of_2(key_dim)), max(tiling.values, next_power_of_2(value_dim))
    units = v.new_empty(2, numbers, key_heads, CHUNK, wide, dtype=half)
    recalls, asks = (v.new_empty(numbers, heads, CHUNK, size, dtype=half) for size in (wide, CHUNK))
    added, totals = (
        v.new_empty(numbers, heads, CHUNK, deep, dtype=half),
        decay.new_empty(numbers, heads, CHUNK),
    )
    launch(
        _within, (numbers, heads),
        q, k, v, decay, beta, units, recalls, asks, added, totals, batch.segments,
        batch.segments.shape[0], group, heads, key_dim, value_dim, q.stride(0), k.stride(0), v.stride(0),
        units.stride(0), key_dim**-0.5,
        CHUNK=CHUNK, LEVELS=LEVELS, SEGMENTS=segments_of(batch), KEYS=wide, VALUES=deep, num_warps=4, early=False,
    )  # fmt: skip
    launch(
        _along, (batch.segments.shape[0], heads, cdiv(value_dim, tiling.values)),
        units, recalls, asks, added, out, totals, state, batch.segments, snapshots,
        taken, group, heads, key_dim, value_dim, units.stride(0), state.stride(0), key_dim**-0.5,
        CHUNK=CHUNK, SNAPSHOTS=max(SNAPSHOTS, next_power_of_2(taken)), KEYS=wide, VALUES=tiling.values, ALL=deep,
        num_warps=tiling.warps, num_stages=tiling.stages, early=False,
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
