"""The operations a model file is written in.

Three implementations: ``engine.native.ops.NativeOps`` (C++), ``engine.kernels.ops.DeviceOps`` (a GPU) and
``engine.layers.reference.ReferenceOps`` (torch twins). Configuration chooses one; they are never mixed. Activations
are float32, ``[rows, ...]``; a row is one token of one sequence. They are contiguous, except that norms, gates,
``route``, ``conv``, ``gated_delta``, ``write_pages`` and what is composed of them also take slices of what a linear
layer gives: rows and heads evenly apart. Weights are float32 or bfloat16.

Exactness: the result for a row depends on that row and its own sequence's history only, never on how many rows are in
the call, on chunking, or on other sequences. Elementwise add and multiply are exact in torch and need no operation
here; everything that reduces or uses a transcendental function does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    """One step: prefill chunks and decode rows of several sequences, flattened to ``rows`` tokens.

    ``tokens`` int64 [rows]; ``positions`` int32 [rows], absolute.
    ``segments`` int32 [sequences, 4]: first row, rows, position of the first row, state slot.
    ``page_table`` int32 [sequences, pages]: the physical page of each absolute page of the sequence, -1 beyond.
    ``snapshots`` int32 [n, 3]: (segment, k, slot): after the segment's first k rows (1 <= k <= rows), copy the
    recurrent state into ``slot``.
    ``logit_rows`` int64 [m]: rows whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    page_table: Tensor
    snapshots: Tensor
    logit_rows: Tensor


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: ``weight`` float32 [dim], epsilon, and what is added to the weight."""

    weight: Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class Routing:
    """What ``Ops.route`` takes: logits [rows, experts], of which ``k`` are chosen."""

    logits: Tensor
    k: int
    renormalize: bool


@dataclass(frozen=True)
class DeltaNet:
    """A layer of Gated DeltaNet up to its output. ``inputs``, packed, gives q and k [key_heads * key_dim], v and z
    [value_heads * value_dim], b and a [value_heads], side by side."""

    norm: Norm
    inputs: Any
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    def split(self, qkv: Tensor, rest: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, z of heads, b, a."""
        rows, keys, values = qkv.shape[0], self.key_heads * self.key_dim, self.value_heads * self.value_dim
        q, k, v = torch.split(qkv, [keys, keys, values], dim=1)
        z, b, a = torch.split(rest, [values, self.value_heads, self.value_heads], dim=1)
        q, k = (x.view(rows, self.key_heads, self.key_dim) for x in (q, k))
        v, z = (x.view(rows, self.value_heads, self.value_dim) for x in (v, z))
        return q, k, v, z, b, a


@dataclass(frozen=True)
class GatedHeads:
    """A layer of gated attention up to its queries. ``inputs``, packed, gives q and gate of each head in turn, then k
    and v. ``norms`` of q and k, and ``table``, are for ``Ops.qk_norm_rope``."""

    norm: Norm
    inputs: Any
    norms: tuple[Norm, Norm]
    table: Tensor
    heads: int
    kv_heads: int
    head_dim: int

    def split(self, out: Tensor) -> tuple[Tensor, ...]:
        """q, gate, k, v, of heads."""
        rows, dim = out.shape[0], self.head_dim
        q_and_gate, k, v = torch.split(out, [2 * self.heads * dim, self.kv_heads * dim, self.kv_heads * dim], dim=1)
        q, gate = q_and_gate.view(rows, self.heads, 2 * dim).chunk(2, dim=2)
        return q, gate, k.view(rows, self.kv_heads, dim), v.view(rows, self.kv_heads, dim)


class Ops(Protocol):
    def pack(self, weight: Tensor) -> Any:
        """Prepare a linear weight [out, in] (float32 or bfloat16) once, at load."""

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] @ weight.T (+ bias float32 [out]) -> [rows, out]."""

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> Any:
        """Prepare one layer's experts once: gate_up [experts, 2 * inner, hidden] (gate rows first), down
        [experts, hidden, inner]."""

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """Routed FFN: sum over rank r, in rank order, of weights[:, r] * down(silu(gate(x)) * up(x)).

        x [rows, hidden], ids int32 [rows, k], weights float32 [rows, k] -> [rows, hidden]."""

    def route(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        """Softmax over all experts, then the k largest, in descending order, ties to the lower index; renormalized to
        sum 1 on request. logits [rows, experts] -> ids int32 [rows, k], weights float32 [rows, k]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """RMSNorm over the last dimension, times (offset + weight). x [..., dim], weight float32 [dim]."""

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm(x) * weight * silu(gate), shapes as x [..., dim]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of the last dimension: [rows, 2 * inner] -> [rows, inner]."""

    def sigmoid_mul(self, x: Tensor, gate: Tensor, base: Tensor | None = None) -> Tensor:
        """(base +) x * sigmoid(gate), x and base [rows, ...], gate of the same shape or [rows, 1]."""

    def rope_table(self, context: int, rotary: int, theta: float) -> Tensor:
        """cos and sin of position * theta^(-2i/rotary), computed in double: float32 [context, rotary // 2, 2]."""

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> None:
        """Rotate, in place, the first ``rotary`` dimensions of each head, half-split. x [rows, heads, head_dim]."""

    def conv(self, x: Tensor, weight: Tensor, state: Tensor, batch: Batch) -> Tensor:
        """Causal depthwise convolution then SiLU, token-serial. x [rows, channels], weight float32 [channels, width],
        state float32 [slots, channels, width - 1] (the last inputs, oldest first), updated in place; snapshots are
        written. -> [rows, channels]."""

    def gdn_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Gated DeltaNet's log decay -exp(a_log) * softplus(a + dt_bias) and beta sigmoid(b), each [rows, heads]."""

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch
    ) -> Tensor:
        """Gated delta rule (arXiv 2412.06464), token-serial; q and k are L2-normalised here (eps 1e-6 inside the
        square root) and q scaled by key_dim ** -0.5. q, k [rows, key_heads, key_dim] (each key head serves
        value_heads / key_heads consecutive value heads), v [rows, value_heads, value_dim], decay (log) and beta
        [rows, value_heads], state float32 [slots, value_heads, key_dim, value_dim] updated in place; snapshots are
        written. -> [rows, value_heads, value_dim]."""

    def attention(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float) -> Tensor:
        """Causal attention of each row over its sequence's pages (the row's own key included, already written);
        keys are reduced page by page in absolute order. q [rows, heads, head_dim], pages float32 or bfloat16
        [pages, 64, kv_heads, head_dim] -> [rows, heads, head_dim]."""

    def write_pages(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> None:
        """Store k, v [rows, kv_heads, head_dim] at their positions."""

    def copy_state(self, state: Tensor, source: int, target: int) -> None:
        """state[target] = state[source], a plain copy."""

    # ── compositions of the above (engine.layers.composed), for what a device does in one go ────────────────────────

    def norm_linear(self, x: Tensor, norm: Norm, weight: Any, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """linear(rms_norm(x)), and rms_norm(x)."""

    def norm_linear_conv(
        self, x: Tensor, norm: Norm, weight: Any, conv: Tensor, state: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """linear(rms_norm(x)): its first channels, as many as ``conv`` has, through ``conv``; and the others."""

    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor,
        state: Tensor, batch: Batch,
    ) -> Tensor:  # fmt: skip
        """gated_delta with the gates that gdn_gates makes."""

    def qk_norm_rope(
        self, q: Tensor, k: Tensor, v: Tensor, norms: tuple[Norm, Norm], table: Tensor,
        k_pages: Tensor, v_pages: Tensor, batch: Batch,
    ) -> Tensor:  # fmt: skip
        """rms_norm of q and of k, rope of both, write_pages of k and v. -> q [rows, heads, head_dim]; its argument and
        k stay as they are."""

    def delta_net(
        self, x: Tensor, net: DeltaNet, window: Tensor, state: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """norm_linear_conv, then gated_delta_net. -> its result and z, each [rows, value_heads, value_dim]."""

    def gated_heads(
        self, x: Tensor, of: GatedHeads, k_pages: Tensor, v_pages: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """norm_linear, then qk_norm_rope. -> its result and the gates, each [rows, heads, head_dim]."""

    def add_linear(self, base: Tensor, x: Tensor, weight: Any) -> Tensor:
        """base + linear(x): here and below, a residual stream [rows, hidden] and what a block adds to it."""

    def add_sigmoid_linear(self, base: Tensor, x: Tensor, gate: Tensor, weight: Any) -> Tensor:
        """base + linear(sigmoid_mul(x, gate)), x and gate [rows, heads, dim]."""

    def add_gated_norm_linear(self, base: Tensor, x: Tensor, gate: Tensor, norm: Norm, weight: Any) -> Tensor:
        """base + linear(gated_rms_norm(x, gate)), x and gate [rows, heads, dim]."""

    def add_silu_linear(self, base: Tensor, gate_up: Tensor, weight: Any) -> Tensor:
        """base + linear(silu_mul(gate_up))."""

    def add_experts(self, base: Tensor, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """base + experts(x)."""

    def add_shared_experts(
        self, base: Tensor, x: Tensor, routing: Routing, experts: Any, gate_up: Tensor, gate: Tensor, down: Any
    ) -> Tensor:
        """base + (experts(x) + linear(silu_mul(gate_up), down) * sigmoid(gate)), gate [rows, 1]: routed experts, and
        one that all rows share."""
