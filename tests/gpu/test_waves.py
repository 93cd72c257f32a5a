"""Waves as the device decides them against the reference, bit for bit; and what must hold of them."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from engine.experts import residency, waves
from engine.experts.layout import FORMATS, Layout
from engine.experts.residency import BYTES, CPU, FETCHED, HITS, ONE, Decision, Residency
from engine.experts.waves import TAIL, Fetches, Waves, link_experts
from engine.kernels import waves as kernels

DEVICE = torch.device("cpu")
LAYOUT = Layout(FORMATS["mxfp4"], 32, 160)
LAYERS = 3


class Side:
    """State and lists of one of the two that are compared."""

    def __init__(self, experts: int, slots: int) -> None:
        self.state = Residency.create(LAYOUT, LAYERS, experts, slots, DEVICE)
        self.waves = Waves.create(LAYERS, experts, DEVICE)
        self.fetches = Fetches.create(experts, DEVICE)
        self.where = torch.zeros(experts, dtype=torch.int32)


class Both:
    """The reference and the device, told the same and compared after every call."""

    def __init__(self, experts: int, slots: int) -> None:
        self.want, self.got = Side(experts, slots), Side(experts, slots)

    def divide(self, counts: Tensor, layer: int, *, cpu: bool) -> None:
        for side, how in ((self.want, waves), (self.got, kernels)):
            how.divide(side.state, side.waves, counts, layer, side.where, cpu=cpu)
        self.compare()

    def take(self, counts: Tensor, layer: int, base: int, room: int, *, first: bool, ahead: bool) -> None:
        for side, how in ((self.want, waves), (self.got, kernels)):
            how.take(
                side.state, side.waves, side.fetches, counts, layer, side.where, base, room, first=first, ahead=ahead
            )
        self.compare()

    def place(self, come: Tensor, layer: int) -> None:
        for side, how in ((self.want, waves), (self.got, kernels)):
            how.place(side.state, side.waves, come, layer)
        self.compare()

    def keep(self, ids: Tensor, rows: int, layer: int, ring: int, share: int) -> None:
        for side, how in ((self.want, waves), (self.got, kernels)):
            how.keep(side.state, side.waves, ids, rows, layer, ring, share)
        self.compare()

    def compare(self) -> None:
        want, got = self.want, self.got
        for one, other in ((got.state, want.state), (got.waves, want.waves)):
            for name in (field.name for field in fields(one) if field.name not in ("experts", "moves")):
                assert torch.equal(getattr(one, name), getattr(other, name)), name
        moved, taken = int(want.waves.moved), int(want.fetches.counts[0])
        assert torch.equal(got.waves.moves[:moved], want.waves.moves[:moved])
        assert torch.equal(got.fetches.counts, want.fetches.counts)
        assert torch.equal(got.fetches.fetch[:taken], want.fetches.fetch[:taken])
        assert torch.equal(got.where, want.where)
        want.state.check()


def routed(rng: random.Random, rows: int, ranks: int, experts: int) -> Tensor:
    """Low experts more often; some rows are padding."""
    names = range(experts)

    def row() -> list[int]:
        return [-1] * ranks if rng.random() < 0.1 else sorted(names, key=lambda e: rng.random() * (e + 3))[:ranks]

    return torch.tensor([row() for _ in range(rows)], dtype=torch.int32)


@pytest.mark.parametrize(
    ("experts", "slots", "ranks"), [pytest.param(40, 100, 4, marks=pytest.mark.deep), (70, 50, 2), (5, 2, 1)]
)
def test_the_device_decides_as_the_reference(experts: int, slots: int, ranks: int) -> None:
    """Whole calls, layer after layer, some of them ahead, with decode decisions and fewer slots between."""
    rng = random.Random(experts)
    both, limit = Both(experts, slots), slots
    for number in range(3):
        costs = [rng.randrange(1, 9), rng.randrange(9), rng.randrange(5), 4, (-1, ONE // 3, -1)[number]]
        for side in (both.want, both.got):
            side.waves.costs.copy_(torch.tensor(costs))
        half = max(1, min(experts, limit // rng.choice((2, 4))))
        whole_call(both, rng, rng.choice((1, 20, 45)), ranks, half, cpu=number > 0)
        decision, ids = Decision.create(1, ranks, DEVICE), routed(rng, 1, ranks, experts)
        limit = rng.randrange(2, slots + 1)
        for side in (both.want, both.got):
            residency.resolve(side.state, ids, 0, decision)
            side.state.resize(limit)


def whole_call(both: Both, rng: random.Random, rows: int, ranks: int, half: int, *, cpu: bool) -> None:
    want, turn, experts = both.want, 0, both.want.state.experts
    whole = 2 * half >= experts
    room, turns = (2 * half, 1) if whole else (half, -(-experts // half))
    for layer in range(LAYERS):
        ids = routed(rng, rows, ranks, experts)
        counts = torch.bincount(ids[ids >= 0].long(), minlength=experts).int()
        before = want.state.counters.tolist()
        if layer + 1 < LAYERS:  # whatever was there
            places = rng.sample(range(int(want.state.limit)), min(int(want.state.limit), experts // 2))
            come = torch.tensor(rng.sample(places + [-1] * (experts - len(places)), experts), dtype=torch.int32)
            both.place(come, layer + 1)
        both.divide(counts, layer, cpu=cpu)
        seen = (want.where >= 0).int() + want.waves.on_cpu
        for wave in range(turns):
            turn ^= 1
            both.take(counts, layer, 0 if whole else turn * half, room, first=not wave, ahead=False)
            seen += (want.where >= 0).int()
        assert seen.tolist() == (counts > 0).int().tolist()  # everything that is routed, exactly once
        assert not want.waves.todo.any()
        ahead = whole and layer + 1 < LAYERS and rng.random() < 0.7
        others = want.state.slot_of.clone()
        share = rng.choice((0, waves.share_of(LAYERS, experts, 2 * half, int(want.state.limit)), experts))
        both.keep(ids[-TAIL:], rows, layer, 2 * half, share)
        others[layer * experts : (layer + 1) * experts] = want.state.slot_of[layer * experts : (layer + 1) * experts]
        assert torch.equal(want.state.slot_of, others)
        if ahead:
            both.take(counts, layer + 1, 0, room, first=False, ahead=True)
            there = [want.state.slot_of[(layer + 1) * experts + e] >= 0 for e in range(experts)]
            assert all(there)
        change = [now - then for now, then in zip(want.state.counters.tolist(), before, strict=True)]
        told, parts = want.waves.told[layer].tolist(), LAYOUT.parts
        assert change[BYTES] * parts == change[FETCHED] * LAYOUT.nbytes
        assert change[CPU] == told[waves.LEFT] * parts and change[HITS] <= told[waves.FOUND] * parts


def test_what_the_last_tokens_use_is_found_by_decoding() -> None:
    """Experts of the ring that count go elsewhere: to free slots up to the layer's share, then in place of those of the
    layer that were not used for long. Those of other layers stay."""
    experts, ring = 8, 4
    side = Side(experts, 9)
    state, made = side.state, side.waves
    decision = Decision.create(1, 2, DEVICE)
    for layer, ids in ((2, [5, 6]), (0, [2, 3])):
        state.hand.fill_(ring)
        residency.resolve(state, torch.tensor([ids], dtype=torch.int32), layer, decision)
    assert [int(state.slot_of[flat]) for flat in (21, 22, 2, 3)] == [4, 5, 6, 7]
    counts = torch.tensor([9, 30, 0, 0, 1, 0, 0, 0], dtype=torch.int32)
    waves.divide(state, made, counts, 0, side.where, cpu=False)
    waves.take(state, made, side.fetches, counts, 0, side.where, 0, 4, first=True, ahead=False)
    assert side.where.tolist() == [1, 0, -1, -1, 2, -1, -1, -1]
    ids = torch.tensor([[1]] * 30 + [[0]] + [[3]], dtype=torch.int32)
    waves.keep(state, made, ids, 32, 0, ring, 3)
    assert made.moves[: int(made.moved)].tolist() == [[0, 8], [1, 6]]  # 3 was used, too, and 4 was not
    state.check()
    assert [int(state.slot_of[flat]) for flat in (0, 1, 2, 3, 4, 21, 22)] == [6, 8, -1, 7, 2, 4, 5]


def test_no_split_is_worse_than_one_side_alone() -> None:
    rng = random.Random(0)
    for _ in range(300):
        rows = sorted((rng.randrange(1, 40) for _ in range(rng.randrange(0, 60))), reverse=True)
        costs = [rng.randrange(1, 50), rng.randrange(50), rng.randrange(5), rng.randrange(99), -1]

        def time(on_link: int, rows: list[int] = rows, costs: list[int] = costs) -> int:
            left = sum(costs[1] + costs[2] * each for each in rows[on_link:])
            return max(on_link * costs[0], left + costs[3] if rows[on_link:] else 0)

        chosen = link_experts(rows, costs)
        assert time(chosen) == min(time(each) for each in range(len(rows) + 1))
    assert link_experts([3, 2, 1, 1], [1, 1, 1, 1, ONE // 2]) == 2
