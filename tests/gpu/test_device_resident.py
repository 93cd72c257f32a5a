"""Experts that are all on the device against the torch twin with the weights that their format holds."""

from __future__ import annotations

import pytest
import torch

from engine.experts.layout import FORMATS, Layout
from engine.kernels.resident import ResidentExperts
from engine.layers.ops import CPU
from engine.layers.reference import ReferenceOps

EXPERTS, HIDDEN, INNER = 3, 64, 32


@pytest.mark.parametrize("name", FORMATS)
def test_resident_experts_equal_the_twin(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) * 0.2
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) * 0.2
    x, weights = torch.randn(3, HIDDEN, generator=generator), torch.rand(3, 2, generator=generator)
    ids = torch.tensor([[2, 0], [1, 2], [0, 1]], dtype=torch.int32)
    resident, layout = ResidentExperts(FORMATS[name], CPU), Layout(FORMATS[name], HIDDEN, INNER)
    resident.pack(down.transpose(1, 2).repeat(1, 2, 1), gate_up.transpose(1, 2)[..., :INNER])  # another layer before it
    held = []
    for expert in range(EXPERTS):
        blob = torch.empty(layout.nbytes, dtype=torch.uint8)
        layout.encode(gate_up[expert], down[expert], blob)
        held.append(layout.decode(blob))
    twin = ReferenceOps()
    want = twin.experts(x, ids, weights, twin.pack_experts(*(torch.stack(each) for each in zip(*held, strict=True))))
    layer = resident.pack(gate_up, down)
    torch.testing.assert_close(resident.run(x, ids, weights, layer), want, rtol=1e-4, atol=1e-4)


def test_rows_without_experts_give_zero() -> None:
    resident = ResidentExperts(FORMATS["bf16"], CPU)
    layer = resident.pack(torch.ones(1, 64, 32), torch.ones(1, 32, 32))
    ids = torch.tensor([[0], [-1]], dtype=torch.int32)
    out = resident.run(torch.ones(2, 32), ids, torch.ones(2, 1), layer)
    assert out[0].all() and not out[1].any()
