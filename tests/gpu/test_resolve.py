"""The device's decision against the reference, bit for bit: state and outputs, over random calls."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from engine.experts import residency
from engine.experts.executor import MailboxLayout
from engine.experts.layout import FORMATS, Layout
from engine.experts.residency import ONE, Decision, Policy, Residency
from engine.kernels.mailbox import Request
from engine.kernels.resolve import resolve

CPU = torch.device("cpu")
LAYOUT = Layout(FORMATS["mxfp4"], 32, 160)


def draw_ids(rng: random.Random, rows: int, ranks: int, experts: int) -> Tensor:
    """Skewed, with padded rows."""
    weights = [1 / (1 + expert % 17) for expert in range(experts)]

    def row() -> Sequence[int]:
        if rng.random() < 0.1:
            return [-1] * ranks
        return sorted(range(experts), key=lambda expert: rng.random() ** (1 / weights[expert]))[-ranks:]

    return torch.tensor([row() for _ in range(rows)], dtype=torch.int32)


def assert_equal(got: Residency | Decision, want: Residency | Decision, skip: Sequence[str] = ()) -> None:
    for field in fields(want):
        if field.name not in ("experts", *skip):
            assert torch.equal(getattr(got, field.name), getattr(want, field.name)), field.name


@pytest.mark.parametrize("policy", residency.policies(3).values(), ids=lambda policy: policy.name)
@pytest.mark.parametrize(
    ("rows", "ranks", "experts", "slots"),
    [(1, 8, 40, 20), (1, 1, 5, 1), (16, 6, 64, 40), (5, 3, 200, 500), (2, 8, 64, 300)],
)
def test_the_device_decides_as_the_reference(rows: int, ranks: int, experts: int, slots: int, policy: Policy) -> None:
    rng = random.Random(rows * slots)
    states = [Residency.create(LAYOUT, 3, experts, slots, CPU) for _ in range(2)]
    decisions = [Decision.create(rows, ranks, CPU) for _ in range(2)]
    for state in states:
        state.follow(policy)
        state.clock.fill_(2**31 // max(1, policy.per_step) - 3)  # times wrap on the way
    for step in range(45):
        if step % 4 == 0:
            share = torch.tensor([rng.choice((0, ONE, rng.randrange(ONE))) for _ in range(3)], dtype=torch.int32)
            for state in states:
                state.share.copy_(share)
        if step % 15 == 9:
            limit = rng.randrange(1, slots + 1)
            for state in states:
                state.resize(limit)
        ids = draw_ids(rng, rows, ranks, experts)
        residency.resolve(states[0], ids, step % 3, decisions[0])
        resolve(states[1], ids, step % 3, decisions[1])
        assert_equal(states[1], states[0])
        assert_equal(decisions[1], decisions[0], skip=["fetch"])
        count = int(decisions[0].counts[0])
        assert torch.equal(decisions[1].fetch[:count], decisions[0].fetch[:count])


@pytest.mark.parametrize(("rows", "ranks", "experts"), [(1, 8, 40), (2, 1, 5), (3, 6, 33)])
def test_it_asks_the_cpu(rows: int, ranks: int, experts: int) -> None:
    states = [Residency.create(LAYOUT, 3, experts, 20, CPU) for _ in range(2)]
    decisions = [Decision.create(rows, ranks, CPU) for _ in range(2)]
    box, generator = MailboxLayout(rows, ranks, 32), torch.Generator().manual_seed(rows)
    for step in range(4):
        for state in states:
            state.share.fill_(ONE if step == 3 else ONE // 3)
        x, weights = torch.randn(rows, 32, generator=generator), torch.rand(rows, ranks, generator=generator)
        ids = torch.rand(rows, experts, generator=generator).topk(ranks, dim=1).indices.int()
        mailbox = torch.zeros(box.nbytes, dtype=torch.uint8)
        residency.resolve(states[0], ids, step % 3, decisions[0])
        resolve(states[1], ids, step % 3, decisions[1], Request(x, weights, mailbox.data_ptr(), box))
        assert_equal(states[1], states[0])
        assert_equal(decisions[1], decisions[0], skip=["fetch"])
        if decisions[0].counts[1]:
            for offset, sent in ((box.x, x), (box.plan, decisions[0].plan), (box.weights, weights)):
                assert torch.equal(mailbox[offset : offset + sent.nbytes].view(sent.dtype), sent.flatten())
            assert int(mailbox[box.ready]) == step % 3 + 1
        else:
            assert not mailbox.any()  # the device writes nothing to host memory that nobody reads
