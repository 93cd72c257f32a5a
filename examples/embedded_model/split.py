"""Divide each FFN's units into one shared and several routed experts, by which units are active together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.embedded_model.base import Dense, layers


@dataclass(frozen=True)
class Split:
    """``units``: expert of each unit, -1 for the shared one. ``router``: experts x hidden, a first guess."""

    units: Tensor
    router: Tensor


@torch.no_grad()
def split(dense: Dense, ids: Tensor, shared: int, experts: int) -> list[Split]:
    """One Split per layer, from what happens on ``ids`` (rows x tokens)."""
    found: list[Split] = []

    def look(down: nn.Module, inputs: tuple[Tensor]) -> None:
        assert isinstance(down, nn.Linear)
        active = inputs[0].flatten(0, 1).float()
        with torch.autocast(dense.device.type, enabled=False):
            found.append(split_layer(seen.pop(), active, down.weight, shared, experts))

    seen: list[Tensor] = []
    for layer in layers(dense.llama):
        layer.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1).float()))
        layer.mlp.down_proj.register_forward_pre_hook(look)
    dense.hidden(dense.llama, ids)
    for layer in layers(dense.llama):
        layer.mlp._forward_pre_hooks.clear()
        layer.mlp.down_proj._forward_pre_hooks.clear()
    return found


def split_layer(x: Tensor, active: Tensor, down: Tensor, shared: int, experts: int) -> Split:
    """x: tokens x hidden, active: tokens x units, down: hidden x units. The units that add most to the output are
    shared; the others are clustered by when they add to it."""
    size = active.abs() * down.norm(dim=0)
    routed = size.square().mean(0).argsort(descending=True)[shared:]
    some = torch.randperm(len(size), device=size.device)[:4096]
    units = torch.full((active.shape[1],), -1, device=x.device)
    units[routed] = balanced_kmeans(F.normalize(size[some][:, routed].T, dim=1), experts)
    return Split(units, ridge_router(x, active, down, units, experts))


def balanced_kmeans(points: Tensor, clusters: int, rounds: int = 12) -> Tensor:
    """A cluster for each row of ``points``, all of one size: points choose in turn, those with most to lose first."""
    generator = torch.Generator(device=points.device).manual_seed(0)
    centres = points[torch.randperm(len(points), generator=generator, device=points.device)[:clusters]]
    labels = torch.zeros(len(points), dtype=torch.long)
    for _ in range(rounds):
        distance = torch.cdist(points, centres).cpu()
        choices = distance.argsort(1).tolist()
        room = [len(points) // clusters] * clusters
        for point in (distance.max(1).values - distance.min(1).values).argsort(descending=True).tolist():
            labels[point] = chosen = next(cluster for cluster in choices[point] if room[cluster])
            room[chosen] -= 1
        centres = torch.stack([points[labels.to(points.device) == cluster].mean(0) for cluster in range(clusters)])
    return labels.to(points.device)


def ridge_router(x: Tensor, active: Tensor, down: Tensor, units: Tensor, experts: int) -> Tensor:
    """Ridge regression from the FFN's input to how much each expert adds to its output; the offset is dropped, and the
    scale is small, so that training begins with nearly equal shares."""
    added = [(active[:, units == expert] @ down[:, units == expert].T).norm(dim=1) for expert in range(experts)]
    inputs = F.pad(x, (0, 1), value=1.0)
    gram = inputs.T @ inputs + 1e-4 * len(x) * torch.eye(inputs.shape[1], device=x.device)
    router: Tensor = torch.linalg.solve(gram, inputs.T @ torch.stack(added, 1))[:-1].T
    return router * (0.02 / router.std())
