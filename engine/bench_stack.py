"""A stack of random layers of a published shape: right in sizes and operations, meaningless in values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.api import PAGE
from engine.layers.ops import Batch
from engine.native.ops import NativeOps, PackedExperts, PackedWeight

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Shape:
    """Sizes of a hybrid layer stack: every ``attention_every``-th layer is gated attention, the rest Gated DeltaNet."""

    hidden: int
    experts: int
    top_k: int
    inner: int
    shared_inner: int
    key_heads: int
    value_heads: int
    gdn_dim: int
    conv_width: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    attention_every: int


SHAPES = {
    "qwen3.6": Shape(2048, 256, 8, 512, 512, 16, 32, 128, 4, 16, 2, 256, 64, 4),
    "tiny": Shape(128, 16, 4, 64, 64, 2, 4, 32, 4, 4, 2, 32, 16, 4),
}


@dataclass(frozen=True)
class Cost:
    """Of one step: bytes that must be read or written, and floating-point operations."""

    bytes: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Mixer:
    """The projections of either kind of layer; ``conv`` is None for attention."""

    projections: tuple[PackedWeight, ...]
    out: PackedWeight
    conv: Tensor | None
    states: tuple[Tensor, Tensor]
    """Convolution and memory states, or key and value pages."""


@dataclass(frozen=True)
class Layer:
    mixer: Mixer
    router: PackedWeight
    experts: PackedExperts
    shared: tuple[PackedWeight, PackedWeight, PackedWeight]


class Stack:
    """``layers`` random layers with room for ``sequences`` of ``context`` tokens, whose keys and values are random."""

    def __init__(
        self,
        ops: NativeOps,
        shape: Shape,
        layers: int,
        sequences: int,
        context: int,
        dtype: torch.dtype,
        tell: Progress,
    ) -> None:
        self.ops, self.shape, self.dtype = ops, shape, dtype
        self._slots = sequences
        self._pages = -(-context // PAGE)
        self._random = torch.randn(1 << 24, generator=torch.Generator().manual_seed(1)).to(dtype)
        self._norm = torch.ones(shape.hidden)
        self._table = ops.rope_table(context, shape.rotary, 1e7)
        self._layers = []
        for index in range(layers):
            tell("layers", index, layers)
            self._layers.append(self._layer((index + 1) % shape.attention_every == 0))
        tell("layers", layers, layers)

    # ── building ────────────────────────────────────────────────────────────────────────────────────────────────

    def _fill(self, buffer: Tensor) -> None:
        values = buffer.view(self.dtype)
        for start in range(0, values.numel(), self._random.numel()):
            part = values[start : start + self._random.numel()]
            part.copy_(self._random[: part.numel()]).mul_(0.02)

    def _linear(self, out: int, inner: int) -> PackedWeight:
        size = out * inner
        repeats = -(-size // self._random.numel())
        return self.ops.pack((self._random.repeat(repeats)[:size] * 0.02).reshape(out, inner))

    def _layer(self, attention: bool) -> Layer:
        shape = self.shape
        experts = self.ops.room_for_experts(shape.experts, shape.hidden, shape.inner, self.dtype)
        self._fill(experts.gate_up)
        self._fill(experts.down)
        shared = (
            self._linear(2 * shape.shared_inner, shape.hidden),
            self._linear(shape.hidden, shape.shared_inner),
            self._linear(1, shape.hidden),
        )
        mixer = self._attention() if attention else self._gdn()
        return Layer(mixer, self._linear(shape.experts, shape.hidden), experts, shared)

    def _attention(self) -> Mixer:
        shape = self.shape
        sizes = (2 * shape.heads * shape.head_dim, *(shape.kv_heads * shape.head_dim,) * 2)
        pages = torch.empty(self._slots * self._pages, PAGE, shape.kv_heads, shape.head_dim, dtype=self.dtype)
        self._fill(pages.view(-1))
        projections = tuple(self._linear(size, shape.hidden) for size in sizes)
        return Mixer(projections, self._linear(shape.hidden, sizes[0] // 2), None, (pages, pages.clone()))

    def _gdn(self) -> Mixer:
        shape = self.shape
        value = shape.value_heads * shape.gdn_dim
        channels = 2 * shape.key_heads * shape.gdn_dim + value
        sizes = (channels, value, shape.value_heads, shape.value_heads)
        states = (
            torch.zeros(self._slots, channels, shape.conv_width - 1),
            torch.zeros(self._slots, shape.value_heads, shape.gdn_dim, shape.gdn_dim),
        )
        projections = tuple(self._linear(size, shape.hidden) for size in sizes)
        return Mixer(projections, self._linear(shape.hidden, value), torch.randn(channels, shape.conv_width), states)

    # ── running ─────────────────────────────────────────────────────────────────────────────────────────────────

    def batch(self, rows: int, position: int) -> Batch:
        """``rows`` tokens of every sequence, from ``position`` on."""
        starts = torch.arange(self._slots, dtype=torch.int32)
        segments = [(int(start) * rows, rows, position, int(start)) for start in starts]
        return Batch(
            tokens=torch.zeros(self._slots * rows, dtype=torch.int64),
            positions=torch.arange(position, position + rows, dtype=torch.int32).repeat(self._slots),
            segments=torch.tensor(segments, dtype=torch.int32),
            page_table=torch.arange(self._slots * self._pages, dtype=torch.int32).reshape(self._slots, self._pages),
            snapshots=torch.zeros((0, 3), dtype=torch.int32),
            logit_rows=torch.zeros(0, dtype=torch.int64),
        )

    def step(self, x: Tensor, batch: Batch) -> tuple[Tensor, Cost]:
        """x [rows, hidden] through all layers, and what that had to cost."""
        cost = Cost()
        for layer in self._layers:
            normed = self.ops.rms_norm(x, self._norm, 1e-6)
            mixed, spent = self._mix_gdn(layer.mixer, normed, batch)
            x = x + mixed
            cost += spent
            mixed, spent = self._feed_forward(layer, self.ops.rms_norm(x, self._norm, 1e-6))
            x = x + mixed
            cost += spent
        return x, cost

    def _mix_gdn(self, mixer: Mixer, x: Tensor, batch: Batch) -> tuple[Tensor, Cost]:
        if mixer.conv is None:
            return self._mix_attention(mixer, x, batch)
        ops, shape, rows = self.ops, self.shape, x.shape[0]
        mixed, z, a, b = (ops.linear(x, weight) for weight in mixer.projections)
        mixed = ops.conv(mixed, mixer.conv, mixer.states[0], batch)
        key = shape.key_heads * shape.gdn_dim
        q, k, v = (part.contiguous() for part in mixed.tensor_split((key, 2 * key), dim=1))
        decay, beta = ops.gdn_gates(a, b, torch.zeros(shape.value_heads), torch.zeros(shape.value_heads))
        keys = (rows, shape.key_heads, shape.gdn_dim)
        values = (rows, shape.value_heads, shape.gdn_dim)
        y = ops.gated_delta(q.view(keys), k.view(keys), v.view(values), decay, beta, mixer.states[1], batch)
        y = ops.gated_rms_norm(y, z.view(values), torch.ones(shape.gdn_dim), 1e-6)
        cells = shape.value_heads * shape.gdn_dim**2
        spent = Cost(2 * 4 * cells * batch.segments.shape[0], rows * 7 * cells)
        return ops.linear(y.view(rows, -1), mixer.out), spent + _dense((*mixer.projections, mixer.out), rows)

    def _mix_attention(self, mixer: Mixer, x: Tensor, batch: Batch) -> tuple[Tensor, Cost]:
        ops, shape, rows = self.ops, self.shape, x.shape[0]
        query, k, v = (ops.linear(x, weight) for weight in mixer.projections)
        q, gate = (part.contiguous() for part in query.chunk(2, dim=1))
        q, k = q.view(rows, shape.heads, -1), k.view(rows, shape.kv_heads, -1)
        norm = torch.ones(shape.head_dim)
        q, k = ops.rms_norm(q, norm, 1e-6), ops.rms_norm(k, norm, 1e-6)
        ops.rope(q, batch.positions, self._table)
        ops.rope(k, batch.positions, self._table)
        ops.write_pages(k, v.view_as(k), *mixer.states, batch)
        y = ops.attention(q, *mixer.states, batch, shape.head_dim**-0.5)
        y = ops.sigmoid_mul(y.view(rows, -1), gate)
        keys = batch.positions.long().sum().item() + rows
        ends = (batch.segments[:, 1] + batch.segments[:, 2]).sum().item()
        spent = Cost(
            int(ends) * 2 * shape.kv_heads * shape.head_dim * self.dtype.itemsize,
            int(keys) * 4 * shape.heads * shape.head_dim,
        )
        return ops.linear(y, mixer.out), spent + _dense((*mixer.projections, mixer.out), rows)

    def _feed_forward(self, layer: Layer, x: Tensor) -> tuple[Tensor, Cost]:
        ops, rows, experts = self.ops, x.shape[0], layer.experts
        ids, weights = ops.route(ops.linear(x, layer.router), self.shape.top_k, True)
        routed = ops.experts(x, ids, weights, experts)
        gate_up, down, gate = layer.shared
        shared = ops.linear(ops.silu_mul(ops.linear(x, gate_up)), down)
        parameters = 3 * experts.hidden * experts.inner
        spent = Cost(
            len(set(ids.flatten().tolist())) * parameters * self.dtype.itemsize,
            2 * rows * self.shape.top_k * parameters,
        )
        return routed + ops.sigmoid_mul(shared, ops.linear(x, gate)), spent + _dense(
            (layer.router, *layer.shared), rows
        )


def _dense(weights: tuple[PackedWeight, ...], rows: int) -> Cost:
    parameters = sum(weight.out * weight.inner for weight in weights)
    size = sum(weight.out * weight.inner * (2 if weight.bfloat else 4) for weight in weights)
    return Cost(size, 2 * rows * parameters)
