"""Drawing tokens. One row of logits at a time, in float64, so nothing depends on the batch.

Order: penalties, bias, grammar, temperature, top-k, top-p, min-p, then one uniform number keyed by (seed, position).
Ties go to the lower token id. Whatever numbers a request brings, scores are numbers and at least one token can be
drawn; what a grammar rules out never is.

A device hands over the best of a row alone, of what a grammar allows if its mask was there in time. Where the others
could change what is drawn, the whole row is fetched; else the token is the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.api import Sampling, TokenLogprob
from engine.grammar import GrammarError, Guide, Mask

Logits = NDArray[np.float32]
Floats = NDArray[np.float64]

_MASK = (1 << 64) - 1
_FEW = 1024
_LARGE = 1e30
_SMALL = 1e-30
"""No effect grows beyond these, and no float64 can overflow within them."""


_HOTTEST = 1e3
"""Above this temperature, scores that differ may be equally probable; all rows are then looked at whole."""


@dataclass(frozen=True, slots=True)
class Best:
    """A row of logits whose best are here and whose others are not: ``ids`` int32 [n] and ``scores`` float32 [n], the
    highest first and of equals the lower id; good until the next step. No other token scores above ``floor``.
    ``highest`` of the row, NaN if any score is; ``mass``: the sum over the whole row of exp((score - highest of these)
    / temperature). ``masked``: what a grammar rules out scored -inf; else only ``highest`` knows of it. ``whole``
    fetches all logits, while no other step was begun."""

    ids: NDArray[np.int32]
    scores: Logits
    floor: float
    highest: float
    mass: float
    temperature: float
    masked: bool
    whole: Callable[[], Logits]


Row = Logits | Best


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


def whole(row: Row) -> Logits:
    return row.whole() if isinstance(row, Best) else row


def check_scores(row: Row, position: int) -> None:
    """Raises ScoresError if the model's scores, and so its state, are no numbers."""
    if not math.isfinite(row.highest if isinstance(row, Best) else row.max()):
        raise ScoresError(f"the scores at position {position} are not finite")


class _Seen:
    """Distinct token ids and how often each was seen, in arrays that grow in place."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._ids, times = np.unique(np.asarray(tokens, np.int64), return_counts=True)
        self._times: Floats = times.astype(np.float64)
        self._count = len(self._ids)
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}

    def among(self, ids: NDArray[np.int64] | None) -> tuple[NDArray[np.int64], Floats]:
        """Where in ``ids`` (None: all ids, in order) those that were seen are, and how often they were."""
        if ids is None:
            return self._ids[: self._count], self._times[: self._count]
        places = np.array([self._places.get(token, -1) for token in ids.tolist()], np.int64)
        there = np.flatnonzero(places >= 0)
        return there, self._times[places[there]]

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
        biases = [bias for _, bias in sampling.logit_bias]
        self._biased = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._biases = np.array(biases, np.float64)
        self._adjusts = self._all is not None or self._sampled is not None or bool(biases)
        lowest = min(sampling.repetition_penalty - 1.0, sampling.presence_penalty, sampling.frequency_penalty)
        self._raises = lowest < 0.0 or max(biases, default=0.0) > 0.0
        """Whether a token may score more than the model says."""

    @property
    def temperature(self) -> float:
        """At which the mass of the best of a row is wanted."""
        return self._sampling.temperature if self._sampling.temperature > 0.0 and not self._scored else 1.0

    @property
    def mask(self) -> Future[Mask] | None:
        """Within which the best of a row are wanted; None: within all of it, which log probabilities are of. Asking
        begins it."""
        mask = self._guide.mask() if self._guide is not None else None
        return None if self._scored else mask

    @property
    def ready(self) -> bool:
        """Whether nothing is to be waited for, once there are scores."""
        return self._guide is None or self._guide.mask().done()

    @property
    def _scored(self) -> bool:
        return self._sampling.logprobs is not None

    def next(self, row: Row, position: int) -> tuple[int, TokenLogprob | None]:
        """The token at ``position`` (tokens before it), and its log probability under the model if asked for.

        Raises ScoresError, and GrammarError where a grammar leads nowhere."""
        sampling = self._sampling
        check_scores(row, position)
        token = self._draw(row, position) if sampling.forced is None else sampling.forced[self.sampled]
        self.note(token)
        if sampling.logprobs is None:
            return token, None
        known = _logprob_of_best(row, token, sampling.logprobs) if isinstance(row, Best) else None
        return token, known or _logprob(whole(row), token, sampling.logprobs)

    def note(self, token: int) -> None:
        """A token was sampled."""
        for seen in (self._all, self._sampled):
            if seen is not None:
                seen.add(token)
        self.sampled += 1
        if self._guide is not None and token not in self._sampling.stop_tokens:
            self._guide.advance(token)

    def _draw(self, row: Row, position: int) -> int:
        mask = None
        if self._guide is not None:
            mask = self._guide.mask().result()
            if not mask.any():
                raise GrammarError("the grammar is complete, and the request has no stop token")
        if isinstance(row, Best):
            token = self._draw_of_best(row, position, None if row.masked else mask)
            if token is not None:
                return token
        scores = self._adjust(whole(row).astype(np.float64))
        if self._guide is not None:
            scores[~self._guide.allowed()] = -np.inf
        if self._sampling.temperature <= 0.0:
            return int(np.argmax(scores))
        return self._choose(*candidates(scores / self._divisor, self._sampling), position)

    def _draw_of_best(self, best: Best, position: int, mask: Mask | None) -> int | None:
        """As ``_draw`` would from the whole row; None where that takes the others. ``mask``: one that they were not
        found within."""
        if (self._raises and best.floor > -np.inf) or self._sampling.temperature > _HOTTEST:
            return None
        if self._sampling.temperature <= 0.0 and mask is None and not self._adjusts:
            return best.ids.item(0) if best.scores.item(0) > best.floor else None
        ids, scores = self._sure(best, mask)
        if not len(ids):
            return None
        if self._sampling.temperature <= 0.0:
            return int(ids[0])
        scores = scores / self._divisor
        top_p = self._within_best(best, scores, alone=mask is None and not self._adjusts)
        if top_p is None:
            return None
        if _keeps_all(self._sampling):
            order = np.argsort(ids)
            ids, scores = ids[order], scores[order]
        places, probabilities = candidates(scores, self._sampling, top_p)
        return self._choose(ids[places], probabilities, position)

    def _sure(self, best: Best, mask: Mask | None) -> tuple[NDArray[np.int64], Floats]:
        """Ids and scores, adjusted, of those that no other token beats: descending, of equals the lower id first."""
        ids, scores = best.ids.astype(np.int64), best.scores.astype(np.float64)
        if mask is None and not self._adjusts:  # they are in order
            count = int(np.count_nonzero(scores > best.floor))
            return ids[:count], scores[:count]
        sure = self._adjust(scores, ids) > best.floor
        if mask is not None:
            sure &= (mask[ids >> 5] >> (ids & 31).astype(np.uint32)) & 1 != 0
        ids, scores = ids[sure], scores[sure]
        order = np.lexsort((ids, -scores))
        return ids[order], scores[order]

    def _within_best(self, best: Best, scores: Floats, *, alone: bool) -> float | None:
        """What is ``top_p`` for these scores alone, descending and divided by the temperature; None where the filters
        would let others through. ``alone``: all tokens are still as the model scored them."""
        sampling = self._sampling
        if best.floor == -np.inf or _keeps_all(sampling):
            return sampling.top_p if best.floor == -np.inf else None
        if sampling.top_k:
            return sampling.top_p if len(scores) >= sampling.top_k else None
        if sampling.top_p < 1.0:
            if not alone or best.temperature != sampling.temperature:
                return None
            mass = sampling.top_p * best.mass / float(np.exp(scores - scores[0]).sum())
            return mass if mass < 1.0 else None
        others = math.exp(best.floor / self._divisor - scores[0])
        return sampling.top_p if others < sampling.min_p else None

    @property
    def _divisor(self) -> float:
        return max(self._sampling.temperature, _SMALL)

    def _choose(self, ids: NDArray[np.int64], probabilities: Floats, position: int) -> int:
        if self._guide is not None:
            ids, probabilities = ids[probabilities > 0.0], probabilities[probabilities > 0.0]
        cumulative = np.cumsum(probabilities)
        at = int(np.searchsorted(cumulative, uniform(self._sampling.seed, position) * cumulative[-1], side="right"))
        return int(ids[min(at, len(ids) - 1)])

    def _adjust(self, scores: Floats, ids: NDArray[np.int64] | None = None) -> Floats:
        """In place. ``ids``: of the scores; None: all, in order."""
        sampling = self._sampling
        if self._all is not None:
            seen, _ = self._all.among(ids)
            old = scores[seen]
            scores[seen] = np.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
        if self._sampled is not None:
            seen, times = self._sampled.among(ids)
            scores[seen] -= sampling.presence_penalty + sampling.frequency_penalty * times
        if ids is None:
            np.add.at(scores, self._biased, self._biases)
        else:
            for token, bias in zip(self._biased, self._biases, strict=True):
                scores[ids == token] += bias
        return scores


def candidates(
    scores: Floats, sampling: Sampling, top_p: float | None = None
) -> tuple[NDArray[np.int64], Floats]:  # fmt: skip
    """Places of the scores whose tokens may be drawn and their probabilities (not renormalised). ``top_p`` instead of
    that of ``sampling``, of scores that descend.

    Sorted by descending probability, except that with no filter at all they stay in order."""
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    if _keeps_all(sampling):
        return np.arange(len(scores)), probabilities
    count = sampling.top_k or len(scores)
    if top_p is None:
        top_p = sampling.top_p
        ids = _top(probabilities, count, top_p)
    else:
        ids = np.arange(min(count, len(scores)))
    kept = probabilities[ids]
    if top_p < 1.0:
        before = np.cumsum(kept) - kept
        within = before < (top_p * kept.sum() if sampling.top_k else top_p)
        within[0] = True
        ids = ids[within]
        kept = probabilities[ids]
    if sampling.min_p > 0.0:
        ids = ids[kept >= sampling.min_p * kept[0]]
    return ids, probabilities[ids]


def _keeps_all(sampling: Sampling) -> bool:
    return not sampling.top_k and sampling.top_p >= 1.0 and sampling.min_p <= 0.0


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


def _logprob_of_best(best: Best, token: int, alternatives: int) -> TokenLogprob | None:
    """None where that takes the whole row."""
    sure = best.scores > best.floor
    ids, scores = best.ids[sure], best.scores[sure].astype(np.float64)
    at = np.flatnonzero(ids == token)
    if not len(at) or len(ids) < alternatives or best.temperature != 1.0:
        return None
    scores -= best.highest + math.log(best.mass)
    top = zip(ids[:alternatives].tolist(), scores[:alternatives].tolist(), strict=True)
    return TokenLogprob(token, float(scores[at[0]]), tuple(top))
