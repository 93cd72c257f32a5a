"""Routed experts in MXFP4 (``engine.experts.layout``), for few rows, on the tensor cores.

What bounds products one by one is not memory but instructions, 6 a weight; these take 2, and as many again for a
program as a whole. A program computes panels of one pair (a row and one of its ranks); its warps share the k, so that
what a pair gives does not depend on other pairs. Every thread decodes the words that it reads, in the order in which a
product takes them from its registers. Activations are the sum of two bfloat16 (float32 in the interpreter, which does
not know bfloat16), which keeps 16 of their 24 bits; weights are exact. Scales are applied to the products of a block.

A bfloat16 of 2^-126 times a weight is what its nibble gives without a table; 2^63 times activations and 2^63 times
scales make up for it, so that no product is a denormal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.experts.layout import BLOCK, HALF, MOST_PARTS, Layout
from engine.experts.residency import Decision
from engine.kernels.blocks import of_part, padded, slot_of
from engine.kernels.launch import LINE, begin, cdiv, launch, next_power_of_2, prefetch, wait
from engine.kernels.pointwise import sigmoid

_WORDS = tl.constexpr(136)
"""Of a block: 8 of scales, then [4 eights of k][32 rows]."""
_RAISE = tl.constexpr(9223372036854775808.0)


@dataclass(frozen=True)
class Tile:
    """``groups`` of k at a time, by so many ``warps``; of gate_up, 1 or 3 tiles ``ahead`` of it are on their way."""

    groups: int
    warps: int
    ahead: int = 1


GATE_UP, DOWN, FINISH = Tile(32, 16), Tile(16, 8), Tile(128, 16)
"""The same on every GPU: a tile sets the order of the sums. That of gate_up leaves room beside it for programs of the
next kernel, which counts for more than having all of k on its way at once."""
GATE_UP_MANY = Tile(16, 8, 3)
"""Of several rows, where all of k is on its way at once in four such tiles. Half the threads do less that all of them
do, and there is another program to hide what one waits for; for one row there is none. So a row's bits are the same in
any company, but others than alone."""


FEW = 64
"""Registers of a thread, of which twice 16 warps have room."""


@triton.jit
def _read(address, here, EVEN: tl.constexpr):
    """A tile; zeros where it is not ``here``."""
    return tl.load(address) if EVEN else tl.load(address, mask=here, other=0)


@triton.jit
def _pair(words):
    """[..., 2]: the two bfloat16 in each word, which are registers of a product as they are."""
    low = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))


@triton.jit
def _nibbles(data, PLACE: tl.constexpr, half: tl.constexpr):
    """Nibbles PLACE and PLACE + 4 of words as [..., 2] weights, times 2^-126; the smallest is a denormal."""
    if half == tl.bfloat16:
        # A product puts the sign of one copy and the rest of another where they belong.
        both = ((data >> (PLACE // 2 * 8)) & (0x000F000F << (PLACE % 2 * 4))) * (4160 >> (PLACE % 2 * 4))
        weights = _pair(both & -2118090304)
    else:
        both = tl.join(data << (28 - 4 * PLACE), data << (12 - 4 * PLACE))
        weights = ((both & -2147483648) | ((both >> 6) & 0x1C00000)).to(half, bitcast=True)
    return weights


@triton.jit
def _weights(data, half: tl.constexpr):
    """Words [...] as [..., half of it, place // 2, odd place]."""
    even = tl.join(_nibbles(data, 0, half), _nibbles(data, 2, half))
    return tl.join(even, tl.join(_nibbles(data, 1, half), _nibbles(data, 3, half)))


@triton.jit
def _round(first, second):
    """Words of two bfloat16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _store(to, k, values, inner, SPLIT: tl.constexpr):
    """SPLIT: [2, inner] bfloat16 in the room of [inner] float32, in the order in which threads take them: of four k 0,
    2, 1, 3."""
    if SPLIT:
        values *= _RAISE
        high = values.to(tl.bfloat16)
        at = to.to(tl.pointer_type(tl.bfloat16)) + (k // 4 * 4 + k % 2 * 2 + k % 4 // 2)
        tl.store(at, high)
        tl.store(at + inner, (values - high.to(tl.float32)).to(tl.bfloat16))
    else:
        tl.store(to + k, values)


@triton.jit
def _blocks(blob, at, first, here):
    """Words and scales of 16 rows of blocks, from ``first`` on; ``at`` [groups]: where they begin in ``blob``. Of a
    warp's 8 x 4 threads each has two neighbouring rows and 8 k. [4, 8, groups, 2] and [4, 8, groups]."""
    four, eight = tl.arange(0, 4)[:, None, None], tl.arange(0, 8)[None, :, None]
    at, here = at[None, None, :], here[None, None, :]
    # From numbers, as Triton would give a thread the scales of several pairs of rows.
    scales = (blob.to(tl.int64) + at * 4 + (first + eight * 2 + four * 0)).to(tl.pointer_type(tl.int16))
    scales = tl.load(scales, mask=here, other=0).to(tl.int32)
    at = (at + (8 + first + four * 32 + eight * 2))[:, :, :, None] + tl.arange(0, 2)[None, None, None, :]
    return tl.load(blob + at, mask=here[:, :, :, None], other=0), scales


@triton.jit
def _columns(h, pair, group, here, inner, SPLIT: tl.constexpr):
    """What blocks at ``group`` [groups] of pairs meet: [groups, 32 k, 8 columns], of which the first two count. All of
    it is read at once and goes through shared memory: Triton's compiler would have products wait for reads in turn."""
    G: tl.constexpr = group.shape[0]
    eight, h = tl.arange(0, 8)[None, :, None, None, None, None], h + pair * inner
    if SPLIT:
        word = tl.arange(0, 2)[None, :, None] * (inner // 2) + tl.arange(0, 16)[None, None, :]
        words = h.to(tl.pointer_type(tl.int32))[:, None, None] + (group[:, None, None] * 16 + word)
        words = tl.load(words, mask=here[:, None, None], other=0)
        words = tl.permute(tl.reshape(words, (G, 2, 4, 4)), (2, 1, 0, 3))
        words = tl.broadcast_to(tl.reshape(words, (4, 1, 2, G, 4)), (4, 4, 2, G, 4))
        values = tl.reshape(_pair(tl.reshape(words, (4, 8, G, 4))), (4, 8, G, 2, 2, 2))
    else:
        k = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        values = tl.load(h[:, None] + k, mask=here[:, None], other=0.0) * _RAISE
        values = tl.permute(tl.reshape(values, (G, 4, 2, 2, 2)), (1, 0, 2, 4, 3))
        values = tl.where(eight == 0, tl.reshape(values, (4, 1, G, 2, 2, 2)), 0.0)
    # In the order of a product's registers: k is [odd place][four][place // 2][half of a word].
    return tl.reshape(tl.permute(values, (2, 3, 0, 4, 5, 1)), (G, 32, 8))


@triton.jit
def _products(data, scales, values, factor, half: tl.constexpr):
    """Products of ``_blocks`` with ``_columns``, times ``factor`` [groups]: [groups, 16, 8], for ``_added``."""
    G: tl.constexpr = factor.shape[0]
    data = tl.reshape(tl.permute(data, (2, 3, 1, 0)), (G, 16, 4))
    weights = tl.reshape(tl.permute(_weights(data, half), (0, 1, 5, 2, 4, 3)), (G, 16, 32))
    total = tl.dot(weights, values, input_precision="ieee")
    scale = (tl.join(scales << 23, scales << 15) & 0x7F800000).to(tl.float32, bitcast=True)
    counts = tl.arange(0, 4)[:, None, None, None] == 0
    scale *= tl.where(counts, factor[None, None, :, None] * _RAISE, 0.0)
    scale = tl.reshape(tl.permute(scale, (2, 3, 1, 0)), (G, 16, 4))
    return total * tl.reshape(tl.join(scale, scale), (G, 16, 8))


@triton.jit
def _added(total, WARPS: tl.constexpr):
    """What ``_products`` gave: [16]."""
    total = tl.sum(tl.reshape(total, (total.shape[0] // WARPS, WARPS, 16, 8)), axis=0)  # of each warp
    total = tl.sum(tl.sum(total, axis=2), axis=0)
    return tl.reshape(tl.trans(tl.reshape(total, (2, 8))), (16,))


@triton.jit
def _words_of(values, half: tl.constexpr):
    """Activations as words: [groups, 4 eights, 4 (odd place, place // 2), halves, 2 pieces]; of
    bfloat16, both halves are in one word."""
    G: tl.constexpr = values.shape[0] // 32
    values = tl.permute(tl.reshape(values * _RAISE, (G, 4, 2, 2, 2)), (0, 1, 2, 4, 3))
    if half == tl.bfloat16:
        first, second = tl.split(values)
        high = _round(first, second)
        first -= (high << 16).to(tl.float32, bitcast=True)
        second -= (high & -65536).to(tl.float32, bitcast=True)
        words = tl.reshape(tl.join(high, _round(first, second)), (G, 4, 4, 1, 2))
    else:
        words = tl.reshape(tl.join(values, 0.0 * values), (G, 4, 4, 2, 2))
    return words


@triton.jit
def _wide_blocks(blob, at, stride, here, EVEN: tl.constexpr):
    """Words and scales of blocks at ``at`` [groups] of both panels that are ``stride`` words apart, for use of all of a
    product's 8 columns: each of the four threads that share a product's rows has rows of its own."""
    four, eight = tl.arange(0, 4)[:, None, None], tl.arange(0, 8)[None, :, None]
    block, live = at[None, None, :] + eight // 4 * stride, here[None, None, :]
    quad = eight % 4 * 2 + four % 2
    # From numbers, as Triton would give a thread the scales of several groups of rows.
    scales = (blob.to(tl.int64) + (block + quad) * 4).to(tl.pointer_type(tl.int32))
    octet, last = tl.arange(0, 2)[None, None, None, :, None] * 2 + four[:, :, :, None, None] // 2, tl.arange(0, 4)
    data = block[:, :, :, None, None] + (8 + octet * 32 + quad[:, :, :, None, None] * 4 + last)
    return _read(blob + data, live[:, :, :, None, None], EVEN), _read(scales, live, EVEN)


@triton.jit
def _wide_values(x, here, EVEN: tl.constexpr):
    """Activations of groups, of those that are ``here``, from ``x`` on."""
    G: tl.constexpr = here.shape[0]
    inside = tl.reshape(tl.broadcast_to(here[:, None], (G, 32)), (G * 32,))
    return _read(x + tl.arange(0, G * 32), inside, EVEN)


@triton.jit
def _wide_columns(values, half: tl.constexpr):
    """What ``_wide_blocks`` of ``_wide_values`` meet: threads have columns of their own where their rows' activations
    are, zeros elsewhere. Two of four have the other eights of k."""
    mine = tl.arange(0, 8)[None, :, None, None, None] // 2 == tl.arange(0, 4)[:, None, None, None, None]
    G: tl.constexpr = values.shape[0] // 32
    words = _words_of(values, half)
    # k is [2][odd place][four][place // 2][half of a word].
    H: tl.constexpr = words.shape[3]
    words = tl.permute(tl.reshape(words, (G, 2, 2, 4, H, 2)), (2, 5, 0, 1, 3, 4))
    words = tl.broadcast_to(tl.reshape(words, (2, 1, 1, 2, G, 2, 4 * H)), (2, 2, 4, 2, G, 2, 4 * H))
    return tl.where(mine, tl.reshape(words, (4, 8, G, 2, 4 * H)), 0)


@triton.jit
def _wide_split(x, group, here, inner):
    """``_wide_columns`` at ``group`` [groups], of what ``_store`` has split."""
    four = tl.arange(0, 4)[:, None, None, None, None]
    eight, last = tl.arange(0, 8)[None, :, None, None, None], tl.arange(0, 4)[None, None, None, None, :]
    octet = tl.arange(0, 2)[None, None, None, :, None] * 2 + four // 2
    words = group[None, None, :, None, None] * 16 + octet * 4 + eight % 2 * (inner // 2) + last
    live = here[None, None, :, None, None] & (eight // 2 == four)
    return _read(x.to(tl.pointer_type(tl.int32)) + words, live, False)


@triton.jit
def _wide_tile(x, blob, start, COUNT: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr):
    """``_wide_blocks`` of both panels from ``start`` on, and ``_wide_values``: only where room does not count."""
    group = start + tl.arange(0, GROUPS)
    values = _wide_values(x + start * 32, group < COUNT, EVEN) if AHEAD > 1 else 0.0
    data, scales = _wide_blocks(blob, group * _WORDS, COUNT * _WORDS, group < COUNT, EVEN)
    return values, data, scales


@triton.jit
def _wide_products(data, scale, words, half: tl.constexpr):
    """[groups, 32 (2, 2 rows, 2 panels, 4), 8 (2 eights of k, 2 pairs of quads, 2 pieces)], for ``_wide_added``."""
    G: tl.constexpr = data.shape[2]
    if half == tl.bfloat16:
        words = _pair(words)
    values = tl.permute(tl.reshape(words, (4, 8, G, 2, 2, 2, 2)), (2, 3, 4, 0, 5, 6, 1))
    data = tl.permute(tl.reshape(data, (4, 8, G, 2, 2, 2)), (2, 4, 5, 1, 3, 0))
    weights = tl.permute(_weights(tl.reshape(data, (G, 32, 2, 4)), half), (0, 1, 2, 6, 3, 5, 4))
    total = tl.dot(tl.reshape(weights, (G, 32, 64)), tl.reshape(values, (G, 64, 8)), input_precision="ieee")
    scale = tl.join(tl.join(scale << 23, scale << 7), tl.join(scale << 15, scale >> 1)) & 0x7F800000
    scale = tl.permute(scale.to(tl.float32, bitcast=True) * _RAISE, (2, 3, 4, 1, 0))
    scale = tl.reshape(scale, (G, 32, 4))
    return total * tl.reshape(tl.join(scale, scale), (G, 32, 8))


@triton.jit
def _wide_added(total, WARPS: tl.constexpr):
    """What ``_wide_products`` gave: [2 panels, 32 rows]."""
    G: tl.constexpr = total.shape[0]
    total = tl.sum(tl.reshape(total, (G // WARPS, WARPS, 32, 8)), axis=0)  # of each warp
    total = tl.sum(tl.sum(tl.reshape(total, (WARPS, 32, 2, 2, 2)), axis=4), axis=2)
    total = tl.reshape(tl.sum(total, axis=0), (2, 2, 2, 4, 2))
    return tl.reshape(tl.permute(total, (2, 3, 4, 0, 1)), (2, 32))


@triton.jit
def _gate_up(
    x, slots, slot_in, parts_in, out, stride_words, hidden, inner, b1, b2, b3, b4, o0, o1, o2, o3,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr, RANKS: tl.constexpr,
    WHOLE: tl.constexpr, AHEAD: tl.constexpr, LINES: tl.constexpr, SPLIT: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    begin()
    pair, panel = tl.program_id(0), tl.program_id(1) * 2
    wait()
    slot, parts = slot_of(slot_in, parts_in, pair, WHOLE)
    part = (panel >= b1).to(tl.int32) + (panel >= b2).to(tl.int32) + (panel >= b3).to(tl.int32)
    if part < parts:
        first, end = of_part(panel, b1, b2, b3, 0, b1, b2, b3), of_part(panel, b1, b2, b3, b1, b2, b3, b4)
        offset = of_part(panel, b1, b2, b3, o0, o1, o2, o3)
        section = tl.multiple_of(slots + slot.to(tl.int64) * stride_words + offset, 16)
        blob, row_x = section + (panel - first) * (COUNT * _WORDS), x + (pair // RANKS).to(tl.int64) * hidden
        total = tl.zeros((GROUPS, 32, 8), tl.float32)
        one = _wide_tile(row_x, blob, 0, COUNT, GROUPS, EVEN, AHEAD)
        two, three, later = one, one, one
        if AHEAD == 3:
            two = _wide_tile(row_x, blob, GROUPS, COUNT, GROUPS, EVEN and 2 * GROUPS <= COUNT, AHEAD)
            three = _wide_tile(row_x, blob, 2 * GROUPS, COUNT, GROUPS, EVEN and 3 * GROUPS <= COUNT, AHEAD)
        for start in tl.static_range(0, COUNT, GROUPS):
            values, data, scales = one
            if AHEAD == 1:
                values = _wide_values(row_x + start * 32, start + tl.arange(0, GROUPS) < COUNT, EVEN)
                words = _wide_columns(values, half)
            if start + AHEAD * GROUPS < COUNT:
                later = _wide_tile(row_x, blob, start + AHEAD * GROUPS, COUNT, GROUPS, EVEN, AHEAD)
            tl.debug_barrier()  # all is on its way before any of it is waited for
            if AHEAD > 1:
                words = _wide_columns(values, half)
            total += _wide_products(data, scales, words, half)
            if AHEAD == 1:
                one = later
            else:
                one, two, three = two, three, later
        # For who comes next: as large a share of the part's down section.
        share = section + (end - first) * (COUNT * _WORDS) + (panel - first) * (COUNT * _WORDS // 2)
        prefetch(share + tl.minimum(tl.arange(0, LINES) * 16, COUNT * _WORDS - 1))
        gates, ups = tl.split(tl.trans(tl.reshape(_wide_added(total, WARPS), (2, 2, 16)), 0, 2, 1))
        column = (panel + tl.arange(0, 2)[:, None]) * 16 + tl.arange(0, 16)[None, :]
        _store(out + pair.to(tl.int64) * inner, column, gates * sigmoid(gates) * ups, inner, SPLIT)


@triton.jit
def _down(
    h, slots, slot_in, parts_in, out, stride_words, hidden, inner, b1, b2, b3, b4, o0, o1, o2, o3,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    SPLIT: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    begin()
    pair, panel = tl.program_id(0), tl.program_id(1) * 2
    wait()
    slot, parts = slot_of(slot_in, parts_in, pair, WHOLE)
    if parts > 0:
        blob = tl.multiple_of(slots + slot.to(tl.int64) * stride_words, 16)
        row_h, panels = h + pair.to(tl.int64) * inner, hidden // 32
        last, other = of_part(parts, 2, 3, 4, b1, b2, b3, b4), (panel + 1 < panels).to(tl.int32) * _WORDS
        total = tl.zeros((GROUPS, 32, 8), tl.float32)
        for start in tl.range(0, COUNT if WHOLE else last, GROUPS):
            group = start + tl.arange(0, GROUPS)
            first = of_part(group, b1, b2, b3, 0, b1, b2, b3)
            wide = of_part(group, b1, b2, b3, b1, b2, b3, b4) - first
            # In the group's part, behind gate and up: the panel, in that the group.
            at = of_part(group, b1, b2, b3, o0, o1, o2, o3) + ((2 * panels + panel) * wide + group - first) * _WORDS
            stride = tl.multiple_of(wide * other, 4)[None, None, :]
            data, scales = _wide_blocks(blob, tl.multiple_of(at, 4), stride, group < last, EVEN)
            if SPLIT:
                words = _wide_split(row_h, group, group < last, inner)
            else:
                words = _wide_columns(_wide_values(row_h + start * 32, group < last, EVEN), half)
            total += _wide_products(data, scales, words, half)
        to = panel * 32 + tl.arange(0, 2)[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(out + pair.to(tl.int64) * hidden + to, _wide_added(total, WARPS), mask=to < hidden)


@triton.jit
def _finish(
    h, slots, slot_in, parts_in, counts, weights, gate, up, gate_row, scale, scale_row, matrix, unit, base, out,
    to_arrived, stride_words, hidden, inner,
    WHOLE: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr, RANKS: tl.constexpr, GROUPS: tl.constexpr,
    WARPS: tl.constexpr, INNER: tl.constexpr, SPLIT: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    begin()
    piece, row, k = tl.program_id(0), tl.program_id(1), tl.arange(0, INNER)
    column, inside = piece * 16 + tl.arange(0, 16), k < inner
    tile = tl.load(matrix + column[:, None] * inner + k[None, :], mask=inside[None, :], other=0.0)
    wait()
    if not WHOLE:
        asked = tl.load(counts + 1)
    gates = tl.load(gate + row * gate_row + k, mask=inside, other=0.0)
    values = tl.load(up + row * gate_row + k, mask=inside, other=0.0) * gates * sigmoid(gates)
    residual, share = tl.load(base + row * hidden + column), tl.load(scale + row * scale_row)
    total = tl.zeros((GROUPS, 16, 8), tl.float32)
    for start in tl.range(0, RANKS * COUNT, GROUPS):
        pair, group = (start + tl.arange(0, GROUPS)) // COUNT, (start + tl.arange(0, GROUPS)) % COUNT
        number = row * RANKS + pair
        slot = tl.load(slot_in + number, mask=pair < RANKS, other=-1)
        here = slot >= 0
        if not WHOLE:
            here &= group // WIDE < tl.load(parts_in + number, mask=pair < RANKS, other=0)
        weight = tl.load(weights + number, mask=here, other=0.0)
        # The down section of the group's part, in it the panel, in that the group.
        block = (group // WIDE * 3 + 2) * WIDE * (hidden // 32) + piece // 2 * WIDE + group % WIDE
        at = tl.multiple_of(slot.to(tl.int64) * stride_words + block * _WORDS, 4)
        data, scales = _blocks(slots, at, piece % 2 * 16, here)
        total += _products(data, scales, _columns(h, number, group, here, COUNT * 32, SPLIT), weight, half)
    routed = _added(total, WARPS)
    shared = tl.sum(tile.to(tl.float32) * values[None, :], axis=1) * unit
    tl.store(out + row * hidden + column, residual + (shared * sigmoid(share) + routed))
    if not WHOLE:  # noqa: SIM102 - Triton's condition, and the device's
        if (piece + row == 0) & (asked > 0):
            tl.store(to_arrived.to(tl.pointer_type(tl.int64)), 1)


def gate_up(x: Tensor, slots: Tensor, decision: Decision, layout: Layout, out: Tensor, whole: bool) -> None:
    """As ``engine.kernels.experts.gate_up``. ``out`` is for ``down`` and ``finish``, on a GPU as of ``_store``."""
    count, (bounds, offsets), pairs = layout.hidden // BLOCK, padded(layout), decision.slot
    many = pairs.shape[0] > 1 and count <= (1 + GATE_UP_MANY.ahead) * GATE_UP_MANY.groups
    tile = GATE_UP_MANY if many else GATE_UP
    launch(
        _gate_up, (pairs.numel(), layout.inner // BLOCK),
        x, slots.view(torch.int32), pairs, decision.gpu_parts, out, slots.shape[1] // 4,
        layout.hidden, layout.inner, *(bound // HALF for bound in bounds[1:]), *offsets,
        EVEN=count % _groups(tile, count) == 0, RANKS=pairs.shape[1], WHOLE=whole, AHEAD=tile.ahead,
        LINES=next_power_of_2(cdiv(count * layout.format.block_bytes, LINE)),
        **_constants(x, tile, count), **({} if many else registers(pairs.shape[0])),
    )  # fmt: skip


def down(h: Tensor, slots: Tensor, decision: Decision, layout: Layout, out: Tensor, whole: bool) -> None:
    """As ``engine.kernels.experts.down``."""
    count, (bounds, offsets), pairs = layout.inner // BLOCK, padded(layout), decision.slot
    launch(
        _down, (pairs.numel(), cdiv(layout.hidden, 2 * BLOCK)),
        h, slots.view(torch.int32), pairs, decision.gpu_parts, out, slots.shape[1] // 4,
        layout.hidden, layout.inner, *(bound // BLOCK for bound in bounds[1:]), *offsets,
        EVEN=whole and count % _groups(DOWN, count) == 0, WHOLE=whole, **_constants(h, DOWN, count),
    )  # fmt: skip


def registers(rows: int) -> dict[str, Any]:
    """Two programs on a processor where there are many; what is computed stays the same."""
    return {"maxnreg": FEW} if rows > 1 else {}


def _groups(tile: Tile, count: int) -> int:
    return min(tile.groups, next_power_of_2(count))


def _constants(x: Tensor, tile: Tile, count: int) -> dict[str, Any]:
    """Of a kernel of such tiles over ``count`` groups."""
    groups = _groups(tile, count)
    return {
        "COUNT": count, "GROUPS": groups, "WARPS": min(tile.warps, groups), "SPLIT": x.is_cuda,
        "half": tl.bfloat16 if x.is_cuda else tl.float32, "num_warps": tile.warps, "num_stages": 1,
    }  # fmt: skip


def finishes(layout: Layout) -> bool:
    """Whether ``finish`` is for such experts: parts are all alike."""
    return layout.format.name == "mxfp4" and layout.inner % (MOST_PARTS * BLOCK) == 0


def finish(
    h: Tensor, slots: Tensor, layout: Layout, decision: Decision, weights: Tensor, base: Tensor,
    gate_up: Tensor, gate: Tensor, matrix: Tensor, unit: float, *, whole: bool, arrived: int = 0,
) -> Tensor:  # fmt: skip
    """The end of a layer in one kernel: ``down`` of ``h`` [rows, k, inner], summed over ranks by ``weights``, base
    [rows, hidden], and the shared expert: silu_mul of ``gate_up`` [rows, 2 * inner], times ``matrix`` [hidden, inner]
    and ``unit``, times sigmoid of ``gate`` [rows, 1]. Unless ``whole``, the word at ``arrived`` becomes 1 where the CPU
    has been asked: the device has all that it computes with."""
    pairs, count, inner = decision.slot, layout.inner // BLOCK, matrix.shape[1]
    out, (rows, ranks) = torch.empty_like(base), pairs.shape
    launch(
        _finish, (layout.hidden // HALF, rows),
        h, slots.view(torch.int32), pairs, decision.gpu_parts, decision.counts, weights,
        gate_up, gate_up[:, inner:], gate_up.stride(0), gate, gate.stride(0), matrix, unit, base, out,
        arrived, slots.shape[1] // 4, layout.hidden, inner,
        WHOLE=whole, WIDE=count // MOST_PARTS, RANKS=ranks, INNER=next_power_of_2(inner),
        **_constants(h, FINISH, ranks * count) | {"COUNT": count}, **registers(rows),
    )  # fmt: skip
    return out
