"""Feed-forward blocks: dense, and routed experts with an optional gated shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.layers.loader import Loader
from engine.layers.ops import Ops


class FeedForward(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""


@dataclass(frozen=True)
class Dense:
    """down(silu(gate(x)) * up(x))."""

    ops: Ops
    gate_up: Any
    down: Any

    @classmethod
    def load(cls, loader: Loader, name: str, hidden: int, inner: int) -> Dense:
        gate_up = loader.stacked(name, {"gate_proj": inner, "up_proj": inner}, hidden)
        return cls(loader.ops, gate_up, loader.linear(f"{name}.down_proj", hidden, inner))

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(self.ops.silu_mul(self.ops.linear(x, self.gate_up)), self.down)


@dataclass(frozen=True)
class Routed:
    """The ``top_k`` experts of each row, weighted by the router's softmax."""

    ops: Ops
    router: Any
    experts: Any
    top_k: int
    renormalize: bool

    @classmethod
    def load(
        cls, loader: Loader, name: str, hidden: int, inner: int, experts: int, top_k: int, renormalize: bool
    ) -> Routed:
        router = loader.linear(f"{name}.gate", experts, hidden)
        return cls(loader.ops, router, loader.experts(f"{name}.experts", experts, inner, hidden), top_k, renormalize)

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = self.ops.route(self.ops.linear(x, self.router), self.top_k, self.renormalize)
        return self.ops.experts(x, ids, weights, self.experts)


@dataclass(frozen=True)
class RoutedWithShared:
    """Routed experts plus one expert that every row uses, scaled by a sigmoid gate of its own."""

    ops: Ops
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
            loader.stacked(name, inputs, hidden),
            [experts, 2 * shared_inner, 1],
            loader.experts(f"{name}.experts", experts, inner, hidden),
            loader.linear(f"{shared}.down_proj", hidden, shared_inner),
            top_k,
            renormalize,
        )

    def __call__(self, x: Tensor) -> Tensor:
        ops = self.ops
        logits, gate_up, gate = torch.split(ops.linear(x, self.inputs), self.sizes, dim=1)
        ids, weights = ops.route(logits, self.top_k, self.renormalize)
        routed = ops.experts(x, ids, weights, self.experts)
        return ops.sigmoid_mul(ops.linear(ops.silu_mul(gate_up), self.down), gate, routed)
