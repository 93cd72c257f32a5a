"""Kernels of one row in which a part of a product is beside what has to wait for another kernel: the delta rule, and
the turning of queries and keys, take microseconds in which memory would be idle. So what a layer needs only behind them
is not multiplied with the rest of its inputs, but here."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.around import NORM
from engine.kernels.attention import rotation, turn_heads
from engine.kernels.launch import begin, cdiv, launch
from engine.kernels.linear import OUTPUTS, Beside, Conv, Part, linear, one_normed_row, outputs
from engine.kernels.recurrent import VALUES, delta, rule
from engine.layers.ops import Batch, DeltaNet, GatedHeads

PROGRAMS = 384
"""Of a delta rule's kernel: there was room for as many at once, and what came later would end late."""
_ALL = 1 << 30


@triton.jit
def _delta_beside(
    programs, q, k, v, gates, states, to, segments, snapshots,
    group, value_heads, key_dim, value_dim, q_row, k_row, v_row, count, scale,
    x, norm, weight, out, part, columns, inner, eps, offset, unit,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    begin()
    program = tl.program_id(0)
    if program < programs:  # none of the ``count`` snapshots, which would take registers
        sequence, head, piece = program // PIECES // value_heads, program // PIECES % value_heads, program % PIECES
        delta(
            sequence, head, piece, q, k, v, gates, states, to, segments, snapshots,
            group, value_heads, key_dim, value_dim, q_row, k_row, v_row, 0, scale, True, KEYS, VALUES,
        )  # fmt: skip
    else:
        one_normed_row(
            program - programs, x, norm, weight, out, part, columns, inner, eps, offset, unit, BLOCK, INNER, THREADS
        )


def delta_net(x: Tensor, net: DeltaNet, window: Tensor, state: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """As ``Ops.delta_net``, for one row of which there are no snapshots."""
    channels, columns = net.conv.shape[0], net.inputs.matrix.shape[0]
    end, through = channels + net.value_heads * net.value_dim, Conv(net.conv, window, batch, x.new_empty(1, channels))
    programs = batch.segments.shape[0] * net.value_heads * (pieces := cdiv(net.value_dim, VALUES))
    size = min(end - channels, max(0, PROGRAMS - programs) * outputs(net.inputs)) // OUTPUTS * OUTPUTS
    part = Part(0, columns - size, end - size, size, 1)
    out = linear(x, net.inputs, kind=NORM, norm=net.norm, conv=through, part=part)
    q, k, v, z, b, a = net.split(through.out, out[:, channels:])
    to, beside = torch.empty_like(v), Beside.of(x, net.norm, net.inputs, out, Part(end - size, size, _ALL, 0, 0))
    gates = a, b, net.a_log, net.dt_bias, a.stride(0), b.stride(0)
    arguments, _, constants = rule(q, k, v, gates, state, to, batch)
    launch(
        _delta_beside, (programs + beside.programs,), programs, *arguments, *beside.arguments,
        PIECES=pieces, **constants, **beside.constants,
    )  # fmt: skip
    return to, z


@triton.jit(do_not_specialize=["count", "width"])
def _turned_beside(
    programs, q, k, v, q_norm, k_norm, to, positions, angles, k_pages, v_pages, segments, table,
    count, width, heads, kv_heads, head_dim, half, q_row, q_head, k_row, k_head, v_row, v_head,
    q_eps, q_offset, k_eps, k_offset,
    x, norm, weight, out, part, columns, inner, eps, offset, unit,
    PAGE: tl.constexpr, SEGMENTS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    begin()
    program = tl.program_id(0)
    if program < programs:
        turn_heads(
            (program * 0).to(tl.int64), program,
            q, k, v, q_norm, k_norm, to, positions, angles, k_pages, v_pages, segments, table,
            count, width, heads, kv_heads, head_dim, half, q_row, q_head, k_row, k_head, v_row, v_head,
            q_eps, q_offset, k_eps, k_offset, PAGE, SEGMENTS, DIM, 1,
        )  # fmt: skip
    else:
        one_normed_row(
            program - programs, x, norm, weight, out, part, columns, inner, eps, offset, unit, BLOCK, INNER, THREADS
        )


def gated_heads(
    x: Tensor, of: GatedHeads, k_pages: Tensor, v_pages: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``Ops.gated_heads``, for one row."""
    columns, dim, programs = of.inputs.matrix.shape[0], of.head_dim, of.heads + of.kv_heads
    size = of.heads * dim
    out = linear(x, of.inputs, kind=NORM, norm=of.norm, part=Part(0, columns - size, dim, dim, of.heads))
    q, gate, k, v = of.split(out)
    beside = Beside.of(x, of.norm, of.inputs, out, Part(dim, size, dim, dim, _ALL))
    to = q.new_empty(q.shape)
    arguments, constants = rotation(q, k, v, of.norms, to, of.table, k_pages, v_pages, batch)
    launch(
        _turned_beside, (programs + beside.programs,), programs, *arguments, *beside.arguments,
        **constants, **beside.constants,
    )  # fmt: skip
    return to, gate
