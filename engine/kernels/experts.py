"""Routed experts on the device: bring them from host memory, compute them from their blobs, reach the CPU for the rest.

A pair is a row and one of its experts. MXFP4 has kernels of its own (``mxfp4``); of other formats one program computes
one panel (``engine.experts.layout``) of one pair: 16 columns of silu(gate x) * up x, or 32 of the hidden columns of
down. It keeps the products of a tile of blocks apart and adds them up at the end, so what a pair gives does not depend
on the other pairs. Programs of all pairs for one panel run side by side: pairs that share an expert share its read
through the L2 cache.

Of int8 a tile is in registers, read as vectors with its scales and activations, and gate and up have the next one on
its way: one row waits for what it reads, not for memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.experts.layout import BLOCK, HALF, Layout
from engine.experts.residency import Decision
from engine.kernels import mxfp4
from engine.kernels.blocks import (
    added,
    of_part,
    padded,
    parts_here,
    read_int8,
    read_values,
    slot_of,
    times_bf16,
    times_int8,
)
from engine.kernels.launch import begin, cdiv, launch, next_power_of_2, wait
from engine.kernels.mailbox import Mailbox, Request, release, store

FETCHERS = 64
"""Programs that fetch: enough reads in flight for the link, few enough to leave the device to others."""
CHUNK = 4096
"""Words that one of them moves at a time."""
COPY = 1024
"""Numbers that one program sends to the CPU, ..."""
SUMS = 128
"""... and adds up."""


@dataclass(frozen=True)
class Tile:
    """``blocks`` at a time, by so many ``warps``; ``unroll`` tiles are read at once, ``stages`` - 1 of the next ones
    are on their way."""

    blocks: int
    warps: int
    unroll: int = 1
    stages: int = 1


@dataclass(frozen=True)
class Tiles:
    gate_up: Tile
    down: Tile


TILES = {
    "bf16": Tiles(Tile(4, 4, 1, 4), Tile(2, 2, 4)),
    "int8": Tiles(Tile(16, 4), Tile(16, 4)),
}
"""By format. The same on every GPU: a tile sets the order of the sums."""

_KINDS = {"bf16": 0, "int8": 1}


@triton.jit
def _fetch(pool, slots, fetch, counts, part_bytes, words, CHUNK: tl.constexpr):
    begin()
    lane, program = tl.arange(0, CHUNK), tl.program_id(0)
    source = tl.multiple_of(pool.to(tl.pointer_type(tl.int32)), 16)
    wait()
    for number in range(tl.load(counts)):
        to = tl.load(fetch + number * 3).to(tl.int64) * words
        origin = tl.load(fetch + number * 3 + 1).to(tl.int64) * words
        parts = tl.load(fetch + number * 3 + 2)
        first, last = tl.load(part_bytes + parts // 8) // 16 * 4, tl.load(part_bytes + parts % 8) // 16 * 4
        for start in range(first + program * CHUNK, last, tl.num_programs(0) * CHUNK):
            at = start + lane
            data = tl.load(source + (origin + at), mask=at < last, cache_modifier=".cg")
            tl.store(slots + (to + at), data, mask=at < last)


def fetch(pool: int, stride: int, slots: Tensor, decision: Decision, part_bytes: Tensor) -> None:
    """Copy what ``decision.fetch`` lists: from the pool's address for the device, 16-byte aligned, as is the ``stride``
    of both in bytes, to ``slots`` uint8 [slots + 1, stride]. ``part_bytes``: of so many first parts of an expert."""
    launch(
        _fetch, (FETCHERS,),
        pool, slots.view(torch.int32), decision.fetch, decision.counts, part_bytes, stride // 4,
        CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _gate_up(
    x, slots, slot_in, parts_in, out, stride_words, hidden, inner, b1, b2, b3, o0, o1, o2, o3,
    KIND: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, RANKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    begin()
    pair, panel = tl.program_id(0), tl.program_id(1)
    wait()
    slot, parts = slot_of(slot_in, parts_in, pair, WHOLE)
    part = (panel >= b1).to(tl.int32) + (panel >= b2).to(tl.int32) + (panel >= b3).to(tl.int32)
    if part < parts:
        first, offset = of_part(panel, b1, b2, b3, 0, b1, b2, b3), of_part(panel, b1, b2, b3, o0, o1, o2, o3)
        groups = hidden // 32
        blob = slots + slot.to(tl.int64) * stride_words + offset + (panel - first) * groups * WORDS
        row_x = x + (pair // RANKS).to(tl.int64) * hidden
        group = tl.arange(0, GROUPS)
        column = tl.arange(0, 16)
        if KIND == 0:
            gate, up = tl.zeros((GROUPS, 32, 16), tl.float32), tl.zeros((GROUPS, 32, 16), tl.float32)
            for start in tl.range(0, groups, GROUPS, num_stages=STAGES, loop_unroll_factor=UNROLL):
                here = start + group < groups
                where = tl.multiple_of(blob + (start + group) * WORDS, 16)
                low, high = times_bf16(where, row_x, start + group, here, EVEN)
                gate += low
                up += high
            gates, ups = added(gate), added(up)
        else:
            total = tl.zeros((GROUPS, 32), tl.float32)
            data, scale = read_int8(tl.multiple_of(blob + group * WORDS, 16), group < groups, EVEN)
            for start in tl.range(0, groups, GROUPS, num_stages=STAGES, loop_unroll_factor=UNROLL):
                values, later = read_values(row_x, start + group, start + group < groups, EVEN), start + GROUPS + group
                next_data, next_scale = read_int8(tl.multiple_of(blob + later * WORDS, 16), later < groups, False)
                tl.debug_barrier()  # all is on its way before any of it is waited for
                total += times_int8(data, scale, values)
                data, scale = next_data, next_scale
            gates, ups = tl.split(tl.trans(tl.reshape(tl.sum(total, axis=0), (2, 16))))
        tl.store(out + pair.to(tl.int64) * inner + panel * 16 + column, gates / (1.0 + tl.exp(-gates)) * ups)


@triton.jit
def _down(
    h, slots, slot_in, parts_in, out, stride_words, hidden, inner, b1, b2, b3, b4, o0, o1, o2, o3,
    KIND: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    begin()
    pair, panel = tl.program_id(0), tl.program_id(1)
    wait()
    slot, parts = slot_of(slot_in, parts_in, pair, WHOLE)
    if parts > 0:
        blob = slots + slot.to(tl.int64) * stride_words
        row_h = h + pair.to(tl.int64) * inner
        last = of_part(parts, 2, 3, 4, b1, b2, b3, b4)
        lane = tl.arange(0, GROUPS)
        column = tl.arange(0, 16)
        base = out + pair.to(tl.int64) * hidden + panel * 32
        if KIND == 0:
            lower, upper = tl.zeros((GROUPS, 32, 16), tl.float32), tl.zeros((GROUPS, 32, 16), tl.float32)
        else:
            total = tl.zeros((GROUPS, 32), tl.float32)
        for start in tl.range(0, last, GROUPS, num_stages=STAGES, loop_unroll_factor=UNROLL):
            group = start + lane
            here = group < last
            # Of each group: its part, where that begins and how wide it is; the down section follows gate and up.
            at = start if EVEN else group  # even: all groups of a tile are in the same part
            first, offset = of_part(at, b1, b2, b3, 0, b1, b2, b3), of_part(at, b1, b2, b3, o0, o1, o2, o3)
            wide = of_part(at, b1, b2, b3, b1, b2, b3, b4) - first
            block = 2 * wide * (hidden // 32) + panel * wide + group - first
            where = tl.multiple_of(blob + (offset + block * WORDS), 16)
            if KIND == 0:
                low, high = times_bf16(where, row_h, group, here, EVEN)
                lower += low
                upper += high
            else:
                data, scale = read_int8(where, here, EVEN)
                total += times_int8(data, scale, read_values(row_h, group, here, EVEN))
        if KIND == 0:
            tl.store(base + column, added(lower))
            tl.store(base + 16 + column, added(upper))
        else:
            tl.store(base + tl.arange(0, 32), tl.sum(total, axis=0))


def gate_up(
    x: Tensor, slots: Tensor, decision: Decision, layout: Layout, out: Tensor, whole: bool = False
) -> None:  # fmt: skip
    """silu(gate x) * up x of each pair, for the columns of its first ``decision.gpu_parts`` parts; other columns are
    left as they are. ``whole``: all parts of pairs with a slot, which is what gpu_parts holds then too.
    x [rows, hidden], slots uint8 [slots + 1, stride] -> out [rows, k, inner]."""
    kind = layout.format.name
    if kind == "mxfp4":
        mxfp4.gate_up(x, slots, decision, layout, out, whole)
        return
    tile, groups = TILES[kind].gate_up, layout.hidden // BLOCK
    blocks = min(tile.blocks, next_power_of_2(groups))
    bounds, offsets = padded(layout)
    launch(
        _gate_up, (decision.slot.numel(), layout.inner // HALF),
        x, slots.view(torch.int32), decision.slot, decision.gpu_parts, out, slots.shape[1] // 4,
        layout.hidden, layout.inner, *(bound // HALF for bound in bounds[1:-1]), *offsets,
        KIND=_KINDS[kind], WORDS=layout.format.block_bytes // 4, GROUPS=blocks,
        EVEN=groups % blocks == 0, STAGES=tile.stages, UNROLL=tile.unroll, RANKS=decision.slot.shape[1],
        WHOLE=whole, num_warps=tile.warps,
    )  # fmt: skip


def down(
    h: Tensor, slots: Tensor, decision: Decision, layout: Layout, out: Tensor, whole: bool = False
) -> None:  # fmt: skip
    """down of what ``gate_up`` gave, over the same columns. h [rows, k, inner] -> out [rows, k, hidden]; pairs without
    parts on the device are left as they are."""
    kind = layout.format.name
    if kind == "mxfp4":
        mxfp4.down(h, slots, decision, layout, out, whole)
        return
    tile, groups = TILES[kind].down, layout.inner // BLOCK
    blocks = min(tile.blocks, next_power_of_2(groups))
    bounds, offsets = padded(layout)
    launch(
        _down, (decision.slot.numel(), layout.hidden // BLOCK),
        h, slots.view(torch.int32), decision.slot, decision.gpu_parts, out, slots.shape[1] // 4,
        layout.hidden, layout.inner, *(bound // BLOCK for bound in bounds[1:]), *offsets,
        KIND=_KINDS[kind], WORDS=layout.format.block_bytes // 4, GROUPS=blocks,
        EVEN=all(bound // BLOCK % blocks == 0 for bound in bounds), STAGES=tile.stages, UNROLL=tile.unroll,
        WHOLE=whole, num_warps=tile.warps,
    )  # fmt: skip


@triton.jit
def routed(
    out, weights, parts, row, at, present, inside, hidden, RANKS: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """What ``combine`` gives, for rows and hidden columns that together make a block."""
    here = present & inside
    total = tl.zeros(here.shape, tl.float32)
    for rank in tl.static_range(RANKS):  # unrolled, and read before it is known to count: all reads go out at once
        pair = (row * RANKS + rank).to(tl.int64)
        part = tl.load(out + pair * hidden + at, mask=here, other=0.0)
        used = (parts_here(parts + pair, present, WHOLE) > 0) & here
        total += tl.where(used, tl.load(weights + pair, mask=present, other=0.0) * part, 0.0)
    return total


@triton.jit
def _combine(
    out, weights, parts, y, hidden, RANKS: tl.constexpr, WHOLE: tl.constexpr, COPY: tl.constexpr
):  # fmt: skip
    begin()
    at = tl.program_id(0) * COPY + tl.arange(0, COPY)
    row, inside = tl.program_id(1) + 0 * at, at < hidden
    wait()
    total = routed(out, weights, parts, row, at, row >= 0, inside, hidden, RANKS, WHOLE)
    tl.store(y + row.to(tl.int64) * hidden + at, total, mask=inside)


@dataclass(frozen=True)
class Sums:
    """What is there of a layer's routed experts before they are added up: each pair's ``out`` [rows, k, hidden], its
    ``weights`` [rows, k]. ``answer`` adds the CPU's part to what a layer gives in the end, after all else, as it waits
    for it. With ``blobs``, slots and layout of experts, ``out`` is what ``gate_up`` gave, and the word at ``arrived``
    is to tell when the device has done its own part."""

    out: Tensor
    weights: Tensor
    decision: Decision
    whole: bool = False
    answer: Callable[[Tensor], None] | None = None
    arrived: int = 0
    blobs: tuple[Tensor, Layout] | None = None


def combine(out: Tensor, weights: Tensor, decision: Decision, y: Tensor, whole: bool = False) -> None:
    """Sum over ranks in order of weights [rows, k] * out [rows, k, hidden] -> y [rows, hidden]."""
    rows, ranks, hidden = out.shape
    launch(
        _combine, (cdiv(hidden, SUMS), rows),
        out, weights, decision.gpu_parts, y, hidden, RANKS=ranks, WHOLE=whole, COPY=SUMS, num_warps=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["value"])
def _publish(
    x, plan, weights, counts, arrivals, to_ready, to_done, to_x, to_plan, to_weights, size, pairs, value,
    PAIRS: tl.constexpr, COPY: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    begin()
    program, pair, both = tl.program_id(0), tl.arange(0, PAIRS), tl.arange(0, 2 * PAIRS)
    at = program * COPY + tl.arange(0, COPY)
    wait()
    if tl.load(counts + 1) > 0:
        store(to_x, at, tl.load(x + at, mask=at < size).to(tl.float32), at < size)
        if program == 0:
            tl.store(to_done.to(tl.pointer_type(tl.int64)), tl.full((), 0, tl.int64))
            store(to_plan, both, tl.load(plan + both, mask=both < 2 * pairs), both < 2 * pairs)
            store(to_weights, pair, tl.load(weights + pair, mask=pair < pairs), pair < pairs)
        tl.debug_barrier()
        # The last program has acquired what the others released, and releases all of it to the CPU.
        last = tl.atomic_add(arrivals, 1, sem="acq_rel") == tl.num_programs(0) - 1
        if last:
            tl.store(arrivals, 0)
            release(to_ready, value, ON_DEVICE)
    elif program == 0:
        tl.store(to_done.to(tl.pointer_type(tl.int64)), 1)


def publish(
    x: Tensor, weights: Tensor, decision: Decision, layer: int, arrivals: Tensor, mailbox: int, layout: Mailbox
) -> None:  # fmt: skip
    """Give the CPU its part of many rows: ``done`` = 0, x [rows, hidden] as float32, plan and weights, then ``ready``;
    without work for it, ``done`` = 1. ``arrivals`` int32 [1]: zero between calls."""
    request, pairs = Request(x, weights, mailbox, layout), decision.slot.numel()
    launch(
        _publish, (cdiv(x.numel(), COPY),),
        x, decision.plan, weights, decision.counts, arrivals, *request.addresses, x.numel(), pairs,
        request.number(layer), PAIRS=next_power_of_2(pairs), COPY=COPY, ON_DEVICE=x.is_cuda, num_warps=8,
    )  # fmt: skip


@triton.jit
def _arrive(to_arrived):
    begin()
    wait()
    tl.store(to_arrived.to(tl.pointer_type(tl.int64)), 1)


def arrive(mailbox: int, layout: Mailbox) -> None:
    """Tell the CPU that the device is done with its part of the layer."""
    launch(_arrive, (1,), mailbox + layout.arrived, num_warps=1)
