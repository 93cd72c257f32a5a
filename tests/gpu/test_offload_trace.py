"""Drawn routing hits as often as it was told to."""

from __future__ import annotations

import pytest
import torch

from engine.bench_trace import ForcedRouting


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.9, 1.0])
def test_hits_come_at_the_rate(rate: float) -> None:
    layers, experts, rows, k = 20, 32, 4, 6
    slot_of = torch.full((layers, experts), -1, dtype=torch.int32)
    slot_of[:, ::3] = 5
    slot_of[:, 1] = 6  # there in part: neither
    lacks = (slot_of == 6).int()
    routing = ForcedRouting(layers, experts, rows, k, torch.device("cpu"))
    hits = 0
    for _ in range(10):
        routing.draw(slot_of.flatten(), rate, lacks.flatten())
        assert routing.ids.sort(dim=2).values.diff(dim=2).min() > 0
        assert not (routing.ids == 1).any()
        hits += int((routing.ids % 3 == 0).sum())
    total = 10 * layers * rows * k
    deviation = (total * rate * (1 - rate)) ** 0.5
    assert abs(hits - rate * total) <= 5 * deviation
