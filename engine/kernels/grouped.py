"""Routed experts for many rows: matrix products of the rows that chose an expert with its blob (``experts.layout``).

Pairs (a row and one of its ranks) are sorted by expert; a program takes a tile of one expert's pairs and a tile of its
columns, and decodes the blob's blocks into tensor core operands as it goes: weights are the left factor, which may come
from registers and has many rows where there are few pairs. Activations are rounded to the precision of the products: on
a GPU bfloat16 (a relative 1.1e-3 of each number, about 1.6e-3 of the result), or for int8, whose scales are float16,
float16 (an eighth of that). Weights are exact but for int8, whose scale times code is rounded likewise. Sums are
float32. Which tile a program has follows from where experts begin alone: expert e's tiles are numbered from
``start[e] // tile + e`` on, so some numbers have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.experts.layout import BLOCK, MOST_PARTS, Layout
from engine.kernels.launch import cdiv, launch, next_power_of_2
from engine.kernels.limits import shared_memory
from engine.kernels.pairs import combine_pairs, sort_pairs, unit


@dataclass(frozen=True)
class Groups:
    """``order`` int32 [pairs]: pairs, row * ranks + rank, by expert, those of no expert (id -1) last; ``start`` int32
    [experts + 1]: where in it each expert's begin; ``slot`` int32 [experts]: where its blob is, -1: not here."""

    order: Tensor
    start: Tensor
    slot: Tensor


@dataclass(frozen=True)
class Tile:
    """``pairs`` x ``columns`` of a product, ``k`` at a time; an expert's last one may have only ``small`` pairs, or
    ``rest`` more: in a tile of their own, so few would cost as much as many. ``columns`` counts rows of the blob: of
    gate_up, half of them are gates."""

    pairs: int
    small: int
    columns: int
    k: int
    warps: int
    stages: int
    rest: int = 0


FEW, SOME, MANY = 0, 1, 2
"""Up to 16 pairs an expert on average, up to 64, or more."""
TILES = {
    "bf16": (Tile(16, 16, 128, 64, 4, 4), Tile(64, 64, 128, 64, 4, 4), Tile(128, 32, 128, 64, 4, 3, 32)),
    "int8": (Tile(16, 16, 128, 64, 4, 3), Tile(64, 32, 128, 64, 8, 3), Tile(128, 32, 128, 64, 4, 3, 32)),
    "mxfp4": (Tile(16, 16, 128, 64, 4, 3), Tile(64, 64, 256, 64, 8, 4), Tile(128, 32, 128, 64, 4, 3, 32)),
}
"""The largest tile takes 111 KB of shared memory, and those of few pairs less than 100."""
ARRANGED = 2048
"""Numbers that one program puts in order."""

_KINDS = {"bf16": 0, "int8": 1, "mxfp4": 2}


def precision(layout: Layout, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Of activations in products, and of what ``down`` gives."""
    if device.type == "cpu":  # the interpreter
        return torch.float32, torch.float32
    return torch.float16 if layout.format.name == "int8" else torch.bfloat16, torch.float16


@triton.constexpr_function
def _small(kind: int, half: tl.dtype) -> int:
    """What weights of MXFP4 as bfloat16 are divided by."""
    return 1 << 24 if kind == 2 and half == tl.bfloat16 else 1


@triton.jit
def _expert_of(start, number, experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """Whose tile this is, where in the order that expert's pairs begin, and this tile, and where those pairs end."""
    expert = tl.arange(0, EXPERTS)
    begins = tl.load(start + expert, mask=expert < experts, other=0)
    before = (expert < experts) & (begins // PAIRS + expert <= number)
    mine = tl.sum(before.to(tl.int32)) - 1
    begin, end = tl.load(start + mine), tl.load(start + mine + 1)
    return mine, begin, begin + (number - (begin // PAIRS + mine)) * PAIRS, end


@triton.jit
def _pairs(packed, half: tl.constexpr):
    """[..., 2]: the two numbers in every int32, which are registers of a product as they are."""
    low = packed.to(tl.int16).to(half, bitcast=True)
    return tl.join(low, (packed >> 16).to(tl.int16).to(half, bitcast=True))


@triton.jit
def _int8(data, scale, ODD: tl.constexpr, half: tl.constexpr):
    """Weights [..., 2] of bytes ODD and ODD + 2 of words; ``scale``: the bits of float16."""
    if half == tl.float16:
        # With its sign bit turned a code is 128 more, which float16 has in the lowest bits of 1024 and more.
        weights = tl.inline_asm_elementwise(
            """{ .reg .b32 code, less;
            lop3.b32 code, $1, 0x00FF00FF, 0x64806480, 0x6A;
            mov.b32 less, 0xE480E480;
            add.rn.f16x2 code, code, less;
            mul.rn.f16x2 $0, code, $2; }""",
            "=r,r,r", [data >> (8 * ODD), (scale & 0xFFFF) * 65537], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return _pairs(weights, half)
    factor = (scale & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    first, second = (data << (24 - 8 * ODD)) >> 24, (data << (8 - 8 * ODD)) >> 24
    return tl.join((first.to(tl.float32) * factor).to(half), (second.to(tl.float32) * factor).to(half))


@triton.jit
def _mxfp4(data, scale, PLACE: tl.constexpr, half: tl.constexpr):
    """Weights [..., 2] of the nibbles of words at PLACE and PLACE + 4; ``scale``: the byte. Codes become 2^-126 times
    what they stand for, the smallest a denormal; as bfloat16, divided as ``_small`` says, one product makes them
    weights, of scales up to 2^25."""
    if half == tl.bfloat16:
        # A product puts the sign of one copy and the rest of another where they belong.
        nibbles = (data >> (PLACE // 2 * 8)) & (0x000F000F << (PLACE % 2 * 4))
        codes = (nibbles * (4160 >> (PLACE % 2 * 4))) & -2118090304
        weights = tl.inline_asm_elementwise(
            """{ .reg .b32 zero;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, $1, $2, zero; }""",
            "=r,r,r", [codes, ((scale & 255) + 102) * 8388736], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return _pairs(weights, half)
    factor = ((scale & 255) << 23).to(tl.float32, bitcast=True)
    first, second = data << (28 - 4 * PLACE), data << (12 - 4 * PLACE)
    first = ((first & -2147483648) | ((first >> 6) & 0x1C00000)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    second = ((second & -2147483648) | ((second >> 6) & 0x1C00000)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return tl.join((first * factor).to(half), (second * factor).to(half))


@triton.jit
def _coded(words, KIND: tl.constexpr, K: tl.constexpr, half: tl.constexpr):
    """Weights [columns, K] of a tile, k in the order of ``arrange``, columns in that of ``_columns``. ``words``
    [panels]: where the tile's first block of each panel is."""
    P: tl.constexpr = words.shape[0]
    G: tl.constexpr = K // 32
    V: tl.constexpr = 8 if KIND == 1 else 4
    SCALES: tl.constexpr = 2 if KIND == 1 else 4  # in a word
    BLOCK: tl.constexpr = 272 if KIND == 1 else 136
    C: tl.constexpr = 32 // SCALES
    # Scales come as whole words, too: what is smaller would not come through shared memory.
    at = tl.arange(0, G * C)
    scale = tl.load(words[:, None] + (at // C * BLOCK + at % C)[None, :])
    if KIND == 1:
        scale = tl.reshape(scale, (P, G, 8, 2))
        scale = tl.join(scale, scale >> 16)
    else:
        scale = tl.reshape(scale, (P, G, 8))
        scale = tl.join(tl.join(scale, scale >> 16), tl.join(scale >> 8, scale >> 24))
    scale = tl.reshape(tl.permute(scale, (3, 0, 4, 2, 1)), (P * 32, G, 1))
    scale = tl.reshape(tl.broadcast_to(scale, (P * 32, G, V)), (P * 32, G * V))
    at = tl.arange(0, G * V * 32)
    data = tl.load(words[:, None] + (at // (V * 32) * BLOCK + C + at % (V * 32))[None, :])
    data = tl.permute(tl.reshape(data, (P, G, V, 8, 2, 2)), (4, 0, 5, 3, 1, 2))
    data = tl.reshape(data, (P * 32, G * V))
    # Every thread decodes the words that it reads, in the order in which a product takes them from its registers.
    if KIND == 1:
        tile = tl.join(_int8(data, scale, 0, half), _int8(data, scale, 1, half))
        tile = tl.permute(tl.reshape(tile, (P * 32, G, 2, 4, 2, 2)), (0, 1, 2, 5, 3, 4))
    else:
        even = tl.join(_mxfp4(data, scale, 0, half), _mxfp4(data, scale, 2, half))
        odd = tl.join(_mxfp4(data, scale, 1, half), _mxfp4(data, scale, 3, half))
        tile = tl.permute(tl.reshape(tl.join(even, odd), (P * 32, G, 4, 2, 2, 2)), (0, 1, 4, 5, 2, 3))
    return tl.reshape(tile, (P * 32, K))


@triton.jit
def _columns(total, KIND: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a tile's sums [panels, 32 rows of a panel, pairs]. A thread has four neighbouring rows of a panel, which it
    reads as one: of the row the bits g g g u l, in the tile's columns u, the panel, l, g g g. bf16's panels have rows j
    and 16 + j side by side."""
    P: tl.constexpr = COLUMNS // 32
    if KIND == 0:
        total = tl.permute(tl.reshape(total, (P, 16, 2, PAIRS)), (0, 2, 1, 3))
    else:
        total = tl.permute(tl.reshape(total, (2, P, 2, 8, PAIRS)), (1, 3, 0, 2, 4))
    return tl.reshape(total, (P, 32, PAIRS))


@triton.jit
def _bf16(words, K: tl.constexpr, half: tl.constexpr):
    """Weights [K, columns] of a tile; ``words`` [columns]: where the first block of each one's panel is."""
    at = tl.arange(0, K)[:, None] * 32 + (tl.arange(0, words.shape[0]) % 32)[None, :]
    if half == tl.bfloat16:
        return tl.load(tl.multiple_of(words.to(tl.pointer_type(tl.bfloat16)), 16)[None, :] + at)
    # the interpreter cannot tell bfloat16 from integers
    bits = tl.load(words.to(tl.pointer_type(tl.uint16))[None, :] + at).to(tl.int32)
    return (bits << 16).to(tl.float32, bitcast=True).to(half)


@triton.jit
def _part(at, b1, b2, b3, v0, v1, v2, v3):
    """Of v0 to v3 that of the part that ``at`` lies in."""
    return tl.where(at < b1, v0, tl.where(at < b2, v1, tl.where(at < b3, v2, v3)))


@triton.jit
def _words(blob, group, panel, hidden, b1, b2, b3, b4, o0, o1, o2, o3, WORDS: tl.constexpr, DOWN: tl.constexpr):
    """Where panels of a section have a group; in each part the down section follows gate and up. Bounds are of inner
    columns, in blocks; a block of them is two panels of gate_up."""
    at = group if DOWN else panel // 2
    begin = _part(at, b1, b2, b3, 0, b1, b2, b3)
    section = _part(at, b1, b2, b3, o0, o1, o2, o3)
    if DOWN:
        wide = _part(at, b1, b2, b3, b1, b2, b3, b4) - begin
        block = 2 * wide * (hidden // 32) + panel * wide + group - begin
    else:
        block = (panel - 2 * begin) * (hidden // 32) + group
    return blob + (section + block * WORDS)


@triton.jit
def _store_gate_up(
    total, out, pair, end, inner, KIND: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """silu(gate) * up as ``arrange`` would give it. ``total`` as ``_columns`` gives it."""
    gates, ups = tl.split(tl.permute(tl.reshape(total, (COLUMNS // 32, 2, 16, PAIRS)), (0, 2, 3, 1)))
    result = (gates / (1.0 + tl.exp(-gates)) * ups * (1 / unit(out.dtype.element_ty))).to(out.dtype.element_ty)
    if KIND == 0:
        result = tl.trans(tl.reshape(result, (COLUMNS // 2, PAIRS)))
    elif KIND == 1:
        result = tl.permute(tl.reshape(result, (COLUMNS // 64, 2, 4, 2, 2, PAIRS)), (5, 0, 1, 4, 2, 3))
    else:
        result = tl.permute(tl.reshape(result, (COLUMNS // 64, 4, 2, 2, 2, PAIRS)), (5, 0, 4, 2, 1, 3))
    column = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    to = out + (pair.to(tl.int64)[:, None] * inner + column[None, :])
    tl.store(to, tl.reshape(result, (PAIRS, COLUMNS // 2)), mask=(pair < end)[:, None] & (column < inner)[None, :])


@triton.jit
def _store_down(total, out, order, pair, end, hidden, PAIRS: tl.constexpr, COLUMNS: tl.constexpr):
    """``total`` as ``_columns`` gives it: columns that lie apart would be written a sector each."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    to = tl.load(order + pair, mask=pair < end, other=0).to(tl.int64)[:, None] * hidden + column[None, :]
    total = (total * (1 / unit(out.dtype.element_ty))).to(out.dtype.element_ty)
    result = tl.trans(tl.reshape(total, (COLUMNS, PAIRS)))
    tl.store(out + to, result, mask=(pair < end)[:, None] & (column < hidden)[None, :])


@triton.jit
def _inputs(x, order, pair, end, ranks, wide, K: tl.constexpr, DOWN: tl.constexpr):
    """Where the inputs of pairs begin; beyond the last pair that is the last one again, whose result is not stored."""
    rows = tl.minimum(pair, end - 1)
    if not DOWN:
        rows = tl.load(order + rows) // ranks
    return x + (rows.to(tl.int64)[:, None] * wide + tl.arange(0, K)[None, :])


@triton.jit
def _add(weights, inputs, total, KIND: tl.constexpr):
    if KIND == 0:
        total = tl.dot(tl.trans(weights), tl.trans(inputs), total, input_precision="ieee")
    else:
        total = tl.dot(weights, tl.trans(inputs), total, input_precision="ieee")
        if weights.dtype != tl.float32:
            # Else the next weights take registers that products still read: Triton 3.6 does not wait for them (its
            # issue 9433) unless their sum is used. This use takes no instruction.
            total = tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1)
    return total


@triton.jit
def _store(
    total, out, order, pair, end, hidden, inner, factor,
    DOWN: tl.constexpr, KIND: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    total = _columns(total * factor, KIND, PAIRS, COLUMNS)
    if DOWN:
        _store_down(total, out, order, pair, end, hidden, PAIRS, COLUMNS)
    else:
        _store_gate_up(total, out, pair, end, inner, KIND, PAIRS, COLUMNS)


@triton.jit
def _tile(
    x, blob, order, out, first, end, ranks, hidden, inner, b1, b2, b3, b4, o0, o1, o2, o3,
    DOWN: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    COLUMNS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = x.dtype.element_ty
    wide, panels = (inner, hidden // 32) if DOWN else (hidden, inner // 16)
    pair = first + tl.arange(0, PAIRS)
    from_x = _inputs(x, order, pair, end, ranks, wide, K, DOWN)
    total = tl.zeros((COLUMNS, PAIRS), tl.float32)
    if REST:
        beyond = first + PAIRS + tl.arange(0, REST)
        from_beyond = _inputs(x, order, beyond, end, ranks, wide, K, DOWN)
        rest = tl.zeros((COLUMNS, REST), tl.float32)
    panel = tl.arange(0, COLUMNS) // 32 if KIND == 0 else tl.arange(0, COLUMNS // 32)
    panel = tl.minimum(tl.program_id(0) * (COLUMNS // 32) + panel, panels - 1)  # the last one again, not stored
    tl.assume(wide >= 32)  # else the assembler lets products wait for each other, for the sake of sums of nothing
    for group in range(0, wide // 32, K // 32):
        # No tile of k is in two parts.
        words = _words(blob, group, panel, hidden, b1, b2, b3, b4, o0, o1, o2, o3, WORDS, DOWN)
        inputs = tl.load(from_x + group * 32)
        if REST:
            more = tl.load(from_beyond + group * 32)
        weights = _bf16(words, K, half) if KIND == 0 else _coded(words, KIND, K, half)
        total = _add(weights, inputs, total, KIND)
        if REST:
            rest = _add(weights, more, rest, KIND)
    factor = unit(half) * _small(KIND, half)
    _store(total, out, order, pair, end, hidden, inner, factor, DOWN, KIND, PAIRS, COLUMNS)
    if REST:
        _store(rest, out, order, beyond, end, hidden, inner, factor, DOWN, KIND, REST, COLUMNS)


@triton.jit
def _product(
    x, slots, order, start, slot_of, out, stride_words, experts, ranks, hidden, inner, b1, b2, b3, b4, o0, o1, o2, o3,
    DOWN: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
    SMALL: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    expert, begin, first, end = _expert_of(start, tl.program_id(1), experts, PAIRS, EXPERTS)
    slot, left = tl.load(slot_of + expert), end - first
    if (left > tl.where(first > begin, REST, 0)) & (slot >= 0):  # else the tile before has them
        blob = slots + slot.to(tl.int64) * stride_words
        if SMALL < PAIRS and left <= SMALL:
            _tile(
                x, blob, order, out, first, end, ranks, hidden, inner, b1, b2, b3, b4, o0, o1, o2, o3,
                DOWN, KIND, WORDS, SMALL, 0, COLUMNS, K,
            )  # fmt: skip
        elif REST > 0 and (left > PAIRS and left <= PAIRS + REST):
            _tile(
                x, blob, order, out, first, end, ranks, hidden, inner, b1, b2, b3, b4, o0, o1, o2, o3,
                DOWN, KIND, WORDS, PAIRS, REST, COLUMNS, K,
            )  # fmt: skip
        else:
            _tile(
                x, blob, order, out, first, end, ranks, hidden, inner, b1, b2, b3, b4, o0, o1, o2, o3,
                DOWN, KIND, WORDS, PAIRS, 0, COLUMNS, K,
            )  # fmt: skip


@triton.jit
def _arrange(x, out, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kind: tl.constexpr = out.dtype.element_ty
    values = (tl.load(x + at, mask=at < size).to(tl.float32) * (1 / unit(kind))).to(kind)
    if KIND == 1:  # of k the bits h t t e u become h u t t e
        values = tl.permute(tl.reshape(values, (BLOCK // 16, 8, 2)), (0, 2, 1))
    elif KIND == 2:  # t t z e s become s z t t e
        values = tl.permute(tl.reshape(values, (BLOCK // 32, 4, 2, 2, 2)), (0, 4, 2, 1, 3))
    tl.store(out + at, tl.reshape(values, (BLOCK,)), mask=at < size)


def arrange(x: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """x [rows, k] in the precision of the products, divided as ``unit`` says, and each 32 k in the order in which
    threads decode a format's words: what ``gate_up`` takes, and gives as what ``down`` takes."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        blocks, kind = cdiv(x.numel(), ARRANGED), _KINDS[layout.format.name]
        launch(_arrange, (blocks,), x, out, x.numel(), KIND=kind, BLOCK=ARRANGED, num_warps=4, early=False)
    return out


def gate_up(x: Tensor, slots: Tensor, layout: Layout, groups: Groups, out: Tensor) -> None:
    """silu(gate x) * up x. x [rows, hidden] as ``arrange`` gives it, slots uint8 [slots, stride] -> out [pairs, inner]
    in the order of ``groups``, its columns in that of ``arrange``; pairs of absent experts are left as they are."""
    if x.shape[0]:
        _launch(x, slots, layout, groups, out, groups.order.shape[0] // x.shape[0], down=False)


def down(h: Tensor, slots: Tensor, layout: Layout, groups: Groups, out: Tensor) -> None:
    """down of what ``gate_up`` gave, [pairs, inner]. -> out [pairs, hidden], divided as ``unit`` says, pair by pair:
    row * ranks + rank."""
    if h.shape[0]:
        _launch(h, slots, layout, groups, out, 1, down=True)


def _launch(
    x: Tensor, slots: Tensor, layout: Layout, groups: Groups, out: Tensor, ranks: int, *, down: bool
) -> None:  # fmt: skip
    pairs, experts = groups.order.shape[0], groups.slot.shape[0]
    size = FEW if pairs <= 16 * experts else SOME if pairs <= 64 * experts else MANY
    if size == MANY and shared_memory(groups.order.device) < 200 << 10:
        size = SOME
    plan = _plan(layout, TILES[layout.format.name][size], experts, down)
    launch(
        _product, (plan.blocks, pairs // plan.pairs + experts),
        x, slots.view(torch.int32), groups.order, groups.start, groups.slot, out, slots.shape[1] // 4, experts, ranks,
        layout.hidden, layout.inner, *plan.sections, **plan.constants, early=False,
    )  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    """What of a product follows from sizes alone. ``sections``: bounds and offsets."""

    blocks: int
    pairs: int
    sections: tuple[int, ...]
    constants: dict[str, Any]


@lru_cache(maxsize=64)
def _plan(layout: Layout, tile: Tile, experts: int, down: bool) -> _Plan:
    name, columns = layout.format.name, layout.hidden if down else 2 * layout.inner
    wide = min(tile.columns, next_power_of_2(columns))
    even = all(bound % tile.k == 0 for bound in layout.bounds) if down else layout.hidden % tile.k == 0
    missing = MOST_PARTS - layout.parts  # bounds and offsets are as of four parts, the last ones empty
    bounds = [bound // BLOCK for bound in layout.bounds[1:]] + [layout.inner // BLOCK] * missing
    offsets = [offset // 4 for offset in layout.offsets[:-1]] + [layout.nbytes // 4] * missing
    constants = {
        "DOWN": down, "KIND": _KINDS[name], "WORDS": layout.format.block_bytes // 4,
        "EXPERTS": next_power_of_2(experts), "PAIRS": tile.pairs, "SMALL": tile.small, "REST": tile.rest,
        "COLUMNS": wide, "K": tile.k if even else BLOCK, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    return _Plan(cdiv(columns, wide), tile.pairs, (*bounds, *offsets), constants)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, layout: Layout, slots: Tensor, base: Tensor | None = None
) -> Tensor:  # fmt: skip
    """As ``Ops.experts``, of experts that are all in ``slots`` uint8 [experts, stride], in order; ids may be -1. Added
    to ``base``, in its memory."""
    count, (half, given) = slots.shape[0], precision(layout, x.device)
    every, ordered = _every(count, x.device), sort_pairs(ids, count)
    groups = Groups(ordered.order, ordered.start, every)
    inner = x.new_empty(ids.numel(), layout.inner, dtype=half)
    out = x.new_empty(ids.numel(), layout.hidden, dtype=given)
    y = torch.empty_like(x) if base is None else base
    gate_up(arrange(x, layout, half), slots, layout, groups, inner)
    down(inner, slots, layout, groups, out)
    combine_pairs(out, ids, every, weights, y, add=base is not None)
    return y


@lru_cache(maxsize=8)
def _every(count: int, device: torch.device) -> Tensor:
    """Slots of experts that are all there."""
    return torch.arange(count, dtype=torch.int32, device=device)
