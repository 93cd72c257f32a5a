"""Compositions that are one kernel on the device, at the sizes of Qwen3.6-35B-A3B: what to compare with their torch
twins, and how fast they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.api import PAGE
from engine.experts.layout import FORMATS
from engine.experts.residency import Decision
from engine.kernels import attention
from engine.kernels.experts import Sums
from engine.kernels.ops import DeviceOps
from engine.kernels.resident import ResidentExperts
from engine.kernels.timing import (
    CHANNELS,
    EXPERTS,
    GPU,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LINEAR_DIM,
    ROTARY,
    TOP_K,
    VALUE_HEADS,
    VOCAB,
    WIDTH,
    decode_attention,
    make_batch,
    measure,
    random,
    report,
    sets_for,
)
from engine.layers.ops import Norm, Ops, Routing


class Draw(Protocol):
    """Random numbers on a device."""

    @property
    def device(self) -> torch.device: ...

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor: ...


@dataclass(frozen=True)
class OnGPU:
    device: torch.device = GPU

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return random(*shape, dtype=dtype) * scale


@dataclass(frozen=True)
class Case:
    """``nbytes`` have to be moved at the least."""

    run: Callable[[], tuple[Tensor, ...]]
    nbytes: int


Make = Callable[[Ops, Draw, int], Case]
WIDE = CHANNELS + (LINEAR_DIM + 2) * VALUE_HEADS
"""Outputs of the layer before Gated DeltaNet."""


def _weight(ops: Ops, draw: Draw, out: int, inner: int) -> tuple[Any, int]:
    matrix = draw(out, inner, scale=inner**-0.5, dtype=torch.bfloat16)
    return ops.pack(matrix), matrix.nbytes


def _norm(draw: Draw, dim: int) -> Norm:
    return Norm(draw(dim, scale=0.3), 1e-6, 1.0)


def _inputs(out: int) -> Make:
    def make(ops: Ops, draw: Draw, rows: int) -> Case:
        (weight, nbytes), x, norm = _weight(ops, draw, out, HIDDEN), draw(rows, HIDDEN, scale=3), _norm(draw, HIDDEN)
        return Case(lambda: ops.norm_linear(x, norm, weight), nbytes + 4 * rows * (HIDDEN + out))

    return make


def _gdn_inputs(ops: Ops, draw: Draw, rows: int) -> Case:
    (weight, nbytes), x, norm = _weight(ops, draw, WIDE, HIDDEN), draw(rows, HIDDEN, scale=3), _norm(draw, HIDDEN)
    conv, state, batch = draw(CHANNELS, WIDTH), draw(rows, CHANNELS, WIDTH - 1), _decode(rows, draw)
    moved = nbytes + 4 * rows * (HIDDEN + WIDE) + 2 * state.nbytes
    return Case(lambda: (*ops.norm_linear_conv(x, norm, weight, conv, state, batch), state), moved)


def _decode(rows: int, draw: Draw) -> Any:
    return make_batch([(1, 100, slot) for slot in range(rows)], draw.device)


def _delta(ops: Ops, draw: Draw, rows: int) -> Case:
    mixed, rest, batch = draw(rows, CHANNELS), draw(rows, WIDE - CHANNELS), _decode(rows, draw)
    keys = (CHANNELS - VALUE_HEADS * LINEAR_DIM) // 2
    q, k, v = (part.view(rows, -1, LINEAR_DIM) for part in mixed.split([keys, keys, VALUE_HEADS * LINEAR_DIM], 1))
    b, a = rest[:, -2 * VALUE_HEADS :].split(VALUE_HEADS, 1)
    a_log, bias, state = draw(VALUE_HEADS), draw(VALUE_HEADS), draw(rows, VALUE_HEADS, LINEAR_DIM, LINEAR_DIM)
    return Case(lambda: (ops.gated_delta_net(q, k, v, a, b, a_log, bias, state, batch), state), 2 * state.nbytes)


def _gdn_out(ops: Ops, draw: Draw, rows: int) -> Case:
    (weight, nbytes), rest = _weight(ops, draw, HIDDEN, VALUE_HEADS * LINEAR_DIM), draw(rows, WIDE - CHANNELS)
    base, x, norm = draw(rows, HIDDEN), draw(rows, VALUE_HEADS, LINEAR_DIM), Norm(draw(LINEAR_DIM), 1e-6)
    gate = rest[:, : VALUE_HEADS * LINEAR_DIM].view(x.shape)
    return Case(lambda: (ops.add_gated_norm_linear(base, x, gate, norm, weight),), nbytes + 2 * x.nbytes + base.nbytes)


def _qk(ops: Ops, draw: Draw, rows: int) -> Case:
    wide, batch, norms = draw(rows, 2 * (HEADS + KV_HEADS) * HEAD_DIM), _decode(rows, draw), _norm(draw, HEAD_DIM)
    both, k, v = wide.split([2 * HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], 1)
    q, _ = both.view(rows, HEADS, 2 * HEAD_DIM).chunk(2, dim=2)
    shape = (batch.page_table.numel(), PAGE, KV_HEADS, HEAD_DIM)
    keys, values = (draw(*shape, dtype=torch.bfloat16) for _ in range(2))
    table = ops.rope_table(1 << 12, ROTARY, 1e7)
    k, v = (part.view(rows, KV_HEADS, HEAD_DIM) for part in (k, v))

    def run() -> tuple[Tensor, ...]:
        return ops.qk_norm_rope(q, k, v, (norms, norms), table, keys, values, batch), keys.float(), values.float()

    return Case(run, wide.nbytes)


def _attention_out(ops: Ops, draw: Draw, rows: int) -> Case:
    (weight, nbytes), wide = _weight(ops, draw, HIDDEN, HEADS * HEAD_DIM), draw(rows, 2 * HEADS * HEAD_DIM)
    base, x = draw(rows, HIDDEN), draw(rows, HEADS, HEAD_DIM)
    _, gate = wide.view(rows, HEADS, 2 * HEAD_DIM).chunk(2, dim=2)
    return Case(lambda: (ops.add_sigmoid_linear(base, x, gate, weight),), nbytes + 2 * x.nbytes + base.nbytes)


CASES: Mapping[str, Make] = {
    "norm, gdn inputs, conv": _gdn_inputs,
    "gates, delta rule": _delta,
    "gated norm, gdn out, residual": _gdn_out,
    "norm, attention inputs": _inputs(2 * (HEADS + KV_HEADS) * HEAD_DIM),
    "q and k: norm, rope, pages": _qk,
    "sigmoid, attention out, residual": _attention_out,
    "norm, router and shared inputs": _inputs(EXPERTS + 1025),
}
"""In the order of a step; those that have a twin of their own."""


def _shared(ops: Ops, draw: Draw, rows: int) -> Case:
    """The last kernel of a layer: the shared expert's down projection and all sums."""
    (weight, nbytes), wide, base = _weight(ops, draw, HIDDEN, 512), draw(rows, EXPERTS + 1025), draw(rows, HIDDEN)
    out, weights = draw(rows, TOP_K, HIDDEN), draw(rows, TOP_K)
    ids = torch.ones(rows, TOP_K, dtype=torch.int32, device=draw.device)
    known = Sums(out, weights, Decision(ids, ids, ids, ids, ids), whole=True)
    given, routing = DeviceOps(_Given(known, draw.device), draw.device), Routing(wide[:, :EXPERTS], TOP_K, True)

    def run() -> tuple[Tensor, ...]:
        gate_up, gate = wide[:, EXPERTS:-1], wide[:, -1:]
        return (given.add_shared_experts(base, base, routing, None, gate_up, gate, weight),)

    return Case(run, nbytes + out.nbytes + 2 * base.nbytes)


class _Given(ResidentExperts):
    """Experts whose outputs are known."""

    def __init__(self, known: Sums, device: torch.device) -> None:
        super().__init__(FORMATS["bf16"], device)
        self._known = known

    def sums(self, x: Tensor, routing: Routing, layer: int) -> Sums:
        return self._known


def time_composed(ops: DeviceOps, reading: float, batches: tuple[int, ...]) -> None:
    timed = {**CASES, "silu, shared down, sum, residual": _shared, "norm, lm_head": _inputs(VOCAB)}
    for rows, (name, make) in itertools.product(batches, timed.items()):
        first = make(ops, OnGPU(), rows)
        cases = [first] + [make(ops, OnGPU(), rows) for _ in range(sets_for(first.nbytes) - 1)]
        report(f"{name}, {rows}", first.nbytes, measure([case.run for case in cases], 5), reading)


PLANS = (
    attention.Tiling(),
    *itertools.starmap(
        lambda short, tile, warps, stages: attention.Tiling(short_split=short, tile=tile, warps=warps, stages=stages),
        ((64, 32, 4, 3), (64, 32, 8, 2), (64, 64, 8, 1), (64, 32, 8, 1), (128, 32, 4, 1), (256, 32, 4, 1)),
    ),
)


def tune() -> None:
    """Other tilings of attention over short contexts, at one row and more."""
    for rows, context in ((1, 1 << 10), (4, 1 << 12)):
        q, keys, values, batch, _ = decode_attention(rows, context)
        plans = [
            (measure([partial(attention.attention, q, keys, values, batch, 0.06, plan)], 3).microseconds, plan)
            for plan in PLANS
        ]
        for fast, plan in sorted(plans, key=itemgetter(0))[:4]:
            print(f"attention {rows} of {context}: {fast:.2f} µs, {plan}", flush=True)
