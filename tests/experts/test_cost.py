"""The planner's arithmetic: what a call brings, and that no plan is worse than the ones without a choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.cost import Costs, Ways, cpu_costs, expected, uniform
from engine.experts.executor import Executor
from engine.experts.layout import FORMATS, Layout
from engine.experts.pool import Pool
from engine.experts.split import Split

H200 = Costs(link=32e3, cpu=18e3, row=6e3, exchange=2e4, read=600.0, pair=15.0, ahead=30e3)
"""A machine of about this size: 1.77 MB experts, 55 GB/s of link, 97 GB/s of CPU."""
EXPERTS, RANKS = 256, 8

COST = st.floats(1.0, 1e6)
COSTS = st.builds(Costs, link=COST, cpu=COST, row=st.floats(0, 1e5), exchange=st.floats(0, 1e5), read=COST, pair=COST,
                  ahead=COST, handed=st.floats(0, 1e5))  # fmt: skip


@pytest.mark.parametrize(("rows", "share"), [(1, 0.032), (16, 0.4), (32, 0.64), (64, 0.87), (128, 0.985)])
def test_equally_likely_experts_touch_so_much_of_a_layer(rows: int, share: float) -> None:
    assert uniform(rows, RANKS, EXPERTS) / EXPERTS == pytest.approx(share, abs=0.01)
    assert len(expected(H200, rows, RANKS, EXPERTS)) / EXPERTS == pytest.approx(share, abs=0.01)


@given(COSTS, st.integers(1, 3000), st.floats(0, 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_short_call_is_never_worse_than_one_side_alone(costs: Costs, rows: int, resident: float, cpu: bool) -> None:
    counts = expected(costs, rows, 2, 40)
    chosen = costs.short(counts, resident, cpu)
    missing = round(len(counts) * (1 - resident))
    assert chosen <= costs.short(counts, resident, False) + missing  # costs are whole ns on the device
    without_link = replace(costs, link=float(1 << 30)).short(counts, resident, True)
    if cpu:
        on_device = costs.device(len(counts), sum(counts))
        assert chosen - on_device <= without_link + sum(counts) + missing


def ahead(costs: Costs, rows: int, resident: float, layers: int = 40) -> bool:
    """Whether whole layers come ahead, before anything was measured."""
    ways = costs.routed(rows, RANKS, EXPERTS, resident, True), costs.streamed(rows, RANKS, EXPERTS, resident, layers)
    return Ways().choose(rows, ways)


def test_the_way_is_the_faster_one_by_what_calls_took() -> None:
    """Of calls of that size, and, where there were none, of those most like them. What nearly pays is tried."""
    ways = Ways()
    assert not ways.choose(1000, (10.0, 11.0)) and ways.choose(1000, (11.0, 10.0)) and ways.choose(1000, (10.0, 10.0))
    ways.learn(False, 1000, 1.6)  # the first one, beside what was expected
    assert ways.choose(1000, (10.0, 11.0)) and ways.choose(600, (10.0, 11.0)) and ways.choose(40, (10.0, 12.0))
    ways.learn(True, 1000, 1.6)
    for _ in range(32):
        assert not ways.choose(1000, (10.0, 12.0))
        ways.learn(False, 1000, 1.3)
    assert ways.choose(1000, (10.0, 12.0)) and not ways.choose(1000, (10.0, 17.0))  # too far
    ways.learn(True, 1000, 1.3)
    assert not ways.choose(1000, (10.0, 12.0))


def test_a_way_that_was_slow_for_a_while_is_gone_again() -> None:
    ways = Ways()
    for _ in range(2):
        ways.learn(True, 1000, 1000.0)
    chosen = []
    for _ in range(64):
        chosen.append(ways.choose(1000, (15.0, 10.0)))
        ways.learn(chosen[-1], 1000, 1.0)
    assert not any(chosen[:4]) and all(chosen[-24:])


def test_a_first_call_that_was_slow_for_another_reason_decides_little() -> None:
    """200 rows, of which what is routed takes 33 ms and whole layers 55: the first call compiles."""
    ways = Ways()
    ways.learn(False, 200, 30.0)
    chosen = []
    for _ in range(8):
        chosen.append(ways.choose(200, (33.0, 55.0)))
        ways.learn(chosen[-1], 200, 1.0)
    assert sum(chosen) <= 1  # tried once


def test_a_call_with_all_experts_there_decides_nothing() -> None:
    assert all(ahead(replace(H200, between=between), rows, 1.0) for rows in (17, 1000, 8192) for between in (0.0, 1e3))


def test_a_cold_prompt_streams_where_all_experts_have_room() -> None:
    """Long ones of which half is there, too; nothing is hidden behind the first layer."""
    assert ahead(replace(H200, between=500.0), 8192, 0.0) and ahead(replace(H200, between=500.0), 8192, 0.5)
    cold = H200.streamed(8192, RANKS, EXPERTS, 0.0, 40)
    assert EXPERTS * H200.ahead < cold < H200.streamed(8192, RANKS, EXPERTS, 0.0, 2)


def test_few_tokens_bring_what_they_need_and_many_bring_layers() -> None:
    for resident in (0.0, 0.4):
        chosen = [ahead(H200, rows, resident) for rows in (16, 64, 200, 1000, 8192, 16384)]
        assert chosen == sorted(chosen)  # one crossover
        assert not chosen[2] and chosen[-1]
    whole = EXPERTS * H200.link
    assert H200.short(expected(H200, 16, RANKS, EXPERTS), 0.0, True) <= 0.3 * whole
    assert H200.short(expected(H200, 200, RANKS, EXPERTS), 0.0, True) <= 0.9 * whole
    assert H200.short(expected(H200, 200, RANKS, EXPERTS), 0.4, True) <= 0.6 * whole
    assert ahead(replace(H200, between=4e3), 1000, 0.0)  # attention hides what comes meanwhile


def test_skewed_routing_needs_fewer_experts() -> None:
    told = np.array([[0, 40, 20, 60]] * 4, np.int32)
    costs, alike = H200, uniform(16, RANKS, EXPERTS)
    for _ in range(60):
        costs = costs.learnt(told, np.zeros((4, 3), np.int64), 4, alike, 128)
    assert costs.spread == pytest.approx(60 / alike, rel=0.02)
    assert len(expected(costs, 16, RANKS, EXPERTS)) < len(expected(H200, 16, RANKS, EXPERTS))
    assert (costs.link, costs.cpu, costs.row) == (H200.link, H200.cpu, H200.row)


def test_costs_settle_at_what_was_measured() -> None:
    told = np.array([[0, 40, 20, 60], [0, 5, 0, 0]], np.int32)
    times = np.array([[2e4 + 20 * 30e3 + 60 * 10e3, 40 * 64e3, 80], [7, 7, 80]]).astype(np.int64)  # the second is older
    costs = H200
    for _ in range(80):
        costs = costs.learnt(told, times, 4, 60.0, 460)
    assert costs.cpu * 20 + costs.row * 60 == pytest.approx(1.2e6, rel=0.02)
    assert costs.link == pytest.approx(64e3, rel=0.02)
    once = H200.learnt(told, times * 1000, 4, 60.0, 460)
    assert once.cpu <= H200.cpu * 1.2 and once.link <= H200.link * 1.2  # one stray measurement
    assert H200.with_device(1e6, 100, 10).read > H200.read > H200.with_device(1.0, 100, 10).read
    assert 0.0 < H200.with_handed(800.0).handed <= 800.0 and H200.with_handed(-1.0).handed == 0.0
    assert H200.with_ahead(1e6, 100).ahead < H200.ahead < H200.with_ahead(1e9, 100).ahead
    assert not ahead(H200, 700, 0.35)
    assert ahead(replace(H200, handed=1600.0), 700, 0.35)  # though the CPU saves a fifth
    assert H200.with_between(9e9).with_between(500.0).between == 500.0
    assert H200.table() == [32000, 18000, 6000, 20000, -1]


def test_what_the_cpu_takes_is_measured() -> None:
    pool = Pool(Layout(FORMATS["int8"], 64, 64), 1, 8)
    pool.fill_random()
    executor = Executor(pool, 16, 2, threads=1)
    whole, row = cpu_costs(executor)
    assert whole > 0 and row > 0
    assert Costs.measured(pool.layout, Split(1, 10.0, 20.0), executor).link == 20.0 * pool.layout.parts
    executor.close()
