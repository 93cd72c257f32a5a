"""Prefill kernels against their torch twins, in the interpreter: rows of several sequences, odd sizes, snapshots."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.kernels import chunked_delta, prefill_attention, prefill_conv
from engine.kernels.prefill_attention import Tiling
from engine.layers.ops import Batch
from engine.layers.reference import ReferenceOps
from tests.gpu.test_device_ops import Draws, make_batch

TWIN = ReferenceOps()
Delta = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Batch], Tensor]


def error(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(("pace", "dtype"), [("mixed", torch.float16), ("apart", torch.float32)])
def test_chunked_delta(pace: str, dtype: torch.dtype) -> None:
    """The state goes on token by token in the twin, in float64. Snapshots on the grid, off it, at the end, and before
    the first whole chunk; keys that are much alike."""
    rows = [(130, 0, 0), (1, 100, 1), (0, 3, 2), (90, 50, 3)]
    batch = make_batch(rows, [(0, 64, 4), (0, 130, 5), (3, 14, 6), (3, 5, 7), (3, 20, 8), (0, 64, 9)])
    draw, total, key_heads, heads, dim = Draws(3), 221, 1, 2, 16
    q, k = draw(total, key_heads, dim).to(dtype), (draw(total, key_heads, dim) * 0.5 + 1).to(dtype)
    v, beta, state = draw(total, heads, 24).to(dtype), torch.sigmoid(draw(total, heads)), draw(10, heads, dim, 24)
    slow, fast = -1e-4 * draw(total, heads).abs(), -20 - draw(total, heads).abs()
    parts = torch.tensor([False, True]) if pace == "apart" else draw(total, heads) > 1
    decay = torch.where(parts, fast, slow)
    decay[5, 1], decay[150, 1] = -torch.inf, -1e30
    exact = state.double()
    want = TWIN.gated_delta(q.double(), k.double(), v.double(), decay.double(), beta.double(), exact, batch)
    got = chunked_delta.gated_delta(q, k, v, decay, beta, state, batch)
    most = 1e-3 if dtype == torch.float16 else 1e-6
    assert got.dtype == dtype and error(got, want) < most
    for slot in range(10):
        assert error(state[slot], exact[slot]) < most, slot


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "programs"),
    [(6, 2, 20, torch.float16, 1), (6, 2, 20, torch.float32, 40), (2, 2, 16, torch.float32, 64)],
)
def test_prefill_attention(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Behind histories, decode rows beside prefill, keys in one part and in several; what lies beyond is NaN."""
    monkeypatch.setattr(prefill_attention, "PROGRAMS", programs)
    monkeypatch.setattr(prefill_attention, "LEAST", 1)
    batch = make_batch([(60, 150, 0), (1, 200, 1), (0, 3, 2), (10, 0, 3)])
    draw = Draws(head_dim)
    k_pages, v_pages = torch.full((2, batch.page_table.numel(), 64, kv_heads, head_dim), float("nan"), dtype=dtype)
    for (_, rows, position, _), table in zip(batch.segments.tolist(), batch.page_table.tolist(), strict=True):
        for number, page in enumerate(table):
            inside = max(0, min(64, position + rows - 64 * number))
            for pages in (k_pages, v_pages):
                pages[page, :inside] = draw(inside, kv_heads, head_dim).to(dtype)
    q = draw(71, heads, head_dim)
    tiling = Tiling(128, 32, 4, 1)
    want = TWIN.attention(q, k_pages, v_pages, batch, head_dim**-0.5)
    for given in {torch.float32, dtype}:
        got = prefill_attention.attention(q.to(given), k_pages, v_pages, batch, head_dim**-0.5, tiling)
        assert got.dtype == given
        torch.testing.assert_close(got.float(), want, rtol=0, atol=1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize(("width", "dtype"), [(1, torch.float32), (4, torch.float16)])
def test_prefill_conv(width: int, dtype: torch.dtype) -> None:
    batch = make_batch(
        [(70, 5, 0), (1, 100, 1), (0, 3, 2), (2, 63, 3)], [(0, 4, 4), (0, 70, 5), (3, 1, 6), (0, 4, 7), (0, 1, 8)]
    )
    draw = Draws(width)
    wide, weight, state = draw(73, 180).to(dtype), draw(150, width), draw(9, 150, width - 1)
    twin = state.clone()
    got = prefill_conv.conv(wide[:, :150], weight, state, batch)
    want = TWIN.conv(wide[:, :150].float(), weight, twin, batch).to(dtype)
    torch.testing.assert_close(got, want, rtol=1e-3 if dtype == torch.float16 else 0, atol=1e-5)
    assert torch.equal(state, twin)


@pytest.mark.parametrize("what", ["decay", "state"])
def test_what_is_no_number_stays_in_its_sequence(what: str) -> None:
    """And is seen there: in all that comes after it, not in the chunks before."""
    batch = make_batch([(20, 50, 0), (70, 0, 1), (3, 63, 2)], [(0, 14, 3), (1, 64, 4), (1, 70, 5)])
    draw, first = Draws(5), 85  # the 66th row of the second sequence
    given = {name: draw(93, 1, 16).half() for name in ("q", "k", "v")}
    given |= {"decay": -draw(93, 1).abs(), "beta": torch.sigmoid(draw(93, 1)), "state": draw(6, 1, 16, 16)}
    spoilt = {name: one.clone() for name, one in given.items()}
    spoilt[what][1 if what == "state" else first].view(-1)[0] = float("nan")
    wanted, got = (chunked_delta.gated_delta(*one.values(), batch) for one in (given, spoilt))
    others = [*range(20), *range(90, 93)]
    assert torch.equal(got[others], wanted[others])
    assert torch.equal(spoilt["state"][[0, 2, 3]], given["state"][[0, 2, 3]])
    chunk, since = (20, 20) if what == "state" else (84, first)
    assert torch.equal(got[20:chunk], wanted[20:chunk]) and got[since:90].isnan().flatten(1).any(dim=1).all()
    assert spoilt["state"][[1, 5]].isnan().flatten(1).any(dim=1).all()
    assert bool(spoilt["state"][4].isnan().any()) == (what == "state")
