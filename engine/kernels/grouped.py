"""Routed experts for many rows: matrix products of the rows that chose an expert with its blob (``experts.layout``).

Pairs (a row and one of its ranks) are sorted by expert; a program takes a tile of one expert's pairs and a tile of its
columns, and decodes the blob's blocks into tensor core operands as it goes. Activations are rounded to the precision of
the products, 16-bit on a GPU (a relative 1.1e-3 of each number, about 1.6e-3 of the result); weights are exact but for
int8, whose scale times code is rounded likewise. Sums are float32. Which tile a program has follows from where experts
begin alone: expert e's tiles are numbered from ``start[e] // tile + e`` on, so some numbers have none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.experts.layout import BLOCK, MOST_PARTS, Layout
from engine.kernels.limits import shared_memory


@dataclass(frozen=True)
class Groups:
    """``order`` int32 [pairs]: pairs, row * ranks + rank, by expert, those of no expert (id -1) last; ``start`` int32
    [experts + 1]: where in it each expert's begin; ``slot`` int32 [experts]: where its blob is, -1: not here."""

    order: Tensor
    start: Tensor
    slot: Tensor


@dataclass(frozen=True)
class Tile:
    """``pairs`` x ``columns`` of a product, ``k`` at a time. ``columns`` counts rows of the blob: of gate_up, half of
    them are gates."""

    pairs: int
    columns: int
    k: int
    warps: int
    stages: int


FEW, SOME, MANY = 0, 1, 2
"""Up to 16 pairs an expert on average, up to 64, or more."""
TILES = {
    "bf16": (Tile(16, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4), Tile(128, 256, 64, 8, 4)),
    "int8": (Tile(16, 128, 64, 4, 3), Tile(64, 128, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
    "mxfp4": (Tile(16, 128, 64, 4, 3), Tile(64, 128, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
}
"""Decoding a block takes about as long as its product: there, two programs share a multiprocessor. The largest tile
takes 192 KB of shared memory, and those of few pairs less than 100."""
HALVED = 128
"""Pairs of a tile from which on an expert's last one may be half as large."""
SUMS = 1024
"""Numbers that one program adds up."""

_KINDS = {"bf16": 0, "int8": 1, "mxfp4": 2}


def sort_pairs(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """``order`` and ``start`` of ``Groups``; rows of an expert stay in order. ids int32 [rows, k], -1 for none."""
    keys = torch.where(ids < 0, experts, ids).flatten().to(torch.int16)
    ordered, order = torch.sort(keys, stable=True)
    edges = torch.arange(experts + 1, dtype=torch.int16, device=ids.device)
    return order.to(torch.int32), torch.searchsorted(ordered, edges, out_int32=True)


@triton.jit
def _expert_of(start, number, experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """Whose tile this is, and where in the order it begins and that expert's pairs end."""
    expert = tl.arange(0, EXPERTS)
    begins = tl.load(start + expert, mask=expert < experts, other=0)
    before = (expert < experts) & (begins // PAIRS + expert <= number)
    mine = tl.sum(before.to(tl.int32)) - 1
    begin, end = tl.load(start + mine), tl.load(start + mine + 1)
    return mine, begin + (number - (begin // PAIRS + mine)) * PAIRS, end


@triton.jit
def _scales(words, KIND: tl.constexpr, K: tl.constexpr):
    """Of every word of a tile's columns, as they are stored; loaded a tile ahead of their words, since they are too
    small to come through shared memory. ``words`` [columns]: where the tile's first block of each column's panel is."""
    column = tl.arange(0, words.shape[0])[:, None] % 32
    if KIND == 0:
        scales = tl.zeros((1, 1), tl.int32)
    elif KIND == 1:
        at = words.to(tl.pointer_type(tl.float16))[:, None] + tl.arange(0, K // 4)[None, :] // 8 * 544
        scales = tl.load(at + column)
    else:
        at = words.to(tl.pointer_type(tl.uint8))[:, None] + tl.arange(0, K // 8)[None, :] // 4 * 544
        scales = tl.load(at + column)
    return scales


@triton.jit
def _int8(data, factor, BYTE: tl.constexpr, like):
    # 2^23 + code + 128 as a float, without a conversion
    code = ((data >> (8 * BYTE)) & 255) | 0x4B000000
    return ((code.to(tl.float32, bitcast=True) - 8388736.0) * factor).to(like.dtype)


@triton.jit
def _mxfp4(data, factor, K: tl.constexpr, like):
    # The code on top, then as a float: 2^-126 times what it stands for, the smallest a denormal.
    code = data << (28 - (K % 4 * 8 + K // 4 * 4))
    value = ((code & -2147483648) | ((code >> 6) & 0x1C00000)).to(tl.float32, bitcast=True)
    return (value * 8.507059173023462e37 * factor).to(like.dtype)


@triton.jit
def _weights(words, scales, KIND: tl.constexpr, K: tl.constexpr, like):
    """Weights [K, columns] of a tile, with what ``_scales`` gave; ``like`` has the type of the product."""
    N: tl.constexpr = words.shape[0]
    column = tl.arange(0, N) % 32
    if KIND == 0:
        at = tl.arange(0, K)[:, None] * 32 + column[None, :]
        if like.dtype == tl.bfloat16:
            tile = tl.load(tl.multiple_of(words.to(tl.pointer_type(tl.bfloat16)), 16)[None, :] + at)
        else:  # the interpreter cannot tell bfloat16 from integers
            bits = tl.load(words.to(tl.pointer_type(tl.uint16))[None, :] + at).to(tl.int32)
            tile = (bits << 16).to(tl.float32, bitcast=True).to(like.dtype)
    elif KIND == 1:
        word = tl.arange(0, K // 4)
        at = word // 8 * 272 + 16 + word % 8 * 32
        data = tl.load(words[:, None] + (at[None, :] + column[:, None])) ^ -2139062144
        f = scales.to(tl.float32)
        # Joined values stay in their thread: the k of a word in order, the most significant bit of k first.
        even = tl.join(_int8(data, f, 0, like), _int8(data, f, 2, like))
        odd = tl.join(_int8(data, f, 1, like), _int8(data, f, 3, like))
        tile = tl.trans(tl.reshape(tl.join(even, odd), (N, K)))
    else:
        word = tl.arange(0, K // 8)
        at = word // 4 * 136 + 8 + word % 4 * 32
        data = tl.load(words[:, None] + (at[None, :] + column[:, None]))
        f = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        zero = tl.join(_mxfp4(data, f, 0, like), _mxfp4(data, f, 4, like))
        one = tl.join(_mxfp4(data, f, 1, like), _mxfp4(data, f, 5, like))
        two = tl.join(_mxfp4(data, f, 2, like), _mxfp4(data, f, 6, like))
        three = tl.join(_mxfp4(data, f, 3, like), _mxfp4(data, f, 7, like))
        tile = tl.trans(tl.reshape(tl.join(tl.join(zero, two), tl.join(one, three)), (N, K)))
    return tile


@triton.jit
def _part(at, b1, b2, b3, v0, v1, v2, v3):
    """Of v0 to v3 that of the part that ``at`` lies in."""
    return tl.where(at < b1, v0, tl.where(at < b2, v1, tl.where(at < b3, v2, v3)))


@triton.jit
def _gate_up_tile(
    x, blob, order, out, first, end, ranks, hidden, inner, b1, b2, b3, o0, o1, o2, o3,
    KIND: tl.constexpr, WORDS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    pair = first + tl.arange(0, PAIRS)
    row = tl.load(order + pair, mask=pair < end, other=0) // ranks
    k = tl.arange(0, K)
    rows = x + row.to(tl.int64)[:, None] * hidden + k[None, :]
    # Columns of a tile beyond the last panel read the last one again.
    half = tl.program_id(0) * (COLUMNS // 2)
    panel = tl.minimum(half // 16 + tl.arange(0, COLUMNS) // 32, inner // 16 - 1)
    groups = hidden // 32
    from_part = _part(panel, b1, b2, b3, o0, o1, o2, o3)
    inside = panel - _part(panel, b1, b2, b3, 0, b1, b2, b3)
    words = blob + (from_part + inside * groups * WORDS)
    total = tl.zeros((PAIRS, COLUMNS), tl.float32)
    scales = _scales(words, KIND, K)
    for group in range(0, groups, K // 32):
        part = tl.load(rows + group * 32, mask=(pair < end)[:, None], other=0.0)
        weights = _weights(words + group * WORDS, scales, KIND, K, part)
        scales = _scales(words + tl.minimum(group + K // 32, groups - K // 32) * WORDS, KIND, K)
        total = tl.dot(part, weights, total, input_precision="ieee")
    if KIND == 0:
        gates, ups = tl.split(tl.reshape(total, (PAIRS, COLUMNS // 2, 2)))
    else:
        both = tl.permute(tl.reshape(total, (PAIRS, COLUMNS // 32, 2, 16)), (0, 1, 3, 2))
        gates, ups = tl.split(tl.reshape(both, (PAIRS, COLUMNS // 2, 2)))
    column = half + tl.arange(0, COLUMNS // 2)
    result = gates / (1.0 + tl.exp(-gates)) * ups
    to = pair.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(out + to, result.to(out.dtype.element_ty), mask=(pair < end)[:, None] & (column < inner)[None, :])


@triton.jit
def _gate_up(
    x, slots, order, start, slot_of, out, stride_words, experts, ranks, hidden, inner, b1, b2, b3, o0, o1, o2, o3,
    KIND: tl.constexpr, WORDS: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
    K: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    expert, first, end = _expert_of(start, tl.program_id(1), experts, PAIRS, EXPERTS)
    slot = tl.load(slot_of + expert)
    if (first < end) & (slot >= 0):
        blob = slots + slot.to(tl.int64) * stride_words
        if HALVES and end - first <= PAIRS // 2:
            _gate_up_tile(
                x, blob, order, out, first, end, ranks, hidden, inner, b1, b2, b3, o0, o1, o2, o3,
                KIND, WORDS, PAIRS // 2, COLUMNS, K,
            )  # fmt: skip
        else:
            _gate_up_tile(
                x, blob, order, out, first, end, ranks, hidden, inner, b1, b2, b3, o0, o1, o2, o3,
                KIND, WORDS, PAIRS, COLUMNS, K,
            )  # fmt: skip


@triton.jit
def _down_words(blob, group, panel, hidden, b1, b2, b3, b4, o0, o1, o2, o3, WORDS: tl.constexpr):
    """Where panels of the down section have a group; in each part that section follows gate and up."""
    begin = _part(group, b1, b2, b3, 0, b1, b2, b3)
    wide = _part(group, b1, b2, b3, b1, b2, b3, b4) - begin
    section = _part(group, b1, b2, b3, o0, o1, o2, o3) + (2 * wide * (hidden // 32) + group - begin) * WORDS
    return blob + (section + panel * wide * WORDS)


@triton.jit
def _down_tile(
    h, blob, order, out, first, end, hidden, inner, b1, b2, b3, b4, o0, o1, o2, o3,
    KIND: tl.constexpr, WORDS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    pair = first + tl.arange(0, PAIRS)
    k, n = tl.arange(0, K), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = h + pair.to(tl.int64)[:, None] * inner + k[None, :]
    panel = tl.minimum(n // 32, hidden // 32 - 1)
    total = tl.zeros((PAIRS, COLUMNS), tl.float32)
    scales = _scales(_down_words(blob, 0, panel, hidden, b1, b2, b3, b4, o0, o1, o2, o3, WORDS), KIND, K)
    for group in range(0, inner // 32, K // 32):
        # No tile of k is in two parts.
        words = _down_words(blob, group, panel, hidden, b1, b2, b3, b4, o0, o1, o2, o3, WORDS)
        part = tl.load(rows + group * 32, mask=(pair < end)[:, None], other=0.0)
        weights = _weights(words, scales, KIND, K, part)
        ahead = tl.minimum(group + K // 32, inner // 32 - K // 32)
        words = _down_words(blob, ahead, panel, hidden, b1, b2, b3, b4, o0, o1, o2, o3, WORDS)
        scales = _scales(words, KIND, K)
        total = tl.dot(part, weights, total, input_precision="ieee")
    if KIND == 0:  # into order here: columns that lie apart are written a sector each
        apart = tl.permute(tl.reshape(total, (PAIRS, COLUMNS // 32, 16, 2)), (0, 1, 3, 2))
        total = tl.reshape(apart, (PAIRS, COLUMNS))
    to = tl.load(order + pair, mask=pair < end, other=0).to(tl.int64)[:, None] * hidden + n[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(pair < end)[:, None] & (n < hidden)[None, :])


@triton.jit
def _down(
    h, slots, order, start, slot_of, out, stride_words, experts, hidden, inner, b1, b2, b3, b4, o0, o1, o2, o3,
    KIND: tl.constexpr, WORDS: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
    K: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    expert, first, end = _expert_of(start, tl.program_id(1), experts, PAIRS, EXPERTS)
    slot = tl.load(slot_of + expert)
    if (first < end) & (slot >= 0):
        blob = slots + slot.to(tl.int64) * stride_words
        if HALVES and end - first <= PAIRS // 2:
            _down_tile(
                h, blob, order, out, first, end, hidden, inner, b1, b2, b3, b4, o0, o1, o2, o3,
                KIND, WORDS, PAIRS // 2, COLUMNS, K,
            )  # fmt: skip
        else:
            _down_tile(
                h, blob, order, out, first, end, hidden, inner, b1, b2, b3, b4, o0, o1, o2, o3,
                KIND, WORDS, PAIRS, COLUMNS, K,
            )  # fmt: skip


def gate_up(x: Tensor, slots: Tensor, layout: Layout, groups: Groups, out: Tensor) -> None:
    """silu(gate x) * up x. x [rows, hidden] in the precision of the products, slots uint8 [slots, stride] -> out
    [pairs, inner] in the order of ``groups``; pairs of absent experts are left as they are."""
    tile, grid = _grid(layout, groups, 2 * layout.inner, layout.hidden // BLOCK)
    bounds, offsets = _padded(layout)
    if x.shape[0]:
        _gate_up[grid](
            x, slots.view(torch.int32), groups.order, groups.start, groups.slot, out, slots.shape[1] // 4,
            groups.slot.shape[0], groups.order.shape[0] // x.shape[0], layout.hidden, layout.inner,
            *(bound // 16 for bound in bounds[1:-1]), *offsets,
            KIND=_KINDS[layout.format.name], WORDS=layout.format.block_bytes // 4, **tile,
        )  # fmt: skip


def down(h: Tensor, slots: Tensor, layout: Layout, groups: Groups, out: Tensor) -> None:
    """down of what ``gate_up`` gave, [pairs, inner]. -> out [pairs, hidden], pair by pair: row * ranks + rank."""
    bounds, offsets = _padded(layout)
    even = all(bound % (2 * BLOCK) == 0 for bound in bounds)
    tile, grid = _grid(layout, groups, layout.hidden, 2 if even else 1)
    if h.shape[0]:
        _down[grid](
            h, slots.view(torch.int32), groups.order, groups.start, groups.slot, out, slots.shape[1] // 4,
            groups.slot.shape[0], layout.hidden, layout.inner, *(bound // BLOCK for bound in bounds[1:]), *offsets,
            KIND=_KINDS[layout.format.name], WORDS=layout.format.block_bytes // 4, **tile,
        )  # fmt: skip


def _grid(layout: Layout, groups: Groups, columns: int, blocks: int) -> tuple[dict[str, int], tuple[int, int]]:
    """Sizes and options of a kernel, and its programs. ``blocks``: the inner dimension is a multiple of so many."""
    pairs, experts = groups.order.shape[0], groups.slot.shape[0]
    size = FEW if pairs <= 16 * experts else SOME if pairs <= 64 * experts else MANY
    if size == MANY and shared_memory(groups.order.device) < 200 << 10:
        size = SOME
    tile = TILES[layout.format.name][size]
    wide = min(tile.columns, triton.next_power_of_2(columns))
    sizes = {
        "EXPERTS": triton.next_power_of_2(experts), "PAIRS": tile.pairs, "HALVES": tile.pairs >= HALVED,
        "COLUMNS": wide, "K": tile.k if blocks % (tile.k // BLOCK) == 0 else BLOCK,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    return sizes, (triton.cdiv(columns, wide), pairs // tile.pairs + experts)


def _padded(layout: Layout) -> tuple[list[int], list[int]]:
    """Bounds, and offsets in words where parts begin, as of four parts, the last ones empty."""
    missing = MOST_PARTS - layout.parts
    offsets = [offset // 4 for offset in layout.offsets[:-1]] + [layout.nbytes // 4] * missing
    return [*layout.bounds] + [layout.inner] * missing, offsets


@triton.jit
def _combine_pairs(out, ids, slot_of, weights, y, hidden, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        pair = row * RANKS + rank
        expert = tl.load(ids + pair)
        slot = tl.load(slot_of + expert, mask=expert >= 0, other=-1)
        here = (at < hidden) & (slot + 0 * at >= 0)
        part = tl.load(out + pair * hidden + at, mask=here, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * part
    tl.store(y + row * hidden + at, total, mask=at < hidden)


def combine_pairs(out: Tensor, ids: Tensor, slot: Tensor, weights: Tensor, y: Tensor) -> None:
    """y [rows, hidden] = sum over ranks, in order, of weights [rows, k] * out [rows * k, hidden] of the pairs whose
    expert has a slot. ids int32 [rows, k]; ``slot`` as in ``Groups``."""
    (rows, ranks), hidden = ids.shape, y.shape[1]
    block = min(SUMS, triton.next_power_of_2(hidden))
    if rows:
        _combine_pairs[(rows, triton.cdiv(hidden, block))](
            out, ids, slot, weights, y, hidden, RANKS=ranks, BLOCK=block, num_warps=4
        )


def experts(x: Tensor, ids: Tensor, weights: Tensor, layout: Layout, slots: Tensor) -> Tensor:
    """As ``Ops.experts``, of experts that are all in ``slots`` uint8 [experts, stride], in order; ids may be -1."""
    count, half = slots.shape[0], torch.bfloat16 if x.is_cuda else x.dtype
    every = torch.arange(count, dtype=torch.int32, device=x.device)
    groups = Groups(*sort_pairs(ids, count), every)
    inner = x.new_empty(ids.numel(), layout.inner, dtype=half)
    out, y = x.new_empty(ids.numel(), layout.hidden, dtype=half), torch.empty_like(x)
    gate_up(x.to(half), slots, layout, groups, inner)
    down(inner, slots, layout, groups, out)
    combine_pairs(out, ids, every, weights, y)
    return y
