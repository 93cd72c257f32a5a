"""Every backend of attention against the twin, and that other sequences change nothing."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import get_args

import pytest
import torch

from engine.api import Attention
from engine.device.attention import AUTO, BACKENDS, choose
from engine.kernels import torch_attention
from engine.layers.reference import ReferenceOps
from tests.gpu.test_device_ops import Draws, make_batch

HEADS, KV_HEADS, DIM = 4, 2, 16
PHASES: list[str] = list(AUTO)
SEGMENTS = {"prefill": [(70, 58, 0), (1, 100, 1), (0, 3, 2), (66, 0, 3)], "decode": [(1, 150, 0), (1, 9, 1)]}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", BACKENDS)
def test_backends(name: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if phase not in BACKENDS[name]:
        assert name not in get_args(get_args(Attention)[PHASES.index(phase)])
        return
    monkeypatch.setattr(torch_attention, "GRID", 64)  # tiles of the first and the last, and what is left of them
    attend = import_module(BACKENDS[name][phase]).attention  # type: ignore[index]
    batch, draw = make_batch(SEGMENTS[phase]), Draws(1)
    k_pages, v_pages = torch.full((2, batch.page_table.numel(), 64, KV_HEADS, DIM), float("nan"))
    for (_, rows, position, _), table in zip(batch.segments.tolist(), batch.page_table.tolist(), strict=True):
        for number, page in enumerate(table):
            inside = max(0, min(64, position + rows - 64 * number))
            for pages in (k_pages, v_pages):
                pages[page, :inside] = draw(inside, KV_HEADS, DIM)
    q = draw(batch.tokens.shape[0], HEADS, DIM)
    got = attend(q, k_pages, v_pages, batch, DIM**-0.5)
    torch.testing.assert_close(got, ReferenceOps().attention(q, k_pages, v_pages, batch, DIM**-0.5), rtol=0, atol=1e-5)
    rows = SEGMENTS[phase][0][0]
    alone = replace(batch, segments=batch.segments[:1], page_table=batch.page_table[:1])
    assert torch.equal(attend(q[:rows], k_pages, v_pages, alone, DIM**-0.5), got[:rows])


def test_tiles_and_runs() -> None:
    tiles, rest = torch_attention.cut([(0, 100, 0, 7), (100, 7000, 60_037, 8), (7100, 1024, 2048, 9)])
    assert rest == [(0, [0, 100, 0, 7]), (1, [100, 379, 60_037, 8]), (1, [6623, 477, 66_560, 8])]
    assert tiles == [(1, 479, 60_416, 4096), (1, 4575, 64_512, 1024), (1, 5599, 65_536, 1024), (2, 7100, 2048, 1024)]
    assert list(torch_attention.runs(38_912, 1024)) == [
        (38_912, 39_936), (6144, 38_912), (2048, 6144), (1024, 2048), (0, 1024)
    ]  # fmt: skip


def test_choice() -> None:
    assert choose(("auto", "auto")).name == "triton,triton"
    chosen = choose(("torch", "auto"))
    assert chosen.name == "torch,triton" and chosen.prefill is torch_attention.attention
