"""What experts' weights give with activations, straight from their blocks (``engine.experts.layout``): a tile of blocks
at a time, float32, products of different blocks kept apart until all are there."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.experts.layout import MOST_PARTS, Layout

_EVERY = tl.constexpr(MOST_PARTS)


def padded(layout: Layout) -> tuple[list[int], list[int]]:
    """Bounds, and offsets in words where parts begin, as of four parts, the last ones empty."""
    missing = MOST_PARTS - layout.parts
    offsets = [offset // 4 for offset in layout.offsets[:-1]] + [layout.nbytes // 4] * missing
    return [*layout.bounds] + [layout.inner] * missing, offsets


@triton.jit
def parts_here(address, present, WHOLE: tl.constexpr):
    """How many parts of a pair the device computes; WHOLE: all, if there is a slot."""
    number = tl.load(address, mask=present, other=-1)
    if WHOLE:
        number = tl.where(number >= 0, _EVERY, 0)
    return number


@triton.jit
def slot_of(slots, parts, pair, WHOLE: tl.constexpr):
    """A pair's slot and ``parts_here``. Volatile, or the second would be asked for when the first is known."""
    slot = tl.load(slots + pair, volatile=True)
    number = tl.where(slot >= 0, _EVERY, 0)
    if not WHOLE:
        number = tl.load(parts + pair, volatile=True)
    return slot, number


@triton.jit
def of_part(at, b1, b2, b3, v0, v1, v2, v3):
    """Of v0 to v3 that of the part that ``at`` lies in."""
    return tl.where(at < b1, v0, tl.where(at < b2, v1, tl.where(at < b3, v2, v3)))


@triton.jit
def _read(address, here, EVEN: tl.constexpr):
    """A tile; zeros where there are no blocks any more."""
    if EVEN:
        return tl.load(address)
    return tl.load(address, mask=here, other=0)


@triton.jit
def times_bf16(words, x, groups, here, EVEN: tl.constexpr):
    """Products of a tile, rows 0-15 and rows 16-31 of its blocks: [groups, 32 k, 16] each. ``words`` [groups]: where
    blocks begin; ``groups``: their k / 32."""
    k, column = tl.arange(0, 32), tl.arange(0, 16)
    at = k[:, None] * 16 + column[None, :]
    data = _read(words[:, None, None] + at[None, :, :], here[:, None, None], EVEN)
    factor = _read(x + (groups[:, None] * 32 + k[None, :]), here[:, None], EVEN)[:, :, None]
    low = (data << 16).to(tl.float32, bitcast=True) * factor
    high = (data & -65536).to(tl.float32, bitcast=True) * factor
    return low, high


@triton.jit
def read_int8(words, here, EVEN: tl.constexpr):
    """Words and scales of a tile: [groups, 8, 32 rows] and [groups, 32]; a thread has all k of its rows in a block."""
    row = tl.arange(0, 32)
    at = 16 + tl.arange(0, 8)[:, None] * 32 + row[None, :]
    data = _read(words[:, None, None] + at[None, :, :], here[:, None, None], EVEN)
    scales = words.to(tl.pointer_type(tl.float16))
    return data, _read(scales[:, None] + row[None, :], here[:, None], EVEN)


@triton.jit
def read_values(x, groups, here, EVEN: tl.constexpr):
    """What a tile of int8 meets, as whole vectors: [groups, 8, second half of a word, odd byte]."""
    at = groups[:, None] * 32 + tl.arange(0, 32)[None, :]
    return tl.reshape(_read(x + at, here[:, None], EVEN), (groups.shape[0], 8, 2, 2))


@triton.jit
def _code(data, SHIFT: tl.constexpr):
    """2^23 + code + 128 as a float, without a conversion."""
    return (((data >> SHIFT) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def times_int8(data, scale, values):
    """Products of a tile, summed over the k of a block: [groups, 32 rows]."""
    G: tl.constexpr = data.shape[0]
    data = data ^ -2139062144
    codes = tl.join(tl.join(_code(data, 0), _code(data, 16)), tl.join(_code(data, 8), _code(data, 24)))
    products = tl.reshape(codes * values[:, :, None, :, :], (G, 8, 32, 4))
    return tl.sum(tl.sum(products, axis=3), axis=1) * scale.to(tl.float32)


@triton.jit
def added(total):
    """[groups, k, rows] -> [rows]."""
    return tl.sum(tl.reshape(total, (total.shape[0] * total.shape[1], total.shape[2])), axis=0)
