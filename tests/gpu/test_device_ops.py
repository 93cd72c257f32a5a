"""Each device operation against its torch twin, in the interpreter: float32, and float16 where 16-bit weights are due.

Shapes are mostly no multiples of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from engine.api import PAGE
from engine.kernels import attention
from engine.kernels.ops import DeviceOps
from engine.layers.ops import CPU, Batch, Ops
from engine.layers.reference import ReferenceOps

Run = Callable[[Ops], tuple[Tensor, ...]]

TWIN = ReferenceOps()


class NoExperts:
    def pack(self, gate_up: Tensor, down: Tensor) -> None:
        raise AssertionError("not here")

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, layer: None) -> Tensor:
        raise AssertionError("not here")


DEVICE = DeviceOps(NoExperts(), CPU)


class Draws:
    """The same random tensors for every implementation."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * scale


def compare(run: Run, tolerance: float = 2e-5) -> None:
    for index, (got, want) in enumerate(zip(run(DEVICE), run(TWIN), strict=True)):
        size = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance * size, msg=lambda m: f"{index}: {m}")  # noqa: B023


def make_batch(
    segments: Sequence[tuple[int, int, int]], snapshots: Sequence[tuple[int, int, int]] = (), padding: int = 0
) -> Batch:
    """Segments as (rows, position, slot), one after another, then rows of no sequence. Pages are dealt out backwards,
    so that physical and absolute order differ."""
    first, rows = 0, []
    for count, position, slot in segments:
        rows.append((first, count, position, slot))
        first += count
    width = max(-(-(position + count) // PAGE) for count, position, _ in segments)
    pages = [[width * len(segments) - 1 - index * width - i for i in range(width)] for index in range(len(segments))]
    positions = [position + i for count, position, _ in segments for i in range(count)] + [0] * padding
    return Batch(
        tokens=torch.zeros(first + padding, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int32),
        segments=torch.tensor(rows, dtype=torch.int32),
        page_table=torch.tensor(pages, dtype=torch.int32),
        snapshots=torch.tensor(list(snapshots), dtype=torch.int32).reshape(-1, 3),
        logit_rows=torch.zeros(0, dtype=torch.int64),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("out", "inner"), [(1, 300), (70, 33), (65, 700), (5, 5000), (2, 1)])
@pytest.mark.parametrize("rows", [0, 1, 7, 16, 17])
def test_linear(rows: int, out: int, inner: int, dtype: torch.dtype) -> None:
    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(inner)
        packed = ops.pack(draw(out, inner).to(dtype))
        x = draw(rows, inner)
        return ops.linear(x, packed), ops.linear(x, packed, draw(out)), ops.linear(x, packed)

    compare(run)


@pytest.mark.parametrize("largest", [8000.0, 9000.0, float("inf"), float("nan")])
def test_bfloat16_weights_become_float16_where_they_fit(largest: float) -> None:
    weight = Draws(7)(9, 65).bfloat16()
    weight[3, 4] = largest
    packed, fits = DEVICE.pack(weight), largest == 8000
    assert packed.matrix.dtype == (torch.float16 if fits else torch.bfloat16)
    assert torch.equal(packed.matrix.float().nan_to_num() / packed.unit, weight.float().nan_to_num())
    if fits:
        for rows in (1, 5, 17):
            compare(lambda ops: (ops.linear(Draws(rows)(rows, 65, scale=1e5), ops.pack(weight)),))  # noqa: B023


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e5])
def test_inputs_as_float16_lose_no_more_than_as_bfloat16(size: float) -> None:
    x, unit = Draws(3)(64, 512, scale=size), DEVICE.pack(Draws(4)(8, 512).bfloat16()).unit
    lost, allowed = ((kept - x).norm() for kept in ((x / unit).half().float() * unit, x.bfloat16().float()))
    assert lost < allowed


def test_a_row_of_linear_is_the_same_in_any_company() -> None:
    draw = Draws(0)
    packed, x = DEVICE.pack(draw(70, 700)), draw(16, 700)
    many = DEVICE.linear(x, packed)
    for rows in (slice(0, 2), slice(3, 9), slice(5, 16)):
        assert torch.equal(DEVICE.linear(x[rows], packed), many[rows])
    torch.testing.assert_close(DEVICE.linear(x[:1], packed), many[:1])  # another order


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("count", [1, 7, 16, 130])
def test_route(count: int, renormalize: bool) -> None:
    logits = Draws(count)(9, count, scale=3.0)
    compare(lambda ops: ops.route(logits, min(count, 6), renormalize))


def test_route_breaks_ties_to_the_lower_index() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 5])
    assert DEVICE.route(logits, 4, True)[0].tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]


def test_route_names_experts_that_exist_whatever_the_logits() -> None:
    logits = torch.tensor([[float("nan")] * 5, [0.0, float("nan"), 1.0, 2.0, 3.0], [float("inf")] * 5])
    ids, weights = DEVICE.route(logits, 3, True)
    assert ((ids >= 0) & (ids < 5)).all()
    assert weights.isnan().all()


@pytest.mark.parametrize("dim", [1, 15, 37, 256])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_norms_and_activations(rows: int, dim: int) -> None:
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

    compare(run)


def test_slices_of_a_packed_linear_layer() -> None:
    batch = make_batch([(3, 62, 0), (1, 5, 1)], [(0, 2, 2)])

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(8)
        wide, mixed = draw(4, 80), draw(4, 96)
        q, gate = wide[:, :60].view(4, 3, 20).chunk(2, dim=2)
        state, window, pages = draw(3, 4, 8, 12), draw(3, 16, 3), draw(4, 64, 1, 10)
        keys, values = mixed[:, :32].view(4, 4, 8), mixed[:, 40:88].view(4, 4, 12)
        ops.write_pages(q[:, :1], gate[:, 1:2], pages, pages.flip(0), batch)
        ids, weights = ops.route(wide[:, 3:14], 3, True)
        return (
            ops.rms_norm(q, draw(10), 1e-6),
            ops.gated_rms_norm(q.contiguous(), gate, draw(10), 1e-6),
            ops.sigmoid_mul(q.contiguous(), gate),
            ops.sigmoid_mul(wide[:, :7], wide[:, 70:71], wide[:, 7:14]),
            ops.silu_mul(wide[:, 4:24]),
            *ops.gdn_gates(wide[:, 5:8], wide[:, 8:11], draw(3), draw(3)),
            ops.conv(wide[:, 60:76], draw(16, 4), window, batch),
            ops.gated_delta(keys, keys, values, -draw(4, 4).abs(), draw(4, 4), state, batch),
            ids.float(), weights, window, state, pages,
        )  # fmt: skip

    compare(run)


def test_extreme_values() -> None:
    x = torch.tensor([[-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e30]])
    ones = torch.ones_like(x)
    compare(lambda ops: (ops.sigmoid_mul(ones, x), ops.silu_mul(torch.cat((x.clamp(-1e4, 1e4), ones), 1))))
    nothing = torch.zeros(9)
    decay, want = (ops.gdn_gates(x, x, nothing, nothing)[0] for ops in (DEVICE, TWIN))
    torch.testing.assert_close(decay, want, rtol=1e-5, atol=0)
    small = torch.linspace(-30, 0, 9)[None]
    decay, want = (ops.gdn_gates(small, small, nothing, nothing)[0] for ops in (DEVICE, TWIN))
    torch.testing.assert_close(decay, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rotary", [2, 6, 10, 64])
def test_rope(rotary: int) -> None:
    def run(ops: Ops) -> tuple[Tensor, ...]:
        x = Draws(rotary)(4, 3, 70)
        ops.rope(x, torch.tensor([0, 1, 5000, 16383], dtype=torch.int32), ops.rope_table(16384, rotary, 1e6))
        return (x,)

    compare(run)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("channels", [1, 150])
def test_conv(channels: int, width: int) -> None:
    batch = make_batch([(9, 0, 0), (1, 100, 1), (0, 3, 2), (2, 63, 3)], [(0, 4, 4), (0, 9, 5), (3, 1, 6), (0, 4, 7)])

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(width)
        state = draw(8, channels, width - 1)
        return ops.conv(draw(12, channels), draw(channels, width), state, batch), state

    compare(run)


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim"), [(1, 1, 8, 8), (2, 4, 12, 40), (2, 2, 33, 64)]
)
def test_gated_delta(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> None:
    batch = make_batch([(9, 0, 0), (1, 100, 1), (0, 3, 2), (5, 63, 3)], [(0, 4, 4), (0, 9, 5), (3, 1, 6), (0, 4, 7)])

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(key_dim)
        keys, values = (15, key_heads, key_dim), (15, value_heads, value_dim)
        decay, beta = -draw(15, value_heads).abs(), torch.sigmoid(draw(15, value_heads))
        state = draw(8, value_heads, key_dim, value_dim)
        return ops.gated_delta(draw(*keys), draw(*keys), draw(*values), decay, beta, state, batch), state

    compare(run, 5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 20), (8, 1, 64), (18, 1, 8)])
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    batch = make_batch([(12, 54, 0), (1, 700, 1), (0, 3, 2), (2, 255, 3), (1, 0, 4)])
    pages = batch.page_table.numel()

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(head_dim)
        k_pages = draw(pages, 64, kv_heads, head_dim).to(dtype)
        v_pages = draw(pages, 64, kv_heads, head_dim).to(dtype)
        ops.write_pages(draw(16, kv_heads, head_dim), draw(16, kv_heads, head_dim), k_pages, v_pages, batch)
        out = ops.attention(draw(16, heads, head_dim), k_pages, v_pages, batch, head_dim**-0.5)
        return out, k_pages.float(), v_pages.float()

    compare(run)


def test_attention_survives_large_scores() -> None:
    batch = make_batch([(3, 125, 0)])

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(1)
        pages = draw(2, 64, 1, 16, scale=40)
        return (ops.attention(draw(3, 2, 16, scale=40), pages, pages, batch, 1.0),)

    compare(run)


def test_a_row_of_attention_is_the_same_in_any_company_and_under_any_width_of_the_table() -> None:
    draw = Draws(2)
    pages, q = draw(16, 64, 2, 20), draw(2, 4, 20)
    both = make_batch([(1, 300, 0), (1, 500, 1)])
    together = DEVICE.attention(q, pages, pages, both, 0.2)
    alone = make_batch([(1, 300, 0)])
    table = both.page_table[:1, :5].contiguous()
    alone = Batch(alone.tokens, alone.positions, alone.segments, table, alone.snapshots, alone.logit_rows)
    assert torch.equal(DEVICE.attention(q[:1], pages, pages, alone, 0.2), together[:1])


def test_it_does_not_matter_which_program_of_attention_takes_which_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, batch = Draws(6), make_batch([(1, 700, 0), (1, 90, 1)])
    pages, q = draw(22, 64, 2, 20), draw(2, 4, 20)
    many = DEVICE.attention(q, pages, pages, batch, 0.2)
    monkeypatch.setattr(attention, "PROGRAMS", 1)
    assert torch.equal(DEVICE.attention(q, pages, pages, batch, 0.2), many)


def test_what_lies_beyond_a_sequence_does_not_matter() -> None:
    draw = Draws(3)
    k_pages, v_pages, q = draw(2, 64, 1, 16), draw(2, 64, 1, 16), draw(1, 2, 16)
    batch = make_batch([(1, 70, 0)])
    before = DEVICE.attention(q, k_pages, v_pages, batch, 0.25)
    last = int(batch.page_table[0, 1])
    k_pages[last, 7:], v_pages[last, 7:] = float("nan"), float("nan")
    assert torch.equal(DEVICE.attention(q, k_pages, v_pages, batch, 0.25), before)


def test_rows_of_no_sequence_change_nothing() -> None:
    draw, batch = Draws(4), make_batch([(1, 70, 0)], padding=2)
    pages, other = draw(2, 64, 1, 16), draw(3, 1, 16)
    untouched = pages.clone()
    DEVICE.write_pages(other, other, pages, pages.clone(), batch)
    assert (pages != untouched).sum() == 16
    out = DEVICE.attention(draw(3, 2, 16), pages, pages, batch, 0.25)
    assert out[0].abs().min() > 0 and not out[1:].any()


def test_copy_state() -> None:
    state = Draws(5)(3, 4, 5)
    DEVICE.copy_state(state, 2, 0)
    assert torch.equal(state[0], state[2]) and not torch.equal(state[1], state[2])
