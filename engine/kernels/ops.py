"""The operations on a GPU, in Triton; plain torch where that is a copy or a large matrix product.

Nothing here waits for the device or reads a device tensor on the host, and shapes follow from shapes, so that a step
can be captured into a CUDA graph. Importing this module imports Triton: only the device path does.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.device.attention import Chosen, choose
from engine.kernels import (
    around,
    attention,
    beside,
    chunked_delta,
    linear,
    mxfp4,
    pointwise,
    prefill_conv,
    recurrent,
)
from engine.kernels.experts import Sums
from engine.kernels.linear import DeviceWeight
from engine.kernels.products import Products
from engine.layers.ops import Batch, DeltaNet, GatedHeads, Norm, Routing
from engine.layers.rope_table import rope_table


class DeviceExperts(Protocol):
    """Where a model's routed experts are, and what computes them."""

    def pack(self, gate_up: Tensor, down: Tensor) -> Any:
        """Take one layer's experts, layers in order; as ``Ops.pack_experts``."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, layer: Any) -> Tensor:
        """As ``Ops.experts``; ``layer`` is what ``pack`` gave. Rows whose ids are -1 give zero."""


@runtime_checkable
class Summable(Protocol):
    """Experts that can leave their last step, the sum over a row's experts, to who adds to it anyway; and do it for who
    gives up what it is added to."""

    def sums(self, x: Tensor, routing: Routing, layer: Any) -> Sums | None:
        """``Ops.route`` and ``run``, but for the sum. None: not for so many rows."""

    def add(self, base: Tensor, x: Tensor, ids: Tensor, weights: Tensor, layer: Any) -> Tensor:
        """base + ``run``, in the memory of base [rows, hidden]."""


def sums_of(experts: DeviceExperts, x: Tensor, routing: Routing, layer: Any) -> Sums | None:
    return experts.sums(x, routing, layer) if isinstance(experts, Summable) else None


def add_to(experts: DeviceExperts, base: Tensor, x: Tensor, ids: Tensor, weights: Tensor, layer: Any) -> Tensor:
    if isinstance(experts, Summable):
        return experts.add(base, x, ids, weights, layer)
    return base + experts.run(x, ids, weights, layer)


class DeviceOps(Products):
    """Implements ``engine.layers.ops.Ops`` for tensors on ``device``; shapes and meanings are documented there.

    A row's result does not depend on the other rows of a call of 2 to 16; alone, linear layers make float32 sums in
    another order. Of more rows they are matrix products in the weight's precision, whose results differ from those in
    the last bits that this precision has.
    """

    def __init__(self, experts: DeviceExperts, device: torch.device, attention: Chosen | None = None) -> None:
        self.device = device
        self._experts = experts
        self._attention = attention or choose(("triton", "triton"))

    def pack(self, weight: Tensor) -> DeviceWeight:
        return linear.pack(weight.to(self.device).contiguous())

    def linear(self, x: Tensor, weight: DeviceWeight, bias: Tensor | None = None) -> Tensor:
        return linear.linear(x, weight, bias) if x.shape[0] <= linear.ROWS else super().linear(x, weight, bias)

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> Any:
        return self._experts.pack(gate_up, down)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        return self._experts.run(x, ids, weights, experts)

    def route(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        return pointwise.route(logits, k, renormalize)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return pointwise.rms_norm(x, None, weight, eps, offset)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return pointwise.rms_norm(x, gate, weight, eps, 0.0)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return pointwise.silu_mul(gate_up)

    def sigmoid_mul(self, x: Tensor, gate: Tensor, base: Tensor | None = None) -> Tensor:
        return pointwise.sigmoid_mul(x, gate, base)

    def rope_table(self, context: int, rotary: int, theta: float) -> Tensor:
        return rope_table(context, rotary, theta).to(self.device)

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> None:
        pointwise.rope(x, positions, table)

    def conv(self, x: Tensor, weight: Tensor, state: Tensor, batch: Batch) -> Tensor:
        if x.shape[0] > linear.ROWS:
            return prefill_conv.conv(x, weight, state, batch)
        return recurrent.conv(x, weight, state, batch)

    def gdn_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        return pointwise.gdn_gates(a, b, a_log, dt_bias)

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch
    ) -> Tensor:
        if q.shape[0] > linear.ROWS:
            return chunked_delta.gated_delta(q, k, v, decay, beta, state, batch)
        return recurrent.gated_delta(q, k, v, decay, beta, state, batch)

    def attention(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float) -> Tensor:
        attend = self._attention.prefill if q.shape[0] > linear.ROWS else self._attention.decode
        return attend(q, k_pages, v_pages, batch, scale)

    def write_pages(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> None:
        attention.write_pages(k, v, k_pages, v_pages, batch)

    def copy_state(self, state: Tensor, source: int, target: int) -> None:
        state[target] = state[source]

    # ── compositions: for the rows of a decode step in one kernel ───────────────────────────────────────────────────

    def norm_linear(
        self, x: Tensor, norm: Norm, weight: DeviceWeight, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if x.shape[0] > linear.ROWS:
            return super().norm_linear(x, norm, weight, bias)
        normed = torch.empty_like(x)
        return linear.linear(x, weight, bias, kind=around.NORM, norm=norm, normed=normed), normed

    def norm_linear_conv(
        self, x: Tensor, norm: Norm, weight: DeviceWeight, conv: Tensor, state: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        if x.shape[0] > linear.ROWS or batch.snapshots.shape[0]:
            return super().norm_linear_conv(x, norm, weight, conv, state, batch)
        through = linear.Conv(conv, state, batch, x.new_empty(x.shape[0], conv.shape[0]))
        out = linear.linear(x, weight, kind=around.NORM, norm=norm, conv=through)
        return through.out, out[:, conv.shape[0] :]

    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor,
        state: Tensor, batch: Batch,
    ) -> Tensor:  # fmt: skip
        if q.shape[0] > linear.ROWS:
            return super().gated_delta_net(q, k, v, a, b, a_log, dt_bias, state, batch)
        return recurrent.gated_delta_net(q, k, v, a, b, a_log, dt_bias, state, batch)

    def delta_net(
        self, x: Tensor, net: DeltaNet, window: Tensor, state: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        end = net.conv.shape[0] + net.value_heads * net.value_dim
        if linear.takes_part(x, net.inputs, end) and not batch.snapshots.shape[0]:
            return beside.delta_net(x, net, window, state, batch)
        return super().delta_net(x, net, window, state, batch)

    def gated_heads(
        self, x: Tensor, of: GatedHeads, k_pages: Tensor, v_pages: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if linear.takes_part(x, of.inputs, of.head_dim):
            return beside.gated_heads(x, of, k_pages, v_pages, batch)
        return super().gated_heads(x, of, k_pages, v_pages, batch)

    def qk_norm_rope(
        self, q: Tensor, k: Tensor, v: Tensor, norms: tuple[Norm, Norm], table: Tensor,
        k_pages: Tensor, v_pages: Tensor, batch: Batch,
    ) -> Tensor:  # fmt: skip
        given = k_pages.dtype if q.shape[0] > linear.ROWS and q.is_cuda else q.dtype
        return attention.qk_norm_rope(q, k, v, norms, table, k_pages, v_pages, batch, given)

    def add_linear(self, base: Tensor, x: Tensor, weight: DeviceWeight) -> Tensor:
        if x.shape[0] > linear.ROWS:
            return super().add_linear(base, x, weight)
        return linear.linear(x, weight, base=base)

    def add_sigmoid_linear(self, base: Tensor, x: Tensor, gate: Tensor, weight: DeviceWeight) -> Tensor:
        if x.shape[0] > linear.ROWS:
            return super().add_sigmoid_linear(base, x, gate, weight)
        return linear.linear(x, weight, kind=around.SIGMOID, gate=gate, base=base)

    def add_gated_norm_linear(
        self, base: Tensor, x: Tensor, gate: Tensor, norm: Norm, weight: DeviceWeight
    ) -> Tensor:  # fmt: skip
        if x.shape[0] > linear.ROWS:
            return super().add_gated_norm_linear(base, x, gate, norm, weight)
        if not linear.takes_heads(weight, x.shape[2]):
            return self.add_linear(base, self.gated_rms_norm(x, gate, norm.weight, norm.eps).flatten(1), weight)
        return linear.linear(x, weight, kind=around.GATED_NORM, gate=gate, norm=norm, base=base)

    def add_silu_linear(self, base: Tensor, gate_up: Tensor, weight: DeviceWeight) -> Tensor:
        if gate_up.shape[0] > linear.ROWS:
            return super().add_silu_linear(base, gate_up, weight)
        gate, up = gate_up.chunk(2, dim=1)
        return linear.linear(up, weight, kind=around.SILU, gate=gate, base=base)

    def add_experts(self, base: Tensor, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        if x.shape[0] <= linear.ROWS:
            return super().add_experts(base, x, ids, weights, experts)
        return add_to(self._experts, base, x, ids, weights, experts)

    def add_shared_experts(
        self, base: Tensor, x: Tensor, routing: Routing, experts: Any,
        gate_up: Tensor, gate: Tensor, down: DeviceWeight,
    ) -> Tensor:  # fmt: skip
        sums = sums_of(self._experts, x, routing, experts) if 0 < x.shape[0] <= linear.ROWS else None
        if sums is None:
            return super().add_shared_experts(base, x, routing, experts, gate_up, gate, down)
        if sums.blobs is not None:
            out = mxfp4.finish(
                sums.out, *sums.blobs, sums.decision, sums.weights, base, gate_up, gate, down.matrix, 1 / down.unit,
                whole=sums.whole, arrived=sums.arrived,
            )  # fmt: skip
        else:
            (gates, values), shared = gate_up.chunk(2, dim=1), linear.Shared(sums, gate)
            out = linear.linear(values, down, kind=around.SILU, gate=gates, base=base, shared=shared)
        if sums.answer is not None:
            sums.answer(out)
        return out
