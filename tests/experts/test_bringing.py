"""Steps that ask nobody are taken where they are no slower, as far as steps that asked have told."""

from __future__ import annotations

import numpy as np
import pytest

from engine.experts.bringing import WAIT, Bringing

LAYERS, PARTS, LINK = 40, 4, 8000.0
"""ns: a part over the link."""


def work(experts: int, share: float = 0.0) -> np.ndarray:
    """A step that misses so many whole experts, one a layer, of which the link brings a share."""
    on_link = round(PARTS * share)
    return np.array([[28, on_link, PARTS - on_link]] * experts + [[32, 0, 0]] * (LAYERS - experts), np.int32)


def times(cpu: float, link: float) -> np.ndarray:
    return np.full((LAYERS, 3), (cpu, link, 0), np.int64)


def step(bringing: Bringing, experts: int, cpu: float = 20_000, link: float = 28_000) -> bool:
    """As an engine does: half of what is missing is the CPU's, unless nobody is asked. Whether nobody was."""
    if brought := bringing.pays:
        bringing.brought(work(experts, 1.0))
    else:
        bringing.asked(times(cpu, link), work(experts, 0.5))
    return brought


def settle(bringing: Bringing, experts: int, **costs: float) -> bool:
    for _ in range(100):
        step(bringing, experts, **costs)
    return bringing.pays


def test_nothing_missing_needs_nobody() -> None:
    assert settle(Bringing(LAYERS, LINK), 0)


@pytest.mark.parametrize(("cpu", "link", "lost"), [
    (20_000, 28_000, 16_000),  # the device was last: the CPU's two parts come on top
    (38_000, 28_000, 6_000),  # the CPU was, and would not be waited for any more
])  # fmt: skip
def test_as_many_misses_as_waits_are_worth(cpu: float, link: float, lost: float) -> None:
    """An expert more than that is asked for, one less than sure is brought."""
    most = LAYERS * WAIT / lost
    assert settle(Bringing(LAYERS, LINK), int(most / 1.3), cpu=cpu, link=link)
    assert not settle(Bringing(LAYERS, LINK), min(LAYERS, int(most) + 1), cpu=cpu, link=link) or most >= LAYERS


def test_between_the_two_it_stays_as_it_is() -> None:
    """As many misses as are just worth it, coming from few and from many."""
    experts = round(LAYERS * WAIT / 16_000 / 1.12)
    few, many = Bringing(LAYERS, LINK), Bringing(LAYERS, LINK)
    settle(many, 40), settle(few, 40), settle(few, 0)
    assert few.pays and not many.pays
    changes = 0
    for _ in range(200):
        before = few.pays, many.pays
        step(few, experts), step(many, experts)
        changes += before != (few.pays, many.pays)
    assert few.pays and not many.pays and not changes


def test_a_cold_cache_asks_within_a_few_steps() -> None:
    bringing = Bringing(LAYERS, LINK)
    settle(bringing, 40), settle(bringing, 0)
    assert [step(bringing, 40) for _ in range(6)][-1] is False


def test_a_cpu_that_is_no_help_is_left_alone_and_asked_again_in_the_end() -> None:
    bringing = Bringing(LAYERS, LINK)
    assert settle(bringing, 20, cpu=200_000)
    took = next(count for count in range(5000) if not step(bringing, 20, cpu=20_000))  # it has become fast meanwhile
    assert took > 100
    assert not settle(bringing, 20, cpu=20_000)


def test_times_that_are_not_known_tell_nothing() -> None:
    bringing = Bringing(LAYERS, LINK)
    before = bringing._cost
    bringing.asked(times(10_000, 0), work(8, 0.5))
    assert bringing._cost == before
