"""Routed experts that are all on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from engine.experts.layout import ExpertFormat, Layout
from engine.experts.residency import Decision
from engine.kernels import experts as kernels
from engine.kernels import grouped, mxfp4
from engine.kernels.experts import Sums
from engine.kernels.linear import ROWS
from engine.kernels.pointwise import route
from engine.layers.ops import Routing

if TYPE_CHECKING:
    from engine.experts.pool import Pool

_ALIGNMENT = 256


class ResidentExperts:
    """Implements ``engine.kernels.ops.DeviceExperts``: a layer's slots are its experts, in order."""

    def __init__(self, format: ExpertFormat, device: torch.device) -> None:
        self._format, self._device = format, device
        self._layers: list[tuple[Layout, Tensor]] = []

    @classmethod
    def of_pool(cls, pool: Pool, device: torch.device) -> Self:
        """A copy of all that a pool holds, its layers in order."""
        return cls.of_slots(pool.layout, pool.slots.to(device).view(pool.layers, pool.experts, pool.stride))

    @classmethod
    def of_slots(cls, layout: Layout, slots: Tensor) -> Self:
        """Over blobs that are on the device already: uint8 [layers, experts, stride]."""
        experts = cls(layout.format, slots.device)
        experts._layers = [(layout, layer) for layer in slots]
        return experts

    def pack(self, gate_up: Tensor, down: Tensor) -> int:
        """Raises ValueError for sizes and weights that the format cannot hold. -> the layer's number."""
        count, hidden, inner = down.shape
        layout = Layout(self._format, hidden, inner)
        stride = -(-layout.nbytes // _ALIGNMENT) * _ALIGNMENT
        slots = torch.zeros(count, stride, dtype=torch.uint8)
        for expert in range(count):
            layout.encode(gate_up[expert], down[expert], slots[expert, : layout.nbytes])
        self._layers.append((layout, slots.to(self._device)))
        return len(self._layers) - 1

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        if x.shape[0] > ROWS:
            return grouped.experts(x, ids, weights, *self._layers[layer])
        y, decision = torch.empty_like(x), _all_of(ids)
        if x.shape[0]:
            out = self._down(self._gate_up(x, decision, layer), decision, layer)
            kernels.combine(out, weights, decision, y, whole=True)
        return y

    def add(self, base: Tensor, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        return grouped.experts(x, ids, weights, *self._layers[layer], base)

    def sums(self, x: Tensor, routing: Routing, layer: int) -> Sums:
        """All of ``route`` and ``run`` but the sum, and without down where ``mxfp4.finish`` does both."""
        ids, weights = route(routing.logits, routing.k, routing.renormalize)
        (layout, slots), decision = self._layers[layer], _all_of(ids)
        inner = self._gate_up(x, decision, layer)
        if mxfp4.finishes(layout):
            return Sums(inner, weights, decision, whole=True, blobs=(slots, layout))
        return Sums(self._down(inner, decision, layer), weights, decision, whole=True)

    def _gate_up(self, x: Tensor, decision: Decision, layer: int) -> Tensor:
        layout, slots = self._layers[layer]
        inner = x.new_empty(*decision.slot.shape, layout.inner)
        kernels.gate_up(x, slots, decision, layout, inner, whole=True)
        return inner

    def _down(self, inner: Tensor, decision: Decision, layer: int) -> Tensor:
        layout, slots = self._layers[layer]
        out = inner.new_empty(*decision.slot.shape, layout.hidden)
        kernels.down(inner, slots, decision, layout, out, whole=True)
        return out


def _all_of(ids: Tensor) -> Decision:
    """Nothing to fetch, nothing for the CPU."""
    return Decision(slot=ids, gpu_parts=ids, plan=ids, fetch=ids, counts=ids)
