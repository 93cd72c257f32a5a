"""The closed loop on simulated machines: it finds the best share, stays there, and never does worse than one side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.experts.residency import ONE, link_parts
from engine.experts.split import Split


@dataclass
class Machine:
    """ns of each side: a fixed cost, and what a part costs."""

    cpu: float
    link: float
    cpu_fixed: float = 0.0
    link_fixed: float = 0.0
    contention: float = 1.0
    noise: float = 0.0

    def times(self, on_cpu: int, on_link: int, rng: random.Random) -> tuple[float, float]:
        """While both work, each is slower by ``contention``."""
        cpu, link = (
            (fixed + cost * parts) * (1 + self.noise * rng.uniform(-1, 1)) if parts else 0.0
            for fixed, cost, parts in ((self.cpu_fixed, self.cpu, on_cpu), (self.link_fixed, self.link, on_link))
        )
        lost = (self.contention - 1) * min(cpu, link)
        return cpu + lost * (cpu > 0), link + lost * (link > 0)


def run(machine: Machine, split: Split, missing: Sequence[int], seed: int = 0) -> tuple[list[int], list[float]]:
    """Parts over the link and time of each step, one layer."""
    rng, fetched, took = random.Random(seed), [], []
    for units in missing:
        on_link = link_parts(units, int(split.share[0]))
        cpu_ns, link_ns = machine.times(units - on_link, on_link, rng)
        times = np.array([[cpu_ns, link_ns, units - on_link]]).astype(np.int64)
        split.update(times, np.array([[0, on_link, units - on_link]], dtype=np.int32))
        fetched.append(on_link)
        took.append(max(cpu_ns, link_ns))
    return fetched, took


COSTS = st.floats(2e3, 2e5)
ERRORS = st.floats(0.75, 1.5)


@given(cpu=COSTS, link=COSTS, units=st.integers(2, 64), start=st.floats(0, 1))
@example(cpu=57474.0, link=2000.0, units=15, start=0.5)
@settings(max_examples=30, deadline=None)
def test_it_settles_within_a_part_of_the_best_and_stays(cpu: float, link: float, units: int, start: float) -> None:
    machine, split = Machine(cpu, link), Split(1, cpu, link)
    run(Machine(cpu * (2 - start), link * (1 + start)), split, [units] * 100)  # another load on the machine
    fetched, took = run(machine, split, [units] * 1200)
    late = fetched[-100:]  # averages that still creep may move it once more, but never to and fro
    assert late in (sorted(late), sorted(late, reverse=True))
    assert took[-1] <= min(max(cpu * (units - parts), link * parts) for parts in range(units + 1)) + max(cpu, link)


@given(cpu=COSTS, link=COSTS, cpu_error=ERRORS, link_error=ERRORS, units=st.integers(2, 64))
@settings(max_examples=30, deadline=None)
def test_costs_that_were_measured_badly_cost_no_more_than_the_better_side(
    cpu: float, link: float, cpu_error: float, link_error: float, units: int
) -> None:
    _, took = run(Machine(cpu, link), Split(1, cpu * cpu_error, link * link_error), [units] * 400)
    assert took[-1] <= min(cpu, link) * units + max(cpu, link)


@pytest.mark.parametrize("fixed", [(3e4, 0.0), (0.0, 3e4), (2e4, 2e4)])
def test_fixed_costs_are_part_of_the_balance(fixed: tuple[float, float]) -> None:
    machine = Machine(9e3, 8e3, *fixed)
    fetched, took = run(machine, Split(1, 9e3, 8e3), [32] * 800)
    assert len(set(fetched[-200:])) == 1
    rng = random.Random(0)
    best = min(max(machine.times(32 - parts, parts, rng)) for parts in range(33))
    assert took[-1] <= best + 9e3


def test_fixed_costs_do_not_make_one_side_alone_seem_better() -> None:
    """A few missing parts beside experts that the device has: neither side's time is that of its parts alone."""
    machine, split = Machine(9e3, 8e3, cpu_fixed=1.5e4, link_fixed=2e4), Split(1, 9e3, 8e3)
    split.fix(0.0)
    for _ in range(32):
        split.update(np.array([[1.5e4 + 8 * 9e3, 2e4, 8]]).astype(np.int64), np.array([[24, 0, 8]], dtype=np.int32))
    split.free()
    fetched, took = run(machine, split, [4] * 400)
    assert len(set(fetched[-100:])) == 1
    rng = random.Random(0)
    assert took[-1] <= min(max(machine.times(4 - parts, parts, rng)) for parts in range(5)) + 9e3


@pytest.mark.parametrize("contention", [1.3, 1.9, 3.0])
@pytest.mark.parametrize(("cpu", "link"), [(1e4, 1e4), (3e4, 1e4), (1e4, 4e4)])
def test_it_is_never_worse_than_one_side_alone_by_more_than_a_part(cpu: float, link: float, contention: float) -> None:
    machine = Machine(cpu, link, contention=contention)
    _, took = run(machine, Split(1, cpu, link), [24] * 6000)
    assert float(np.mean(took[500:])) <= min(cpu, link) * 24 + max(cpu, link)


def test_noise_and_changing_misses_do_not_shake_it() -> None:
    rng = random.Random(5)
    machine, split = Machine(8e3, 12e3, noise=0.3), Split(1, 1.6e4, 9e3)
    run(machine, split, [rng.randrange(0, 9) * 4 for _ in range(500)])
    shares = []
    for _ in range(500):
        run(machine, split, [rng.randrange(0, 9) * 4], seed=rng.randrange(1 << 30))
        shares.append(int(split.share[0]) / ONE)
    assert max(shares) - min(shares) < 0.25
    assert abs(float(np.mean(shares)) - 0.4) < 0.1


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 64), st.integers(0, 64))))
@settings(deadline=None)
def test_a_step_changes_it_by_at_most_one_part(steps: list[tuple[int, int, int, int]]) -> None:
    split = Split(1, 1e4, 1e4)
    for cpu_ns, link_ns, on_cpu, on_link in steps:
        before = int(split.share[0])
        changed = split.update(
            np.array([[cpu_ns, link_ns, on_cpu]], dtype=np.int64), np.array([[0, on_link, on_cpu]], dtype=np.int32)
        )
        after = int(split.share[0])
        assert 0 <= after <= ONE
        assert abs(after - before) <= ONE / max(1, on_cpu + on_link) + 1
        assert changed or after == before


def test_a_fixed_share_stays_and_layers_are_apart() -> None:
    split = Split(2, 1e4, 1e4)
    split.fix(0.25)
    assert not split.update(np.array([[9, 1, 4]] * 2, dtype=np.int64), np.array([[0, 4, 4]] * 2, dtype=np.int32))
    assert split.share.tolist() == [ONE // 4] * 2
    split.free()
    assert split.share.tolist() == [ONE // 2] * 2
    for _ in range(40):
        split.update(
            np.array([[90000, 10000, 4], [0, 0, 0]], dtype=np.int64), np.array([[0, 4, 4], [32, 0, 0]], dtype=np.int32)
        )
    assert split.share[0] > ONE * 0.75
    assert split.share[1] == ONE // 2


def test_what_the_cpu_does_alone_is_brought_now_and_then() -> None:
    """Or what is on the device would never change. It may cost a thirtieth of what the CPU takes."""
    split, brought = Split(3, 1e4, 4e4), np.zeros(3)
    split.link(2)
    times, work = np.array([[8e4, 9e4, 4]] * 3, dtype=np.int64), np.array([[0, 4, 4]] * 3, dtype=np.int32)
    for _ in range(200):
        split.update(times, work)  # both at once take longer than the CPU alone
    assert split.share.tolist() == [0, 0, 0]
    for _ in range(128):
        assert split.update(np.array([[4e4, 0, 4]] * 3, dtype=np.int64), np.array([[4, 0, 4]] * 3, dtype=np.int32))
        brought += split.now == ONE
    assert brought.tolist() == [1, 1, 0]


@pytest.mark.parametrize("arguments", [(0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, float("nan"))])
def test_what_makes_no_split(arguments: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="a split needs"):
        Split(*arguments)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Split(1, 1.0, 1.0).fix(1.5)
