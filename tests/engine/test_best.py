"""Drawing from the best of a row is drawing from the whole of it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Sampling
from engine.device.masks import Masks
from engine.device.reduce import KEPT, Reduced, reduce
from engine.grammar import packed
from engine.sampling import Best, Logits, Sampler, ScoresError


class Mask:
    """Stands in for a grammar that allows the same tokens again and again."""

    def __init__(self, allowed: Any) -> None:
        self._allowed, self._mask = allowed, Future[Any]()
        self._mask.set_result(packed(np.flatnonzero(allowed).tolist(), len(allowed)))

    def mask(self) -> Future[Any]:
        return self._mask

    def allowed(self) -> Any:
        return self._allowed.copy()

    def advance(self, token: int) -> None:
        """The same again."""


def best(logits: Logits, temperature: float, fetched: list[int] | None = None, mask: Any = None) -> Best:
    """As the device hands it over; whole rows that are fetched are counted, or forbidden. ``mask``: in time."""

    def whole(row: int) -> Logits:
        assert fetched is not None, "the best would have been enough"
        fetched.append(row)
        return logits

    rows = torch.from_numpy(np.stack([logits[::-1], logits]))
    masks = Masks(len(logits), 3, torch.device("cpu"))
    for rows_masks in ([mask and mask.result()] * 3, [None, mask and mask.result()]):  # some row had one before
        masks.copy(rows_masks)
    reduced = reduce(rows, torch.tensor([0.5, temperature]), masks)
    return Reduced(reduced, len(logits)).best([0.5, temperature], [False, mask is not None], whole)[1]


def both(logits: Logits, prompt: list[int], sampling: Sampling, mask: Any = None) -> tuple[Sampler, Sampler]:
    return Sampler(sampling, prompt, mask), Sampler(sampling, prompt, mask)


numbers = st.floats(0, 1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Logits, Sampling, list[int], Any]:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    size = draw(st.sampled_from([3, KEPT, KEPT + 1, 700, 3000]))
    logits = rng.normal(0, draw(st.sampled_from([0.0, 0.3, 2.0, 6.0])), size)
    logits = logits.round(draw(st.sampled_from([0, 1, 9]))).astype(np.float32)  # with and without ties
    tokens = st.integers(0, size - 1)
    sampling = Sampling(
        max_tokens=9,
        temperature=draw(st.sampled_from([0.0, 1e-3, 0.3, 0.7, 1.0, 1.5, 1e9])),
        top_k=draw(st.sampled_from([0, 1, 5, 20, 127, 200])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.5, 0.0])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        seed=draw(st.integers(0, 1000)),
        logprobs=draw(st.sampled_from([None, 0, 5])),
        logit_bias=tuple(draw(st.lists(st.tuples(tokens, st.sampled_from([-100.0, -1.0, 2.0])), max_size=4))),
    )
    allowed = rng.random(size) < draw(st.sampled_from([0.01, 0.3, 0.99]))
    allowed[draw(tokens)] = True
    return logits, sampling, draw(st.lists(tokens, max_size=6)), draw(st.sampled_from([None, Mask(allowed)]))


@given(cases())
@settings(max_examples=120, deadline=None)
def test_the_token_is_that_of_the_whole_row(case: tuple[Logits, Sampling, list[int], Any]) -> None:
    logits, sampling, prompt, mask = case
    of_whole, of_best = both(logits, prompt, sampling, mask)
    for position in range(4):
        token, logprob = of_whole.next(logits, position)
        in_time = of_best.mask if position % 2 else None
        got, scored = of_best.next(best(logits, of_best.temperature, [], in_time), position)
        assert got == token
        if logprob is not None:
            assert scored is not None and scored.logprob == pytest.approx(logprob.logprob, abs=1e-5)
            assert [one for one, _ in scored.top] == [one for one, _ in logprob.top]
            assert [of for _, of in scored.top] == pytest.approx([of for _, of in logprob.top], abs=1e-5)


PEAKED = np.random.default_rng(5).normal(0, 3, 3000).astype(np.float32)


@pytest.mark.parametrize("options", [
    {"temperature": 0.0}, {"temperature": 0.0, "logprobs": 20}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"top_k": 40}, {"temperature": 0.6, "top_p": 0.5}, {"min_p": 0.1}, {"top_k": 5, "logprobs": 3},
    {"top_k": 20, "presence_penalty": 1.5, "repetition_penalty": 1.1}, {"forced": (3, 4, 5, 6), "max_tokens": 9},
    {"temperature": 0.0, "logit_bias": ((7, -100.0), (8, -1.0))},
])  # fmt: skip
def test_usual_requests_need_no_whole_row(options: dict[str, Any]) -> None:
    sampling = Sampling(**{"max_tokens": 4, "seed": 3, **options})
    highest = 99.0 if sampling.min_p else 7.0
    masks: list[Any] = [None, Mask(highest > PEAKED)]
    if sampling.logprobs is None and not sampling.min_p:
        masks.append(Mask((PEAKED < 4.0) & (np.arange(len(PEAKED)) % 9 < 2)))  # none among the best of all
    for mask in masks:
        of_whole, of_best = both(PEAKED, [1, 2], sampling, mask)
        for position in range(4):
            row = best(PEAKED, of_best.temperature, mask=of_best.mask)
            assert of_best.next(row, position)[0] == of_whole.next(PEAKED, position)[0]


@pytest.mark.parametrize("options", [
    {}, {"top_p": 0.9, "presence_penalty": 1.5}, {"frequency_penalty": -0.5}, {"logit_bias": ((7, 9.0), (5, -9.0))},
])  # fmt: skip
def test_few_allowed_tokens_need_no_whole_row_either(options: dict[str, Any]) -> None:
    mask = Mask(np.arange(len(PEAKED)) < KEPT - 1)
    of_whole, of_best = both(PEAKED, [1, 2], Sampling(max_tokens=20, seed=3, **options), mask)
    for position in range(20):
        row = best(PEAKED, of_best.temperature, mask=of_best.mask)
        assert of_best.next(row, position)[0] == of_whole.next(PEAKED, position)[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_no_numbers(bad: float) -> None:
    logits = PEAKED.copy()
    logits[9] = bad
    with pytest.raises(ScoresError):
        Sampler(Sampling(max_tokens=1), ()).next(best(logits, 1.0), 0)
