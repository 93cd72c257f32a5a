"""What must hold of every decision, whatever was routed; and what policies are good for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.layout import FORMATS, Layout
from engine.experts.replay import Chooser, Trace, choose_policy, hit_rate, resolved_hit_rate, synthetic
from engine.experts.residency import (
    BYTES,
    ENTRIES,
    ONE,
    SHIFT,
    SPAN,
    WINDOW,
    Decision,
    Residency,
    decayed,
    link_parts,
    lru,
    policies,
    resolve,
    used,
    wrap,
)

DEVICE = torch.device("cpu")
LAYOUT = Layout(FORMATS["int8"], 32, 160)
LAYERS = 2


Call = tuple[int, int, list[list[int]], int | None]
"""Layer, share and ids: rows of different experts, or of padding; a new limit before."""


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, int, str, list[Call]]:
    """Experts, slots, policy, calls."""
    experts, ranks = draw(st.integers(4, 24)), draw(st.integers(1, 4))
    row = st.one_of(
        st.just([-1] * ranks),
        st.lists(st.integers(0, experts - 1), min_size=ranks, max_size=ranks, unique=True),
    )
    rows = st.integers(1, 4).flatmap(lambda count: st.lists(row, min_size=count, max_size=count))
    share = st.one_of(st.sampled_from([0, ONE // 2, ONE]), st.integers(0, ONE))
    slots = draw(st.integers(1, 40))
    limit = st.one_of(st.none(), st.integers(1, slots))
    call = st.tuples(st.integers(0, LAYERS - 1), share, rows, limit)
    policy = draw(st.sampled_from(sorted(policies(LAYERS))))
    return experts, slots, policy, draw(st.lists(call, min_size=1, max_size=25))


@given(calls())
@settings(max_examples=60, deadline=None)
def test_every_decision(drawn: tuple[int, int, str, list[Call]]) -> None:
    experts, slots, policy, sequence = drawn
    state = Residency.create(LAYOUT, LAYERS, experts, slots, DEVICE)
    state.follow(policies(LAYERS)[policy])
    parts = state.parts
    limit = slots
    for layer, share, rows, new_limit in sequence:
        if new_limit is not None:
            kept = [slot if slot < new_limit else -1 for slot in state.slot_of.tolist()]
            state.resize(limit := new_limit)
            assert state.slot_of.tolist() == kept
        state.share.fill_(share)
        ids, decision = torch.tensor(rows, dtype=torch.int32), Decision.create(len(rows), len(rows[0]), DEVICE)
        before, counters = state.slot_of.tolist(), state.counters.tolist()
        there = [parts - less if slot >= 0 else 0 for slot, less in zip(before, state.lacks.tolist(), strict=True)]
        resolve(state, ids, layer, decision)
        after, owner = state.slot_of.tolist(), state.owner.tolist()

        state.check()
        assert all(after[flat] == slot for slot, flat in enumerate(owner) if flat >= 0)  # inverse of each other
        assert all(owner[slot] == flat for flat, slot in enumerate(after) if slot >= 0)
        assert all(flat < 0 for flat in owner[limit:])

        active = {expert for row in rows for expert in row if expert >= 0}
        flats = {layer * experts + expert for expert in active}
        units = sum(parts - there[flat] for flat in flats)
        assert all(after[flat] == before[flat] for flat in flats if before[flat] >= 0)

        fetches = decision.fetch[: int(decision.counts[0])].tolist()
        brought = {flat: (slot, some % 8) for slot, flat, some in fetches}
        assert len(brought) == len(fetches) == len({slot for slot, _, _ in fetches})
        assert all(there[flat] == some // 8 < some % 8 <= parts for _, flat, some in fetches)
        on_link = sum(last - there[flat] for flat, (_, last) in brought.items())
        budget = link_parts(units, share)
        assert on_link <= budget
        if limit >= len(active):
            assert on_link == budget
        assert sum(last < parts for _, last in brought.values()) <= 1
        for flat, (slot, last) in brought.items():  # in part or whole, it is there next time
            assert (after[flat], int(state.lacks[flat])) == ((slot, parts - last) if slot < slots else (-1, 0))

        on_cpu = 0
        outputs = (decision.slot.tolist(), decision.gpu_parts.tolist(), decision.plan.tolist())
        for row, slot_row, parts_row, plan_row in zip(rows, *outputs, strict=True):
            for expert, slot, done, (planned, first) in zip(row, slot_row, parts_row, plan_row, strict=True):
                if expert < 0:
                    assert (slot, done, planned) == (-1, 0, -1)
                    continue
                flat = layer * experts + expert
                assert (planned, first) == ((expert, done) if done < parts else (-1, 0))  # every part exactly once
                on_cpu += planned >= 0
                assert (slot, done) == brought.get(flat, (before[flat], there[flat]))
                assert slot < slots or (slot == slots and after[flat] < 0)  # the scratch slot keeps nothing
        assert int(decision.counts[1]) == on_cpu

        change = [now - then for now, then in zip(state.counters.tolist(), counters, strict=True)]
        assert change[:BYTES] == [len(active) * parts - units, on_link, units - on_link]
        ends = LAYOUT.offsets
        assert change[BYTES] == sum(ends[last] - ends[there[flat]] for flat, (_, last) in brought.items())
        assert state.work[layer].tolist() == change[:3]


def test_check_finds_maps_that_disagree() -> None:
    def made() -> Residency:
        state = Residency.create(LAYOUT, LAYERS, 8, 6, DEVICE)
        decide(state, [1, 2, 3])
        return state

    made().check()
    for name, place, number in (("slot_of", 1, -1), ("slot_of", 1, 2), ("slot_of", 5, 0), ("owner", 0, 4)):
        state = made()
        getattr(state, name)[place] = number
        with pytest.raises(AssertionError, match="say otherwise"):
            state.check()
    state = made()
    state.lacks[5] = 1
    with pytest.raises(AssertionError, match="none is there"):
        state.check()
    state = made()
    state.limit.fill_(2)
    with pytest.raises(AssertionError, match="limit of 2"):
        state.check()
    for limit in (0, 7):
        with pytest.raises(ValueError, match=f"1 to 6 slots, not {limit}"):
            made().resize(limit)


def test_a_new_policy_keeps_the_order_of_last_uses() -> None:
    state = Residency.create(LAYOUT, LAYERS, 16, 4, DEVICE)
    state.follow(lru(LAYERS))
    for expert in (3, 1, 2, 0):
        decide(state, [expert])
    for policy in (decayed(32), lru(LAYERS), decayed(128)):
        state.follow(policy)
        assert sorted(range(4), key=lambda expert: int(state.value[expert])) == [3, 1, 2, 0]
        assert int(state.value[7]) <= -SPAN
    assert decide(state, [9]).slot.tolist() == [[0]]  # 3 went


@given(st.integers(0, 1024), st.integers(0, ONE))
def test_parts_of_the_link(units: int, share: int) -> None:
    parts = link_parts(units, share)
    assert parts == math.floor(units * share / ONE + 0.5)
    assert 0 <= parts <= units
    assert link_parts(units, 0) == 0
    assert link_parts(units, ONE) == units


@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, SPAN), st.sampled_from([32, 128]))
def test_a_use_adds_as_frequencies_do(now: int, ago: int, half_life: int) -> None:
    bump = np.array(decayed(half_life).bump, dtype=np.int32)
    exact = 256 * math.log2(1 + 2 ** (-ago / 256))
    added = wrap(used(wrap(now - ago), now, bump) - now)
    assert abs(added - exact) <= 0.5 + (1 << SHIFT) / 2
    assert used(wrap(now - ago), now, np.zeros(ENTRIES, np.int32)) == now
    assert used(now, wrap(now - ago), np.zeros(ENTRIES, np.int32)) == now


def decide(state: Residency, ids: list[int], layer: int = 0) -> Decision:
    decision = Decision.create(1, len(ids), DEVICE)
    resolve(state, torch.tensor([ids], dtype=torch.int32), layer, decision)
    return decision


def test_most_recently_active_misses_are_fetched_first() -> None:
    state = Residency.create(LAYOUT, LAYERS, 16, 8, DEVICE)
    state.share.fill_(0)
    for ids in ([9, 4], [7, 3], [3, 12]):
        decide(state, ids)
    state.share.fill_(ONE * 5 // 16)
    fetched = decide(state, [9, 7, 3, 1]).fetch[:2].tolist()
    assert fetched == [[0, 3, 4], [1, 7, 1]]


def test_what_comes_in_part_is_completed_by_later_uses() -> None:
    """Else nothing new would stay where less than an expert goes over the link at a time, however often it misses."""
    state = Residency.create(LAYOUT, LAYERS, 16, 8, DEVICE)
    state.share.fill_(ONE // 2)
    made = [decide(state, [5]) for _ in range(4)]
    assert [one.fetch[0].tolist() for one in made[:3]] == [[0, 5, 2], [0, 5, 8 * 2 + 3], [0, 5, 8 * 3 + 4]]
    assert [one.plan.flatten().tolist() for one in made] == [[5, 2], [5, 3], [-1, 0], [-1, 0]]
    assert state.counters[:BYTES].tolist() == [2 + 3 + 4, 2 + 1 + 1, 2 + 1]
    decide(state, [6])
    state.drop_partial()
    assert (state.slot_of >= 0).nonzero().flatten().tolist() == [5] and int(state.owner[1]) == -1
    state.check()


def test_free_slots_go_first_then_the_least_valuable() -> None:
    state = Residency.create(LAYOUT, LAYERS, 16, 4, DEVICE)
    state.follow(lru(LAYERS))
    assert decide(state, [5, 6]).slot.tolist() == [[0, 1]]
    assert decide(state, [7]).slot.tolist() == [[2]]
    decide(state, [5])
    assert decide(state, [8]).slot.tolist() == [[3]]
    assert decide(state, [9, 5]).slot.tolist() == [[1, 0]]
    assert state.slot_of[6] == -1


def test_the_window_moves_on() -> None:
    state = Residency.create(LAYOUT, LAYERS, 1000, 700, DEVICE)
    assert decide(state, [1]).slot.tolist() == [[0]]
    assert decide(state, [2]).slot.tolist() == [[WINDOW]]
    decide(state, [2])  # nothing to fetch
    assert decide(state, [3]).slot.tolist() == [[2 * WINDOW]]


def test_of_equal_victims_the_first_of_the_window_goes() -> None:
    state = Residency.create(LAYOUT, LAYERS, 16, 4, DEVICE)
    state.follow(lru(LAYERS))
    decide(state, [1, 2, 3, 4])
    state.hand.fill_(2)
    assert decide(state, [9, 10]).slot.tolist() == [[2, 3]]


@pytest.mark.parametrize(("half_life", "text"), [(0, "power of two"), (33, "power of two"), (512, "power of two")])
def test_half_lives(half_life: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        decayed(half_life)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        Residency.create(LAYOUT, LAYERS, 16, 0, DEVICE)
    with pytest.raises(ValueError, match="more than 256"):
        Decision.create(33, 8, DEVICE)


def test_policies_are_good_for_what_they_are_made_for() -> None:
    layers, experts = 4, 64
    slots = layers * experts // 8
    every = policies(layers)
    static = synthetic("static", 400, layers, experts, 4)
    rates = {name: hit_rate(static, experts, slots, policy) for name, policy in every.items()}
    assert rates["decayed-128"] >= rates["decayed-32"] > rates["lru"]
    assert choose_policy(static, experts, slots, sample=1).name == "decayed-128"
    temporal = synthetic("temporal", 400, layers, experts, 4)
    assert hit_rate(temporal, experts, slots, every["decayed-32"]) > hit_rate(
        temporal, experts, slots, every["decayed-128"]
    )


def followed(chooser: Chooser, trace: Trace) -> list[str]:
    """The policies that it changed to."""
    return [chooser.policy.name for step in trace if chooser.step(np.pad(step, ((0, 0), (0, 5)), constant_values=-1))]


def test_the_chooser_follows_what_is_routed() -> None:
    """From one policy to the better one, once, and back when the routing changes."""
    layers, experts = 4, 64
    chooser = Chooser(layers, experts, layers * experts // 8)
    assert followed(chooser, synthetic("static", 800, layers, experts, 4)) == ["decayed-128"]
    back = followed(chooser, synthetic("temporal", 1000, layers, experts, 4))
    assert back and back[-1] in ("decayed-32", "lru")


@pytest.mark.parametrize("name", policies(LAYERS))
def test_more_slots_never_hit_less_and_resolve_hits_as_the_replay(name: str) -> None:
    layers, experts = 2, 32
    trace, policy = synthetic("temporal", 150, layers, experts, 4), policies(layers)[name]
    rates = [hit_rate(trace, experts, slots, policy) for slots in (8, 16, 32, 64)]
    assert rates == sorted(rates)
    assert rates[-1] > 0.98
    assert abs(resolved_hit_rate(trace, experts, 32, policy) - rates[2]) < 0.05
