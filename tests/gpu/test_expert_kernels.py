"""Expert kernels against their torch twins, in the interpreter; everything that must not be read is NaN or 0xFF."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.experts.layout import FORMATS, Layout
from engine.experts.residency import Decision
from engine.kernels import experts, experts_twin, mailbox, mxfp4

CPU = torch.device("cpu")
SHAPES = [(32, 32), (96, 64), (64, 160), (32, 256)]


def slots_of(layout: Layout, count: int, seed: int = 0) -> Tensor:
    """Random experts in slots of whole 256 bytes."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.full((count, -(-layout.nbytes // 256) * 256), 0xFF, dtype=torch.uint8)
    for slot in slots:
        gate_up = torch.randn(2 * layout.inner, layout.hidden, generator=generator) * 0.2
        down = torch.randn(layout.hidden, layout.inner, generator=generator) * 0.2
        layout.encode(gate_up, down, slot[: layout.nbytes])
    return slots


def decision(slots: list[list[int]], parts: list[list[int]]) -> Decision:
    made = Decision.create(len(slots), len(slots[0]), CPU)
    made.slot.copy_(torch.tensor(slots))
    made.gpu_parts.copy_(torch.tensor(parts))
    made.counts.zero_()
    return made


def activations(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def computed(x: Tensor, slots: Tensor, made: Decision, layout: Layout) -> tuple[Tensor, Tensor]:
    h = torch.full((*made.slot.shape, layout.inner), float("nan"))
    out = torch.full((*made.slot.shape, layout.hidden), float("nan"))
    experts.gate_up(x, slots, made, layout, h)
    experts.down(h, slots, made, layout, out)
    return h, out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("hidden", "inner"), SHAPES)
def test_experts_of_every_format(name: str, hidden: int, inner: int) -> None:
    layout = Layout(FORMATS[name], hidden, inner)
    slots, x = slots_of(layout, 3), activations(2, hidden)
    made = decision([[2, -1], [0, 1]], [[layout.parts, 0], [1, max(1, layout.parts - 1)]])
    h, out = computed(x, slots, made, layout)
    want_h, want_out = torch.full_like(h, float("nan")).double(), torch.full_like(out, float("nan")).double()
    experts_twin.gate_up(x.double(), slots, made, layout, want_h)
    experts_twin.down(want_h, slots, made, layout, want_out)
    torch.testing.assert_close(h.double(), want_h, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_the_same_bits_in_any_company(name: str) -> None:
    layout = Layout(FORMATS[name], 64, 64)
    slots, x = slots_of(layout, 3), activations(3, 64)
    _, three = computed(x, slots, decision([[0, 1], [2, 0], [1, 2]], [[2, 2], [2, 1], [1, 2]]), layout)
    _, two = computed(x[1:].contiguous(), slots, decision([[2, 0], [1, 2]], [[2, 1], [1, 2]]), layout)
    assert torch.equal(three[1:], two)


@pytest.mark.parametrize(
    ("hidden", "groups", "ahead"), [(96, 1, 3), (128, 1, 3), (160, 2, 3), (224, 2, 3), (160, 2, 1)]
)
def test_tiles_that_are_on_their_way_in_mxfp4(
    hidden: int, groups: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mxfp4, "GATE_UP_MANY", mxfp4.Tile(groups, 1, ahead))
    layout = Layout(FORMATS["mxfp4"], hidden, 32)
    slots, x, made = slots_of(layout, 3), activations(2, hidden), decision([[2, -1], [0, 1]], [[1, 0], [1, 1]])
    h, want = torch.full((2, 2, 32), float("nan")), torch.full((2, 2, 32), float("nan"), dtype=torch.float64)
    experts.gate_up(x, slots, made, layout, h)
    experts_twin.gate_up(x.double(), slots, made, layout, want)
    torch.testing.assert_close(h.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_extreme_scales_of_mxfp4() -> None:
    layout = Layout(FORMATS["mxfp4"], 32, 32)
    slots, x = slots_of(layout, 1), torch.ones(1, 32)
    blob = slots[0, : layout.nbytes].view(-1, 544)
    made = decision([[0]], [[1]])
    for scale in (4, 60, 127):
        blob[:, :32] = 127
        blob[:2, :16] = scale  # gate rows of both panels
        h, _ = computed(x, slots, made, layout)
        want = torch.empty(1, 1, 32, dtype=torch.float64)
        experts_twin.gate_up(x.double(), slots, made, layout, want)
        torch.testing.assert_close(h.double(), want, rtol=1e-5, atol=1e-45)


@pytest.mark.parametrize(("groups", "whole", "asked"), [(1, True, 0), (4, True, 0), (4, False, 1), (128, False, 0)])
def test_the_end_of_a_layer(groups: int, whole: bool, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for tile in ("GATE_UP", "GATE_UP_MANY", "DOWN", "FINISH"):
        monkeypatch.setattr(mxfp4, tile, mxfp4.Tile(groups, min(groups, 4)))
    layout, draw = Layout(FORMATS["mxfp4"], 64, 128), torch.Generator().manual_seed(3)
    slots, x, base = slots_of(layout, 4), activations(2, 64), activations(2, 64)
    ids, weights = torch.tensor([[2, 0, 3], [1, -1, 2]], dtype=torch.int32), torch.rand(2, 3, generator=draw)
    wide, matrix = torch.randn(2, 300, generator=draw), torch.randn(64, 96, generator=draw)
    gate_up, gate = wide[:, 40:232], wide[:, 299:]
    parts = (ids >= 0) * layout.parts if whole else torch.tensor([[3, 0, 4], [1, 0, 2]])
    made, arrived = decision(ids.tolist(), parts.tolist()), torch.zeros(1, dtype=torch.int64)
    made.counts[1] = asked
    h, out = computed(x, slots, made, layout)
    told: dict[str, Any] = {"whole": whole, "arrived": arrived.data_ptr()}
    got = mxfp4.finish(h, slots, layout, made, weights, base, gate_up, gate, matrix, 0.5, **told)
    assert int(arrived) == asked
    want = torch.empty(2, 64)
    experts_twin.combine(out, weights, made, want)
    shared = torch.nn.functional.silu(gate_up[:, :96]) * gate_up[:, 96:] @ matrix.T * 0.5
    torch.testing.assert_close(got, base + want + shared * gate.sigmoid(), rtol=1e-5, atol=1e-5)
    first = replace(made, slot=made.slot[:1], gpu_parts=made.gpu_parts[:1])
    one = h[:1].contiguous(), slots, layout, first, weights[:1], base[:1], gate_up[:1], gate[:1]
    assert torch.equal(mxfp4.finish(*one, matrix, 0.5, **told), got[:1])


def test_fetch_moves_what_is_listed_and_nothing_else() -> None:
    layout = Layout(FORMATS["int8"], 64, 160)
    part_bytes = torch.tensor(layout.offsets, dtype=torch.int32)
    stride = -(-layout.nbytes // 256) * 256
    pool = torch.randint(0, 256, (12, stride), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    made = Decision.create(2, 3, CPU)
    made.fetch.fill_(1 << 20)
    made.fetch[:3] = torch.tensor([[4, 7, 4], [0, 11, 4], [5, 3, 2]])
    made.counts.copy_(torch.tensor([3, 0]))
    got = torch.full((6, stride), 0xA5, dtype=torch.uint8)
    want = got.clone()
    experts.fetch(pool.data_ptr(), stride, got, made, part_bytes)
    experts_twin.fetch(pool, want, made, part_bytes)
    assert torch.equal(got, want)
    assert torch.equal(got[5, layout.offsets[2] :], torch.full_like(got[5, layout.offsets[2] :], 0xA5))
    made.counts.zero_()
    experts.fetch(pool.data_ptr(), stride, got, made, part_bytes)
    assert torch.equal(got, want)


class Box:
    """A mailbox of 3 rows, 2 ranks and 40 hidden."""

    ready, done, arrived, x, plan, weights, y, nbytes = 0, 64, 256, 320, 832, 896, 960, 1472

    def __init__(self) -> None:
        self.memory = torch.full((self.nbytes,), 0xEE, dtype=torch.uint8)
        self.address = self.memory.data_ptr()

    def read(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        return self.memory[offset : offset + count * dtype.itemsize].view(dtype)

    def word(self, offset: int) -> int:
        return int(self.read(offset, 1, torch.int64))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_publish_gives_the_cpu_its_part(rows: int, ranks: int) -> None:
    box, x, weights = Box(), activations(rows, 40), activations(rows, ranks)
    made, arrivals = Decision.create(rows, ranks, CPU), torch.zeros(1, dtype=torch.int32)
    made.plan.copy_(torch.arange(made.plan.numel()).view(made.plan.shape))
    made.counts.copy_(torch.tensor([0, 1]))
    experts.publish(x, weights, made, 41, arrivals, box.address, box)
    assert box.word(box.ready) == rows << 32 | 42
    assert box.word(box.done) == 0
    assert torch.equal(box.read(box.x, x.numel(), torch.float32), x.flatten())
    assert torch.equal(box.read(box.plan, made.plan.numel(), torch.int32), made.plan.flatten())
    assert torch.equal(box.read(box.weights, weights.numel(), torch.float32), weights.flatten())
    assert not arrivals.any()


def test_publish_without_work_for_the_cpu() -> None:
    box = Box()
    made, arrivals = Decision.create(1, 2, CPU), torch.zeros(1, dtype=torch.int32)
    made.counts.zero_()
    before = box.memory.clone()
    experts.publish(activations(1, 40), activations(1, 2), made, 0, arrivals, box.address, box)
    before[box.done : box.done + 8].view(torch.int64).fill_(1)
    assert torch.equal(box.memory, before)


def test_arrive() -> None:
    box = Box()
    experts.arrive(box.address, box)
    assert box.word(box.arrived) == 1


def test_combine_adds_ranks_in_order() -> None:
    weights, out = activations(3, 2), activations(3, 2, 40)
    made = decision([[0, 1], [-1, 2], [-1, -1]], [[1, 1], [0, 1], [0, 0]])
    out[1, 0] = out[2] = float("nan")  # never computed
    got, want = torch.full((3, 40), float("nan")), torch.empty(3, 40)
    experts.combine(out, weights, made, got)
    experts_twin.combine(out, weights, made, want)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_the_cpus_answer_is_added_if_it_was_asked() -> None:
    box, y = Box(), activations(3, 40)
    answer, before = box.read(box.y, 120, torch.float32).view(3, 40), y.clone()
    answer.fill_(float("nan"))  # of an earlier request
    mailbox.add_answer(y, torch.tensor([4, 0], dtype=torch.int32), box.address, box)
    assert torch.equal(y, before)
    answer.copy_(activations(3, 40))
    mailbox.add_answer(y, torch.tensor([0, 3], dtype=torch.int32), box.address, box)
    assert torch.equal(y, before + answer)
