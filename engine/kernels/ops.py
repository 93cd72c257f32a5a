"""The operations on a GPU, in Triton; plain torch where that is a copy or a large matrix product.

Nothing here waits for the device or reads a device tensor on the host, and shapes follow from shapes, so that a step
can be captured into a CUDA graph. Importing this module imports Triton: only the device path does.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from engine.kernels import attention, linear, pointwise, recurrent
from engine.kernels.linear import DeviceWeight
from engine.layers.composed import Composed
from engine.layers.ops import Batch
from engine.layers.rope_table import rope_table


class DeviceExperts(Protocol):
    """Where a model's routed experts are, and what computes them."""

    def pack(self, gate_up: Tensor, down: Tensor) -> Any:
        """Take one layer's experts, layers in order; as ``Ops.pack_experts``."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, layer: Any) -> Tensor:
        """As ``Ops.experts``; ``layer`` is what ``pack`` gave. Rows whose ids are -1 give zero."""


class DeviceOps(Composed):
    """Implements ``engine.layers.ops.Ops`` for tensors on ``device``; shapes and meanings are documented there.

    A row's result does not depend on the other rows of a call of up to 16 rows. Linear layers of more rows are matrix
    products in the weight's precision, whose results differ from those in the last bits that this precision has.
    """

    def __init__(self, experts: DeviceExperts, device: torch.device) -> None:
        self.device = device
        self._experts = experts

    def pack(self, weight: Tensor) -> DeviceWeight:
        return linear.pack(weight.to(self.device).contiguous())

    def linear(self, x: Tensor, weight: DeviceWeight, bias: Tensor | None = None) -> Tensor:
        return (linear.linear if x.shape[0] <= linear.ROWS else linear.matmul)(x, weight, bias)

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
        return recurrent.conv(x, weight, state, batch)

    def gdn_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        return pointwise.gdn_gates(a, b, a_log, dt_bias)

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch
    ) -> Tensor:
        return recurrent.gated_delta(q, k, v, decay, beta, state, batch)

    def attention(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float) -> Tensor:
        return attention.attention(q, k_pages, v_pages, batch, scale)

    def write_pages(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> None:
        attention.write_pages(k, v, k_pages, v_pages, batch)

    def copy_state(self, state: Tensor, source: int, target: int) -> None:
        state[target] = state[source]
