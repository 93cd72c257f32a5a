"""Drawing tokens. One row of logits at a time, in float64, so nothing depends on the batch.

Order: penalties, bias, grammar, temperature, top-k, top-p, min-p, then one uniform number keyed by (seed, position).
Ties go to the lower token id. Whatever numbers a request brings, scores are numbers and at least one token can be
drawn; what a grammar rules out never is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.api import Sampling, TokenLogprob
from engine.grammar import GrammarError, Guide

Logits = NDArray[np.float32]
Floats = NDArray[np.float64]

_MASK = (1 << 64) - 1
_FEW = 1024
_LARGE = 1e30
_SMALL = 1e-30
"""No effect grows beyond these, and no float64 can overflow within them."""


class ScoresError(Exception):
    """The model's scores are no numbers, so nothing can be drawn from them."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for (seed, position): splitmix64 over both."""
    mixed = _splitmix((_splitmix(seed & _MASK) + position) & _MASK)
    return (mixed >> 11) * 2.0**-53


def _splitmix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def check_scores(logits: Logits, position: int) -> None:
    """Raises ScoresError if the model's scores, and so its state, are no numbers."""
    if not np.isfinite(logits.max()):
        raise ScoresError(f"the scores at position {position} are not finite")


class _Seen:
    """Distinct token ids and how often each was seen, in arrays that grow in place."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._ids, times = np.unique(np.asarray(tokens, np.int64), return_counts=True)
        self._times: Floats = times.astype(np.float64)
        self._count = len(self._ids)
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._count]

    @property
    def times(self) -> Floats:
        return self._times[: self._count]

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, self._count)
        if place == self._count:
            if place == len(self._ids):
                room = np.zeros(max(64, place), np.int64)
                self._ids = np.concatenate([self._ids, room])
                self._times = np.concatenate([self._times, room.astype(np.float64)])
            self._ids[place] = token
            self._count += 1
        self._times[place] += 1.0


class Sampler:
    """The sampling state of one sequence: its parameters, what has been seen, and where its grammar stands."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], guide: Guide | None = None) -> None:
        self._sampling = sampling = _finite(sampling)
        self._guide = guide
        self.sampled = 0
        self._all = _Seen(prompt) if sampling.repetition_penalty != 1.0 else None
        self._sampled = _Seen() if sampling.presence_penalty or sampling.frequency_penalty else None
        self._biased = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in sampling.logit_bias], np.float64)

    def next(self, logits: Logits, position: int) -> tuple[int, TokenLogprob | None]:
        """The token at ``position`` (tokens before it), and its log probability under the model if asked for.

        Raises ScoresError, and GrammarError where a grammar leads nowhere."""
        sampling = self._sampling
        check_scores(logits, position)
        token = self._draw(logits, position) if sampling.forced is None else sampling.forced[self.sampled]
        self.note(token)
        if sampling.logprobs is None:
            return token, None
        return token, _logprob(logits, token, sampling.logprobs)

    def note(self, token: int) -> None:
        """A token was sampled."""
        for seen in (self._all, self._sampled):
            if seen is not None:
                seen.add(token)
        self.sampled += 1
        if self._guide is not None and token not in self._sampling.stop_tokens:
            self._guide.advance(token)

    def _draw(self, logits: Logits, position: int) -> int:
        sampling = self._sampling
        scores = self._adjust(logits.astype(np.float64))
        if self._guide is not None:
            allowed = self._guide.allowed()
            if not allowed.any():
                raise GrammarError("the grammar is complete, and the request has no stop token")
            scores[~allowed] = -np.inf
        if sampling.temperature <= 0.0:
            return int(np.argmax(scores))
        ids, probabilities = candidates(scores / max(sampling.temperature, _SMALL), sampling)
        if self._guide is not None:
            ids, probabilities = ids[probabilities > 0.0], probabilities[probabilities > 0.0]
        cumulative = np.cumsum(probabilities)
        at = int(np.searchsorted(cumulative, uniform(sampling.seed, position) * cumulative[-1], side="right"))
        return int(ids[min(at, len(ids) - 1)])

    def _adjust(self, scores: Floats) -> Floats:
        sampling = self._sampling
        if self._all is not None:
            seen = self._all.ids
            old = scores[seen]
            scores[seen] = np.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
        if self._sampled is not None:
            penalties = sampling.presence_penalty + sampling.frequency_penalty * self._sampled.times
            scores[self._sampled.ids] -= penalties
        np.add.at(scores, self._biased, self._biases)
        return scores


def candidates(scores: Floats, sampling: Sampling) -> tuple[NDArray[np.int64], Floats]:
    """Token ids that may be drawn and their probabilities (not renormalised).

    Sorted by descending probability, except that with no filter at all they stay in the order of their ids."""
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    if not sampling.top_k and sampling.top_p >= 1.0 and sampling.min_p <= 0.0:
        return np.arange(len(scores)), probabilities
    ids = _top(probabilities, sampling.top_k or len(scores), sampling.top_p)
    kept = probabilities[ids]
    if sampling.top_p < 1.0:
        before = np.cumsum(kept) - kept
        within = before < (sampling.top_p * kept.sum() if sampling.top_k else sampling.top_p)
        within[0] = True
        ids = ids[within]
        kept = probabilities[ids]
    if sampling.min_p > 0.0:
        ids = ids[kept >= sampling.min_p * kept[0]]
    return ids, probabilities[ids]


def _finite(sampling: Sampling) -> Sampling:
    """The same wishes, within what float64 can carry out."""
    return replace(
        sampling,
        temperature=_within(sampling.temperature, 0.0, _LARGE, 1.0),
        top_k=max(0, sampling.top_k),
        top_p=_within(sampling.top_p, 0.0, 1.0, 1.0),
        min_p=_within(sampling.min_p, 0.0, 1.0, 0.0),
        presence_penalty=_within(sampling.presence_penalty, -_LARGE, _LARGE, 0.0),
        frequency_penalty=_within(sampling.frequency_penalty, -_LARGE, _LARGE, 0.0),
        repetition_penalty=_within(sampling.repetition_penalty, _SMALL, _LARGE, 1.0),
        logit_bias=tuple((token, _within(bias, -_LARGE, _LARGE, 0.0)) for token, bias in sampling.logit_bias),
    )


def _within(value: float, low: float, high: float, off: float) -> float:
    return off if math.isnan(value) else min(max(value, low), high)


def _top(probabilities: Floats, count: int, mass: float) -> NDArray[np.int64]:
    """The ``count`` most probable ids, descending; no more of them than ``mass`` needs where a few are enough."""
    size = len(probabilities)
    few = min(count, _FEW)
    if few < size:
        threshold = np.partition(probabilities, size - few)[size - few]
        best = np.flatnonzero(probabilities >= threshold)
        best = best[np.argsort(-probabilities[best], kind="stable")]
        if count <= _FEW or (count == size and mass < 1.0 and probabilities[best].sum() >= mass):
            return best[:count]
    return np.argsort(-probabilities, kind="stable")[:count]


def _logprob(logits: Logits, token: int, alternatives: int) -> TokenLogprob:
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        threshold = np.partition(scores, len(scores) - min(alternatives, len(scores)))[-min(alternatives, len(scores))]
        best = np.flatnonzero(scores >= threshold)
        best = best[np.argsort(-scores[best], kind="stable")][:alternatives]
        top = tuple((int(one), float(scores[one])) for one in best)
    return TokenLogprob(token, float(scores[token]), top)
