"""Prefill kernels against their torch twins, in the interpreter: rows of several sequences, odd sizes, snapshots."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.kernels import chunked_delta
from engine.layers.ops import Batch
from engine.layers.reference import ReferenceOps
from tests.gpu.test_device_ops import Draws, make_batch

TWIN = ReferenceOps()
Delta = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Batch], Tensor]


def error(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("pace", "half"), [("mixed", torch.float16), ("none", torch.float32), ("steep", torch.float32)]
)
def test_chunked_delta(pace: str, half: torch.dtype) -> None:
    """The state goes on token by token in the twin, in float64. Snapshots on the grid, off it, at the end, and before
    the first whole chunk; keys that are much alike."""
    rows = [(130, 0, 0), (1, 100, 1), (0, 3, 2), (90, 50, 3)]
    batch = make_batch(rows, [(0, 64, 4), (0, 130, 5), (3, 14, 6), (3, 5, 7), (3, 20, 8), (0, 64, 9)])
    draw, total, key_heads, heads, dim = Draws(3), 221, 1, 2, 16
    q, k = draw(total, key_heads, dim), draw(total, key_heads, dim) * 0.5 + 1
    v, beta, state = draw(total, heads, 24), torch.sigmoid(draw(total, heads)), draw(10, heads, dim, 24)
    slow, fast = -1e-4 * draw(total, heads).abs(), -20 - draw(total, heads).abs()
    decay = {"mixed": torch.where(draw(total, heads) > 1, fast, slow), "none": slow, "steep": fast}[pace]
    exact = state.double()
    want = TWIN.gated_delta(q.double(), k.double(), v.double(), decay.double(), beta.double(), exact, batch)
    got = chunked_delta.gated_delta(q, k, v, decay, beta, state, batch, half)
    assert error(got, want) < 1e-4
    for slot in (0, 1, *range(3, 10)):
        assert error(state[slot], exact[slot]) < 1e-4, slot
