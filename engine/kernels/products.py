"""Linear layers of many rows: torch's product of two matrices, with what a model has before and after it.

A kernel makes of an input, as it comes from the product before, what the next one takes: normalised or gated, in the
precision of the weight. Where that is float16, what lies between a product and the kernel that reads it may be float16
as well (a relative 1.4e-4 of each number), since memory is what such a kernel waits for; the residual stream is float32
and a product adds to it in place.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import cdiv, launch, next_power_of_2
from engine.kernels.linear import ROWS, DeviceWeight
from engine.kernels.pointwise import sigmoid, strides
from engine.layers.composed import Composed
from engine.layers.ops import Batch, Norm, Ops, Routing

SIZE = 4096
"""Numbers of a program."""


@triton.jit
def _prepare(
    x, gate, norm, share, out, count, heads, dim, x_row, x_head, gate_row, gate_head, share_row, eps, offset,
    scale, NORM: tl.constexpr, GATE: tl.constexpr, SILU: tl.constexpr, SHARE: tl.constexpr, SOME: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    number, column = tl.program_id(0) * SOME + tl.arange(0, SOME), tl.arange(0, DIM)
    here = (number < count)[:, None] & (column < dim)[None, :]
    row, head = (number // heads).to(tl.int64), number % heads
    values = tl.load(x + (row * x_row + head * x_head)[:, None] + column[None, :], mask=here, other=0.0).to(tl.float32)
    if NORM:
        values *= (1.0 / tl.sqrt(tl.sum(values * values, axis=1) / dim + eps))[:, None]
        values *= (offset + tl.load(norm + column, mask=column < dim, other=0.0))[None, :]
    if GATE:
        gates = gate + (row * gate_row + head * gate_head)[:, None] + column[None, :]
        gates = tl.load(gates, mask=here, other=0.0).to(tl.float32)
        values *= sigmoid(gates)
        if SILU:
            values *= gates
    if SHARE:
        values *= sigmoid(tl.load(share + row * share_row, mask=number < count, other=0.0).to(tl.float32))[:, None]
    to = number.to(tl.int64)[:, None] * dim + column[None, :]
    tl.store(out + to, (values * scale).to(out.dtype.element_ty), mask=here)


def prepare(
    x: Tensor, weight: DeviceWeight, *, norm: Norm | None = None, gate: Tensor | None = None, silu: bool = True,
    share: Tensor | None = None, divided: bool = True,
) -> Tensor:  # fmt: skip
    """x [rows, heads, dim] or [rows, dim] as a product with ``weight`` takes it, [rows, inner]: normalised by ``norm``,
    times silu or sigmoid of ``gate`` (of x's shape), times sigmoid of ``share`` [rows, 1]; ``divided`` by the weight's
    unit, so that float16 has room for what is large."""
    heads, dim = x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    out = torch.empty((x.shape[0], heads * dim), dtype=_half(weight, x.device), device=x.device)
    gates, shares, wide = x if gate is None else gate, x if share is None else share, next_power_of_2(dim)
    some = max(1, SIZE // wide)
    if x.numel():
        launch(
            _prepare, (cdiv(x.shape[0] * heads, some),),
            x, gates, x if norm is None else norm.weight, shares, out,
            x.shape[0] * heads, heads, dim, *strides(x), *strides(gates), shares.stride(0),
            0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset,
            1 / weight.unit if divided else 1.0,
            NORM=norm is not None, GATE=gate is not None, SILU=silu, SHARE=share is not None,
            SOME=some, DIM=wide, num_warps=max(1, some * wide // 512), early=False,
        )  # fmt: skip
    return out


def _half(weight: DeviceWeight, device: torch.device) -> torch.dtype:
    """What a product takes its factors in."""
    return torch.float32 if device.type == "cpu" else weight.whole.dtype


def multiply(
    x: Tensor, weight: DeviceWeight, bias: Tensor | None = None, *, base: Tensor | None = None, short: bool = False,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """x as ``prepare`` gives it -> [rows, out], rows maybe farther apart: float32 times ``scale``, or, ``short``,
    float16 where the weight is; added to ``base`` [rows, out], in its memory."""
    matrix, columns = weight.whole.t().to(x.dtype), weight.matrix.shape[0]
    if base is not None and columns == matrix.shape[1]:
        if x.dtype == torch.float32:
            return torch.addmm(base, x, matrix, out=base)
        return torch.addmm(base, x, matrix, out_dtype=torch.float32, out=base)
    if short and x.dtype == torch.float16:
        out = torch.mm(x, matrix)
    elif x.dtype == torch.float32:
        out = torch.mm(x, matrix).mul_(scale)
    else:
        out = torch.empty((x.shape[0], matrix.shape[1]), dtype=torch.float32, device=x.device)
        torch.addmm(out, x, matrix, out_dtype=torch.float32, beta=0, alpha=scale, out=out)
    out = out[:, :columns]
    if bias is not None:
        out += bias
    return out if base is None else base.add_(out)


class Products(Composed):
    """Compositions for more than ``ROWS`` rows. A base is given up: the result is in its memory."""

    def linear(self, x: Tensor, weight: DeviceWeight, bias: Tensor | None = None) -> Tensor:
        return multiply(prepare(x, weight), weight, bias)

    def norm_linear(
        self, x: Tensor, norm: Norm, weight: DeviceWeight, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        normed = prepare(x, weight, norm=norm, divided=False)
        return multiply(normed, weight, bias, scale=1 / weight.unit), normed

    def norm_linear_conv(
        self: Ops, x: Tensor, norm: Norm, weight: DeviceWeight, conv: Tensor, state: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        few, channels = x.shape[0] <= ROWS, conv.shape[0]
        out = (
            self.norm_linear(x, norm, weight)[0] if few else multiply(prepare(x, weight, norm=norm), weight, short=True)
        )
        return self.conv(out[:, :channels], conv, state, batch), out[:, channels:]

    def add_linear(self, base: Tensor, x: Tensor, weight: DeviceWeight) -> Tensor:
        return multiply(prepare(x, weight), weight, base=base)

    def add_sigmoid_linear(self, base: Tensor, x: Tensor, gate: Tensor, weight: DeviceWeight) -> Tensor:
        return multiply(prepare(x, weight, gate=gate, silu=False), weight, base=base)

    def add_gated_norm_linear(
        self, base: Tensor, x: Tensor, gate: Tensor, norm: Norm, weight: DeviceWeight
    ) -> Tensor:  # fmt: skip
        return multiply(prepare(x, weight, norm=norm, gate=gate), weight, base=base)

    def add_silu_linear(self, base: Tensor, gate_up: Tensor, weight: DeviceWeight) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return multiply(prepare(up, weight, gate=gate), weight, base=base)

    def add_shared_experts(
        self: Ops, base: Tensor, x: Tensor, routing: Routing, experts: Any,
        gate_up: Tensor, gate: Tensor, down: DeviceWeight,
    ) -> Tensor:  # fmt: skip
        if x.shape[0] <= ROWS:
            return Composed.add_shared_experts(self, base, x, routing, experts, gate_up, gate, down)
        halves = gate_up.chunk(2, dim=1)
        base = multiply(prepare(halves[1], down, gate=halves[0], share=gate), down, base=base)
        return self.add_experts(base, x, *self.route(routing.logits, routing.k, routing.renormalize), experts)
