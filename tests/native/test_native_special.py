"""Infinities, NaN, denormals, empty tensors: nothing leaks to other rows, instruction sets agree, nothing crashes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.layers.ops import Batch
from engine.layers.reference import ReferenceOps
from engine.native.ops import NativeOps

MakeBatch = Callable[..., Batch]
INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor(
    [0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-39, 3e38, -3e38, INF, -INF, NAN, 1.0, -1.0, 88.0, -88.0, 87.3, -87.3, 120.0]
)


def specials(seed: int, share: float, *shape: int) -> Tensor:
    """Random numbers, a share of them special ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    mask = torch.rand(*shape, generator=generator) < share
    x[mask] = SPECIAL[torch.randint(len(SPECIAL), (int(mask.sum()),), generator=generator)]
    return x


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, except that one NaN is as good as another."""
    if a.dtype != torch.float32:
        return torch.equal(a, b)
    nan = a.isnan() & b.isnan()
    return torch.equal(a.view(torch.int32)[~nan], b.view(torch.int32)[~nan])


@pytest.mark.parametrize("width", [1, 7, 16, 17, 33, 64, 129])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_instruction_sets_agree_on_special_numbers(all_native: dict[str, NativeOps], width: int, share: float) -> None:
    x, y = specials(1, share, 9, width), specials(2, share, 9, width)
    weight, matrix = specials(3, share, width), specials(4, share, 19, width)

    def run(ops: NativeOps) -> dict[str, Tensor]:
        ids, ranks = ops.route(x, (width + 1) // 2, True)
        decay, beta = ops.gdn_gates(x, y, weight, weight.flip(0).contiguous())
        return {
            "rms_norm": ops.rms_norm(x, weight, 1e-6),
            "gated_rms_norm": ops.gated_rms_norm(x, y, weight, 1e-6),
            "sigmoid_mul": ops.sigmoid_mul(x, y),
            "shared_sigmoid_mul": ops.sigmoid_mul(x, y[:, :1].contiguous()),
            "silu_mul": ops.silu_mul(torch.cat([x, y], 1)),
            "ids": ids, "ranks": ranks, "decay": decay, "beta": beta,
            "linear": ops.linear(x, ops.pack(matrix)),
            "bfloat": ops.linear(x, ops.pack(matrix.bfloat16())),
        }  # fmt: skip

    results = [run(ops) for ops in all_native.values()]
    for name, first in results[0].items():
        assert all(same(result[name], first) for result in results), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (14, 2), (24, 1)])
@pytest.mark.parametrize("position", [0, 5, 60, 130])
@pytest.mark.parametrize("poison", [INF, -INF, NAN, 3e38])
def test_attention_to_a_key_leaves_those_before_it_alone(
    all_native: dict[str, NativeOps],
    make_batch: MakeBatch,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    position: int,
    poison: float,
) -> None:
    rows, bad = 40, 23
    pages = -(-(position + rows) // 64)
    shape, size = (pages, 64, kv_heads, 48), (rows, heads, 48)
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(size, generator=generator)
    batch = make_batch([(rows, position, 0)])
    at = position + bad
    page = int(batch.page_table[0, at // 64])
    results = []
    for ops in all_native.values():
        clean = ops.attention(q, keys, values, batch, 0.1)
        for poisoned in (keys, values):
            kept = poisoned[page, at % 64].clone()
            poisoned[page, at % 64] = poison
            out = ops.attention(q, keys, values, batch, 0.1)
            poisoned[page, at % 64] = kept
            assert torch.equal(out[:bad], clean[:bad]), ops.instruction_set
            assert not torch.equal(out[bad:], clean[bad:])
            results.append(out)
    assert all(same(result, results[index % 2]) for index, result in enumerate(results))


@pytest.mark.parametrize(
    "row", [[NAN] * 9, [-INF] * 9, [1.0, NAN, *[0.0] * 7], [INF, 1.0, INF, *[0.0] * 6], [0.0] * 8 + [NAN]]
)
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_router_without_numbers_chooses_each_expert_once(
    all_native: dict[str, NativeOps], row: list[float], renormalize: bool
) -> None:
    logits = torch.tensor([[float(i) for i in range(9)], row])
    expected, _ = ReferenceOps().route(logits, 4, renormalize)
    for ops in all_native.values():
        ids, weights = ops.route(logits, 4, renormalize)
        assert torch.equal(ids, expected) and ids[1].tolist() == [0, 1, 2, 3]
        assert weights[1].isnan().all() and weights[0].isfinite().all()


@pytest.mark.parametrize(
    "call",
    [
        lambda ops: ops.pack(torch.empty(0, 4)),
        lambda ops: ops.pack(torch.empty(4, 0)),
        lambda ops: ops.pack_experts(torch.empty(0, 4, 4), torch.empty(0, 4, 2)),
        lambda ops: ops.rms_norm(torch.empty(3, 0), torch.empty(0), 1e-6),
        lambda ops: ops.rms_norm(torch.empty(0), torch.empty(0), 1e-6),
        lambda ops: ops.rms_norm(torch.tensor(1.0), torch.empty(1), 1e-6),
        lambda ops: ops.gated_rms_norm(torch.empty(3, 0), torch.empty(3, 0), torch.empty(0), 1e-6),
        lambda ops: ops.rope(torch.ones(1, 1, 4), torch.zeros(1, dtype=torch.int32), torch.empty(0, 2, 2)),
        lambda ops: ops.rope(torch.ones(1, 1, 4), torch.zeros(1, dtype=torch.int32), torch.empty(4, 0, 2)),
        lambda ops: ops.route(torch.empty(3, 0), 1, True),
    ],
)
def test_what_is_empty_is_refused(native: NativeOps, call: Callable[[NativeOps], object]) -> None:
    with pytest.raises(ValueError, match="must have shape"):
        call(native)


def test_states_and_pages_that_are_empty_are_refused(native: NativeOps, make_batch: MakeBatch) -> None:
    batch, one = make_batch([(1, 0, 0)]), torch.ones(1, 1, 8)
    with pytest.raises(ValueError, match="state must have shape"):
        native.conv(torch.ones(1, 8), torch.ones(8, 4), torch.empty(0, 8, 3), batch)
    with pytest.raises(ValueError, match="state must have shape"):
        gates = torch.ones(1, 1)
        native.gated_delta(one, one, one, gates, gates, torch.empty(0, 1, 8, 8), batch)
    with pytest.raises(ValueError, match="k_pages must have shape"):
        native.attention(one, torch.empty(0, 64, 1, 8), torch.empty(0, 64, 1, 8), batch, 1.0)


def test_no_rows_give_no_rows(native: NativeOps) -> None:
    experts = native.pack_experts(torch.ones(2, 12, 4), torch.ones(2, 4, 6))
    ids, ranks = native.route(torch.empty(0, 2), 1, True)
    assert native.linear(torch.empty(0, 4), native.pack(torch.ones(3, 4))).shape == (0, 3)
    assert native.rms_norm(torch.empty(0, 4), torch.ones(4), 1e-6).shape == (0, 4)
    assert native.experts(torch.empty(0, 4), ids, ranks, experts).shape == (0, 4)
    assert native.silu_mul(torch.empty(0, 4)).shape == (0, 2)


def test_reading_reads_every_word(native: NativeOps) -> None:
    memory = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected = 0
    for word in memory.view(torch.int64).tolist():
        expected ^= word & (1 << 64) - 1
    assert native.read(memory) == expected
