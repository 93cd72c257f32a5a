"""Norms, gates, rotation and routing: one program per row or per head of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _rms_norm(x, gate, weight, out, dim, eps, offset, GATED: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    here = column < dim
    at = tl.program_id(0).to(tl.int64) * dim + column
    values = tl.load(x + at, mask=here, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / dim + eps)
    result = values * scale * (offset + tl.load(weight + column, mask=here, other=0.0))
    if GATED:
        gates = tl.load(gate + at, mask=here, other=0.0)
        result *= gates * _sigmoid(gates)
    tl.store(out + at, result, mask=here)


def rms_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, offset: float) -> Tensor:
    out, dim = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(dim)
    if x.numel():
        _rms_norm[(x.numel() // dim,)](
            x, x if gate is None else gate, weight, out, dim, eps, offset, GATED=gate is not None, BLOCK=block,
            num_warps=warps(block),
        )  # fmt: skip
    return out


@triton.jit
def _gated(x, gate, out, width, x_stride, gate_stride, WIDE: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    gates = tl.load(gate + row * gate_stride + (column if WIDE else column * 0), mask=here, other=0.0)
    scale = _sigmoid(gates)
    if SILU:
        scale *= gates
    tl.store(out + row * width + column, tl.load(x + row * x_stride + column, mask=here, other=0.0) * scale, mask=here)


def silu_mul(gate_up: Tensor) -> Tensor:
    width = gate_up.shape[1] // 2
    return _gate(gate_up[:, width:], gate_up[:, :width], silu=True)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    return _gate(x, gate, silu=False)


def _gate(x: Tensor, gate: Tensor, silu: bool) -> Tensor:
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    if out.numel():
        _gated[(rows, triton.cdiv(width, block))](
            x, gate, out, width, x.stride(0), gate.stride(0), WIDE=gate.shape[1] == width, SILU=silu, BLOCK=block,
            num_warps=warps(block),
        )  # fmt: skip
    return out


@triton.jit
def _gdn_gates(a, b, a_log, dt_bias, decay, beta, heads, BLOCK: tl.constexpr):
    head = tl.arange(0, BLOCK)
    here, at = head < heads, tl.program_id(0).to(tl.int64) * heads + head
    x = tl.load(a + at, mask=here, other=0.0) + tl.load(dt_bias + head, mask=here, other=0.0)
    # log(1 + e), exact for small e too: the rounding of 1 + e is divided out again (Kahan).
    small = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + small
    softplus = tl.where(above == 1.0, small, tl.log(above) * small / tl.where(above == 1.0, 1.0, above - 1.0))
    softplus = tl.where(x > 20.0, x, softplus)
    rate = tl.exp(tl.load(a_log + head, mask=here, other=0.0))
    tl.store(decay + at, -rate * softplus, mask=here)
    tl.store(beta + at, _sigmoid(tl.load(b + at, mask=here, other=0.0)), mask=here)


def gdn_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    decay, beta, (rows, heads) = torch.empty_like(a), torch.empty_like(b), a.shape
    block = triton.next_power_of_2(heads)
    if rows:
        _gdn_gates[(rows,)](a, b, a_log, dt_bias, decay, beta, heads, BLOCK=block, num_warps=warps(block))
    return decay, beta


@triton.jit
def _rope(x, positions, table, heads, head_dim, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, HEADS), tl.arange(0, HALF)
    here = (head < heads)[:, None] & (i < half)[None, :]
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
        _rope[(rows,)](
            x, positions, table, heads, head_dim, half,
            HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(half),
        )  # fmt: skip


@triton.jit
def _route(
    logits, ids, weights, experts, k, RENORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert, rank = tl.arange(0, EXPERTS), tl.arange(0, K)
    values = tl.load(logits + row * experts + expert, mask=expert < experts, other=float("-inf"))
    values = tl.exp(values - tl.max(values))
    every = tl.sum(values)
    left = tl.where(expert < experts, values / every, -1.0)
    chosen, share, total = tl.zeros((K,), tl.int32), tl.zeros((K,), tl.float32), 0.0
    for turn in range(k):
        best = tl.max(left)
        # The lowest of equals; where there is none, because of a NaN, still an expert.
        winner = tl.min(tl.where(left == best, expert, experts - 1))
        chosen = tl.where(rank == turn, winner, chosen)
        share = tl.where(rank == turn, best, share)
        total += best
        left = tl.where(expert == winner, -1.0, left)
    if RENORMALIZE:
        share /= total
    share += 0.0 * every  # a NaN, which max passes over, reaches all weights
    tl.store(ids + row * k + rank, chosen, mask=rank < k)
    tl.store(weights + row * k + rank, share, mask=rank < k)


def route(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    rows, experts = logits.shape
    ids = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(experts)
    if rows:
        _route[(rows,)](
            logits, ids, weights, experts, k, RENORMALIZE=renormalize, EXPERTS=block, K=triton.next_power_of_2(k),
            num_warps=1,
        )  # fmt: skip
    return ids, weights


def warps(block: int) -> int:
    """For a program over ``block`` elements: eight or so a thread."""
    return max(1, min(8, block // 256))
