"""Pairs (a row and one of its ranks) of routed experts, before and after the products of many rows: put in order by
expert, by counting, and added up."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import cdiv, launch, next_power_of_2

SORTED, OTHERS = 512, 32
"""Pairs that a program puts in order, and how many it compares them with at a time."""
BLOCKS = 8
"""Programs whose counts are added up at a time."""
SUMS = 1024
"""Numbers that one program adds up."""


class Ordered(NamedTuple):
    """``order`` int32 [pairs]: pairs, row * ranks + rank, by expert, those of no expert (id -1) last, otherwise as they
    come; ``start`` int32 [experts + 1]: where in it each expert's begin; ``counts`` int32 [experts]: how many there
    are."""

    order: Tensor
    start: Tensor
    counts: Tensor


@triton.jit(do_not_specialize=["size"])
def _count(ids, counts, places, size, experts, SORTED: tl.constexpr, OTHERS: tl.constexpr, BINS: tl.constexpr):
    """How many pairs of a block each expert has, and which of its expert's there each pair is."""
    i = tl.arange(0, SORTED)
    first = tl.program_id(0) * SORTED
    here = first + i < size
    expert = tl.load(ids + first + i, mask=here, other=-1)
    place = 0 * i
    for start in range(0, SORTED, OTHERS):
        other = start + tl.arange(0, OTHERS)
        theirs = tl.load(ids + first + other, mask=first + other < size, other=-1)
        before = (theirs[:, None] == expert[None, :]) & (other[:, None] < i[None, :])
        place += tl.sum(before.to(tl.int32), axis=0)
    tl.store(places + first + i, place, mask=here)
    bins = tl.arange(0, BINS)
    found = tl.histogram(tl.where(expert < 0, experts, expert), BINS)
    found -= tl.where(bins == experts, tl.sum(1 - here.to(tl.int32)), 0)
    tl.store(counts + tl.program_id(0) * (experts + 1) + bins, found, mask=bins <= experts)


@triton.jit(do_not_specialize=["size", "blocks"])
def _place(
    ids, counts, places, bases, order, start, totals, size, blocks, experts,
    SORTED: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    program, i, bins = tl.program_id(0), tl.arange(0, SORTED), tl.arange(0, BINS)
    inside = bins <= experts
    total, before = 0 * bins, 0 * bins
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        at = block[:, None] * (experts + 1) + bins[None, :]
        found = tl.load(counts + at, mask=(block < blocks)[:, None] & inside[None, :], other=0)
        total += tl.sum(found, axis=0)
        before += tl.sum(tl.where((block < program)[:, None], found, 0), axis=0)
    begin = tl.cumsum(total, axis=0) - total
    if program == 0:
        tl.store(start + bins, begin, mask=inside)
        tl.store(totals + bins, total, mask=bins < experts)
    bases += program * (experts + 1)
    tl.store(bases + bins, begin + before, mask=inside)
    tl.debug_barrier()  # bases are there
    at = program * SORTED + i
    here = at < size
    expert = tl.load(ids + at, mask=here, other=-1)
    base = tl.load(bases + tl.where(expert < 0, experts, expert), mask=here, other=0)
    tl.store(order + base + tl.load(places + at, mask=here, other=0), at, mask=here)


def sort_pairs(ids: Tensor, experts: int) -> Ordered:
    """ids int32 [rows, k], contiguous, -1 for none."""
    size, blocks, bins = ids.numel(), max(1, cdiv(ids.numel(), SORTED)), next_power_of_2(experts + 1)
    order, start, totals = ids.new_empty(size), ids.new_empty(experts + 1), ids.new_empty(experts)
    places, counts, bases = ids.new_empty(size), *(ids.new_empty(blocks, experts + 1) for _ in range(2))
    launch(
        _count, (blocks,), ids, counts, places, size, experts,
        SORTED=SORTED, OTHERS=OTHERS, BINS=bins, num_warps=8, early=False,
    )  # fmt: skip
    launch(
        _place, (blocks,), ids, counts, places, bases, order, start, totals, size, blocks, experts,
        SORTED=SORTED, BLOCKS=BLOCKS, BINS=bins, num_warps=8, early=False,
    )  # fmt: skip
    return Ordered(order, start, totals)


@triton.constexpr_function
def unit(half: tl.dtype) -> int:
    """What numbers between products are divided by: of those in float16, what is large has room."""
    return 64 if half == tl.float16 else 1


@triton.jit
def _combine_pairs(
    out, ids, slot_of, weights, y, hidden, RANKS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        pair = row * RANKS + rank
        expert = tl.load(ids + pair)
        slot = tl.load(slot_of + expert, mask=expert >= 0, other=-1)
        here = (at < hidden) & (slot + 0 * at >= 0)
        part = tl.load(out + pair * hidden + at, mask=here, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * part
    total *= unit(out.dtype.element_ty)
    if ADD:
        total += tl.load(y + row * hidden + at, mask=at < hidden, other=0.0)
    tl.store(y + row * hidden + at, total, mask=at < hidden)


def combine_pairs(out: Tensor, ids: Tensor, slot: Tensor, weights: Tensor, y: Tensor, *, add: bool = False) -> None:
    """y [rows, hidden] = sum over ranks, in order, of weights [rows, k] * out [rows * k, hidden] of the pairs whose
    expert has a slot, ``out`` divided as ``unit`` says; ``add``: to what y has. ids int32 [rows, k]; ``slot`` int32
    [experts]: -1 for none."""
    (rows, ranks), hidden = ids.shape, y.shape[1]
    block = min(SUMS, next_power_of_2(hidden))
    if rows:
        launch(
            _combine_pairs, (rows, cdiv(hidden, block)), out, ids, slot, weights, y, hidden,
            RANKS=ranks, ADD=add, BLOCK=block, num_warps=4, early=False,
        )  # fmt: skip
