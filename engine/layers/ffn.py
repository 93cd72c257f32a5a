"""Feed-forward blocks: dense, and routed experts with an optional gated shared expert. Each adds to the residual stream
what it makes of its RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.layers.loader import Loader
from engine.layers.ops import Norm, Ops, Routing


class FeedForward(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden], the input included."""


@dataclass(frozen=True)
class Dense:
    """down(silu(gate(x)) * up(x))."""

    ops: Ops
    norm: Norm
    gate_up: Any
    down: Any

    @classmethod
    def load(cls, loader: Loader, name: str, norm: Norm, hidden: int, inner: int) -> Dense:
        gate_up = loader.stacked(name, {"gate_proj": inner, "up_proj": inner}, hidden)
        return cls(loader.ops, norm, gate_up, loader.linear(f"{name}.down_proj", hidden, inner))

    def __call__(self, x: Tensor) -> Tensor:
        gate_up, _ = self.ops.norm_linear(x, self.norm, self.gate_up)
        return self.ops.add_silu_linear(x, gate_up, self.down)


@dataclass(frozen=True)
class Routed:
    """The ``top_k`` experts of each row, weighted by the router's softmax."""

    ops: Ops
    norm: Norm
    router: Any
    experts: Any
    top_k: int
    renormalize: bool

    @classmethod
    def load(
        cls, loader: Loader, name: str, norm: Norm, hidden: int, inner: int, experts: int, top_k: int, renormalize: bool
    ) -> Routed:
        return cls(
            loader.ops,
            norm,
            loader.linear(f"{name}.gate", experts, hidden),
            loader.experts(f"{name}.experts", experts, inner, hidden),
            top_k,
            renormalize,
        )

    def __call__(self, x: Tensor) -> Tensor:
        logits, normed = self.ops.norm_linear(x, self.norm, self.router)
        ids, weights = self.ops.route(logits, self.top_k, self.renormalize)
        return self.ops.add_experts(x, normed, ids, weights, self.experts)


@dataclass(frozen=True)
class RoutedWithShared:
    """Routed experts plus one expert that every row uses, scaled by a sigmoid gate of its own."""

    ops: Ops
    norm: Norm
    inputs: Any
    """Router, the shared expert's gate and up projections, and the gate that scales it."""
    sizes: list[int]
    experts: Any
    down: Any
    top_k: int
    renormalize: bool

    @classmethod
    def load(
        cls,
        loader: Loader,
        name: str,
        norm: Norm,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int,
        renormalize: bool,
        shared_inner: int,
    ) -> RoutedWithShared:
        shared = f"{name}.shared_expert"
        inputs = {
            "gate": experts,
            "shared_expert.gate_proj": shared_inner,
            "shared_expert.up_proj": shared_inner,
            "shared_expert_gate": 1,
        }
        return cls(
            loader.ops,
            norm,
            loader.stacked(name, inputs, hidden),
            [experts, 2 * shared_inner, 1],
            loader.experts(f"{name}.experts", experts, inner, hidden),
            loader.linear(f"{shared}.down_proj", hidden, shared_inner),
            top_k,
            renormalize,
        )

    def __call__(self, x: Tensor) -> Tensor:
        ops = self.ops
        out, normed = ops.norm_linear(x, self.norm, self.inputs)
        logits, gate_up, gate = torch.split(out, self.sizes, dim=1)
        routing = Routing(logits, self.top_k, self.renormalize)
        return ops.add_shared_experts(x, normed, routing, self.experts, gate_up, gate, self.down)
