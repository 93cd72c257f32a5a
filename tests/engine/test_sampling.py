"""Drawing tokens: distributions, determinism, penalties against their formulas."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from engine_support import prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Sampling
from engine.sampling import Sampler, ScoresError, candidates, uniform

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 2, 50).astype(np.float32)


def draw(logits: Any, position: int = 0, seen: Any = (), **options: Any) -> int:
    sampler = Sampler(Sampling(max_tokens=1, **options), seen)
    return sampler.next(np.asarray(logits, np.float32), position)[0]


def softmax(scores: Any) -> Any:
    scores = np.asarray(scores, np.float64)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def test_uniform_numbers_are_uniform_and_depend_on_seed_and_position() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(40) for position in range(250)])
    assert numbers.min() >= 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert (abs(counts - 500) < 5 * np.sqrt(500)).all()
    assert len(set(numbers.tolist())) == len(numbers)
    along = np.array([uniform(3, position) for position in range(5000)])
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.05
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_frequencies_follow_the_softmax() -> None:
    drawn = np.bincount([draw(LOGITS, position, temperature=0.7) for position in range(20_000)], minlength=50)
    expected = softmax(LOGITS.astype(np.float64) / 0.7) * 20_000
    likely = expected >= 5
    chi = (((drawn - expected) ** 2) / expected)[likely].sum()
    assert chi < likely.sum() + 5 * np.sqrt(2 * likely.sum())


def test_the_same_seed_and_position_draw_the_same() -> None:
    tokens = [draw(LOGITS, position, seed=7) for position in range(100)]
    assert tokens == [draw(LOGITS, position, seed=7) for position in range(100)]
    assert tokens != [draw(LOGITS, position, seed=8) for position in range(100)]


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert draw([1, 3, 3, 2], temperature=0.0) == 1
    assert {draw([1, 3, 3, 2], position, top_k=1) for position in range(20)} == {1}


def test_a_row_draws_the_same_wherever_it_lies() -> None:
    rows = np.repeat(LOGITS[None], 5, axis=0)
    assert len({draw(row, 3, seed=1) for row in rows}) == 1


@pytest.mark.parametrize("size", [50, 5000])
@pytest.mark.parametrize("options", [
    {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 2000}, {"top_p": 0.999}, {"top_k": 7, "top_p": 0.6},
    {"top_k": 2000, "top_p": 0.9, "min_p": 0.001}, {"top_p": 1e-9}, {"top_k": 1 << 20},
])  # fmt: skip
def test_filters_against_their_definitions(size: int, options: dict[str, Any]) -> None:
    scores = np.random.default_rng(1).normal(0, 1.5, size).round(2)  # rounded, so that there are ties
    order = np.argsort(-softmax(scores), kind="stable")
    probabilities = softmax(scores)[order][: options.get("top_k", size)]
    probabilities = probabilities / probabilities.sum() if "top_k" in options else probabilities
    keep = np.cumsum(probabilities) - probabilities < options.get("top_p", 1.0)
    keep &= probabilities >= options.get("min_p", 0.0) * probabilities[0]
    ids, found = candidates(scores, Sampling(max_tokens=1, **options))
    assert ids.tolist() == order[: len(keep)][keep].tolist()
    np.testing.assert_allclose(found, softmax(scores)[ids])


def test_penalties_against_their_formulas() -> None:
    sampling = Sampling(
        max_tokens=9, temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3,
        logit_bias=((4, 1.5), (9, -2.0)),
    )  # fmt: skip
    sampler, said, seen = Sampler(sampling, [1, 2, 2]), [], {1, 2}
    for position in range(30):
        scores = LOGITS.astype(np.float64)
        for token in seen:
            scores[token] = scores[token] / 1.3 if scores[token] > 0 else scores[token] * 1.3
        for token in set(said):
            scores[token] -= 0.5 + 0.25 * said.count(token)
        scores[4] += 1.5
        scores[9] -= 2.0
        token, _ = sampler.next(LOGITS, position)
        assert token == int(np.argmax(scores))
        said.append(token)
        seen.add(token)
    assert len(set(said)) > 5


def test_logprobs_are_those_of_the_model() -> None:
    sampling = Sampling(max_tokens=3, temperature=0.3, top_k=3, logprobs=4)
    token, logprob = Sampler(sampling, []).next(LOGITS, 0)
    assert logprob is not None and logprob.token == token
    expected = np.log(softmax(LOGITS))
    assert logprob.logprob == pytest.approx(expected[token])
    order = np.argsort(-expected, kind="stable")[:4]
    assert [one for one, _ in logprob.top] == order.tolist()
    np.testing.assert_allclose([value for _, value in logprob.top], expected[order])
    _, forced = Sampler(Sampling(max_tokens=1, forced=(3,), logprobs=0), []).next(LOGITS, 0)
    assert forced is not None and forced.top == () and forced.logprob == pytest.approx(expected[3])


def test_more_alternatives_than_tokens() -> None:
    _, logprob = Sampler(Sampling(max_tokens=1, logprobs=99), prompt(1, 3, 4)).next(LOGITS[:4], 0)
    assert logprob is not None and len(logprob.top) == 4


NUMBERS = st.sampled_from(
    [0.0, 5e-324, 1e-320, 1e-308, 1e-30, 1e-7, 0.5, 1.0, 2.0, 1e30, 1.7e308, -1.0, -1e308, np.inf, -np.inf, np.nan]
)
ROWS = st.sampled_from(
    [LOGITS, LOGITS * np.float32(1e36), np.zeros(50, np.float32), np.where(LOGITS > 0, LOGITS, -np.inf)]
)


@settings(max_examples=300, deadline=None)
@given(st.data(), ROWS, st.integers(-3, 2**70))
def test_no_numbers_whatever_leave_nothing_to_draw(data: Any, row: Any, top_k: int) -> None:
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    options: dict[str, Any] = {name: data.draw(NUMBERS, name) for name in names}
    options |= {"top_k": data.draw(st.sampled_from([0, 1, 5, top_k]))}
    options |= {"logit_bias": tuple((token % 4, data.draw(NUMBERS)) for token in range(data.draw(st.integers(0, 8))))}
    sampler = Sampler(Sampling(max_tokens=4, logprobs=2, **options), [1, 2, 3, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an overflow is a warning of numpy's
        for position in range(4):
            assert 0 <= sampler.next(row.astype(np.float32), position)[0] < 50


def test_the_coldest_temperatures_are_greedy() -> None:
    for temperature in (1e-7, 1e-300, 1e-320, 5e-324):
        assert draw(LOGITS, temperature=temperature, seed=5) == int(LOGITS.argmax())
        assert draw(LOGITS, temperature=temperature, top_k=5, top_p=1e-320) == int(LOGITS.argmax())


@pytest.mark.parametrize("row", [np.full(50, np.nan), np.full(50, np.inf), np.full(50, -np.inf)])
def test_scores_that_are_no_numbers_are_an_error(row: Any) -> None:
    with pytest.raises(ScoresError):
        draw(row)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_penalties_and_bias_over_many_tokens_follow_their_formulas(data: st.DataObject) -> None:
    number = st.floats(-2, 2)
    prompt_tokens = data.draw(st.lists(st.integers(0, 49), max_size=30))
    forced = tuple(data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=100)))
    options: dict[str, Any] = {
        "repetition_penalty": data.draw(st.floats(0.2, 3)),
        "presence_penalty": data.draw(number),
        "frequency_penalty": data.draw(number),
        "logit_bias": tuple(data.draw(st.lists(st.tuples(st.integers(0, 49), number), max_size=8))),
    }
    sampler = Sampler(Sampling(max_tokens=100, forced=forced, **options), prompt_tokens)
    for position in range(len(forced)):
        sampler.next(LOGITS, position)
    scores = LOGITS.astype(np.float64)
    for token in {*prompt_tokens, *forced}:
        penalty = options["repetition_penalty"]
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(forced):
        scores[token] -= options["presence_penalty"] + options["frequency_penalty"] * forced.count(token)
    for token, bias in options["logit_bias"]:
        scores[token] += bias
    free = Sampler(Sampling(max_tokens=100, temperature=0.0, forced=None, **options), prompt_tokens)
    for token in forced:
        free.note(token)
    assert free.next(LOGITS, 0)[0] == int(np.argmax(scores))


def test_what_was_seen_is_not_gathered_again_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.1}
    sampler = Sampler(Sampling(max_tokens=500, **options), range(40))
    for name in ("unique", "union1d", "fromiter"):
        monkeypatch.setattr(np, name, None)
    for position in range(500):
        sampler.next(LOGITS, position)
