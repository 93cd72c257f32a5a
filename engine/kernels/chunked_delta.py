"""The gated delta rule for many rows (Gated DeltaNet, arXiv 2412.06464), in chunks of 64 absolute positions.

In a chunk, with G the running sum of log decays, S the state before it and u_i what row i adds to the state along its
key, (I + A) U = beta (V - exp(G) K S) for A_ti = beta_t exp(G_t - G_i) k_t k_i, i < t. With T = (I + A)^-1 and
P_ti = exp(G_t - G_i) q_t k_i, i <= t:

    W = T beta exp(G) K       U = T beta V - W S       O = P T beta V + (exp(G) Q - P W) S
    S' = exp(G_last) S + (exp(G_last - G) K)^T U

``_within`` computes all that does not need S, for all chunks at once; ``_along`` takes S through the chunks. Only
differences of G that are not positive are exponentiated, so no decay over- or underflows into the result. A factor of a
product is the sum of two 16-bit numbers, which keeps 16 of its 24 bits; all else is float32: results are within 1e-4 of
exact ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from engine.kernels import recurrent
from engine.kernels.launch import cdiv, launch, next_power_of_2
from engine.kernels.limits import shared_memory
from engine.kernels.segments import find_tile, segments_of, tiles
from engine.layers.ops import Batch

CHUNK = 64
BLOCKS = 4
"""Diagonal blocks of a chunk that are inverted row by row."""


@dataclass(frozen=True)
class Tiling:
    """``slice``: key or value dimensions that ``_within`` has at a time; ``values``: those that a program of ``_along``
    carries, and ``stages`` - 1 chunks of the next ones are on their way."""

    slice: int
    values: int
    stages: int


LARGE, SMALL = Tiling(32, 32, 2), Tiling(32, 16, 1)
"""At a key_dim of 128 the first takes 225 KB of shared memory, the second 40."""


@triton.jit
def _halves(x, HALF: tl.constexpr):
    """Two 16-bit numbers whose sum is x, nearly."""
    high = x.to(HALF)
    return high, (x - high.to(tl.float32)).to(HALF)


@triton.jit
def _dot(a_high, a_low, b_high, b_low, total):
    """total + a @ b of halves."""
    if a_high.dtype != tl.float32:
        total = tl.dot(a_low, b_high, total)
        total = tl.dot(a_high, b_low, total)
    return tl.dot(a_high, b_high, total, input_precision="ieee")


@triton.jit
def _times(a, b, HALF: tl.constexpr):
    a_high, a_low = _halves(a, HALF)
    b_high, b_low = _halves(b, HALF)
    return _dot(a_high, a_low, b_high, b_low, tl.zeros((a.shape[0], b.shape[1]), tl.float32))


@triton.jit
def _store(to, plane, x, inside):
    high, low = _halves(x, to.dtype.element_ty)
    tl.store(to, high, mask=inside)
    tl.store(to + plane, low, mask=inside)


@triton.jit
def _inverse(a, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, HALF: tl.constexpr):
    """(I + a)^-1 of a strictly lower a. Diagonal blocks row by row, which is as stable as solving is; what is left is
    I + m with m^4 = 0."""
    SIDE: tl.constexpr = CHUNK // BLOCKS
    i, block = tl.arange(0, CHUNK), tl.arange(0, BLOCKS)
    same = block[:, None, None, None] == block[None, None, :, None]
    cells = tl.sum(tl.where(same, tl.reshape(a, (BLOCKS, SIDE, BLOCKS, SIDE)), 0.0), axis=2)
    row = tl.arange(0, SIDE)[None, :, None]
    inverse = tl.where(row == tl.arange(0, SIDE)[None, None, :], 1.0, 0.0) + tl.zeros(cells.shape, tl.float32)
    for number in range(1, SIDE):
        factors = tl.sum(tl.where(row == number, cells, 0.0), axis=1)
        change = tl.sum(factors[:, :, None] * inverse, axis=1)
        inverse = tl.where(row == number, inverse - change[:, None, :], inverse)
    diagonal = tl.where(same, inverse[:, :, None, :] + tl.zeros((BLOCKS, SIDE, BLOCKS, SIDE), tl.float32), 0.0)
    diagonal = tl.reshape(diagonal, (CHUNK, CHUNK))
    below = tl.where(i[:, None] // SIDE > i[None, :] // SIDE, a, 0.0)
    m = _times(diagonal, below, HALF)
    squared = _times(m, m, HALF)
    return diagonal + _times(squared - m - _times(m, squared, HALF), diagonal, HALF)


@triton.jit
def _within(
    q, k, v, decay, beta, keys_out, from_keys, from_queries, added, out, fades, segments,
    count, group, heads, key_dim, value_dim, q_row, k_row, v_row, plane, key_plane, scale,
    CHUNK: tl.constexpr, BLOCKS: tl.constexpr, SEGMENTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = keys_out.dtype.element_ty
    sequence, begin, length = find_tile(segments, count, tl.program_id(0), CHUNK, SEGMENTS)
    head = tl.program_id(1)
    if length > 0:
        i, part = tl.arange(0, CHUNK), tl.arange(0, SLICE)
        here = i < length
        first = (tl.load(segments + sequence * 4) + begin).to(tl.int64)
        q += first * q_row + head // group * key_dim
        k += first * k_row + head // group * key_dim
        v += first * v_row + head * value_dim
        at = (first * heads + head) + i * heads

        alike = tl.zeros((CHUNK, CHUNK), tl.float32)
        asked = tl.zeros((CHUNK, CHUNK), tl.float32)
        key_size, query_size = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
        for start in tl.static_range(0, KEYS, SLICE):
            inside = here[:, None] & (start + part < key_dim)[None, :]
            keys = tl.load(k + (i[:, None] * k_row + (start + part)[None, :]), mask=inside, other=0.0)
            queries = tl.load(q + (i[:, None] * q_row + (start + part)[None, :]), mask=inside, other=0.0)
            key_size += tl.sum(keys * keys, axis=1)
            query_size += tl.sum(queries * queries, axis=1)
            key_high, key_low = _halves(keys, HALF)
            query_high, query_low = _halves(queries, HALF)
            alike = _dot(key_high, key_low, tl.trans(key_high), tl.trans(key_low), alike)
            asked = _dot(query_high, query_low, tl.trans(key_high), tl.trans(key_low), asked)
        key_size = 1.0 / tl.sqrt(key_size + 1e-6)
        query_size = scale / tl.sqrt(query_size + 1e-6)
        strength = tl.load(beta + at, mask=here, other=0.0)
        # Differences of large sums may be small: in float32 they would be off by 1e-4.
        total = tl.cumsum(tl.load(decay + at, mask=here, other=0.0).to(tl.float64), axis=0)
        last = tl.sum(tl.where(i == length - 1, total, 0.0))
        fade = tl.exp(total.to(tl.float32))
        tl.store(fades + at * 2, fade, mask=here)
        tl.store(fades + at * 2 + 1, tl.exp((last - total).to(tl.float32)), mask=here)

        since = (total[:, None] - total[None, :]).to(tl.float32)
        since = tl.exp(tl.where(i[:, None] >= i[None, :], since, float("-inf"))) * key_size[None, :]
        strict = tl.where(i[:, None] > i[None, :], alike * since * (strength * key_size)[:, None], 0.0)
        high, low = _halves(_inverse(strict, CHUNK, BLOCKS, HALF), HALF)
        asked_high, asked_low = _halves(asked * since * query_size[:, None], HALF)

        for start in tl.static_range(0, KEYS, SLICE):
            inside = here[:, None] & (start + part < key_dim)[None, :]
            keys = tl.load(k + (i[:, None] * k_row + (start + part)[None, :]), mask=inside, other=0.0)
            keys *= key_size[:, None]
            if head % group == 0:
                of_keys = keys_out + (first * (heads // group) + head // group) * key_dim
                by_key = i[:, None] * (heads // group * key_dim) + (start + part)[None, :]
                _store(of_keys + by_key, key_plane, keys, inside)
            key_high, key_low = _halves(keys * (strength * fade)[:, None], HALF)
            recalled = _dot(high, low, key_high, key_low, tl.zeros((CHUNK, SLICE), tl.float32))
            key_high, key_low = _halves(recalled, HALF)
            where = i[:, None] * (heads * key_dim) + (start + part)[None, :]
            _store(from_keys + (first * heads + head) * key_dim + where, plane, recalled, inside)
            minus = _dot(asked_high, asked_low, key_high, key_low, tl.zeros((CHUNK, SLICE), tl.float32))
            queries = tl.load(q + (i[:, None] * q_row + (start + part)[None, :]), mask=inside, other=0.0)
            queries = queries * (fade * query_size)[:, None] - minus
            _store(from_queries + (first * heads + head) * key_dim + where, plane, queries, inside)

        for start in tl.static_range(0, VALUES, SLICE):
            inside = here[:, None] & (start + part < value_dim)[None, :]
            values = tl.load(v + (i[:, None] * v_row + (start + part)[None, :]), mask=inside, other=0.0)
            value_high, value_low = _halves(values * strength[:, None], HALF)
            new = _dot(high, low, value_high, value_low, tl.zeros((CHUNK, SLICE), tl.float32))
            to = (first * heads + head) * value_dim
            where = i[:, None] * (heads * value_dim) + (start + part)[None, :]
            tl.store(added + to + where, new, mask=inside)
            value_high, value_low = _halves(new, HALF)
            known = _dot(asked_high, asked_low, value_high, value_low, tl.zeros((CHUNK, SLICE), tl.float32))
            tl.store(out + to + where, known, mask=inside)


@triton.jit
def _keep(memory, cells, snapshot, sequence, rows, slot_stride, inside):
    """If it is to be kept after so many rows; no branch, so that the loop can be pipelined."""
    wanted = (tl.load(snapshot) == sequence) & (tl.load(snapshot + 1) == rows)
    target = tl.where(wanted, tl.load(snapshot + 2), -1).to(tl.int64)
    tl.store(cells + target * slot_stride, memory, mask=inside & (target + tl.zeros(inside.shape, tl.int32) >= 0))


@triton.jit
def _along(
    keys_in, from_keys, from_queries, added, out, fades, states, segments, snapshots,
    group, heads, key_dim, value_dim, plane, key_plane, slot_stride,
    CHUNK: tl.constexpr, SNAPSHOTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = keys_in.dtype.element_ty
    sequence, head = tl.program_id(0), tl.program_id(1)
    i, key, value = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    first, rows = tl.load(segments + sequence * 4).to(tl.int64), tl.load(segments + sequence * 4 + 1)
    offset = tl.load(segments + sequence * 4 + 2) % CHUNK
    key_here, value_here = key < key_dim, value < value_dim
    inside = key_here[:, None] & value_here[None, :]
    states += head * key_dim * value_dim
    cells = states + (key[:, None] * value_dim + value[None, :])
    slot = tl.load(segments + sequence * 4 + 3).to(tl.int64) * slot_stride
    memory = tl.load(cells + slot, mask=inside, other=0.0)
    for number in tl.static_range(SNAPSHOTS):
        _keep(memory, cells, snapshots + number * 3, sequence, 0, slot_stride, inside)
    for start in range(-offset, tl.where(rows > 0, rows, -offset), CHUNK):
        begin, end = tl.maximum(start, 0), tl.minimum(start + CHUNK, rows)
        here = begin + i < end
        at = (first + begin) * heads + head
        by_key = i[:, None] * (heads * key_dim) + key[None, :]
        by_value = i[:, None] * (heads * value_dim) + value[None, :]
        with_keys, with_values = here[:, None] & key_here[None, :], here[:, None] & value_here[None, :]
        recalled_high = tl.load(from_keys + at * key_dim + by_key, mask=with_keys, other=0.0)
        recalled_low = tl.load(from_keys + plane + at * key_dim + by_key, mask=with_keys, other=0.0)
        asked_high = tl.load(from_queries + at * key_dim + by_key, mask=with_keys, other=0.0)
        asked_low = tl.load(from_queries + plane + at * key_dim + by_key, mask=with_keys, other=0.0)
        new = tl.load(added + at * value_dim + by_value, mask=with_values, other=0.0)
        known = tl.load(out + at * value_dim + by_value, mask=with_values, other=0.0)
        of_keys = keys_in + ((first + begin) * (heads // group) + head // group) * key_dim
        by_key = i[:, None] * (heads // group * key_dim) + key[None, :]
        key_high = tl.load(of_keys + by_key, mask=with_keys, other=0.0)
        key_low = tl.load(of_keys + key_plane + by_key, mask=with_keys, other=0.0)
        share = tl.load(fades + (at + i * heads) * 2 + 1, mask=here, other=0.0)
        fade = tl.load(fades + ((first + end - 1) * heads + head) * 2)

        high, low = _halves(memory, HALF)
        new -= _dot(recalled_high, recalled_low, high, low, tl.zeros((CHUNK, VALUES), tl.float32))
        known = _dot(asked_high, asked_low, high, low, known)
        tl.store(out + at * value_dim + by_value, known, mask=with_values)
        high, low = _halves(new * share[:, None], HALF)
        memory = _dot(tl.trans(key_high), tl.trans(key_low), high, low, memory * fade)
        for number in tl.static_range(SNAPSHOTS):
            _keep(memory, cells, snapshots + number * 3, sequence, end, slot_stride, inside)
    tl.store(cells + slot, memory, mask=inside)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch,
    half: torch.dtype | None = None, tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """As ``Ops.gated_delta``, for any number of rows of any number of sequences. ``half``: what factors are cut into;
    float32, which the CPU's way is, leaves them whole."""
    (rows, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    out = v.new_empty(v.shape)
    if not v.numel():
        return out
    half = half or (torch.bfloat16 if v.is_cuda else torch.float32)
    tiling = tiling or (LARGE if shared_memory(v.device) >= 225 << 10 else SMALL)
    snapshots, taken = batch.snapshots, batch.snapshots.shape[0]
    if taken:
        snapshots, tails = _on_chunks(batch)
        snapshots = pad(snapshots, (0, 0, 0, next_power_of_2(taken) - taken), value=-1)  # a kernel for few numbers
    keys = v.new_empty(2, rows, key_heads, key_dim, dtype=half)
    from_keys, from_queries = v.new_empty(2, 2, rows, heads, key_dim, dtype=half)
    added, fades = torch.empty_like(out), v.new_empty(rows, heads, 2)
    group, wide = heads // key_heads, max(16, next_power_of_2(key_dim))
    values = max(16, next_power_of_2(value_dim))
    launch(
        _within, (tiles(rows, batch, CHUNK), heads),
        q, k, v, decay, beta, keys, from_keys, from_queries, added, out, fades, batch.segments,
        batch.segments.shape[0], group, heads, key_dim, value_dim, q.stride(0), k.stride(0), v.stride(0),
        from_keys.stride(0), keys.stride(0), key_dim**-0.5,
        CHUNK=CHUNK, BLOCKS=BLOCKS, SEGMENTS=segments_of(batch), KEYS=wide, VALUES=values,
        SLICE=min(tiling.slice, wide, values), num_warps=4, early=False,
    )  # fmt: skip
    launch(
        _along, (batch.segments.shape[0], heads, cdiv(value_dim, tiling.values)),
        keys, from_keys, from_queries, added, out, fades, state, batch.segments, snapshots,
        group, heads, key_dim, value_dim, from_keys.stride(0), keys.stride(0), state.stride(0),
        CHUNK=CHUNK, SNAPSHOTS=snapshots.shape[0], KEYS=wide, VALUES=tiling.values,
        num_warps=4, num_stages=tiling.stages, early=False,
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
