"""What carries state from token to token: the causal convolution and the gated delta rule.

A program owns a piece of one sequence's state and goes through the sequence's rows in order, so results do not depend
on how rows are cut into calls. Snapshots go to slots of their own, never to one that a sequence of the batch lives in.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.layers.ops import Batch

CHANNELS = 128
VALUES = 32


@triton.jit
def _input(x, state, row, first, channel, x_row, here, KEEP: tl.constexpr):
    """Input number ``row`` of a segment; the KEEP ones before its first are in the state."""
    rows = row + 0 * channel
    old = tl.load(state + channel * KEEP + rows + KEEP, mask=here & (rows < 0), other=0.0)
    new = tl.load(x + (first + rows).to(tl.int64) * x_row + channel, mask=here & (rows >= 0), other=0.0)
    return tl.where(rows < 0, old, new)


@triton.jit
def _conv(
    x, weight, states, out, segments, snapshots, channels, x_row, count, slot_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    KEEP: tl.constexpr = WIDTH - 1
    sequence, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = channel < channels
    first, rows = tl.load(segments + sequence * 4), tl.load(segments + sequence * 4 + 1)
    state = states + tl.load(segments + sequence * 4 + 3).to(tl.int64) * slot_stride
    for row in range(rows):
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(WIDTH):
            value = _input(x, state, row + tap - KEEP, first, channel, x_row, here, KEEP)
            total += value * tl.load(weight + channel * WIDTH + tap, mask=here, other=0.0)
        total *= 1.0 / (1.0 + tl.exp(-total))
        tl.store(out + (first + row).to(tl.int64) * channels + channel, total, mask=here)
    for number in range(count):
        if tl.load(snapshots + number * 3) == sequence:
            after, slot = tl.load(snapshots + number * 3 + 1), tl.load(snapshots + number * 3 + 2).to(tl.int64)
            for tap in tl.static_range(KEEP):
                value = _input(x, state, after + tap - KEEP, first, channel, x_row, here, KEEP)
                tl.store(states + slot * slot_stride + channel * KEEP + tap, value, mask=here)
    tl.debug_barrier()
    for tap in tl.static_range(KEEP):  # ascending: what is read lies above what has been written
        value = _input(x, state, rows + tap - KEEP, first, channel, x_row, here, KEEP)
        tl.debug_barrier()
        tl.store(state + channel * KEEP + tap, value, mask=here)


def conv(x: Tensor, weight: Tensor, state: Tensor, batch: Batch) -> Tensor:
    out, (channels, width) = x.new_empty(x.shape), weight.shape
    if x.numel():
        _conv[(batch.segments.shape[0], triton.cdiv(channels, CHANNELS))](
            x, weight, state, out, batch.segments, batch.snapshots, channels, x.stride(0), batch.snapshots.shape[0],
            state.stride(0), WIDTH=width, BLOCK=CHANNELS, num_warps=CHANNELS // 32,
        )  # fmt: skip
    return out


@triton.jit
def _gated_delta(
    q, k, v, decay, beta, states, out, segments, snapshots,
    group, value_heads, key_dim, value_dim, q_row, k_row, v_row, count, scale,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    key_here, value_here = key < key_dim, value < value_dim
    here = key_here[:, None] & value_here[None, :]
    first, rows = tl.load(segments + sequence * 4), tl.load(segments + sequence * 4 + 1)
    slot = tl.load(segments + sequence * 4 + 3).to(tl.int64)
    cells = states + (head * key_dim + key[:, None]) * value_dim + value[None, :]
    slot_stride = value_heads * key_dim * value_dim
    memory = tl.load(cells + slot * slot_stride, mask=here, other=0.0)
    for step in range(rows):
        row = (first + step).to(tl.int64)
        at = head // group * key_dim + key
        keys = tl.load(k + row * k_row + at, mask=key_here, other=0.0)
        queries = tl.load(q + row * q_row + at, mask=key_here, other=0.0)
        keys *= 1.0 / tl.sqrt(tl.sum(keys * keys) + 1e-6)
        queries *= scale / tl.sqrt(tl.sum(queries * queries) + 1e-6)
        values = tl.load(v + row * v_row + head * value_dim + value, mask=value_here, other=0.0)
        memory *= tl.exp(tl.load(decay + row * value_heads + head))
        recalled = tl.sum(memory * keys[:, None], axis=0)
        change = (values - recalled) * tl.load(beta + row * value_heads + head)
        memory += keys[:, None] * change[None, :]
        answer = tl.sum(memory * queries[:, None], axis=0)
        tl.store(out + (row * value_heads + head) * value_dim + value, answer, mask=value_here)
        for number in range(count):
            if (tl.load(snapshots + number * 3) == sequence) & (tl.load(snapshots + number * 3 + 1) == step + 1):
                target = tl.load(snapshots + number * 3 + 2).to(tl.int64)
                tl.store(cells + target * slot_stride, memory, mask=here)
    tl.store(cells + slot * slot_stride, memory, mask=here)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch
) -> Tensor:  # fmt: skip
    out = v.new_empty(v.shape)
    (_, key_heads, key_dim), (_, value_heads, value_dim) = k.shape, v.shape
    if v.numel():
        _gated_delta[(batch.segments.shape[0], value_heads, triton.cdiv(value_dim, VALUES))](
            q, k, v, decay, beta, state, out, batch.segments, batch.snapshots,
            value_heads // key_heads, value_heads, key_dim, value_dim, q.stride(0), k.stride(0), v.stride(0),
            batch.snapshots.shape[0], key_dim**-0.5,
            KEYS=triton.next_power_of_2(key_dim), VALUES=VALUES, num_warps=4,
        )  # fmt: skip
    return out
