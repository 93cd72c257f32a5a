"""A small pool of random experts per format."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from engine.experts.layout import FORMATS, Layout
from engine.experts.pool import Pool

MakePool = Callable[..., Pool]


@pytest.fixture(scope="session")
def make_pool() -> MakePool:
    @cache
    def make(name: str, hidden: int = 96, inner: int = 160, layers: int = 2, experts: int = 5) -> Pool:
        pool = Pool(Layout(FORMATS[name], hidden, inner), layers, experts)
        generator = torch.Generator().manual_seed(hidden + inner)
        for layer in range(layers):
            for expert in range(experts):
                gate_up = torch.randn(2 * inner, hidden, generator=generator) * 0.2
                pool.put(layer, expert, gate_up, torch.randn(hidden, inner, generator=generator) * 0.2)
        return pool

    return make
