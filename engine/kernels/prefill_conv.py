"""The causal convolution for many rows: tiles of rows at once, and then what the next step needs to know of them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import cdiv, launch
from engine.kernels.segments import find_tile, segments_of, tiles
from engine.layers.ops import Batch

ROWS, CHANNELS = 16, 128


@triton.jit
def _inputs(x, state, row, channel, x_row, here, KEEP: tl.constexpr):
    """Inputs number ``row`` of a segment that begins at x; the KEEP ones before its first are in the state."""
    old = tl.load(state + channel * KEEP + row + KEEP, mask=here & (row < 0), other=0.0)
    new = tl.load(x + row * x_row + channel, mask=here & (row >= 0), other=0.0)
    return tl.where(row < 0, old, new)


@triton.jit
def _taps(x, weight, state, begin, row, channel, channels, x_row, here, WIDTH: tl.constexpr, OLD: tl.constexpr):
    """Products of the weights and the inputs, OLD: some of which are in the state."""
    line = tl.program_id(1) * here.shape[1] + tl.arange(0, here.shape[1])  # whose weights are loaded as they lie
    total = tl.zeros(here.shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        at = begin + row + (tap - WIDTH + 1)
        if OLD:
            value = _inputs(x, state, at, channel, x_row, here, WIDTH - 1)
        else:
            value = tl.load(x + (at * x_row + channel), mask=here, other=0.0)
        total += value.to(tl.float32) * tl.load(weight + line * WIDTH + tap, mask=line < channels, other=0.0)[None, :]
    return total


@triton.jit
def _conv(
    x, weight, states, out, segments, count, channels, x_row, slot_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    sequence, begin, length = find_tile(segments, count, tl.program_id(0), ROWS, SEGMENTS)
    if length > 0:
        entry = segments + sequence * 4
        first, state = tl.load(entry).to(tl.int64), states + tl.load(entry + 3).to(tl.int64) * slot_stride
        row, channel = tl.arange(0, ROWS)[:, None], tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        here = (row < length) & (channel < channels)
        x += first * x_row
        if begin < WIDTH - 1:
            total = _taps(x, weight, state, begin, row, channel, channels, x_row, here, WIDTH, True)
        else:
            total = _taps(x, weight, state, begin, row, channel, channels, x_row, here, WIDTH, False)
        to = (first + begin) * channels + (row * channels + channel)
        tl.store(out + to, total / (1.0 + tl.exp(-total)), mask=here)


@triton.jit
def _states(
    x, states, segments, snapshots, channels, x_row, count, slot_stride, KEEP: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    sequence, channel = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here = channel < channels
    entry = segments + sequence * 4
    x += tl.load(entry).to(tl.int64) * x_row
    state = states + tl.load(entry + 3).to(tl.int64) * slot_stride
    for number in range(count):
        if tl.load(snapshots + number * 3) == sequence:
            after, slot = tl.load(snapshots + number * 3 + 1), tl.load(snapshots + number * 3 + 2).to(tl.int64)
            for tap in tl.static_range(KEEP):
                value = _inputs(x, state, after + (tap - KEEP) + 0 * channel, channel, x_row, here, KEEP)
                tl.store(states + slot * slot_stride + channel * KEEP + tap, value, mask=here)
    rows = tl.load(entry + 1)
    for tap in tl.static_range(KEEP):  # ascending: what is read lies above what has been written
        tl.debug_barrier()
        value = _inputs(x, state, rows + (tap - KEEP) + 0 * channel, channel, x_row, here, KEEP)
        tl.debug_barrier()
        tl.store(state + channel * KEEP + tap, value, mask=here)


def conv(x: Tensor, weight: Tensor, state: Tensor, batch: Batch) -> Tensor:
    """As ``Ops.conv``, for any number of rows of any number of sequences; x and the result may be float16."""
    out, (channels, width), count = x.new_empty(x.shape), weight.shape, batch.segments.shape[0]
    blocks = cdiv(channels, CHANNELS)
    if x.numel():
        launch(
            _conv, (tiles(x.shape[0], batch, ROWS), blocks),
            x, weight, state, out, batch.segments, count, channels, x.stride(0), state.stride(0),
            WIDTH=width, ROWS=ROWS, CHANNELS=CHANNELS, SEGMENTS=segments_of(batch), num_warps=4, maxnreg=64,
            early=False,
        )  # fmt: skip
        launch(
            _states, (count, blocks),
            x, state, batch.segments, batch.snapshots, channels, x.stride(0), batch.snapshots.shape[0],
            state.stride(0), KEEP=width - 1, CHANNELS=CHANNELS, num_warps=4, early=False,
        )  # fmt: skip
    return out
