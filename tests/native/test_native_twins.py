"""Each native operation against its torch twin, and the same bits from every instruction set and thread count.

Shapes are mostly no multiples of anything.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.layers.ops import Batch, Ops
from engine.layers.reference import ReferenceOps
from engine.native.ops import NativeOps

MakeBatch = Callable[..., Batch]
Run = Callable[[Ops], tuple[Tensor, ...]]

TWIN = ReferenceOps()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


class Draws:
    """The same random tensors for every implementation."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * scale

    def choices(self, rows: int, count: int, k: int) -> Tensor:
        order = [torch.randperm(count, generator=self._generator)[:k] for _ in range(rows)]
        return torch.stack(order).int() if rows else torch.zeros((0, k), dtype=torch.int32)


def compare(run: Run, all_native: dict[str, NativeOps], tolerance: float = 2e-5) -> None:
    expected = run(TWIN)
    results = {name: run(ops) for name, ops in all_native.items()}
    first = next(iter(results.values()))
    for name, actual in results.items():
        for index, (got, want, reference) in enumerate(zip(actual, expected, first, strict=True)):
            size = max(1.0, want.abs().max().item()) if want.numel() else 1.0
            torch.testing.assert_close(got, want, rtol=0, atol=tolerance * size, msg=lambda m: f"{name} {index}: {m}")  # noqa: B023
            assert torch.equal(got, reference), f"{name}, output {index}: other bits"


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40), inner=st.integers(1, 300), out=st.integers(1, 100), dtype=DTYPES, seed=st.integers(0, 9)
)
def test_linear(
    all_native: dict[str, NativeOps], rows: int, inner: int, out: int, dtype: torch.dtype, seed: int
) -> None:
    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(seed)
        packed = ops.pack(draw(out, inner).to(dtype))
        x = draw(rows, inner)
        return ops.linear(x, packed), ops.linear(x, packed, draw(out))

    compare(run, all_native)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 40),
    hidden=st.integers(1, 80),
    inner=st.integers(1, 50),
    count=st.integers(1, 9),
    data=st.data(),
    dtype=DTYPES,
)
def test_experts(
    all_native: dict[str, NativeOps],
    rows: int,
    hidden: int,
    inner: int,
    count: int,
    data: st.DataObject,
    dtype: torch.dtype,
) -> None:
    k = data.draw(st.integers(1, count))

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(rows)
        gate_up, down = draw(count, 2 * inner, hidden, scale=0.3), draw(count, hidden, inner, scale=0.3)
        packed = ops.pack_experts(gate_up.to(dtype), down.to(dtype))
        return (ops.experts(draw(rows, hidden), draw.choices(rows, count, k), draw(rows, k), packed),)

    compare(run, all_native)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("count", [1, 7, 16, 130])
def test_route(all_native: dict[str, NativeOps], count: int, renormalize: bool) -> None:
    logits = Draws(count)(33, count, scale=3.0)
    compare(lambda ops: ops.route(logits, min(count, 6), renormalize), all_native)


def test_route_breaks_ties_to_the_lower_index(all_native: dict[str, NativeOps]) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 5])
    for ops in (*all_native.values(), TWIN):
        assert ops.route(logits, 4, True)[0].tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("dim", [1, 15, 16, 37, 256])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_norms_and_activations(all_native: dict[str, NativeOps], rows: int, dim: int) -> None:
    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(dim)
        x, gate, weight = draw(rows, 3, dim, scale=4), draw(rows, 3, dim, scale=9), draw(dim)
        a, b = draw(rows, dim, scale=25), draw(rows, dim, scale=25)
        return (
            ops.rms_norm(x, weight, 1e-6),
            ops.rms_norm(x, weight, 1e-5, 1.0),
            ops.gated_rms_norm(x, gate, weight, 1e-6),
            ops.silu_mul(torch.cat((a, b), dim=1)),
            ops.sigmoid_mul(a, b),
            ops.sigmoid_mul(a, b[:, :1].contiguous()),
            ops.sigmoid_mul(a, b[:, :1], b),
            *ops.gdn_gates(a, b, draw(dim), draw(dim)),
        )

    compare(run, all_native)


def test_extreme_values(all_native: dict[str, NativeOps]) -> None:
    x = torch.tensor([[-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e30]])
    ones = torch.ones_like(x)
    compare(lambda ops: (ops.sigmoid_mul(ones, x), ops.silu_mul(torch.cat((x.clamp(-1e4, 1e4), ones), 1))), all_native)
    for ops in all_native.values():
        assert ops.sigmoid_mul(ones[:, :1].contiguous(), torch.full((1, 1), float("nan"))).isnan().all()


@pytest.mark.parametrize("rotary", [2, 6, 10, 64])
def test_rope(all_native: dict[str, NativeOps], rotary: int) -> None:
    def run(ops: Ops) -> tuple[Tensor, ...]:
        x = Draws(rotary)(4, 3, 70)
        ops.rope(x, torch.tensor([0, 1, 5000, 262143], dtype=torch.int32), ops.rope_table(262144, rotary, 1e6))
        return (x,)

    compare(run, all_native)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("channels", [1, 70])
def test_conv(all_native: dict[str, NativeOps], make_batch: MakeBatch, channels: int, width: int) -> None:
    batch = make_batch([(9, 0, 0), (1, 100, 1), (0, 3, 2), (2, 63, 3)], [(0, 4, 4), (0, 9, 5), (3, 1, 6), (0, 4, 7)])

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(width)
        state = draw(8, channels, width - 1)
        return ops.conv(draw(12, channels), draw(channels, width), state, batch), state

    compare(run, all_native)


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim"), [(1, 1, 8, 8), (2, 4, 12, 40), (2, 2, 33, 64)]
)
def test_gated_delta(
    all_native: dict[str, NativeOps],
    make_batch: MakeBatch,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
) -> None:
    batch = make_batch([(70, 0, 0), (1, 100, 1), (0, 3, 2), (17, 63, 3)], [(0, 64, 4), (0, 70, 5), (3, 1, 6)])

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(key_dim)
        keys, values = (88, key_heads, key_dim), (88, value_heads, value_dim)
        decay, beta = -draw(88, value_heads).abs(), torch.sigmoid(draw(88, value_heads))
        state = draw(8, value_heads, key_dim, value_dim)
        return ops.gated_delta(draw(*keys), draw(*keys), draw(*values), decay, beta, state, batch), state

    compare(run, all_native, 5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 20), (8, 1, 64), (2, 2, 256), (30, 1, 8)])
def test_attention(
    all_native: dict[str, NativeOps],
    make_batch: MakeBatch,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    batch = make_batch([(70, 0, 0), (1, 130, 1), (0, 3, 2), (17, 63, 3)])
    pages = batch.page_table.numel()

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(head_dim)
        k_pages = draw(pages, 64, kv_heads, head_dim).to(dtype)
        v_pages = draw(pages, 64, kv_heads, head_dim).to(dtype)
        ops.write_pages(draw(88, kv_heads, head_dim), draw(88, kv_heads, head_dim), k_pages, v_pages, batch)
        out = ops.attention(draw(88, heads, head_dim), k_pages, v_pages, batch, head_dim**-0.5)
        return out, k_pages.float(), v_pages.float()

    compare(run, all_native)


def test_attention_survives_large_scores(all_native: dict[str, NativeOps], make_batch: MakeBatch) -> None:
    batch = make_batch([(3, 125, 0)])

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(1)
        pages = draw(2, 64, 1, 16, scale=40)
        return (ops.attention(draw(3, 2, 16, scale=40), pages, pages, batch, 1.0),)

    compare(run, all_native)
