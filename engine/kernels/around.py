"""What stands before and after the matrix of a linear layer: norms and gates of the input as it is read; bias, residual
and the sum over routed experts as outputs are written."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.experts import routed
from engine.kernels.pointwise import sigmoid

PLAIN, NORM, GATED_NORM, SILU, SIGMOID = (tl.constexpr(kind) for kind in range(5))
"""What is done to the input: nothing; RMSNorm; RMSNorm of heads times silu of a gate; times silu of one, or sigmoid."""


@triton.jit
def load_factor(norm, k, here, offset, KIND: tl.constexpr, HEAD: tl.constexpr):
    """A norm's weights."""
    factor = 1.0
    if KIND == NORM:
        factor = offset + tl.load(norm + k, mask=here, other=0.0)
    if KIND == GATED_NORM:
        factor = tl.load(norm + k % HEAD, mask=here, other=0.0)
    return factor


@triton.jit
def load_inputs(x, gate, factor, row, k, here, KIND: tl.constexpr, HEAD: tl.constexpr):
    """Activations as they meet the weight, norms without the scale; and as they come."""
    x, x_row = x
    gate, gate_row, gate_head = gate
    plain = tl.load(x + row * x_row + k, mask=here, other=0.0)
    values = plain * factor
    if KIND >= GATED_NORM:
        gates = tl.load(gate + row * gate_row + k // HEAD * gate_head + k % HEAD, mask=here, other=0.0)
        values *= sigmoid(gates)
        if KIND != SIGMOID:
            values *= gates
    return values, plain


@triton.jit
def load_beside(
    after, row, column, present, inside, columns,
    BIAS: tl.constexpr, BASE: tl.constexpr, RANKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What ``finish`` needs, on its way while sums are made: bias, gate, routed experts, residual."""
    bias, base, out, weights, parts, gate, gate_row = after
    added, gates, experts, residual = 0.0, 1.0, 0.0, 0.0
    if BIAS:
        added = tl.load(bias + column, mask=inside, other=0.0)
    if RANKS:
        gates = tl.load(gate + row * gate_row, mask=present, other=0.0)
        experts = routed(out, weights, parts, row, column, present, inside, columns, RANKS, WHOLE)
    if BASE:
        residual = tl.load(base + row * columns + column, mask=present & inside, other=0.0)
    return added, gates, experts, residual


@triton.jit
def finish(total, beside, BIAS: tl.constexpr, BASE: tl.constexpr, RANKS: tl.constexpr):
    added, gates, experts, residual = beside
    if BIAS:
        total += added
    if RANKS:
        total = total * sigmoid(gates) + experts
    if BASE:
        total += residual
    return total


@triton.jit
def give_normed(
    program, x, gate, norm, normed, row, present, squares, inner, eps, offset,
    KIND: tl.constexpr, HEAD: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """A program's piece of the inputs of the product."""
    k = program * NORMED + tl.arange(0, NORMED)[:, None]
    inside = (k < inner) & present[None, :]
    factor = load_factor(norm, k, inside, offset, KIND, HEAD)
    values, _ = load_inputs(x, gate, factor, row[None, :], k, inside, KIND, HEAD)
    scales = (1.0 / tl.sqrt(squares / inner + eps))[None, :]
    tl.store(normed + row[None, :] * inner + k, values * scales, mask=inside)
