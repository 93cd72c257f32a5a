"""Whether a forward hides a restore: by what was seen of this machine, and never in doubt."""

from __future__ import annotations

import random

import pytest

from engine.pace import BYTES_PER_SECOND, HELD, LEAST, SECONDS_PER_TOKEN, Pace

GB = 10**9


def test_until_something_was_seen_the_assumed_rates_hold() -> None:
    pace = Pace()
    size = round(100 * SECONDS_PER_TOKEN * BYTES_PER_SECOND)
    assert pace.hides(size - 1, 100) and not pace.hides(size + 1, 100)
    assert pace.hides(0, 1)


def test_the_slower_of_the_last_two_reads_counts() -> None:
    pace = Pace()
    pace.fed(100, 1.0)
    pace.read(2 * GB, 1.0)
    assert pace.hides(19 * GB // 10, 100) and not pace.hides(21 * GB // 10, 100)
    pace.read(GB, 1.0)
    pace.read(4 * GB, 1.0)
    assert not pace.hides(11 * GB // 10, 100)
    pace.read(4 * GB, 1.0)
    assert pace.hides(39 * GB // 10, 100)
    for _ in range(2):
        pace.read(1 << 20, 10.0)
    assert pace.hides(39 * GB // 10, 100)  # too small to say anything


def test_the_faster_of_two_forwards_counts() -> None:
    pace = Pace()
    pace.fed(64, 9.0)
    pace.fed(100, 2.0)
    assert pace.forward_seconds(100) == pytest.approx(2.0)
    pace.fed(64, 5.0)
    pace.fed(64, 5.0)
    assert pace.forward_seconds(100) == pytest.approx(5.0)


@pytest.mark.parametrize("seed", range(50))
def test_never_more_than_a_forward_takes(seed: int) -> None:
    """Of any machine on which a batch costs something and each token more: whatever was fed before."""
    rng = random.Random(seed)
    base, each, pace = rng.random(), rng.random() / 100, Pace()
    for _ in range(rng.randint(1, 20)):
        tokens = rng.choice((1, rng.randint(1, 64), rng.randint(1, 2048)))
        pace.fed(tokens, base + each * tokens)
    for tokens in (1, 2, 16, 100, 512, 4096):
        assert 0 < pace.forward_seconds(tokens) <= base + each * tokens + 1e-9
    assert pace.forward_seconds(4096) >= base


def test_an_answer_for_measurements() -> None:
    assert Pace(always=True).hides(10**15, 1) and not Pace(always=False).hides(0, 10**6)


def hold_ups(
    fixed: float, token: float, decode: float, later: float = 1.0, prompt: int = 65536, chunk: int = 4096
) -> tuple[float, float]:
    """On a machine where a forward takes so many seconds, and so many for each token, of the last ones ``later`` times
    as many, or for answers alone: the longest that a sequence that answers waited while a prompt was fed beside it, and
    how much longer that took than alone."""
    pace, longest, took, left, alone = Pace(), 0.0, 0.0, prompt, -(-prompt // chunk) * fixed
    pace.fed(chunk, fixed + chunk * token)
    while left:
        count, each = min(left, pace.beside(chunk)), token * (later - (later - 1) * left / prompt)
        seconds = fixed + count * each if count else decode
        pace.fed(count + 1, seconds, 1)
        longest, took, alone, left = max(longest, seconds), took + seconds, alone + count * each, left - count
    return longest, took / alone


@pytest.mark.parametrize("token", [1e-6, 2e-5, 2e-4, 4e-3])
def test_answers_are_not_held_up_for_long(token: float) -> None:
    longest, later = hold_ups(0.002, token, 0.002 + 2 * token)
    assert longest <= max(HELD, 5 * LEAST * token) and later < 1.7


def test_a_hiccup_is_soon_forgotten() -> None:
    pace = Pace()
    for seconds in (0.1, 5.0):
        pace.fed(2049, seconds, 1)
        pace.fed(1, 10.0, 1)
    small = pace.beside(8192)
    pace.fed(small + 1, 0.005, 1)
    pace.fed(1, 10.0, 1)
    assert small < 2048 <= pace.beside(8192)


def test_a_prompt_whose_experts_come_over_a_link_is_not_cut() -> None:
    longest, later = hold_ups(1.1, 5e-5, 0.02)
    assert longest < 1.5 and later < 1.7


@pytest.mark.parametrize("token", [1e-6, 2e-5, 2e-4])
def test_nor_where_there_is_more_and_more_to_look_at(token: float) -> None:
    longest, later = hold_ups(0.01, token, 0.012, later=6.0)
    assert longest <= 1.25 * HELD and later < 1.7


def test_who_answers_has_a_quarter_of_the_time() -> None:
    pace, alone = Pace(), 0
    pace.fed(64, 0.3)
    for _ in range(100):
        count = pace.beside(64)
        alone += not count
        pace.fed(count + 1, 0.3 if count else 0.01, 1)
    assert 85 < alone < 95  # ten steps of theirs to one of 0.3 s
    assert Pace(always=True).beside(64) == 64
