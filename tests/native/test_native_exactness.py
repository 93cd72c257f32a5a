"""A row's bits depend on that row and its own history only: not on company, chunking or threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.layers.ops import Batch
from engine.native.ops import NativeOps

MakeBatch = Callable[..., Batch]
ROWS = (1, 2, 3, 11, 12, 13, 25, 64)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_of_products(dtype: torch.dtype, threads: int) -> None:
    ops = NativeOps(threads=threads)
    x, weight = random(1, 64, 333), ops.pack(random(2, 130, 333).to(dtype))
    experts = ops.pack_experts(random(3, 5, 2 * 40, 333).to(dtype), random(4, 5, 333, 40).to(dtype))
    ids, ranks = ops.route(random(5, 64, 5), 3, True)
    whole, routed = ops.linear(x, weight), ops.experts(x, ids, ranks, experts)
    for rows in ROWS:
        for first in (0, 64 - rows):
            part = slice(first, first + rows)
            assert torch.equal(ops.linear(x[part], weight), whole[part])
            assert torch.equal(ops.experts(x[part], ids[part], ranks[part], experts), routed[part])


def test_threads_give_the_same_bits() -> None:
    x, weight = random(1, 20, 500), random(2, 300, 500)
    results = [ops.linear(x, ops.pack(weight)) for ops in (NativeOps(threads=t) for t in (1, 2, 5))]
    assert all(torch.equal(result, results[0]) for result in results)


def test_layers_packed_as_one_give_the_bits_that_each_gives(native: NativeOps) -> None:
    x, weights = random(1, 9, 100), [random(2, 50, 100), random(3, 1, 100), random(4, 33, 100)]
    parts = native.linear(x, native.pack(torch.cat(weights))).split([50, 1, 33], dim=1)
    assert all(torch.equal(native.linear(x, native.pack(w)), part) for w, part in zip(weights, parts, strict=True))
    for part in parts:
        norm, copy = torch.ones(part.shape[1]), part.contiguous()
        assert torch.equal(native.rms_norm(part, norm, 1e-6), native.rms_norm(copy, norm, 1e-6))
        assert torch.equal(native.sigmoid_mul(part, parts[1], part), copy + native.sigmoid_mul(copy, parts[1]))


def test_rows_of_norms_and_activations(native: NativeOps) -> None:
    x, gate, weight = random(1, 64, 200), random(2, 64, 200), random(3, 200)
    table, positions = native.rope_table(64, 20, 1e4), torch.arange(64, dtype=torch.int32)

    def run(part: slice) -> tuple[Tensor, ...]:
        rotated = x[part].reshape(-1, 5, 40).clone()
        native.rope(rotated, positions[part], table)
        return (
            native.rms_norm(x[part], weight, 1e-6),
            native.gated_rms_norm(x[part], gate[part], weight, 1e-6),
            native.silu_mul(x[part]),
            native.sigmoid_mul(x[part], gate[part]),
            *native.route(x[part], 9, True),
            *native.gdn_gates(x[part], gate[part], weight, weight),
            rotated,
        )

    whole = run(slice(0, 64))
    for first in (0, 1, 31, 63):
        alone = run(slice(first, first + 1))
        assert all(torch.equal(a, b[first : first + 1]) for a, b in zip(alone, whole, strict=True))


@dataclass
class Sequences:
    """Two sequences of one recurrent and one attention layer, fed in any chunks, together or alone."""

    ops: NativeOps
    make_batch: MakeBatch
    dtype: torch.dtype
    length: int = 150

    def __post_init__(self) -> None:
        self.inputs = random(7, 2, self.length, 48)
        self.pages = random(8, 6, 64, 1, 24).to(self.dtype), random(9, 6, 64, 1, 24).to(self.dtype)
        self.conv_state = torch.zeros(8, 48, 3)
        self.delta_state = torch.zeros(8, 2, 8, 24)
        self.fed = [0, 0]
        self.out: list[list[Tensor]] = [[], []]

    def feed(self, chunks: Sequence[tuple[int, int]], snapshots: Sequence[tuple[int, int, int]] = ()) -> None:
        """``chunks``: (sequence, rows) of one step."""
        tables = ((4, 1, 3), (0, 5, 2))
        batch = self.make_batch(
            [(rows, self.fed[sequence], sequence) for sequence, rows in chunks],
            snapshots,
            [tables[sequence] for sequence, _ in chunks],
        )
        x = torch.cat([self.inputs[s, self.fed[s] : self.fed[s] + rows] for s, rows in chunks])
        y = self.ops.conv(x, random(10, 48, 4), self.conv_state, batch)
        q, k, v = (part.contiguous() for part in y.tensor_split((8, 16), dim=1))
        v = torch.cat((v, v[:, :16]), dim=1).view(-1, 2, 24)
        decay, beta = self.ops.gdn_gates(x[:, :2].contiguous(), y[:, :2].contiguous(), random(11, 2), random(12, 2))
        y = self.ops.gated_delta(q.view(-1, 1, 8), k.view(-1, 1, 8), v, decay, beta, self.delta_state, batch)
        self.ops.write_pages(y[:, :1].contiguous(), y[:, 1:].contiguous(), *self.pages, batch)
        y = self.ops.attention(torch.cat((y, y, -y), dim=1), *self.pages, batch, 0.2)
        for (sequence, rows), part in zip(chunks, y.split([rows for _, rows in chunks]), strict=True):
            self.out[sequence].append(part)
            self.fed[sequence] += rows

    def outputs(self, sequence: int) -> Tensor:
        return torch.cat(self.out[sequence])

    def state(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.conv_state[slot], self.delta_state[slot]


def equal(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


SIZES = st.integers(0, 70)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.tuples(SIZES, SIZES, st.booleans()), max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_chunks_and_company(
    native: NativeOps, make_batch: MakeBatch, steps: list[tuple[int, int, bool]], dtype: torch.dtype
) -> None:
    """Each alone in one chunk, against both together in any chunks and order, empty ones among them."""
    alone = Sequences(native, make_batch, dtype)
    for sequence in (0, 1):
        alone.feed([(sequence, alone.length)])
    together = Sequences(native, make_batch, dtype)
    for first, second, swap in (*steps, (together.length, together.length, False)):
        left = [together.length - fed for fed in together.fed]
        chunks = [(0, min(first, left[0])), (1, min(second, left[1]))]
        together.feed(chunks[::-1] if swap else chunks)
    for sequence in (0, 1):
        assert torch.equal(together.outputs(sequence), alone.outputs(sequence))
        assert equal(together.state(sequence), alone.state(sequence))


def test_decode_equals_prefill(native: NativeOps, make_batch: MakeBatch) -> None:
    prefill = Sequences(native, make_batch, torch.bfloat16)
    prefill.feed([(0, prefill.length)])
    decode = Sequences(native, make_batch, torch.bfloat16)
    for _ in range(decode.length):
        decode.feed([(0, 1)])
    assert torch.equal(decode.outputs(0), prefill.outputs(0))
    assert equal(decode.state(0), prefill.state(0))


def test_snapshot_equals_stopping_there(native: NativeOps, make_batch: MakeBatch) -> None:
    snapshots = [(0, 1, 2), (0, 2, 3), (0, 64, 4), (0, 150, 5), (1, 149, 6)]
    through = Sequences(native, make_batch, torch.float32)
    through.feed([(0, 150), (1, 150)], snapshots)
    for sequence, count, slot in snapshots:
        stopped = Sequences(native, make_batch, torch.float32)
        stopped.feed([(sequence, count)])
        assert equal(through.state(slot), stopped.state(sequence))
        native.copy_state(stopped.conv_state, sequence, 7)
        assert torch.equal(stopped.conv_state[7], stopped.conv_state[sequence])


def test_stale_page_contents_do_not_matter(native: NativeOps, make_batch: MakeBatch) -> None:
    results = []
    for stale in (0.0, 3.0, float("nan"), float("inf")):
        sequences = Sequences(native, make_batch, torch.float32)
        for pages in sequences.pages:
            pages.fill_(stale)
        sequences.feed([(0, 70)])
        sequences.feed([(0, 1)])
        results.append(sequences.outputs(0))
    assert all(torch.equal(result, results[0]) for result in results)


def test_denormals_are_flushed_on_every_thread() -> None:
    tiny = torch.full((64, 8), 1e-25)
    weight = torch.full((64, 8), 1e-20)
    for threads in (1, 3):
        ops = NativeOps(threads=threads)
        assert ops.linear(tiny, ops.pack(weight)).count_nonzero() == 0
    assert (torch.tensor(1e-25) * torch.tensor(1e-20)).item() != 0, "the caller's own mode must be left as it was"


@pytest.mark.deep
def test_released_sizes(all_native: dict[str, NativeOps]) -> None:
    """Qwen3.6's hidden size and experts, bfloat16: the same bits for 1 and 64 rows and every instruction set."""
    gate_up, down = random(1, 16, 1024, 2048).bfloat16(), random(2, 16, 2048, 512).bfloat16()
    x, weight = random(3, 64, 2048), random(4, 4096, 2048).bfloat16()
    results = []
    for ops in all_native.values():
        packed, experts = ops.pack(weight), ops.pack_experts(gate_up, down)
        ids, ranks = ops.route(random(5, 64, 16), 8, True)
        results.append((ops.linear(x, packed), ops.experts(x, ids, ranks, experts)))
        assert torch.equal(ops.linear(x[7:8], packed), results[-1][0][7:8])
        assert torch.equal(ops.experts(x[7:8], ids[7:8], ranks[7:8], experts), results[-1][1][7:8])
    assert all(equal(result, results[0]) for result in results)
