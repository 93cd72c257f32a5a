"""What carries state from token to token: the causal convolution and the gated delta rule.

A program owns a piece of one sequence's state and goes through the sequence's rows in order, so results do not depend
on how rows are cut into calls. Snapshots go to slots of their own, never to one that a sequence of the batch lives in.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import begin, launch, wait
from engine.kernels.pointwise import sigmoid, softplus
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
def _snapshot(x, states, state, snapshot, first, channel, x_row, here, slot_stride, KEEP: tl.constexpr):
    after, slot = tl.load(snapshot + 1), tl.load(snapshot + 2).to(tl.int64)
    for tap in tl.static_range(KEEP):
        value = _input(x, state, after + tap - KEEP, first, channel, x_row, here, KEEP)
        tl.store(states + slot * slot_stride + channel * KEEP + tap, value, mask=here)


@triton.jit
def _conv(
    x, weight, states, out, segments, snapshots, channels, x_row, count, slot_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    KEEP: tl.constexpr = WIDTH - 1
    sequence, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = channel < channels
    wait()
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
            _snapshot(x, states, state, snapshots + number * 3, first, channel, x_row, here, slot_stride, KEEP)
    tl.debug_barrier()
    for tap in tl.static_range(KEEP):  # ascending: what is read lies above what has been written
        value = _input(x, state, rows + tap - KEEP, first, channel, x_row, here, KEEP)
        tl.debug_barrier()
        tl.store(state + channel * KEEP + tap, value, mask=here)


def conv(x: Tensor, weight: Tensor, state: Tensor, batch: Batch) -> Tensor:
    out, (channels, width) = x.new_empty(x.shape), weight.shape
    if x.numel():
        launch(
            _conv, (batch.segments.shape[0], triton.cdiv(channels, CHANNELS)),
            x, weight, state, out, batch.segments, batch.snapshots, channels, x.stride(0), batch.snapshots.shape[0],
            state.stride(0), WIDTH=width, BLOCK=CHANNELS, num_warps=CHANNELS // 32,
        )  # fmt: skip
    return out


@triton.jit
def _inputs(x, states, row, first, slot, channel, x_row, slot_stride, here, KEEP: tl.constexpr):
    """As ``_input``, of rows of several segments. ``row`` counts from the first of the segment."""
    old = tl.load(states + slot * slot_stride + channel * KEEP + row + KEEP, mask=here & (row < 0), other=0.0)
    new = tl.load(x + (first + row) * x_row + channel, mask=here & (row >= 0), other=0.0)
    return tl.where(row < 0, old, new)


@triton.jit
def conv_rows(
    x, conv, first_channel, x_row, rows,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``conv`` of BLOCK channels of all rows, by the program that has just stored them as ``x``."""
    weight, states, out, segments, snapshots, channels, count, snapshots_count, slot_stride = conv
    KEEP: tl.constexpr = WIDTH - 1
    if first_channel < channels:
        tl.debug_barrier()
        channel = first_channel + tl.arange(0, BLOCK)[None, :]
        inside = channel < channels
        number = tl.arange(0, SEGMENTS)
        live = number < count
        firsts = tl.load(segments + number * 4, mask=live, other=0)
        counts = tl.load(segments + number * 4 + 1, mask=live, other=0)
        slots = tl.load(segments + number * 4 + 3, mask=live, other=0)

        row = tl.arange(0, ROWS)
        mine = (firsts[None, :] <= row[:, None]) & (row[:, None] < (firsts + counts)[None, :])
        first = tl.sum(tl.where(mine, firsts[None, :], 0), axis=1)[:, None]
        slot = tl.sum(tl.where(mine, slots[None, :], 0), axis=1)[:, None].to(tl.int64)
        here = (tl.max(mine.to(tl.int32), axis=1)[:, None] > 0) & (row[:, None] < rows) & inside
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for tap in tl.static_range(WIDTH):
            value = _inputs(
                x, states, row[:, None] - first + tap - KEEP, first, slot, channel, x_row, slot_stride, here, KEEP
            )
            total += value * tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0)
        tl.store(out + row[:, None] * channels + channel, total * sigmoid(total), mask=here)

        for index in range(snapshots_count):
            sequence = tl.load(snapshots + index * 3)
            state = states + tl.load(segments + sequence * 4 + 3).to(tl.int64) * slot_stride
            start = tl.load(segments + sequence * 4)
            flat = first_channel + tl.arange(0, BLOCK)
            _snapshot(x, states, state, snapshots + index * 3, start, flat, x_row, flat < channels, slot_stride, KEEP)
        for tap in tl.static_range(KEEP):  # ascending, as above
            tl.debug_barrier()
            value = _inputs(
                x, states, counts[:, None] + tap - KEEP, firsts[:, None], slots[:, None].to(tl.int64), channel, x_row,
                slot_stride, live[:, None] & inside, KEEP,
            )  # fmt: skip
            tl.debug_barrier()
            to = states + slots[:, None].to(tl.int64) * slot_stride + channel * KEEP + tap
            tl.store(to, value, mask=live[:, None] & inside)


@triton.jit
def _gates(gates, row, head, FUSED: tl.constexpr):
    """Log decay and beta, as given or, FUSED, as ``Ops.gdn_gates`` makes them."""
    a, b, a_log, dt_bias, a_row, b_row = gates
    decay, beta = tl.load(a + row * a_row + head), tl.load(b + row * b_row + head)
    if FUSED:
        decay = -tl.exp(tl.load(a_log + head)) * softplus(decay + tl.load(dt_bias + head))
        beta = sigmoid(beta)
    return decay, beta


@triton.jit
def _gated_delta(
    q, k, v, gates, states, out, segments, snapshots,
    group, value_heads, key_dim, value_dim, q_row, k_row, v_row, count, scale,
    FUSED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    begin()
    sequence, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    key_here, value_here = key < key_dim, value < value_dim
    here = key_here[:, None] & value_here[None, :]
    wait()
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
        decay, beta = _gates(gates, row, head, FUSED)
        memory *= tl.exp(decay)
        recalled = tl.sum(memory * keys[:, None], axis=0)
        change = (values - recalled) * beta
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
    return _delta(q, k, v, (decay, beta, decay, beta, decay.stride(0), beta.stride(0)), state, batch, fused=False)


def gated_delta_net(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, batch: Batch
) -> Tensor:  # fmt: skip
    return _delta(q, k, v, (a, b, a_log, dt_bias, a.stride(0), b.stride(0)), state, batch, fused=True)


def _delta(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor | int, ...], state: Tensor, batch: Batch, fused: bool
) -> Tensor:  # fmt: skip
    out = v.new_empty(v.shape)
    (_, key_heads, key_dim), (_, value_heads, value_dim) = k.shape, v.shape
    if v.numel():
        launch(
            _gated_delta, (batch.segments.shape[0], value_heads, triton.cdiv(value_dim, VALUES)),
            q, k, v, gates, state, out, batch.segments, batch.snapshots,
            value_heads // key_heads, value_heads, key_dim, value_dim, q.stride(0), k.stride(0), v.stride(0),
            batch.snapshots.shape[0], key_dim**-0.5,
            FUSED=fused, KEYS=triton.next_power_of_2(key_dim), VALUES=VALUES, num_warps=4,
        )  # fmt: skip
    return out
