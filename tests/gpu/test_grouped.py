"""Grouped expert kernels against their torch twins, in the interpreter; what must not be read is NaN or 0xFF."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.experts.layout import FORMATS, Layout
from engine.kernels import grouped, grouped_twin, pairs
from engine.kernels.grouped import Groups, Tile


def draw(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slots_of(layout: Layout, count: int) -> Tensor:
    slots = torch.full((count, -(-layout.nbytes // 256) * 256), 0xFF, dtype=torch.uint8)
    for number, slot in enumerate(slots):
        gate_up = draw(2 * layout.inner, layout.hidden, seed=number) * 0.2
        layout.encode(gate_up, draw(layout.hidden, layout.inner, seed=number + 99) * 0.2, slot[: layout.nbytes])
    return slots


def nothing(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"))


@pytest.mark.parametrize("rows", [0, 1, 40, 700])
def test_sort_pairs(rows: int) -> None:
    """In one block and in several; some experts have none."""
    ids = torch.randint(-1, 7, (rows, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(rows))
    for got, want in zip(pairs.sort_pairs(ids, 9), grouped_twin.sort_pairs(ids, 9), strict=True):
        assert got.dtype == torch.int32
        assert torch.equal(got, want)


@pytest.mark.parametrize(("name", "hidden", "inner"), [("bf16", 96, 160), ("int8", 64, 64), ("mxfp4", 32, 160)])
def test_experts_of_every_format(name: str, hidden: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 0, of few and of a tile and a rest; an expert that is not here; pairs of no expert."""
    monkeypatch.setitem(grouped.TILES, name, (Tile(32, 16, 128, 64, 4, 1, rest=16),) * 3)
    layout, experts = Layout(FORMATS[name], hidden, inner), 5
    slots = slots_of(layout, 2)
    ids = torch.tensor([[0, 3], [-1, 0], [2, -1], *[[0, 1]] * 15, *[[3, 0]] * 17], dtype=torch.int32)
    x, count = draw(ids.shape[0], hidden), ids.numel()
    slot = torch.tensor([1, -1, 0, 1, 0], dtype=torch.int32)
    groups = Groups(*pairs.sort_pairs(ids, experts)[:2], slot)
    h, out, y = nothing(count, inner), nothing(count, hidden), nothing(ids.shape[0], hidden)
    grouped.gate_up(grouped.arrange(x, layout, x.dtype), slots, layout, groups, h)
    grouped.down(h, slots, layout, groups, out)
    pairs.combine_pairs(out, ids, slot, draw(*ids.shape), y)
    want_h, want_out, want_y = nothing(count, inner).double(), nothing(count, hidden).double(), y.double()
    grouped_twin.gate_up(x.double(), slots, layout, groups, want_h)
    grouped_twin.down(want_h, slots, layout, groups, want_out)
    grouped_twin.combine_pairs(want_out, ids, slot, draw(*ids.shape).double(), want_y)
    for got, want in ((h, grouped.arrange(want_h, layout, want_h.dtype)), (out, want_out), (y, want_y)):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert y.isfinite().all()


@pytest.mark.parametrize(("name", "half"), [("int8", "*fp16"), pytest.param("mxfp4", "*bf16", marks=pytest.mark.deep)])
def test_no_product_goes_on_while_the_next_weights_are_made(tmp_path: Path, name: str, half: str) -> None:
    """It would read their registers."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kept |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", str(Path(__file__).with_name("waits_dry.py")), name, half]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [4, [0] * 4]
