"""Linear layers of few rows: one pass over the weight, whatever the number of rows up to ``ROWS``.

bfloat16 weights are kept as float16, times ``UNIT``: tensor cores then take inputs of 11 bits instead of 8.

One row, the commonest case by far, has the kernel here: many small programs, whose weights are all on their way at
once, multiply in float32. More rows are ``linear_many``'s, where a row's result is other bits.

What stands before and after a matrix in a model is done, too: norms and gates of the input as it is read; the
residual, the sum over routed experts, the causal convolution as outputs are written. A norm's scale of a row is a
factor of the whole row, and is applied to the sums.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from engine.kernels import linear_many
from engine.kernels.around import GATED_NORM, NORM, PLAIN, finish, give_normed, load_beside, load_factor, load_inputs
from engine.kernels.experts import Sums
from engine.kernels.launch import begin, cdiv, launch, next_power_of_2, wait
from engine.kernels.pointwise import strides
from engine.kernels.recurrent import sequences, slide, window
from engine.layers.ops import Batch, Norm

ROWS = 16
OUTPUTS, WIDEST, SHARE = 8, 8192, 512
"""Of one row: outputs of a program; inputs at the most; and how many of these a warp has. Reads of many small programs
keep memory busier than those of few that go on, be it through shared memory with more on its way."""
EVEN = 8
"""torch's product with 1,281 rows of a weight takes seven times as long as with 1,288."""
UNIT = 8
"""What bfloat16 weights are multiplied by to be float16, and inputs divided by. Of weights from 2^-17 to 8188 no bit is
lost, and what is smaller is off by at most 2^-28. Inputs may be 524,032 at the most; small ones are off by up to 2^-22,
so that rows of about 10^-4 keep as many bits as bfloat16 would give them."""


@dataclass(frozen=True)
class DeviceWeight:
    """A linear weight [out, inner] times ``unit`` on the device; ``whole``: with rows of zeros up to a multiple of
    ``EVEN``; ``counts``: as ``many`` needs it."""

    matrix: Tensor
    whole: Tensor
    unit: float
    counts: Tensor


def pack(weight: Tensor) -> DeviceWeight:
    """bfloat16 as float16, unless a weight is too large for that."""
    out, unit = weight.shape[0], 1.0
    if weight.dtype == torch.bfloat16 and _largest(weight) <= torch.finfo(torch.float16).max / UNIT:
        unit, weight = UNIT, torch.mul(weight, UNIT, out=torch.empty_like(weight, dtype=torch.float16))
    whole = pad(weight, (0, 0, 0, -out % EVEN)) if out % EVEN else weight
    counts = torch.zeros(cdiv(out, linear_many.OUTPUTS), dtype=torch.int32, device=weight.device)
    return DeviceWeight(whole[:out], whole, unit, counts)


def _largest(weight: Tensor) -> float:
    least, most = torch.aminmax(weight)
    return float(torch.maximum(-least, most))  # NaN if one is


@triton.jit
def _threads(INNER: tl.constexpr, THREADS: tl.constexpr):
    """The inner dimension as threads have it that read 16-bit weights by eight, and float32 by four:
    [THREADS, rounds, 2, 4]. Nothing is exchanged then to multiply one with the other."""
    near = tl.arange(0, 2)[:, None] * 4 + tl.arange(0, 4)[None, :]
    far = tl.arange(0, THREADS)[:, None] * 8 + tl.arange(0, INNER // (8 * THREADS))[None, :] * (8 * THREADS)
    return far[:, :, None, None] + near[None, None, :, :]


@triton.jit
def _in_order(values):
    """[threads, rounds, 2, 4] -> [inner]."""
    return tl.ravel(tl.permute(values, (1, 0, 2, 3)))


@triton.jit
def one_row(
    program, x, gate, norm, weight, after, conv, out, normed, part, columns, inner, eps, offset, unit,
    KIND: tl.constexpr, HEAD: tl.constexpr, BIAS: tl.constexpr, BASE: tl.constexpr, RANKS: tl.constexpr,
    WHOLE: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, NORMED: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """What a program of a kernel does that has begun, all that it reads and writes included."""
    first, count, run, gap, most = part
    row, k, number = tl.arange(0, 1), tl.arange(0, INNER), program * BLOCK
    here = number + tl.arange(0, BLOCK) < count
    column = first + number + tl.minimum(number // run, most) * gap + tl.arange(0, BLOCK)
    present = row < 1
    at = column[:, None].to(tl.int64) * inner + k[None, :]
    tile = tl.load(weight + at, mask=here[:, None] & (k < inner)[None, :], other=0.0)
    k = _threads(INNER, THREADS)
    factor = load_factor(norm, k, k < inner, offset, KIND, HEAD)
    if WIDTH:
        live = sequences(conv, row, SEGMENTS)
        past = window(conv, live, column, columns, row, WIDTH)
    wait()
    beside = load_beside(
        after, row[None, :], column[:, None], present[None, :], here[:, None], columns,
        BIAS, BASE, RANKS, WHOLE,
    )  # fmt: skip
    values, plain = load_inputs(x, gate, factor, 0, k, k < inner, KIND, HEAD)
    values = _in_order(values)
    if KIND == GATED_NORM:
        heads = tl.reshape(_in_order(plain * plain), (INNER // HEAD, HEAD))
        scales = (1.0 / tl.sqrt(tl.sum(heads, axis=1) / HEAD + eps))[:, None]
        values *= tl.reshape(tl.broadcast_to(scales, (INNER // HEAD, HEAD)), (INNER,))
    squares = tl.zeros((1,), tl.float32)
    if KIND == NORM:
        squares += tl.sum(plain * plain)
    total = tl.sum(tile.to(tl.float32) * values[None, :], axis=1)[:, None]
    if KIND == NORM:
        total *= (1.0 / tl.sqrt(squares / inner + eps))[None, :]
    total = finish(total * unit, beside, BIAS, BASE, RANKS)
    tl.store(out + column[:, None], total, mask=here[:, None])
    if WIDTH:
        slide(total, out, conv, live, column, columns, row, columns, past, WIDTH)
    if NORMED:
        give_normed(program, x, gate, norm, normed, row, present, squares, inner, eps, offset, KIND, HEAD, NORMED)


@triton.jit
def _row(
    x, gate, norm, weight, after, conv, out, normed, part, columns, inner, eps, offset, unit,
    KIND: tl.constexpr, HEAD: tl.constexpr, BIAS: tl.constexpr, BASE: tl.constexpr, RANKS: tl.constexpr,
    WHOLE: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, NORMED: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    begin()
    one_row(
        tl.program_id(0), x, gate, norm, weight, after, conv, out, normed, part, columns, inner, eps, offset, unit,
        KIND, HEAD, BIAS, BASE, RANKS, WHOLE, WIDTH, SEGMENTS, NORMED, BLOCK, INNER, THREADS,
    )  # fmt: skip


@triton.jit
def one_normed_row(
    program, x, norm, weight, out, part, columns, inner, eps, offset, unit,
    BLOCK: tl.constexpr, INNER: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """``one_row`` of a normed input and nothing behind it."""
    one_row(
        program, (x, 0), (x, 0, 0), norm, weight, (out, out, out, out, out, out, 0), 0, out, out, part,
        columns, inner, eps, offset, unit,
        NORM, 1, False, False, 0, False, 0, 1, 0, BLOCK, INNER, THREADS,
    )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Some of a weight's outputs: ``number`` from ``first`` on, but that behind each of the first ``most`` runs of
    ``run`` of them ``gap`` others stand. A program's outputs are in one run."""

    first: int
    number: int
    run: int
    gap: int
    most: int


@dataclass(frozen=True)
class Beside:
    """A part of ``norm_linear`` of one row that programs of another kernel may do: ``one_normed_row``."""

    arguments: tuple[Any, ...]
    programs: int
    constants: dict[str, Any]

    @classmethod
    def of(cls, x: Tensor, norm: Norm, weight: DeviceWeight, out: Tensor, part: Part) -> Self:
        (columns, inner), sizes = weight.matrix.shape, _sizes(weight)
        scales = norm.eps, norm.offset, 1 / weight.unit
        arguments = x, norm.weight, weight.matrix, out, astuple(part), columns, inner, *scales
        return cls(arguments, cdiv(part.number, sizes["BLOCK"]), sizes)


def outputs(weight: DeviceWeight) -> int:
    """Of a program of one row."""
    return OUTPUTS * 2 // weight.matrix.element_size()


def _sizes(weight: DeviceWeight) -> dict[str, Any]:
    """Of programs of one row."""
    width = max(256, next_power_of_2(weight.matrix.shape[1]))
    warps = max(1, width // SHARE)
    return {
        "BLOCK": outputs(weight), "INNER": width, "THREADS": 32 * warps, "num_warps": warps,
    }  # fmt: skip


@dataclass(frozen=True)
class Shared:
    """Routed experts, to which the layer's output times sigmoid of ``gate`` [rows, 1] is added."""

    sums: Sums
    gate: Tensor


@dataclass(frozen=True)
class Conv:
    """``Ops.conv`` of the layer's first outputs, without snapshots. ``out`` [rows, channels]: where to."""

    weight: Tensor
    state: Tensor
    batch: Batch
    out: Tensor


def takes_heads(weight: DeviceWeight, dim: int) -> bool:
    """Whether GATED_NORM can be of heads of so many dimensions."""
    return weight.matrix.shape[1] % dim == 0 and dim & (dim - 1) == 0


def takes_one(x: Tensor, weight: DeviceWeight) -> bool:
    """Whether it is one row, of a width that ``_row`` has."""
    return x.shape[0] == 1 and weight.matrix.shape[1] <= WIDEST


def takes_part(x: Tensor, weight: DeviceWeight, run: int) -> bool:
    """Whether ``Part`` can be of such runs."""
    return takes_one(x, weight) and run % OUTPUTS == 0


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
    part: Part | None = None,
) -> Tensor:
    """x float32 [rows <= ROWS, inner] or [rows, heads, dim], made by ``kind`` with ``gate`` (of the same shape) and
    ``norm`` what meets the weight. -> float32 [rows, out], ``base`` and what ``shared`` says added. ``normed``: where
    the input of the product goes, of NORM. ``part``, for one row: the others of the outputs are left open."""
    rows, (columns, inner) = x.shape[0], weight.matrix.shape
    out = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
    if not rows:
        return out
    gates = x if gate is None else gate
    inputs = (x, x.stride(0)), (gates, *strides(gates)), x if norm is None else norm.weight, weight.matrix
    past, to = 0 if conv is None else _window(conv), out if normed is None else normed
    after = _after(out, bias, base, shared), past, out, to
    scales = (0.0, 0.0, 1 / weight.unit) if norm is None else (norm.eps, norm.offset, 1 / weight.unit)
    before: dict[str, Any] = {"KIND": kind.value, "HEAD": inner if gates.dim() == 2 else gates.shape[2]}
    options: dict[str, Any] = {
        "BIAS": bias is not None,
        "BASE": base is not None,
        **_with(shared),
        **_through(conv, rows),
    }
    if takes_one(x, weight):
        sizes, part = _sizes(weight), part or Part(0, columns, columns, 0, 0)
        programs = cdiv(part.number, sizes["BLOCK"])
        launch(
            _row, (programs,), *inputs, *after, astuple(part),
            columns, inner, *scales,
            NORMED=0 if normed is None else next_power_of_2(cdiv(inner, programs)), **sizes, **before, **options,
        )  # fmt: skip
        return out
    linear_many.many(weight.matrix, weight.counts, inputs[:3], after, rows, scales, before, options, normed is not None)
    return out


def _after(out: Tensor, bias: Tensor | None, base: Tensor | None, shared: Shared | None) -> tuple[Tensor | int, ...]:
    first = (out if bias is None else bias, out if base is None else base)
    if shared is None:
        return (*first, out, out, out, out, 0)
    sums, decision = shared.sums, shared.sums.decision
    pairs = (sums.out, sums.weights, decision.gpu_parts)
    return (*first, *pairs, shared.gate, shared.gate.stride(0))


def _with(shared: Shared | None) -> dict[str, int]:
    if shared is None:
        return {"RANKS": 0, "WHOLE": False}
    sums = shared.sums
    return {"RANKS": sums.out.shape[1], "WHOLE": sums.whole}


def _window(conv: Conv) -> tuple[Tensor | int, ...]:
    batch = conv.batch
    return (
        conv.weight, conv.state, conv.out, batch.segments, conv.weight.shape[0], batch.segments.shape[0],
        conv.state.stride(0),
    )  # fmt: skip


def _through(conv: Conv | None, rows: int) -> dict[str, int]:
    if conv is None:
        return {"WIDTH": 0, "SEGMENTS": 1}
    return {"WIDTH": conv.weight.shape[1], "SEGMENTS": next_power_of_2(rows)}
