"""The operations in plain torch: what the native library is compared with, and the engine without it.

Mathematically the same as the native operations in float32, not bit-identical to them. Row invariance: products,
recurrences and attention are computed one row at a time, by calls whose shapes depend on that row alone. Norms, softmax
and elementwise functions run on the whole tensor: in practice torch computes each row alike whatever the number of
rows, but it does not promise to. Only the native operations carry the exactness contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.api import PAGE
from engine.layers.composed import Composed
from engine.layers.ops import Batch
from engine.layers.rope_table import rope_table


@dataclass(frozen=True)
class ReferenceExperts:
    """gate_up float32 [experts, 2 * inner, hidden], down float32 [experts, hidden, inner]."""

    gate_up: Tensor
    down: Tensor


class Segment(NamedTuple):
    """One sequence's rows in a batch, and where its recurrent state is to be copied: (after k rows, slot)."""

    sequence: int
    first: int
    rows: int
    position: int
    slot: int
    snapshots: tuple[tuple[int, int], ...]


class ReferenceOps(Composed):
    """Implements ``engine.layers.ops.Ops``; shapes and meanings are documented there."""

    def pack(self, weight: Tensor) -> Tensor:
        return weight.float().contiguous()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = _by_row(lambda row: weight @ row, x, weight.shape[0])
        return out if bias is None else out + bias

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> ReferenceExperts:
        return ReferenceExperts(gate_up.float().contiguous(), down.float().contiguous())

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ReferenceExperts) -> Tensor:
        out = torch.zeros_like(x)
        for row, (row_ids, row_weights) in enumerate(zip(ids.tolist(), weights, strict=True)):
            for rank, expert in enumerate(row_ids):
                inner = self.silu_mul((experts.gate_up[expert] @ x[row])[None])[0]
                out[row] += row_weights[rank] * (experts.down[expert] @ inner)
        return out

    def route(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(logits, dim=-1)
        # A stable sort keeps equal values in index order, which topk does not promise.
        values, order = probabilities.sort(dim=-1, descending=True, stable=True)
        ids, weights = order[:, :k], values[:, :k]
        if renormalize:
            total = weights[:, :1].clone()
            for rank in range(1, k):
                total += weights[:, rank : rank + 1]
            weights = weights / total
        return ids.to(torch.int32).contiguous(), weights.contiguous()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return _normalize(x, eps) * (offset + weight)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _normalize(x, eps) * weight * F.silu(gate)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.contiguous()) * up

    def sigmoid_mul(self, x: Tensor, gate: Tensor, base: Tensor | None = None) -> Tensor:
        result = x * torch.sigmoid(gate)
        return result if base is None else base + result

    def rope_table(self, context: int, rotary: int, theta: float) -> Tensor:
        return rope_table(context, rotary, theta)

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> None:
        half = table.shape[1]
        cos, sin = table[positions.long()][:, None].unbind(-1)
        first, second = x[..., :half].clone(), x[..., half : 2 * half].clone()
        x[..., :half] = first * cos - second * sin
        x[..., half : 2 * half] = second * cos + first * sin

    def conv(self, x: Tensor, weight: Tensor, state: Tensor, batch: Batch) -> Tensor:
        out = torch.empty_like(x)
        keep = weight.shape[1] - 1
        for segment in _segments(batch):
            rows = slice(segment.first, segment.first + segment.rows)
            inputs = torch.cat((state[segment.slot], x[rows].T), dim=1)
            total = torch.zeros_like(x[rows])
            for tap in range(weight.shape[1]):
                total += inputs[:, tap : tap + segment.rows].T * weight[:, tap]
            out[rows] = F.silu(total)
            for k, slot in (*segment.snapshots, (segment.rows, segment.slot)):
                state[slot] = inputs[:, k : k + keep]
        return out

    def gdn_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.exp(a_log) * F.softplus(a + dt_bias), torch.sigmoid(b)

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch
    ) -> Tensor:
        group = v.shape[1] // k.shape[1]
        q = (_l2_normalize(q) * q.shape[-1] ** -0.5).repeat_interleave(group, dim=1)
        k = _l2_normalize(k).repeat_interleave(group, dim=1)
        out = torch.empty_like(v)
        for segment in _segments(batch):
            memory = state[segment.slot].clone()
            slots_after: dict[int, list[int]] = {}
            for count, slot in segment.snapshots:
                slots_after.setdefault(count, []).append(slot)
            for i in range(segment.rows):
                row = segment.first + i
                memory *= torch.exp(decay[row])[:, None, None]
                recalled = (memory * k[row][:, :, None]).sum(1)
                memory += k[row][:, :, None] * ((v[row] - recalled) * beta[row][:, None])[:, None, :]
                out[row] = (memory * q[row][:, :, None]).sum(1)
                for slot in slots_after.get(i + 1, ()):
                    state[slot] = memory
            state[segment.slot] = memory
        return out

    def attention(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float) -> Tensor:
        out = torch.empty_like(q)
        kv_heads, head_dim = k_pages.shape[2:]
        for segment in _segments(batch):
            end = segment.position + segment.rows
            pages = batch.page_table[segment.sequence, : -(-end // PAGE)].long()
            keys = k_pages[pages].reshape(-1, kv_heads, head_dim).float()
            values = v_pages[pages].reshape(-1, kv_heads, head_dim).float()
            for i in range(segment.rows):
                row, length = segment.first + i, segment.position + i + 1
                grouped = q[row].reshape(kv_heads, -1, head_dim)
                scores = torch.einsum("hgd,thd->hgt", grouped, keys[:length]) * scale
                mixed = torch.einsum("hgt,thd->hgd", torch.softmax(scores, dim=-1), values[:length])
                out[row] = mixed.reshape(-1, head_dim)
        return out

    def write_pages(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> None:
        for segment in _segments(batch):
            rows = slice(segment.first, segment.first + segment.rows)
            positions = torch.arange(segment.position, segment.position + segment.rows)
            pages = batch.page_table[segment.sequence, positions // PAGE].long()
            k_pages[pages, positions % PAGE] = k[rows].to(k_pages.dtype)
            v_pages[pages, positions % PAGE] = v[rows].to(v_pages.dtype)

    def copy_state(self, state: Tensor, source: int, target: int) -> None:
        state[target] = state[source]


def _by_row(function: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    out = x.new_empty((x.shape[0], width))
    for i, row in enumerate(x):
        out[i] = function(row)
    return out


def _segments(batch: Batch) -> list[Segment]:
    snapshots: dict[int, list[tuple[int, int]]] = {}
    for index, k, slot in batch.snapshots.tolist():
        snapshots.setdefault(index, []).append((k, slot))
    return [
        Segment(index, first, rows, position, slot, tuple(snapshots.get(index, ())))
        for index, (first, rows, position, slot) in enumerate(batch.segments.tolist())
    ]


def _normalize(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _l2_normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
