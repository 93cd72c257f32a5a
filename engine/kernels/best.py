"""The best scores of each row of logits, within what a grammar allows of them; ``engine.device.reduce`` has the twin.

The best of many small groups of a row give a level that enough scores reach and few more do; those alone are gathered
and sorted, as whole numbers that carry score and id. What is found of a row does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import begin, cdiv, launch, next_power_of_2, wait


@dataclass(frozen=True)
class Tiling:
    """``stretch``: scores of one program, at most. ``room``: scores that may reach the level; where more do, none are
    told. Powers of two."""

    stretch: int = 1024
    room: int = 1024
    warps: int = 4
    level_warps: int = 4
    sort_warps: int = 8


TILING = Tiling()
GROUPS = 8
"""Of one stretch."""
_BITS = tl.constexpr(20)
"""Of the level: it need not be exact."""
_NOTHING = tl.constexpr(-(1 << 63))


@triton.jit
def _ordered(scores):
    """uint32, in the order of the scores."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 is no less than 0.0
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _allowed(logits, which, masks, row, at, vocab, words):
    """Scores at these places, -inf for what is not allowed; and as they are."""
    scores = tl.load(logits + row.to(tl.int64) * vocab + at, mask=at < vocab, other=float("-inf"))
    mask = tl.load(which + row)
    there = at < tl.where(mask < 0, 0, vocab)
    word = tl.load(masks + mask.to(tl.int64) * words + at // 32, mask=there, other=-1)
    return tl.where((word >> (at % 32)) & 1 != 0, scores, float("-inf")), scores


@triton.jit
def _look(
    logits, which, masks, temperatures, tops, sums, vocab, words, STRETCH: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    begin()
    number, row = tl.program_id(0), tl.program_id(1)
    at = number * STRETCH + tl.arange(0, STRETCH)
    wait()
    scores, as_they_are = _allowed(logits, which, masks, row, at, vocab, words)
    wrong = tl.max((as_they_are != as_they_are).to(tl.int32))
    best = tl.max(scores)
    level = tl.where(best == float("-inf"), 0.0, best)
    mass = tl.sum(tl.exp((scores - level) / tl.load(temperatures + row)))
    to = row * tl.num_programs(0) + number
    tl.store(sums + to * 3, tl.where(wrong > 0, float("nan"), tl.max(as_they_are)))
    tl.store(sums + to * 3 + 1, best)
    tl.store(sums + to * 3 + 2, mass)
    groups = tl.max(tl.reshape(scores, (STRETCH // GROUPS, GROUPS)), axis=0)
    tl.store(tops + to * GROUPS + tl.arange(0, GROUPS), groups)


@triton.jit
def _level(
    tops, sums, temperatures, levels, counts, out, count, kept,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    begin()
    row, one, group = tl.program_id(0), tl.arange(0, COUNT), tl.arange(0, COUNT * GROUPS)
    wait()
    here = one < count
    sums += (row * count + one) * 3
    highest = tl.load(sums, mask=here, other=float("-inf"))
    bests = tl.load(sums + 1, mask=here, other=float("-inf"))
    masses = tl.load(sums + 2, mask=here, other=0.0)
    wrong, best = tl.max((highest != highest).to(tl.int32)), tl.max(bests)
    base = tl.where(best == float("-inf"), 0.0, best)
    mass = tl.sum(masses * tl.exp((bests - base) / tl.load(temperatures + row)))
    out += row * (2 * kept + 2) + 2 * kept
    tl.store(out, tl.where(wrong > 0, float("nan"), tl.max(highest)).to(tl.int32, bitcast=True))
    tl.store(out + 1, mass.to(tl.int32, bitcast=True))
    numbers = _ordered(tl.load(tops + row * count * GROUPS + group, mask=group < count * GROUPS, other=float("-inf")))
    level = (row * 0).to(tl.uint32)
    for bit in tl.static_range(_BITS):
        higher = level | (1 << (31 - bit))
        level = tl.where(tl.sum((numbers >= higher).to(tl.int32)) >= KEPT, higher, level)
    tl.store(levels + row, level.to(tl.int32, bitcast=True))
    tl.store(counts + row, 0)


@triton.jit
def _gather(
    logits, which, masks, levels, counts, found, vocab, words, STRETCH: tl.constexpr, ROOM: tl.constexpr
):  # fmt: skip
    begin()
    number, row = tl.program_id(0), tl.program_id(1)
    at = number * STRETCH + tl.arange(0, STRETCH)
    wait()
    scores, _ = _allowed(logits, which, masks, row, at, vocab, words)
    ordered = _ordered(scores)
    good = (ordered >= tl.load(levels + row).to(tl.uint32, bitcast=True)) & (scores > float("-inf"))
    total = tl.sum(good.to(tl.int32))
    if total > 0:
        place = tl.atomic_add(counts + row, total) + tl.cumsum(good.to(tl.int32), 0) - 1
        # The lower id is the higher number where scores are equal.
        numbers = ((ordered ^ 0x80000000).to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - at)
        tl.store(found + row * ROOM + place, numbers, mask=good & (place < ROOM))


@triton.jit
def _sort(found, counts, out, kept, ROOM: tl.constexpr, KEPT: tl.constexpr):
    begin()
    row, at, place = tl.program_id(0), tl.arange(0, ROOM), tl.arange(0, KEPT)
    wait()
    count = tl.load(counts + row)
    best = tl.topk(tl.load(found + row * ROOM + at, mask=at < count, other=_NOTHING), KEPT)
    ordered = (best >> 32).to(tl.int32)
    scores = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
    scores = tl.where(best == _NOTHING, float("-inf"), scores)
    scores = tl.where(count > ROOM, float("inf"), scores)
    out += row * (2 * kept + 2)
    tl.store(out + place, scores.to(tl.int32, bitcast=True), mask=place < kept)
    tl.store(out + kept + place, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), mask=place < kept)


def reduce(
    logits: Tensor, temperatures: Tensor, which: Tensor, masks: Tensor, most: int, tiling: Tiling = TILING
) -> Tensor:
    """As ``engine.device.reduce.twin``, for ``most`` a power of two; but where too many scores are about as good as the
    last that is kept, all are told as inf, which none is above."""
    (rows, vocab), device = logits.shape, logits.device
    kept, words = min(most, vocab), masks.shape[1]
    out = torch.empty(rows, 2 * kept + 2, dtype=torch.int32, device=device)
    if not rows:
        return out
    stretch = max(4 * GROUPS, min(tiling.stretch, next_power_of_2(vocab // most)))
    count = cdiv(vocab, stretch)
    tops, sums = logits.new_empty(rows, count * GROUPS), logits.new_empty(rows, count, 3)
    levels, counts = torch.empty(2, rows, dtype=torch.int32, device=device)
    found = torch.empty(rows, tiling.room, dtype=torch.int64, device=device)
    launch(
        _look, (count, rows), logits, which, masks, temperatures, tops, sums, vocab, words,
        STRETCH=stretch, GROUPS=GROUPS, num_warps=tiling.warps,
    )  # fmt: skip
    launch(
        _level, (rows,), tops, sums, temperatures, levels, counts, out, count, kept,
        GROUPS=GROUPS, KEPT=most, COUNT=next_power_of_2(count), num_warps=tiling.level_warps,
    )  # fmt: skip
    launch(
        _gather, (count, rows), logits, which, masks, levels, counts, found, vocab, words,
        STRETCH=stretch, ROOM=tiling.room, num_warps=tiling.warps,
    )  # fmt: skip
    launch(_sort, (rows,), found, counts, out, kept, ROOM=tiling.room, KEPT=most, num_warps=tiling.sort_warps)
    return out
