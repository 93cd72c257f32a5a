"""Routing for benches: random weights have no locality, so experts are drawn so that they hit as often as told."""

from __future__ import annotations

import torch
from torch import Tensor


class ForcedRouting:
    """What the routers of the next step are replaced by, on the device: ``logits`` [layers, rows, experts], of which
    ``ids`` int32 [layers, rows, k] are the largest."""

    def __init__(self, layers: int, experts: int, rows: int, k: int, device: torch.device, seed: int = 1) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._experts = experts
        self.ids = torch.zeros(layers, rows, k, dtype=torch.int32, device=device)
        self.logits = torch.empty(layers, rows, experts, device=device)
        self.draw(torch.full((layers * experts,), -1, dtype=torch.int32, device=device), 0.0)

    def draw(self, slot_of: Tensor, rate: float, lacks: Tensor | None = None) -> None:
        """New ids, on the current stream. Each is, with probability ``rate``, one of its layer's experts that are on
        the device, else one of those of which nothing is: ``slot_of`` and ``lacks`` int32 [layers * experts] as in
        ``Residency``. A row's are distinct as long as a layer has ``k`` of both."""
        layers, _, k = self.ids.shape
        absent = slot_of < 0
        whole = ~absent if lacks is None else ~absent & (lacks == 0)
        order = torch.rand(self.logits.shape, generator=self._generator, device=self.logits.device)
        hits, misses = (
            torch.where(chosen.view(layers, 1, self._experts), order, order - 2).topk(k, dim=2).indices
            for chosen in (whole, absent)
        )
        chance = torch.rand(self.ids.shape, generator=self._generator, device=self.logits.device)
        chosen = torch.where(chance < rate, hits, misses)
        self.ids.copy_(chosen)
        self.logits.copy_(order).scatter_(2, chosen, 2 + chance)
