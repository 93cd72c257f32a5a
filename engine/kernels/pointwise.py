"""Norms, gates, rotation and routing: one program per row or per head of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import begin, cdiv, launch, next_power_of_2, wait


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _rms_norm(
    x, gate, weight, out, heads, dim, x_row, x_head, gate_row, gate_head, eps, offset,
    GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    program, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row, head, here = program // heads, program % heads, column < dim
    wait()
    values = tl.load(x + row * x_row + head * x_head + column, mask=here, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / dim + eps)
    result = values * scale * (offset + tl.load(weight + column, mask=here, other=0.0))
    if GATED:
        gates = tl.load(gate + row * gate_row + head * gate_head + column, mask=here, other=0.0)
        result *= gates * sigmoid(gates)
    tl.store(out + program * dim + column, result, mask=here)


def rms_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, offset: float) -> Tensor:
    out, dim, block = x.new_empty(x.shape), x.shape[-1], next_power_of_2(x.shape[-1])
    other = x if gate is None else gate
    if x.numel():
        launch(
            _rms_norm, (x.numel() // dim,),
            x, other, weight, out, x.shape[1] if x.dim() == 3 else 1, dim, *strides(x), *strides(other), eps, offset,
            GATED=gate is not None, BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return out


def strides(x: Tensor) -> tuple[int, int]:
    """Of rows and of heads; x [rows, dim] has one head."""
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0


@triton.jit
def _gated(
    x, gate, base, out, width, dim, x_row, gate_row, gate_head, base_row,
    WIDE: tl.constexpr, SILU: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    wait()
    where = column // dim * gate_head + column % dim if WIDE else column * 0
    gates = tl.load(gate + row * gate_row + where, mask=here, other=0.0)
    result = tl.load(x + row * x_row + column, mask=here, other=0.0) * sigmoid(gates)
    if SILU:
        result *= gates
    if ADDED:
        result += tl.load(base + row * base_row + column, mask=here, other=0.0)
    tl.store(out + row * width + column, result, mask=here)


def silu_mul(gate_up: Tensor) -> Tensor:
    width = gate_up.shape[1] // 2
    return _gate(gate_up[:, width:], gate_up[:, :width], silu=True)


def sigmoid_mul(x: Tensor, gate: Tensor, base: Tensor | None) -> Tensor:
    return _gate(x, gate, base)


def _gate(x: Tensor, gate: Tensor, base: Tensor | None = None, silu: bool = False) -> Tensor:
    """``x`` times its gates, added to ``base``. Heads of x, unlike those of the gates, follow on each other."""
    rows, dim = x.shape[0], x.shape[-1]
    out = x.new_empty(x.shape)
    width = x[0].numel() if rows else 0
    block = min(1024, next_power_of_2(max(1, width)))
    if out.numel():
        launch(
            _gated, (rows, cdiv(width, block)),
            x, gate, x if base is None else base, out, width, dim, x.stride(0), *strides(gate),
            x.stride(0) if base is None else base.stride(0),
            WIDE=gate.shape == x.shape, SILU=silu, ADDED=base is not None, BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return out


@triton.jit
def softplus(x):
    """log(1 + e^x), exact for small e^x too: the rounding of 1 + e^x is divided out again (Kahan)."""
    small = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + small
    result = tl.where(above == 1.0, small, tl.log(above) * small / tl.where(above == 1.0, 1.0, above - 1.0))
    return tl.where(x > 20.0, x, result)


@triton.jit
def _gdn_gates(a, b, a_log, dt_bias, decay, beta, heads, a_row, b_row, BLOCK: tl.constexpr):
    begin()
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here, at = head < heads, row * heads + head
    wait()
    x = tl.load(a + row * a_row + head, mask=here, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=here, other=0.0)
    rate = tl.exp(tl.load(a_log + head, mask=here, other=0.0))
    tl.store(decay + at, -rate * softplus(x), mask=here)
    tl.store(beta + at, sigmoid(tl.load(b + row * b_row + head, mask=here, other=0.0).to(tl.float32)), mask=here)


def gdn_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    (rows, heads), (decay, beta) = a.shape, torch.empty((2, *a.shape), dtype=torch.float32, device=a.device)
    block = next_power_of_2(heads)
    if rows:
        launch(
            _gdn_gates, (rows,),
            a, b, a_log, dt_bias, decay, beta, heads, a.stride(0), b.stride(0), BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return decay, beta


@triton.jit
def _rope(x, positions, table, heads, head_dim, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, HEADS), tl.arange(0, HALF)
    here = (head < heads)[:, None] & (i < half)[None, :]
    wait()
    angle = table + (tl.load(positions + row).to(tl.int64) * half + i) * 2
    cos = tl.load(angle, mask=i < half, other=0.0)[None, :]
    sin = tl.load(angle + 1, mask=i < half, other=0.0)[None, :]
    at = x + (row * heads + head[:, None]) * head_dim + i[None, :]
    first, second = tl.load(at, mask=here, other=0.0), tl.load(at + half, mask=here, other=0.0)
    tl.store(at, first * cos - second * sin, mask=here)
    tl.store(at + half, second * cos + first * sin, mask=here)


def rope(x: Tensor, positions: Tensor, table: Tensor) -> None:
    rows, heads, head_dim = x.shape
    half = table.shape[1]
    if x.numel():
        launch(
            _rope, (rows,),
            x, positions, table, heads, head_dim, half,
            HEADS=next_power_of_2(heads), HALF=next_power_of_2(half),
        )  # fmt: skip


@triton.jit
def _route(
    logits, ids, weights, experts, k, logits_row, RENORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64)
    expert, rank = tl.arange(0, EXPERTS), tl.arange(0, K)
    wait()
    values = tl.load(logits + row * logits_row + expert, mask=expert < experts, other=float("-inf"))
    values = tl.exp(values - tl.max(values))
    every = tl.sum(values)
    # Numbers that are not negative are in the order of their bits, and maxima of integers are one instruction.
    left = tl.where(expert < experts, (values / every).to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    chosen, share, total = tl.zeros((K,), tl.int32), tl.zeros((K,), tl.float32), 0.0
    for turn in range(k):
        best = tl.max(left)
        winner = tl.min(tl.where(left == best, expert, experts - 1))  # the lowest of equals
        chosen = tl.where(rank == turn, winner, chosen)
        share = tl.where(rank == turn, best.to(tl.float32, bitcast=True), share)
        total += best.to(tl.float32, bitcast=True)
        left = tl.where(expert == winner, -1, left)
    if RENORMALIZE:
        share /= total
    share += 0.0 * every  # a NaN reaches all weights
    tl.store(ids + row * k + rank, chosen, mask=rank < k)
    tl.store(weights + row * k + rank, share, mask=rank < k)


def route(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    rows, experts = logits.shape
    ids = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    block = next_power_of_2(experts)
    if rows:
        launch(
            _route, (rows,),
            logits, ids, weights, experts, k, logits.stride(0),
            RENORMALIZE=renormalize, EXPERTS=block, K=next_power_of_2(k), num_warps=1,
        )  # fmt: skip
    return ids, weights


def warps(block: int) -> int:
    """For a program over ``block`` elements: eight or so a thread."""
    return max(1, min(8, block // 256))
