"""Compositions of operations, one after another: what a device may do in one go instead."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.layers.ops import Batch, DeltaNet, GatedHeads, Norm, Ops, Routing


class Composed:
    """The second part of ``engine.layers.ops.Ops``, for classes that have the first."""

    def norm_linear(
        self: Ops, x: Tensor, norm: Norm, weight: Any, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        normed = self.rms_norm(x, norm.weight, norm.eps, norm.offset)
        return self.linear(normed, weight, bias), normed

    def norm_linear_conv(
        self: Ops, x: Tensor, norm: Norm, weight: Any, conv: Tensor, state: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        out, _ = self.norm_linear(x, norm, weight)
        channels = conv.shape[0]
        return self.conv(out[:, :channels], conv, state, batch), out[:, channels:]

    def gated_delta_net(
        self: Ops, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor,
        state: Tensor, batch: Batch,
    ) -> Tensor:  # fmt: skip
        decay, beta = self.gdn_gates(a, b, a_log, dt_bias)
        return self.gated_delta(q, k, v, decay, beta, state, batch)

    def qk_norm_rope(
        self: Ops, q: Tensor, k: Tensor, v: Tensor, norms: tuple[Norm, Norm], table: Tensor,
        k_pages: Tensor, v_pages: Tensor, batch: Batch,
    ) -> Tensor:  # fmt: skip
        q, k = (self.rms_norm(x, norm.weight, norm.eps, norm.offset) for x, norm in zip((q, k), norms, strict=True))
        self.rope(q, batch.positions, table)
        self.rope(k, batch.positions, table)
        self.write_pages(k, v, k_pages, v_pages, batch)
        return q

    def delta_net(
        self: Ops, x: Tensor, net: DeltaNet, window: Tensor, state: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v, z, b, a = net.split(*self.norm_linear_conv(x, net.norm, net.inputs, net.conv, window, batch))
        return self.gated_delta_net(q, k, v, a, b, net.a_log, net.dt_bias, state, batch), z

    def gated_heads(
        self: Ops, x: Tensor, of: GatedHeads, k_pages: Tensor, v_pages: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, gate, k, v = of.split(self.norm_linear(x, of.norm, of.inputs)[0])
        return self.qk_norm_rope(q, k, v, of.norms, of.table, k_pages, v_pages, batch), gate

    def add_linear(self: Ops, base: Tensor, x: Tensor, weight: Any) -> Tensor:
        return base + self.linear(x, weight)

    def add_sigmoid_linear(self: Ops, base: Tensor, x: Tensor, gate: Tensor, weight: Any) -> Tensor:
        return base + self.linear(self.sigmoid_mul(x, gate).view(x.shape[0], -1), weight)

    def add_gated_norm_linear(self: Ops, base: Tensor, x: Tensor, gate: Tensor, norm: Norm, weight: Any) -> Tensor:
        return base + self.linear(self.gated_rms_norm(x, gate, norm.weight, norm.eps).view(x.shape[0], -1), weight)

    def add_silu_linear(self: Ops, base: Tensor, gate_up: Tensor, weight: Any) -> Tensor:
        return base + self.linear(self.silu_mul(gate_up), weight)

    def add_experts(self: Ops, base: Tensor, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        return base + self.experts(x, ids, weights, experts)

    def add_shared_experts(
        self: Ops, base: Tensor, x: Tensor, routing: Routing, experts: Any, gate_up: Tensor, gate: Tensor, down: Any
    ) -> Tensor:
        routed = self.experts(x, *self.route(routing.logits, routing.k, routing.renormalize), experts)
        return base + self.sigmoid_mul(self.linear(self.silu_mul(gate_up), down), gate, routed)
