"""Linear layers of few rows: one pass over the weight, whatever the number of rows up to ``ROWS``.

Two kernels, and the weight's shape alone says which and how it is cut, so that a row's result is the same bits alone
and in company. Small weights are read straight into registers, all of them at once, and multiplied in float32: what
they take is one trip to memory. Large ones stream through the tensor cores, the weight as the left factor and the rows
as ``ROWS`` columns, absent ones as zeros; float32 activations meet 16-bit weights as the sum of two 16-bit numbers,
which keeps 16 of their 24 bits or more. float32 weights are multiplied in float32.

What stands before and after a matrix in a model is done here too, while the weight is on its way: norms and gates of
the input as it is read; the residual, the sum over routed experts, the causal convolution as outputs are written. A
norm's scale of a row is a factor of the whole row, and is applied to the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from engine.kernels.experts import Sums, routed
from engine.kernels.launch import LINE, begin, launch, prefetch, wait
from engine.kernels.pointwise import sigmoid, strides
from engine.kernels.recurrent import conv_rows
from engine.layers.ops import Batch, Norm

ROWS = 16
PLAIN, NORM, GATED_NORM, SILU, SIGMOID = (tl.constexpr(kind) for kind in range(5))
"""What is done to the input: nothing; RMSNorm; RMSNorm of heads times silu of a gate; times silu of one, or sigmoid."""
AHEAD, PREFETCHED = 512, 528
"""Numbers of each row of a weight that are asked for before the input is there, if so many programs run at most."""


@dataclass(frozen=True)
class Direct:
    """A program for ``block`` outputs and the whole inner dimension."""

    block: int = 4
    warps: int = 2


@dataclass(frozen=True)
class Stream:
    """``programs``: as many as a large GPU's memory wants; weights of fewer output blocks are cut along the inner
    dimension too, into ``splits`` at most: adding the pieces up takes time. Constants, so that results do not depend
    on the GPU. ``stages`` is for 16-bit weights: as many of float32 would not fit into every GPU's shared memory."""

    block_n: int = 64
    block_k: int = 128
    programs: int = 528
    splits: int = 8
    warps: int = 4
    stages: int = 3


DIRECT, STREAM, LONG_STREAM = Direct(), Stream(), Stream(splits=1, stages=4)
"""The last is for weights that need not be cut: fewer programs at a time, each further ahead."""
SMALL = 1 << 22
"""Most numbers of a weight that is read directly, ..."""
SHORT = 1 << 12
"""... and its largest inner dimension."""
EVEN = 8
"""torch's product with 1,281 rows of a weight takes seven times as long as with 1,288."""


@dataclass(frozen=True)
class DeviceWeight:
    """A linear weight [out, inner] on the device. ``whole``: with rows of zeros up to a multiple of ``EVEN``;
    ``arrived`` int32 [blocks]: zero between calls."""

    matrix: Tensor
    whole: Tensor
    tiling: Direct | Stream
    splits: int
    arrived: Tensor


def pack(weight: Tensor, tiling: Direct | Stream | None = None) -> DeviceWeight:
    out, inner = weight.shape
    if tiling is None:
        if out * inner <= SMALL and inner <= SHORT:
            tiling = DIRECT
        else:
            tiling = STREAM if 2 * triton.cdiv(out, STREAM.block_n) <= STREAM.programs else LONG_STREAM
    blocks, splits = 1, 1
    if isinstance(tiling, Stream):
        blocks = triton.cdiv(out, tiling.block_n)
        splits = min(tiling.splits, triton.cdiv(inner, 2 * tiling.block_k), max(1, tiling.programs // blocks))
    whole = pad(weight, (0, 0, 0, -out % EVEN)) if out % EVEN else weight
    arrived = torch.zeros(blocks, dtype=torch.int32, device=weight.device)
    return DeviceWeight(whole[:out], whole, tiling, splits, arrived)


@triton.jit
def dot(a, b, total):
    """total + a @ b, where one is float32 and the other of any float type, to about float32."""
    if a.dtype == b.dtype:
        total = tl.dot(a, b, total, input_precision="ieee")
    elif a.dtype == tl.float32:
        high = a.to(b.dtype)
        total = tl.dot((a - high.to(tl.float32)).to(b.dtype), b, total)
        total = tl.dot(high, b, total)
    else:
        high = b.to(a.dtype)
        total = tl.dot(a, (b - high.to(tl.float32)).to(a.dtype), total)
        total = tl.dot(a, high, total)
    return total


@triton.jit
def _inputs(x, before, row, k, present, inside, x_row, KIND: tl.constexpr, HEAD: tl.constexpr):
    """Activations as they meet the weight, norms without the scale; and as they come."""
    gate, norm, gate_row, gate_head, offset = before
    plain = tl.load(x + row * x_row + k, mask=present & inside, other=0.0)
    values = plain
    if KIND == NORM:
        values *= offset + tl.load(norm + k, mask=inside, other=0.0)
    if KIND == GATED_NORM:
        values *= tl.load(norm + k % HEAD, mask=inside, other=0.0)
    if KIND >= GATED_NORM:
        gates = tl.load(
            gate + row * gate_row + k // HEAD * gate_head + k % HEAD, mask=present & inside, other=0.0
        )  # fmt: skip
        values *= sigmoid(gates)
        if KIND != SIGMOID:
            values *= gates
    return values, plain


@triton.jit
def _finished(
    total, after, row, column, present, inside, columns,
    BIAS: tl.constexpr, BASE: tl.constexpr, RANKS: tl.constexpr, WHOLE: tl.constexpr, WITH_CPU: tl.constexpr,
):  # fmt: skip
    bias, base, out, weights, parts, counts, cpu_y, gate, gate_row = after
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0)
    if RANKS:
        total *= sigmoid(tl.load(gate + row * gate_row, mask=present, other=0.0))
        total += routed(
            out, weights, parts, counts, cpu_y, row, column, present, inside, columns, RANKS, WHOLE, WITH_CPU
        )
    if BASE:
        total += tl.load(base + row * columns + column, mask=present & inside, other=0.0)
    return total


@triton.jit
def _stream(
    x, before, weight, after, conv, out, normed, partial, squares, arrived, rows, columns, inner, per_split, x_row, eps,
    KIND: tl.constexpr, HEAD: tl.constexpr, BIAS: tl.constexpr, BASE: tl.constexpr, RANKS: tl.constexpr,
    WHOLE: tl.constexpr, WITH_CPU: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, NORMED: tl.constexpr,
    FEW: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    begin()
    block, split = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, ROWS)[None, :], block * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    present, inside = row < rows, column < columns
    weight_rows = weight + column.to(tl.int64) * inner
    first = split * per_split
    if AHEAD:
        lines = tl.minimum(first + tl.arange(0, AHEAD // STEP) * STEP, inner - 1)[None, :]
        prefetch(weight + tl.minimum(column, columns - 1).to(tl.int64) * inner + lines)
    wait()
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    seen = tl.zeros((BLOCK_K, ROWS), tl.float32)
    for start in range(first, min(first + per_split, inner), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tile = tl.load(weight_rows + k[None, :], mask=inside & (k < inner)[None, :], other=0.0)
        values, plain = _inputs(x, before, row, k[:, None], present, (k < inner)[:, None], x_row, KIND, HEAD)
        if KIND == NORM:
            seen += plain * plain
        if KIND == GATED_NORM:  # one head at a time
            values *= 1.0 / tl.sqrt(tl.sum(plain * plain, axis=0)[None, :] / HEAD + eps)
        total = dot(tile, values, total)
    square = tl.sum(seen, axis=0)[None, :]
    where = row * columns + column
    last = True
    if SPLITS > 1:
        # Whichever program of a block comes last adds all parts up, in their order.
        tl.store(partial + split * ROWS * columns + where, total, mask=present & inside)
        if KIND == NORM:
            tl.store(squares + (block * SPLITS + split) * ROWS + row, square)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.store(arrived + block, 0)
            total, square = tl.zeros((BLOCK_N, ROWS), tl.float32), tl.zeros((1, ROWS), tl.float32)
            for number in range(SPLITS):
                total += tl.load(partial + number * ROWS * columns + where, mask=present & inside, other=0.0)
                if KIND == NORM:
                    square += tl.load(squares + (block * SPLITS + number) * ROWS + row)
        if KIND == NORM:
            scale = 1.0 / tl.sqrt(square / inner + eps)
            total *= scale
            if NORMED:
                for start in range(block * BLOCK_K, inner, tl.num_programs(0) * BLOCK_K):
                    k = start + tl.arange(0, BLOCK_K)[:, None]
                    values, _ = _inputs(x, before, row, k, present, k < inner, x_row, KIND, HEAD)
                    tl.store(normed + row * inner + k, values * scale, mask=present & (k < inner))
        total = _finished(total, after, row, column, present, inside, columns, BIAS, BASE, RANKS, WHOLE, WITH_CPU)
        tl.store(out + where, total, mask=present & inside)
        if WIDTH:
            conv_rows(out, conv, block * BLOCK_N, columns, rows, BLOCK_N, FEW, SEGMENTS, WIDTH)


@triton.jit
def _direct(
    x, before, weight, after, conv, out, normed, rows, columns, inner, x_row, eps,
    KIND: tl.constexpr, HEAD: tl.constexpr, BIAS: tl.constexpr, BASE: tl.constexpr, RANKS: tl.constexpr,
    WHOLE: tl.constexpr, WITH_CPU: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, NORMED: tl.constexpr,
    FEW: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    begin()
    column, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, INNER)
    inside, here = k < inner, column < columns
    tile = tl.load(
        weight + column.to(tl.int64)[:, None] * inner + k[None, :], mask=here[:, None] & inside[None, :], other=0.0
    )
    wait()
    for number in tl.static_range(FEW):  # unrolled: the reads of all rows are on their way at once
        values, plain = _inputs(x, before, number, k, k * 0 + number < rows, inside, x_row, KIND, HEAD)
        total = tl.sum(tile.to(tl.float32) * values[None, :], axis=1)
        if KIND == NORM:
            scale = 1.0 / tl.sqrt(tl.sum(plain * plain) / inner + eps)
            total *= scale
            if NORMED:
                mine = inside & (k * 0 + number < tl.where(tl.program_id(0) == 0, rows, 0))
                tl.store(normed + number * inner + k, values * scale, mask=mine)
        row = column * 0 + number
        total = _finished(total, after, row, column, row < rows, here, columns, BIAS, BASE, RANKS, WHOLE, WITH_CPU)
        tl.store(out + row * columns + column, total, mask=here & (row < rows))
    if WIDTH:
        conv_rows(out, conv, tl.program_id(0) * BLOCK, columns, rows, BLOCK, FEW, SEGMENTS, WIDTH)


@dataclass(frozen=True)
class Shared:
    """Routed experts, to which the layer's output times sigmoid of ``gate`` [rows, 1] is added."""

    sums: Sums
    gate: Tensor


@dataclass(frozen=True)
class Conv:
    """``Ops.conv`` of the layer's first outputs. ``out`` [rows, channels]: where to."""

    weight: Tensor
    state: Tensor
    batch: Batch
    out: Tensor


def takes_heads(weight: DeviceWeight, dim: int) -> bool:
    """Whether GATED_NORM can be of heads of so many dimensions."""
    tiling = weight.tiling
    return isinstance(tiling, Stream) and tiling.block_k == dim and weight.matrix.shape[1] % dim == 0


def linear(
    x: Tensor,
    weight: DeviceWeight,
    bias: Tensor | None = None,
    *,
    kind: tl.constexpr = PLAIN,
    gate: Tensor | None = None,
    norm: Norm | None = None,
    normed: Tensor | None = None,
    base: Tensor | None = None,
    shared: Shared | None = None,
    conv: Conv | None = None,
) -> Tensor:
    """x float32 [rows <= ROWS, inner] or [rows, heads, dim], made by ``kind`` with ``gate`` (of the same shape) and
    ``norm`` what meets the weight. -> float32 [rows, out], ``base`` and what ``shared`` says added. ``normed``: where
    the input of the product goes, of NORM."""
    rows, (columns, inner), tiling = x.shape[0], weight.matrix.shape, weight.tiling
    out = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
    if not rows:
        return out
    before = (
        x if gate is None else gate,
        x if norm is None else norm.weight,
        *strides(x if gate is None else gate),
        0.0 if norm is None else norm.offset,
    )
    options = {
        "KIND": kind.value, "HEAD": inner if gate is None or gate.dim() == 2 else gate.shape[2],
        "BIAS": bias is not None, "BASE": base is not None, "NORMED": normed is not None,
        "FEW": triton.next_power_of_2(rows), **_with(shared), **_through(conv),
        "num_warps": tiling.warps,
    }  # fmt: skip
    after = _after(out, bias, base, shared)
    window = 0 if conv is None else _window(conv)
    early = shared is None or shared.sums.layout is None
    to = out if normed is None else normed
    if isinstance(tiling, Direct):
        launch(
            _direct, (triton.cdiv(columns, tiling.block),),
            x, before, weight.matrix, after, window, out, to, rows, columns, inner, x.stride(0),
            0.0 if norm is None else norm.eps,
            BLOCK=tiling.block, INNER=triton.next_power_of_2(inner), early=early, **options,
        )  # fmt: skip
        return out
    blocks, size = triton.cdiv(columns, tiling.block_n), weight.matrix.element_size()
    partial = squares = out
    if weight.splits > 1:
        partial, squares = out.new_empty((weight.splits, ROWS, columns)), out.new_empty((blocks, weight.splits, ROWS))
    per_split = triton.cdiv(triton.cdiv(inner, tiling.block_k), weight.splits) * tiling.block_k
    launch(
        _stream, (blocks, weight.splits),
        x, before, weight.matrix, after, window, out, to, partial, squares, weight.arrived, rows, columns, inner,
        per_split, x.stride(0), 0.0 if norm is None else norm.eps,
        SPLITS=weight.splits, ROWS=ROWS, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
        AHEAD=AHEAD if blocks * weight.splits <= PREFETCHED else 0, STEP=LINE // size, early=early,
        num_stages=tiling.stages if size == 2 else 2, **options,
    )  # fmt: skip
    return out


def _after(out: Tensor, bias: Tensor | None, base: Tensor | None, shared: Shared | None) -> tuple[Tensor | int, ...]:
    first = (out if bias is None else bias, out if base is None else base)
    if shared is None:
        return (*first, out, out, out, out, 0, out, 0)
    sums, decision = shared.sums, shared.sums.decision
    pairs = (sums.out, sums.weights, decision.gpu_parts, decision.counts, sums.cpu_y)
    return (*first, *pairs, shared.gate, shared.gate.stride(0))


def _with(shared: Shared | None) -> dict[str, int]:
    if shared is None:
        return {"RANKS": 0, "WHOLE": False, "WITH_CPU": False}
    sums = shared.sums
    return {"RANKS": sums.out.shape[1], "WHOLE": sums.whole, "WITH_CPU": sums.layout is not None}


def _window(conv: Conv) -> tuple[Tensor | int, ...]:
    batch = conv.batch
    return (
        conv.weight, conv.state, conv.out, batch.segments, batch.snapshots, conv.weight.shape[0],
        batch.segments.shape[0], batch.snapshots.shape[0], conv.state.stride(0),
    )  # fmt: skip


def _through(conv: Conv | None) -> dict[str, int]:
    if conv is None:
        return {"WIDTH": 0, "SEGMENTS": 1}
    return {"WIDTH": conv.weight.shape[1], "SEGMENTS": triton.next_power_of_2(conv.batch.segments.shape[0])}


def matmul(x: Tensor, weight: DeviceWeight, bias: Tensor | None) -> Tensor:
    """Any number of rows, in the weight's own precision with float32 sums."""
    matrix = weight.whole.t()
    if x.is_cuda and matrix.dtype != torch.float32:
        out = torch.mm(x.to(matrix.dtype), matrix, out_dtype=torch.float32)
    else:
        out = x @ matrix.float()
    out = out[:, : weight.matrix.shape[0]].contiguous()
    return out if bias is None else out + bias
