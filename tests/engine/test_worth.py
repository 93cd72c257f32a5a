"""Dividing memory by what it saves: never below minima, never more than there is, monotone, and at rest."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.memory.worth import MOVED, Bounds, PageWorth, SlotWorth, Split, best, better

KIB = 1 << 10


def saved(split: Split, slots: SlotWorth, pages: PageWorth) -> float:
    return slots.saved(split.slots) + pages.saved(split.pages)


def drawn(rng: random.Random) -> tuple[SlotWorth, PageWorth, Bounds]:
    """Machines and loads of all kinds; what is asked of every one fits."""
    experts, slot, page = (
        rng.choice((64, 2560, 20480)),
        rng.choice((64, 1700, 9000)) * KIB,
        rng.choice((20, 1300)) * KIB,
    )
    slots = SlotWorth.measured(experts, slot, rng.randint(1, experts), rng.random(), rng.random())
    ages = [(age, rng.randint(1, 500)) for age in sorted(rng.sample(range(300), rng.randint(1, 6)))]
    pages = PageWorth(page, 10 ** rng.uniform(-4, 0), 10 ** rng.uniform(-3, 1), ages, rng.random() < 0.7)
    least_pages, least_slots = rng.randint(2, 300), rng.randint(1, experts // 8)
    most_pages, most_slots = least_pages + rng.randint(0, 20000), rng.randint(least_slots, experts)
    room = rng.randint(0, most_slots * slot + most_pages * page)
    return slots, pages, Bounds(
        least_pages * page + least_slots * slot + room, least_pages, most_pages, least_slots, most_slots
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(100))
def test_any_division(seed: int) -> None:
    rng = random.Random(seed)
    slots, pages, bounds = drawn(rng)
    found = best(slots, pages, bounds)
    assert bounds.least_pages <= found.pages <= bounds.most_pages
    assert bounds.least_slots <= found.slots <= bounds.most_slots
    assert found.slots * slots.nbytes + found.pages * pages.nbytes <= bounds.nbytes
    # no other division saves more, but for what does not divide evenly
    for _ in range(20):
        other = rng.randint(bounds.least_pages, bounds.most_pages)
        left = min((bounds.nbytes - other * pages.nbytes) // slots.nbytes, bounds.most_slots)
        if left >= bounds.least_slots:
            even = Split(found.slots + 1, found.pages + slots.nbytes // pages.nbytes + 1)
            assert saved(Split(left, other), slots, pages) <= saved(even, slots, pages) * (1 + 1e-9)
    # who is worth more has no less
    assert best(replace(slots, seconds=2 * slots.seconds), pages, bounds).pages <= found.pages
    assert best(slots, replace(pages, seconds=2 * pages.seconds), bounds).pages >= found.pages
    assert best(slots, pages, replace(bounds, nbytes=bounds.nbytes + 9 * slots.nbytes)).pages >= found.pages
    # once there, it stays there, though measurements vary
    now = better(Split(bounds.least_slots, bounds.least_pages), slots, pages, bounds)
    for _ in range(5):
        noise = (
            replace(slots, seconds=slots.seconds * rng.uniform(0.98, 1.02)),
            replace(pages, seconds=pages.seconds * rng.uniform(0.98, 1.02)),
        )
        then = better(now, *noise, bounds)
        assert then == now or abs(then.pages - now.pages) >= MOVED * now.pages
        assert better(then, *noise, bounds) == then


def test_what_is_measured_is_what_the_curve_says() -> None:
    slots = SlotWorth.measured(1000, KIB, 250, 0.6, 0.2)
    assert slots.saved(1000) == pytest.approx(0.2 / 0.4)
    assert slots.saved(250) == pytest.approx(0.6 * 0.5)
    assert slots.slope(250) * KIB == pytest.approx(slots.saved(251) - slots.saved(250), rel=0.01)
    assert slots.slope(1000) == 0
    pages = PageWorth(KIB, 0.1, 2.0, [(1, 10), (9, 30)], full=True)
    assert pages.saved(10) == pytest.approx(0.2 * 5)
    assert pages.saved(40) == pytest.approx(0.2 * (5 + 3))
    assert pages.slope(100) * KIB == pytest.approx(pages.saved(101) - pages.saved(100), rel=0.01)
    assert replace(pages, full=False).slope(40) == 0


def test_a_session_that_is_asked_for_is_worth_experts_and_a_forgotten_one_is_not() -> None:
    bounds = Bounds(2000 * 1700 * KIB, 64, 100_000, 100, 10_000)
    slots = SlotWorth.measured(10_000, 1700 * KIB, 1900, 0.7, 0.5)
    asked = PageWorth(1300 * KIB, 64e-3, 0.2, [(0, 500), (2, 500)], full=True)
    forgotten = PageWorth(1300 * KIB, 64e-3, 0.2, [(0, 500), (200, 500)], full=False)
    now = Split(1235, 1000)
    assert best(slots, asked, bounds).pages >= 900
    assert better(now, slots, forgotten, bounds).pages <= 500
