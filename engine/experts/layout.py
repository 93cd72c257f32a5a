"""How one expert lies in memory: the same bytes in the host pool, on the device and on disk.

An expert is a SwiGLU of ``inner`` columns, down(silu(gate x) * up x). The columns are cut into parts, each with its own
gate, up and down weights, so that parts can be computed in different places and their results added. A part is its
gate_up section, then its down section. A section is panels of 32 rows, a panel its groups of 32 k, one block each;
a panel of gate_up holds 16 gate rows and then the 16 up rows of the same columns. Nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

BLOCK = 32
"""Rows of a block, and k of a block: quantised weights share a scale along these k."""
HALF = 16
"""Gate rows of a gate_up panel; as many up rows follow."""
MOST_PARTS = 4


@dataclass(frozen=True)
class ExpertFormat:
    """``encode`` takes float32 blocks [n, 32 rows, 32 k] to uint8 [n, block_bytes], ``decode`` takes them back."""

    name: str
    block_bytes: int
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """Where everything is in the blob of an expert."""

    format: ExpertFormat
    hidden: int
    inner: int

    def __post_init__(self) -> None:
        for name, size in (("hidden", self.hidden), ("inner", self.inner)):
            if size < BLOCK or size % BLOCK:
                raise ValueError(f"experts need {name} to be a multiple of {BLOCK}, not {size}")

    @cached_property
    def parts(self) -> int:
        return min(MOST_PARTS, self.inner // BLOCK)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Part i has the inner columns [bounds[i], bounds[i + 1])."""
        return tuple(self.inner // BLOCK * part // self.parts * BLOCK for part in range(self.parts + 1))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Part i has the bytes [offsets[i], offsets[i + 1])."""
        return tuple(3 * (bound // BLOCK) * (self.hidden // BLOCK) * self.format.block_bytes for bound in self.bounds)

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]

    def encode(self, gate_up: Tensor, down: Tensor, out: Tensor) -> None:
        """``gate_up`` [2 * inner, hidden] (gate rows first) and ``down`` [hidden, inner] into ``out``, uint8 [nbytes].

        Raises ValueError for other shapes, and for weights that the format cannot hold, such as NaN.
        """
        _check_shape("gate_up", gate_up, (2 * self.inner, self.hidden))
        _check_shape("down", down, (self.hidden, self.inner))
        _check_shape("out", out, (self.nbytes,))
        gate, up = gate_up.view(2, self.inner, self.hidden)
        for first, last, gate_up_bytes, down_bytes in self._sections(out):
            panels = [rows[first:last].view(-1, HALF, self.hidden) for rows in (gate, up)]
            self._write(gate_up_bytes, torch.cat(panels, dim=1))
            self._write(down_bytes, down[:, first:last].reshape(-1, BLOCK, last - first))

    def decode(self, blob: Tensor) -> tuple[Tensor, Tensor]:
        """``gate_up`` and ``down`` as for ``encode``, float32: exactly the weights that the kernels compute with."""
        _check_shape("blob", blob, (self.nbytes,))
        gate_up = torch.empty(2, self.inner, self.hidden)
        down = torch.empty(self.hidden, self.inner)
        for first, last, gate_up_bytes, down_bytes in self._sections(blob):
            panels = self._read(gate_up_bytes, self.hidden).view(-1, 2, HALF, self.hidden)
            gate_up[:, first:last] = panels.transpose(0, 1).reshape(2, last - first, self.hidden)
            down[:, first:last] = self._read(down_bytes, last - first).reshape(self.hidden, last - first)
        return gate_up.view(2 * self.inner, self.hidden), down

    def _sections(self, blob: Tensor) -> list[tuple[int, int, Tensor, Tensor]]:
        """First column, last column + 1, gate_up section, down section of every part."""
        sections = []
        for part in range(self.parts):
            first, last = self.bounds[part : part + 2]
            start, end = self.offsets[part : part + 2]
            middle = start + (end - start) // 3 * 2
            sections.append((first, last, blob[start:middle], blob[middle:end]))
        return sections

    def _write(self, section: Tensor, panels: Tensor) -> None:
        """``panels`` [panels, 32, k]."""
        blocks = panels.view(panels.shape[0], BLOCK, -1, BLOCK).transpose(1, 2).reshape(-1, BLOCK, BLOCK)
        section.view(-1, self.format.block_bytes).copy_(self.format.encode(blocks.float()))

    def _read(self, section: Tensor, k: int) -> Tensor:
        """Panels [panels, 32, k]."""
        blocks = self.format.decode(section.reshape(-1, self.format.block_bytes))
        return blocks.view(-1, k // BLOCK, BLOCK, BLOCK).transpose(1, 2).reshape(-1, BLOCK, k)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(tensor.shape)}")


# ── bf16: [32 k][32 positions], rows j and 16 + j side by side ──────────────────────────────────────────────────────


def _encode_bf16(blocks: Tensor) -> Tensor:
    pairs = blocks.to(torch.bfloat16).view(-1, 2, HALF, BLOCK).permute(0, 3, 2, 1)
    return _bytes(pairs)


def _decode_bf16(data: Tensor) -> Tensor:
    pairs = _as(data, torch.bfloat16).view(-1, BLOCK, HALF, 2)
    return pairs.permute(0, 3, 2, 1).reshape(-1, BLOCK, BLOCK).float()


# ── int8: 32 float16 scales, then [8 v][32 rows][4 b], k = 4 v + b ──────────────────────────────────────────────────
# Codes are -127 to 127: the kernels negate them.


def _encode_int8(blocks: Tensor) -> Tensor:
    scales = (blocks.abs().amax(dim=2) / 127).to(torch.float16)
    if not bool(scales.isfinite().all()):
        raise ValueError("weights for int8 must be finite, and no larger than 127 times the largest float16")
    divisors = torch.where(scales == 0, torch.inf, scales.float())
    codes = (blocks / divisors[:, :, None]).round().clamp(-127, 127).to(torch.int8)
    quads = codes.view(-1, BLOCK, 8, 4).transpose(1, 2)
    return torch.cat((_bytes(scales), _bytes(quads)), dim=1)


def _decode_int8(data: Tensor) -> Tensor:
    scales = _as(data[:, : 2 * BLOCK], torch.float16).float()
    quads = _as(data[:, 2 * BLOCK :], torch.int8).view(-1, 8, BLOCK, 4)
    return quads.transpose(1, 2).reshape(-1, BLOCK, BLOCK).float() * scales[:, :, None]


# ── mxfp4 (OCP Microscaling Formats 1.0): 32 e8m0 scales, then [4 v][32 rows][4 b] ──────────────────────────────────
# The low nibble of byte b is k = 8 v + b, the high one k = 8 v + 4 + b; the codes are e2m1.

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LOWEST_SCALE = 4
"""Groups that would need a smaller scale byte become zeros (byte 0 is a scale of 0): no product is ever denormal."""


def _encode_mxfp4(blocks: Tensor) -> Tensor:
    """The largest magnitude of a group gets the codes 4 to 6, as the specification has it; those beyond 6 saturate.
    Weights that come from MXFP4 are kept exactly."""
    if not bool(blocks.isfinite().all()):
        raise ValueError("weights for mxfp4 must be finite")
    _, exponents = torch.frexp(blocks.abs().amax(dim=2))  # largest = [0.5, 1) * 2^exponent
    scales = exponents - 3 + 127  # at most 252
    scales = torch.where(scales < _LOWEST_SCALE, 0, scales)
    factors = torch.where(scales == 0, 0.0, _power_of_two(254 - scales))
    scaled = blocks * factors[:, :, None]
    codes = _nearest_code(scaled.abs()) | (scaled < 0).to(torch.uint8) << 3
    nibbles = codes.view(-1, BLOCK, 4, 2, 4)
    octets = (nibbles[:, :, :, 0] | nibbles[:, :, :, 1] << 4).transpose(1, 2)
    return torch.cat((scales.to(torch.uint8), _bytes(octets)), dim=1)


def _nearest_code(magnitudes: Tensor) -> Tensor:
    """Of two equally near codes the even one. The codes go up in steps of 1/2, then of 1 from 2 on, of 2 from 4 on:
    the lowest of three lines."""
    lines = [(magnitudes * 2).round_(), magnitudes.round().add_(2), (magnitudes / 2).round_().add_(4)]
    return torch.minimum(torch.minimum(lines[0], lines[1]), lines[2]).clamp_(max=7).to(torch.uint8)


def _decode_mxfp4(data: Tensor) -> Tensor:
    scales = _power_of_two(data[:, :BLOCK])
    octets = data[:, BLOCK:].reshape(-1, 4, BLOCK, 4).transpose(1, 2)
    codes = torch.stack((octets & 15, octets >> 4), dim=3).reshape(-1, BLOCK, BLOCK)
    values = torch.tensor(_E2M1 + tuple(-value for value in _E2M1))
    return values[codes.long()] * scales[:, :, None]


def _power_of_two(biased: Tensor) -> Tensor:
    """2^(biased - 127), and 0 for 0."""
    return (biased.int() << 23).view(torch.float32)


def _bytes(values: Tensor) -> Tensor:
    """[n, ...] as uint8 [n, bytes]."""
    return values.reshape(values.shape[0], -1).contiguous().view(torch.uint8)


def _as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [n, bytes], at any alignment and stride, as [n, values]."""
    return data.contiguous().view(dtype)


FORMATS: Mapping[str, ExpertFormat] = MappingProxyType(
    {
        format.name: format
        for format in (
            ExpertFormat("bf16", 2048, _encode_bf16, _decode_bf16),
            ExpertFormat("int8", 1088, _encode_int8, _decode_int8),
            ExpertFormat("mxfp4", 544, _encode_mxfp4, _decode_mxfp4),
        )
    }
)
