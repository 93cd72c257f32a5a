"""What experts' weights give with activations, straight from their blocks (``engine.experts.layout``): a tile of blocks
at a time, float32, products kept apart until ``added``."""

from __future__ import annotations

import triton
import triton.language as tl


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
def times_int8(words, x, groups, here, EVEN: tl.constexpr):
    """Products of a tile, summed over the four k of a word: [groups, 8, 32 rows]."""
    octet, row = tl.arange(0, 8), tl.arange(0, 32)
    at = octet[:, None] * 32 + row[None, :]
    data = _read(words[:, None, None] + (16 + at)[None, :, :], here[:, None, None], EVEN) ^ -2139062144
    scales = words.to(tl.pointer_type(tl.float16))
    scale = _read(scales[:, None] + row[None, :], here[:, None], EVEN).to(tl.float32)
    total = tl.zeros(data.shape, tl.float32)
    for byte in tl.static_range(4):
        factor = _read(x + (groups[:, None] * 32 + octet[None, :] * 4 + byte), here[:, None], EVEN)
        # 2^23 + code + 128 as a float, without a conversion
        code = (((data >> (8 * byte)) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
        total += code * factor[:, :, None]
    return total * scale[:, None, :]


@triton.jit
def times_mxfp4(words, x, groups, here, EVEN: tl.constexpr):
    """Products of a tile, summed over the eight k of a word: [groups, 4, 32 rows]."""
    octet, row = tl.arange(0, 4), tl.arange(0, 32)
    at = octet[:, None] * 32 + row[None, :]
    data = _read(words[:, None, None] + (8 + at)[None, :, :], here[:, None, None], EVEN)
    scales = words.to(tl.pointer_type(tl.uint8))
    scale = _read(scales[:, None] + row[None, :], here[:, None], EVEN).to(tl.int32)
    total = tl.zeros(data.shape, tl.float32)
    base = x + (groups[:, None] * 32 + octet[None, :] * 8)
    for nibble in tl.static_range(4):
        # Two nibbles that are 16 bits apart as two bf16: multiplied so that the sign of one copy and the rest of the
        # other are where they belong. That is a bf16 of 2^-126 times the value; with activations times 2^63 no product
        # is denormal.
        source = data if nibble < 2 else data >> 8
        both = ((source & (0x000F000F << (nibble % 2 * 4))) * (4160 >> (nibble % 2 * 4))) & -2118090304
        k = nibble % 2 * 4 + nibble // 2
        first = _read(base + k, here[:, None], EVEN) * 9223372036854775808.0
        second = _read(base + (k + 2), here[:, None], EVEN) * 9223372036854775808.0
        total += (both << 16).to(tl.float32, bitcast=True) * first[:, :, None]
        total += (both & -65536).to(tl.float32, bitcast=True) * second[:, :, None]
    return (total * 9223372036854775808.0) * (scale << 23).to(tl.float32, bitcast=True)[:, None, :]


@triton.jit
def added(total):
    """[groups, words, rows] -> [rows]."""
    return tl.sum(tl.reshape(total, (total.shape[0] * total.shape[1], total.shape[2])), axis=0)
