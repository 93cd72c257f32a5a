"""Which policy suits a trace of routing: the cache replayed without its experts, on a sample of them.

    python -m engine.experts.replay [--tokens N]

prints the hit rates of each policy on synthetic routing, replayed exactly and by ``resolve`` with its windows.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.experts.layout import FORMATS, Layout
from engine.experts.residency import (
    CPU,
    DEFAULT,
    ENTRIES,
    FETCHED,
    HITS,
    SHIFT,
    SPAN,
    Decision,
    Policy,
    Residency,
    policies,
    resolve,
)

_SAMPLED = 640
"""Experts that a chooser follows, about."""
_PERIOD = 256
"""Steps from one choice to the next."""
_MARGIN = 0.01
"""Of the uses: what another policy has to gain."""

Trace = npt.NDArray[np.int32]
"""[tokens, layers, k]: the experts of each token in each layer."""


class Shadow:
    """A cache that holds nothing: every miss takes the place of the least valuable of ``room`` experts."""

    def __init__(self, room: int, policy: Policy) -> None:
        self._room, self._policy = max(1, room), policy
        self._value: dict[int, int] = {}
        self._resident: set[int] = set()
        self._oldest: list[tuple[int, int]] = []  # value when it was pushed, expert: values only grow

    def use(self, flat: int, token: int, layer: int) -> bool:
        """Whether it was there. Tokens and layers come in order."""
        policy = self._policy
        now, before = token * policy.per_step + layer * policy.per_layer, self._value.get(flat, -SPAN)
        # As ``used``, without its 32 bits: this is what a chooser's time goes to.
        added = policy.bump[min(abs(now - before) >> SHIFT, ENTRIES - 1)]
        value, hit = max(now, before) + added, flat in self._resident
        self._value[flat] = value
        if not hit:
            if len(self._resident) == self._room:
                self._resident.remove(self._least())
            self._resident.add(flat)
            heapq.heappush(self._oldest, (value, flat))
        return hit

    def _least(self) -> int:
        while self._value[self._oldest[0][1]] != self._oldest[0][0]:
            flat = self._oldest[0][1]
            heapq.heapreplace(self._oldest, (self._value[flat], flat))
        return heapq.heappop(self._oldest)[1]


def hit_rate(trace: Trace, experts: int, slots: int, policy: Policy, sample: float = 1.0, warm: float = 1 / 3) -> float:
    """Of the uses after the first ``warm`` of the tokens, those whose expert was resident, when every miss takes the
    place of the least valuable expert. Only a share ``sample`` of the experts is looked at, in as much smaller a cache
    (Waldspurger et al., "SHARDS", FAST 2015)."""
    flats = trace.shape[1] * experts
    kept = _sampled(flats, sample)
    shadow = Shadow(round(slots * len(kept) / flats), policy)
    hits = uses = 0
    for token, layer, flat in _uses(trace, experts, kept):
        hit, counts = shadow.use(flat, token, layer), token >= warm * len(trace)
        uses += counts
        hits += counts and hit
    return hits / max(1, uses)


def choose_policy(trace: Trace, experts: int, slots: int, sample: float = 0.125) -> Policy:
    """The one with the most hits; of equals the first."""
    return max(policies(trace.shape[1]).values(), key=lambda policy: hit_rate(trace, experts, slots, policy, sample))


class Chooser:
    """Follows what is routed in every step with a small shadow for each policy, and says when another one would have
    hit more often. ``slots``: of the cache."""

    def __init__(self, layers: int, experts: int, slots: int, policy: Policy | None = None) -> None:
        self._experts, self._policies = experts, tuple(policies(layers).values())
        self._first = np.arange(layers)[:, None] * experts
        kept = _sampled(layers * experts, min(1.0, _SAMPLED / (layers * experts)))
        self._kept = np.zeros(layers * experts, np.bool_)
        self._kept[list(kept)] = True
        room = round(slots * len(kept) / (layers * experts))
        self._shadows = [Shadow(room, policy) for policy in self._policies]
        self._hits, self._uses, self._steps = np.zeros(len(self._policies)), 0, 0
        self.policy = policy or policies(layers)[DEFAULT]

    def step(self, routed: npt.NDArray[np.int32]) -> bool:
        """After a step, with ``Residency.routed``: whether ``policy`` is another one now."""
        flats = (routed + self._first)[routed >= 0]
        kept = sorted(set(flats[self._kept[flats]].tolist()))
        for number, shadow in enumerate(self._shadows):
            self._hits[number] += sum(shadow.use(flat, self._steps, flat // self._experts) for flat in kept)
        self._uses += len(kept)
        self._steps += 1
        if self._steps % _PERIOD:
            return False
        before, best = self.policy, int(np.argmax(self._hits))
        gained = self._hits[best] - self._hits[self._policies.index(before)]
        if self._steps > _PERIOD and gained > _MARGIN * self._uses:  # the first period fills the shadows
            self.policy = self._policies[best]
        self._hits, self._uses = self._hits / 2, self._uses // 2
        return self.policy is not before


def resolved_hit_rate(trace: Trace, experts: int, slots: int, policy: Policy, warm: float = 1 / 3) -> float:
    """Of the same uses, by ``resolve`` with everything that is missing fetched."""
    tokens, layers, ranks = trace.shape
    cpu = torch.device("cpu")
    state = Residency.create(Layout(FORMATS["bf16"], 32, 32), layers, experts, slots, cpu)
    state.follow(policy)
    decision = Decision.create(1, ranks, cpu)
    for token in range(tokens):
        if token == round(warm * tokens):
            state.counters.zero_()
        for layer in range(layers):
            resolve(state, torch.from_numpy(trace[token, layer][None]), layer, decision)
    counted = state.counters.tolist()
    return float(counted[HITS] / (counted[HITS] + counted[FETCHED] + counted[CPU]))


def synthetic(kind: str, tokens: int, layers: int, experts: int, ranks: int, seed: int = 0) -> Trace:
    """Routing by the sum of a constant preference, a slow and a fast random walk, and noise: ``temporal`` lives from
    the walks, ``static`` from the preferences, ``skewed`` from strong ones."""
    constant, slow, fast, noise = {
        "temporal": (0.5, 0.6, 0.75, 0.6),
        "static": (0.45, 0.1, 0.1, 0.9),
        "skewed": (1.6, 0.45, 0.45, 0.55),
    }[kind]
    rng = np.random.default_rng(seed)
    preference = rng.standard_normal((layers, experts)) * constant
    walks = rng.standard_normal((2, layers, experts))
    keep = 0.5 ** np.array([1 / 300, 1 / 4])[:, None, None]
    trace = np.empty((tokens, layers, ranks), np.int32)
    for token in range(tokens):
        walks = keep * walks + np.sqrt(1 - keep**2) * rng.standard_normal(walks.shape)
        logits = preference + slow * walks[0] + fast * walks[1] + noise * rng.standard_normal((layers, experts))
        trace[token] = np.argpartition(-logits, ranks, axis=1)[:, :ranks]
    return trace


def _sampled(flats: int, sample: float) -> frozenset[int]:
    """By a hash, so that the sample is the same each time and spread over layers."""
    return frozenset(flat for flat in range(flats) if (flat * 2654435761 >> 8) % (1 << 16) < sample * (1 << 16))


def _uses(trace: Trace, experts: int, kept: frozenset[int]) -> Iterator[tuple[int, int, int]]:
    for token, layers in enumerate(trace.tolist()):
        for layer, ids in enumerate(layers):
            for expert in ids:
                if layer * experts + expert in kept:
                    yield token, layer, layer * experts + expert


def table(tokens: int, layers: int = 10, experts: int = 128, ranks: int = 8) -> Iterable[str]:
    """Markdown: exact replay / ``resolve``."""
    every = policies(layers).values()
    yield "| routing | resident | " + " | ".join(policy.name for policy in every) + " | chosen |"
    yield "|" + "---|" * (3 + len(every))
    for kind in ("temporal", "static", "skewed"):
        trace = synthetic(kind, tokens, layers, experts, ranks)
        for percent in (6, 12, 25, 40):
            slots = layers * experts * percent // 100
            rates = [
                f"{replay(trace, experts, slots, policy):.1%}"
                for policy in every
                for replay in (hit_rate, resolved_hit_rate)
            ]
            cells = [f"{exact} / {windowed}" for exact, windowed in zip(rates[::2], rates[1::2], strict=True)]
            chosen = choose_policy(trace, experts, slots).name
            yield f"| {kind} | {percent} % | " + " | ".join(cells) + f" | {chosen} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300)
    for line in table(parser.parse_args(arguments).tokens):
        print(line, flush=True)


if __name__ == "__main__":
    main()
