"""What carries state from token to token: the causal convolution and the gated delta rule.

A program owns a piece of one sequence's state and goes through the sequence's rows in order, so results do not depend
on how rows are cut into calls. Snapshots go to slots of their own, never to one that a sequence of the batch lives in.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import begin, cdiv, launch, next_power_of_2, wait
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
            _conv, (batch.segments.shape[0], cdiv(channels, CHANNELS)),
            x, weight, state, out, batch.segments, batch.snapshots, channels, x.stride(0), batch.snapshots.shape[0],
            state.stride(0), WIDTH=width, BLOCK=CHANNELS, num_warps=CHANNELS // 32,
        )  # fmt: skip
    return out


@triton.jit
def sequences(conv, row, SEGMENTS: tl.constexpr):
    """Of each row: the first and the last row of its sequence, (0, -1) of none; and the sequence's state."""
    _, states, _, segments, _, count, slot_stride = conv
    number = tl.arange(0, SEGMENTS)
    first = tl.load(segments + number * 4, mask=number < count, other=0)
    end = first + tl.load(segments + number * 4 + 1, mask=number < count, other=0)
    slot = tl.load(segments + number * 4 + 3, mask=number < count, other=0)
    mine = (first[None, :] <= row[:, None]) & (row[:, None] < end[None, :])
    slot = tl.sum(tl.where(mine, slot[None, :], 0), axis=1).to(tl.int64)
    first, end = tl.sum(tl.where(mine, first[None, :], 0), axis=1), tl.sum(tl.where(mine, end[None, :], 0), axis=1)
    return first, end - 1, states + slot * slot_stride


@triton.jit
def window(conv, live, channel, end, row, WIDTH: tl.constexpr):
    """What ``slide`` needs of the time before: the weights, and inputs of earlier calls, [channels, rows, taps]."""
    weight, _, _, _, channels, _, _ = conv
    first, last, state = live
    lag = tl.arange(0, 4 if WIDTH <= 4 else 16)[None, None, :]
    inside, since = (channel < tl.minimum(channels, end))[:, None, None], (row - first)[None, :, None] - lag
    here = inside & (row <= last)[None, :, None] & (lag < WIDTH)
    cells = state[None, :, None] + channel[:, None, None] * (WIDTH - 1)
    taps = weight + channel[:, None, None] * WIDTH + (WIDTH - 1) - lag
    taps = tl.load(taps, mask=inside & (lag < WIDTH), other=0.0)
    return taps, tl.load(cells + (WIDTH - 1) + since, mask=here & (since < 0), other=0.0)


@triton.jit
def slide(values, x, conv, live, channel, end, row, x_row, window, WIDTH: tl.constexpr):
    """``conv`` of ``values`` [channels, rows], by the program that has just stored them as ``x``: of channels before
    ``end``."""
    _, _, out, _, channels, _, _ = conv
    first, last, state = live
    taps, old = window
    lag = tl.arange(0, 4 if WIDTH <= 4 else 16)[None, None, :]
    inside, since = channel < tl.minimum(channels, end), (row - first)[None, :, None] - lag
    here = inside[:, None, None] & (row <= last)[None, :, None] & (lag < WIDTH)
    tl.debug_barrier()
    new = x + (row[None, :, None] - lag) * x_row + channel[:, None, None]
    new = tl.load(new, mask=here & (since >= 0) & (lag > 0), other=0.0)
    inputs = tl.where(lag == 0, values[:, :, None], tl.where(since < 0, old, new))
    total = tl.sum(inputs * taps, axis=2)
    to = out + row[None, :] * channels + channel[:, None]
    tl.store(to, total * sigmoid(total), mask=inside[:, None] & (row <= last)[None, :])
    tl.debug_barrier()
    cells = state[None, :, None] + channel[:, None, None] * (WIDTH - 1) + (WIDTH - 2) - lag
    tl.store(cells, inputs, mask=here & (row == last)[None, :, None] & (lag < WIDTH - 1))


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
def delta(
    sequence, head, piece, q, k, v, gates, states, out, segments, snapshots,
    group, value_heads, key_dim, value_dim, q_row, k_row, v_row, count, scale,
    FUSED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """What a program of a kernel does that has begun: VALUES columns of a head's state."""
    key, value = tl.arange(0, KEYS), piece * VALUES + tl.arange(0, VALUES)
    key_here, value_here = key < key_dim, value < value_dim
    here = key_here[:, None] & value_here[None, :]
    slot_stride = value_heads * key_dim * value_dim
    first, rows = tl.load(segments + sequence * 4), tl.load(segments + sequence * 4 + 1)
    slot = tl.load(segments + sequence * 4 + 3).to(tl.int64)
    cells = states + slot * slot_stride + (head * key_dim + key[:, None]) * value_dim + value[None, :]
    if FUSED:  # no kernel of a decode step writes states before this one
        memory = tl.load(cells, mask=here, other=0.0)
    wait()
    if not FUSED:
        memory = tl.load(cells, mask=here, other=0.0)
    for step in range(rows):
        row = (first + step).to(tl.int64)
        at = head // group * key_dim + key
        keys = tl.load(k + row * k_row + at, mask=key_here, other=0.0).to(tl.float32)
        queries = tl.load(q + row * q_row + at, mask=key_here, other=0.0).to(tl.float32)
        values = tl.load(v + row * v_row + head * value_dim + value, mask=value_here, other=0.0).to(tl.float32)
        decay, beta = _gates(gates, row, head, FUSED)
        # All sums over keys at once, of the state, keys and queries as they come: what scales those, scales sums.
        recalled, answer = tl.split(tl.sum(tl.join(memory * keys[:, None], memory * queries[:, None]), axis=0))
        squares = tl.join(keys * keys, queries * queries)
        squares, products = tl.split(tl.sum(tl.join(squares, tl.join(keys * queries, 0.0 * keys)), axis=0))
        of_keys, of_queries = tl.split(squares)
        both, _ = tl.split(products)
        keys_scale, decay = 1.0 / tl.sqrt(of_keys + 1e-6), tl.exp(decay)
        change = (values - recalled * (decay * keys_scale)) * (beta * keys_scale)
        answer = (answer * decay + change * both) * (scale / tl.sqrt(of_queries + 1e-6))
        tl.store(out + (row * value_heads + head) * value_dim + value, answer, mask=value_here)
        memory = memory * decay + keys[:, None] * change[None, :]
        for number in range(count):
            if (tl.load(snapshots + number * 3) == sequence) & (tl.load(snapshots + number * 3 + 1) == step + 1):
                target = tl.load(snapshots + number * 3 + 2).to(tl.int64)
                tl.store(cells + (target - slot) * slot_stride, memory, mask=here)
    tl.store(cells, memory, mask=here)


@triton.jit
def _gated_delta(
    q, k, v, gates, states, out, segments, snapshots,
    group, value_heads, key_dim, value_dim, q_row, k_row, v_row, count, scale,
    FUSED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    begin()
    delta(
        tl.program_id(0), tl.program_id(1), tl.program_id(2), q, k, v, gates, states, out, segments, snapshots,
        group, value_heads, key_dim, value_dim, q_row, k_row, v_row, count, scale, FUSED, KEYS, VALUES,
    )  # fmt: skip


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch
) -> Tensor:  # fmt: skip
    return _delta(q, k, v, (decay, beta, decay, beta, decay.stride(0), beta.stride(0)), state, batch, fused=False)


def gated_delta_net(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, batch: Batch
) -> Tensor:  # fmt: skip
    return _delta(q, k, v, (a, b, a_log, dt_bias, a.stride(0), b.stride(0)), state, batch, fused=True)


def rule(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor | int, ...], state: Tensor, out: Tensor, batch: Batch
) -> tuple[tuple[Any, ...], tuple[int, int, int], dict[str, Any]]:  # fmt: skip
    """What ``delta`` takes behind its place; how many sequences, heads and pieces there are; constants."""
    (_, key_heads, key_dim), (_, value_heads, value_dim) = k.shape, v.shape
    arguments = (
        q, k, v, gates, state, out, batch.segments, batch.snapshots,
        value_heads // key_heads, value_heads, key_dim, value_dim, q.stride(0), k.stride(0), v.stride(0),
        batch.snapshots.shape[0], key_dim**-0.5,
    )  # fmt: skip
    places = batch.segments.shape[0], value_heads, cdiv(value_dim, VALUES)
    return arguments, places, {"KEYS": next_power_of_2(key_dim), "VALUES": VALUES}


def _delta(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor | int, ...], state: Tensor, batch: Batch, fused: bool
) -> Tensor:  # fmt: skip
    out = v.new_empty(v.shape)
    if v.numel():
        arguments, places, constants = rule(q, k, v, gates, state, out, batch)
        launch(_gated_delta, places, *arguments, FUSED=fused, num_warps=4, **constants)
    return out
