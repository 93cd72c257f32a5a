"""The best scores of each row of logits, within what a grammar allows of them; ``engine.device.reduce`` is the twin.

A program finds the best of one stretch of a row, by a bitonic sort of whole numbers that carry score and id; others
then merge the lists, always in the same order. What is found of a row does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import begin, launch, wait


@dataclass(frozen=True)
class Tiling:
    """``stretch``: scores that one program goes through. ``lists`` that one merges. Powers of two."""

    stretch: int = 2048
    lists: int = 16
    warps: int = 4
    merge_warps: int = 4


TILING = Tiling()
_NOTHING = tl.constexpr(-(1 << 63))


@triton.jit
def _numbers(scores, ids):
    """int64, in the order of the scores; the lower id is the higher where they are equal."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 is no less than 0.0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _stretches(
    logits, which, masks, temperatures, lists, sums, vocab, words, count,
    STRETCH: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    begin()
    number, row = tl.program_id(0), tl.program_id(1)
    at = number * STRETCH + tl.arange(0, STRETCH)
    inside = at < vocab
    wait()
    scores = tl.load(logits + row.to(tl.int64) * vocab + at, mask=inside, other=float("-inf"))
    wrong = tl.max((scores != scores).to(tl.int32))
    highest = tl.where(wrong > 0, float("nan"), tl.max(scores))
    mask = tl.load(which + row)
    there = at < tl.where(mask < 0, 0, vocab)
    word = tl.load(masks + mask.to(tl.int64) * words + at // 32, mask=there, other=-1)
    scores = tl.where((word >> (at % 32)) & 1 != 0, scores, float("-inf"))
    best = tl.max(scores)
    level = tl.where(best == float("-inf"), 0.0, best)
    mass = tl.sum(tl.exp((scores - level) / tl.load(temperatures + row)))
    to = row * count + number
    tl.store(sums + to * 3, highest)
    tl.store(sums + to * 3 + 1, best)
    tl.store(sums + to * 3 + 2, mass)
    found = tl.topk(tl.where(inside, _numbers(scores, at), _NOTHING), KEPT)
    tl.store(lists + to.to(tl.int64) * KEPT + tl.arange(0, KEPT), found)


@triton.jit
def _merge(
    lists, sums, temperatures, to_lists, to_sums, out, count, kept,
    LISTS: tl.constexpr, KEPT: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    begin()
    number, row = tl.program_id(0), tl.program_id(1)
    one, at = number * LISTS + tl.arange(0, LISTS), tl.arange(0, LISTS * KEPT)
    wait()
    sums += (row * count + one) * 3
    here = one < count
    highest = tl.load(sums, mask=here, other=float("-inf"))
    bests = tl.load(sums + 1, mask=here, other=float("-inf"))
    wrong = tl.max((highest != highest).to(tl.int32))
    top, best = tl.where(wrong > 0, float("nan"), tl.max(highest)), tl.max(bests)
    level = tl.where(best == float("-inf"), 0.0, best)
    masses = tl.load(sums + 2, mask=here, other=0.0)
    mass = tl.sum(masses * tl.exp((bests - level) / tl.load(temperatures + row)))
    base = (row * count + number * LISTS).to(tl.int64) * KEPT
    found = tl.load(lists + base + at, mask=number * LISTS + at // KEPT < count, other=_NOTHING)
    found, place = tl.topk(found, KEPT), tl.arange(0, KEPT)
    if LAST:
        ordered = (found >> 32).to(tl.int32)
        bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
        out += row * (2 * kept + 2)
        tl.store(out + place, bits, mask=place < kept)
        tl.store(out + kept + place, 0x7FFFFFFF - (found & 0x7FFFFFFF).to(tl.int32), mask=place < kept)
        tl.store(out + 2 * kept, top.to(tl.int32, bitcast=True))
        tl.store(out + 2 * kept + 1, mass.to(tl.int32, bitcast=True))
    else:
        to = row * tl.num_programs(0) + number
        tl.store(to_sums + to * 3, top)
        tl.store(to_sums + to * 3 + 1, best)
        tl.store(to_sums + to * 3 + 2, mass)
        tl.store(to_lists + to.to(tl.int64) * KEPT + place, found)


def reduce(
    logits: Tensor, temperatures: Tensor, which: Tensor, masks: Tensor, most: int, tiling: Tiling = TILING
) -> Tensor:
    """As ``engine.device.reduce.reduce``."""
    rows, vocab = logits.shape
    kept, count = min(most, vocab), triton.cdiv(vocab, tiling.stretch)
    room = int(triton.next_power_of_2(most))
    out = torch.empty(rows, 2 * kept + 2, dtype=torch.int32, device=logits.device)
    if not rows:
        return out
    lists, sums = _room(logits, rows, count, room)
    launch(
        _stretches, (count, rows), logits, which, masks, temperatures, lists, sums, vocab, masks.shape[1], count,
        STRETCH=tiling.stretch, KEPT=room, num_warps=tiling.warps,
    )  # fmt: skip
    while True:
        merged = triton.cdiv(count, tiling.lists)
        to_lists, to_sums = _room(logits, rows, merged, room) if merged > 1 else (lists, sums)
        launch(
            _merge, (merged, rows), lists, sums, temperatures, to_lists, to_sums, out, count, kept,
            LISTS=tiling.lists, KEPT=room, LAST=merged == 1, num_warps=tiling.merge_warps,
        )  # fmt: skip
        if merged == 1:
            return out
        lists, sums, count = to_lists, to_sums, merged


def _room(like: Tensor, rows: int, count: int, kept: int) -> tuple[Tensor, Tensor]:
    return like.new_empty(rows, count, kept, dtype=torch.int64), like.new_empty(rows, count, 3)
