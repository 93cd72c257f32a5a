"""What experts of a layer cost in different places, and what is best for so many rows.

A call of few rows needs some experts: those are brought when they are known, with the most rows first, while the CPU
computes the others. One of many rows needs all: then the next layer's are brought while a layer is computed, before
they are known. Both bring only what is not on the device. Which is faster is expected from what parts of the work cost,
and corrected by what whole calls took (``Ways``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

from engine.experts.executor import Executor
from engine.experts.layout import Layout
from engine.experts.split import Split
from engine.experts.waves import FOUND, LEFT, LINK, ROWS, link_experts

_WEIGHT = 1 / 8
"""Of the newest measurement."""
_FARTHEST = 2.0
"""A measurement that is farther from what was expected counts as this."""
_MOST = 1 << 30
_EXCHANGE = 2e4
_HANDED = 4
"""Times as long as its bytes take over the link: about what was learnt for calls of 200 to 2,000 rows on an H200."""
_DEVICE_BYTES, _DEVICE_FLOPS = 1e12, 1e14
"""Per second: of a middling GPU. What there is, is learnt."""
_REPEATS, _MANY = 5, 16
_NEAR, _TRIES = 1.25, 32
"""The other way is tried once in so many calls of a size where it is expected to take at most so many times as long."""
_SIZES = 32
"""Powers of two of rows."""
_FAR = 8
"""Standard deviations from the mean that no expert's rows are expected beyond."""


@dataclass(frozen=True)
class Costs:
    """ns. ``link``: an expert over the link, when it is known, and ``ahead``, by the copy engine, before. ``cpu``: an
    expert on the CPU, and ``row`` each of its rows; ``exchange``: to ask the CPU; ``handed``: a row of a call that it
    helps with, there and back, and all else of a layer that nothing hides. ``read``: the device reads an expert;
    ``pair``: it computes one row of one. ``between``: a row in what lies between the experts of two layers.
    ``spread``: of the experts that equally likely ones would be, how many a call uses."""

    link: float
    cpu: float
    row: float
    exchange: float
    read: float
    pair: float
    ahead: float
    handed: float = 0.0
    between: float = 0.0
    spread: float = 1.0

    @staticmethod
    def measured(layout: Layout, split: Split, executor: Executor) -> Costs:
        """From what the split began with, and from experts that the CPU computes now, for some ten milliseconds."""
        cpu, row = cpu_costs(executor)
        link = split.link_alone * layout.parts
        return Costs(
            link=link,
            cpu=cpu,
            row=row,
            exchange=_EXCHANGE,
            handed=_HANDED * link * 8 * layout.hidden / layout.nbytes,
            read=1e9 * layout.nbytes / _DEVICE_BYTES,
            pair=1e9 * 6 * layout.hidden * layout.inner / _DEVICE_FLOPS,
            ahead=link,
        )

    def table(self, share: int = -1) -> list[int]:
        """As ``Waves.costs``."""
        rounded = [max(0, min(round(ns), _MOST)) for ns in (self.link, self.cpu, self.row, self.exchange)]
        return [*rounded, share]

    def short(self, rows: Sequence[int], resident: float, cpu: bool) -> float:
        """ns of a layer when only what is routed is brought. ``rows``: of each routed expert, most first; a share
        ``resident`` of them is on the device. ``cpu``: it may help."""
        missing = _without(rows, resident)
        on_link = link_experts(missing, self.table()) if cpu else len(missing)
        left = sum(missing[on_link:])
        return self.divided(len(rows) - len(missing), on_link, len(missing) - on_link, left, sum(rows))

    def divided(self, found: int, on_link: int, left: int, left_pairs: int, pairs: int) -> float:
        """ns of a layer whose experts are divided so; ``pairs``: rows of all of them, ``left_pairs`` on the CPU."""
        each = (pairs - left_pairs) / max(1, found + on_link)
        on_cpu = self.exchange + self.cpu * left + self.row * left_pairs if left else 0.0
        first = max(on_link * self.link, on_cpu, self.device(found, found * each))
        return first + self.device(on_link, on_link * each)

    def routed(self, rows: int, ranks: int, experts: int, resident: float, cpu: bool) -> float:
        """ns of a layer, and of what lies before it, of a call of so many rows when only what is routed is brought."""
        layer = self.short(expected(self, rows, ranks, experts), resident, cpu)
        return layer + (self.between + cpu * self.handed) * rows

    def streamed(self, rows: int, ranks: int, experts: int, resident: float, layers: int) -> float:
        """The same when whole layers are brought ahead, during those before: of ``layers``, one waits for the link, or
        is computed after all has come."""
        each = expected(self, rows, ranks, experts)
        come = (1 - resident) * experts * self.ahead
        computed = self.device(len(each), sum(each)) + self.between * rows
        return max(come, computed) + min(come, computed) / layers

    def device(self, experts: int, pairs: float) -> float:
        return max(experts * self.read, pairs * self.pair)

    def learnt(
        self, told: npt.NDArray[np.int32], times: npt.NDArray[np.int64], parts: int, uniform: float, pairs: int
    ) -> Costs:  # fmt: skip
        """After a call: ``told`` [layers, 4] as ``Waves`` has it, ``times`` [layers, 3] as the executor; ``uniform``:
        how many experts equally likely ones would have been; ``pairs``: rows of all experts of a layer."""
        used = [int(layer[FOUND] + layer[LINK] + layer[LEFT]) for layer in told]
        costs = replace(self, spread=min(1.0, self.spread * _change([one / (uniform * self.spread) for one in used])))
        asked = [
            (layer, took)
            for layer, took in zip(told.tolist(), times.tolist(), strict=True)
            if layer[LEFT] and took[2] == layer[LEFT] * parts
        ]
        expected = [max(1.0, layer[LEFT] * self.cpu + layer[ROWS] * self.row) for layer, _ in asked]
        cpu = _change([(took[0] - self.exchange) / ns for (_, took), ns in zip(asked, expected, strict=True)])
        link = _change([
            (took[1] - self._computed(layer, pairs)) / (layer[LINK] * self.link)
            for layer, took in asked if layer[LINK] and took[1]
        ])  # fmt: skip
        return replace(costs, cpu=self.cpu * cpu, row=self.row * cpu, link=self.link * link)

    def _computed(self, layer: Sequence[int], pairs: int) -> float:
        """ns that the device takes for what the link brought, after that."""
        there = layer[FOUND] + layer[LINK]
        return self.device(layer[LINK], (pairs - layer[ROWS]) * layer[LINK] / there)

    def with_ahead(self, ns: float, experts: int) -> Costs:
        """After so many that came ahead took ``ns``."""
        return replace(self, ahead=self.ahead * _change([ns / (experts * self.ahead)]))

    def with_device(self, ns: float, experts: int, pairs: int) -> Costs:
        """After the device took ``ns`` to compute so much."""
        change = _change([ns / self.device(experts, pairs)])
        return replace(self, read=self.read * change, pair=self.pair * change)

    def with_handed(self, ns: float) -> Costs:
        """After a row took ``ns`` of a layer that the CPU helped with, besides what was expected."""
        return replace(self, handed=self.handed + _WEIGHT * (max(0.0, ns) - self.handed))

    def with_between(self, ns: float) -> Costs:
        """After a row took ``ns`` between the experts of two layers: the least of late, as launches can only add."""
        return replace(self, between=min(ns, self.between * (1 + _WEIGHT)) if self.between else ns)


def uniform(rows: int, ranks: int, experts: int) -> float:
    """How many different experts so many rows use when all are equally likely."""
    return experts * (1 - (1 - ranks / experts) ** rows)


def expected(costs: Costs, rows: int, ranks: int, experts: int) -> tuple[int, ...]:
    """Rows of each expert that is used, most first: as equally likely ones have them, spread over fewer."""
    return _spread(rows, ranks, max(ranks, round(experts * costs.spread)))


@lru_cache(maxsize=64)
def _spread(rows: int, ranks: int, room: int) -> tuple[int, ...]:
    """As ``expected``, over ``room`` experts."""
    chance, below, counts = ranks / room, 0.0, list[int]()
    deviation = math.sqrt(rows * chance * (1 - chance))
    first, last = (round(rows * chance + far * deviation) for far in (-_FAR, _FAR))
    for used in range(max(0, first), min(rows, last) + 1):
        below += _binomial(used, rows, chance)
        counts += [used] * (round(room * below) - len(counts))
    return tuple(count for count in reversed(counts) if count)


class Ways:
    """Two ways, and which is the faster one for calls of so many rows: False, 0, or True, 1. What is expected of each
    is corrected by how many times as long calls of a size, or else of the next one measured, took."""

    def __init__(self) -> None:
        self._times = np.ones((2, _SIZES))
        self._calls = np.zeros((2, _SIZES), np.int64)
        self._other = np.full((2, _SIZES), _TRIES)  # calls since it was the way that was gone

    def choose(self, rows: int, expected: Sequence[float]) -> bool:
        size = rows.bit_length()
        likely = [expected[way] * self._corrected(way, size) for way in (0, 1)]
        best = bool(likely[1] <= likely[0])
        tries = self._other[1 - best, size] >= _TRIES and self._calls[int(best), size] > 0
        return not best if tries and likely[1 - best] <= _NEAR * likely[best] else best

    def learn(self, way: bool, rows: int, times: float) -> None:
        """A call took ``times`` as long as was expected of its way."""
        size = rows.bit_length()
        self._calls[int(way), size] += 1
        weight = max(_WEIGHT, 1 / (1 + self._calls[int(way), size]))  # what is expected counts as a call, too
        bounded = max(1 / _FARTHEST, min(times, _FARTHEST))
        self._times[int(way), size] += weight * (bounded - self._times[int(way), size])
        self._times[1 - way, size] += (1.0 - self._times[1 - way, size]) / _TRIES  # one stray is forgotten
        self._other[int(way), size] = 0
        self._other[1 - way, size] += 1

    def _corrected(self, way: int, size: int) -> float:
        measured = np.flatnonzero(self._calls[way])
        if not len(measured):
            return 1.0
        return float(self._times[way, measured[np.abs(measured - size).argmin()]])


def cpu_costs(executor: Executor) -> tuple[float, float]:
    """ns of an expert on the CPU besides its rows, and of a row, from requests for experts that no cache holds yet."""
    ranks, many = min(executor.layout.ranks, executor.pool.experts), min(_MANY, executor.layout.rows)
    one, all_rows = (
        median(_request(executor, number, rows, ranks) for number in range(first, first + _REPEATS))
        for first, rows in ((0, 1), (_REPEATS, many))
    )
    row = max(1.0, (all_rows - one) / max(1, many - 1) / ranks)
    return max(1.0, one / ranks - row), row


def _request(executor: Executor, number: int, rows: int, ranks: int) -> float:
    """ns of one, for experts that depend on ``number``, the same for all rows."""
    pool, box = executor.pool, executor.layout
    chosen = (number * ranks + torch.arange(ranks)) % pool.experts
    plan = torch.full((rows, box.ranks, 2), -1, dtype=torch.int32)
    plan[:, :ranks, 0], plan[:, :ranks, 1] = chosen.int(), 0
    x, weights = torch.ones(rows, box.hidden), torch.ones(rows, box.ranks)
    start = time.perf_counter_ns()
    executor.run(number % pool.layers, x, plan, weights)
    return float(time.perf_counter_ns() - start)


def _binomial(used: int, rows: int, chance: float) -> float:
    if chance >= 1:
        return float(used == rows)
    ways = math.lgamma(rows + 1) - math.lgamma(used + 1) - math.lgamma(rows - used + 1)
    return math.exp(ways + used * math.log(chance) + (rows - used) * math.log(1 - chance))


def _without(rows: Sequence[int], resident: float) -> list[int]:
    """Those that are missing, spread evenly."""
    count = round(len(rows) * (1 - resident))
    return [rows[int((place + 0.5) * len(rows) / count)] for place in range(count)]


def _change(ratios: Sequence[float]) -> float:
    """By what a cost changes, after measurements that were so many times what was expected."""
    if not ratios:
        return 1.0
    return 1.0 + _WEIGHT * (max(1 / _FARTHEST, min(median(ratios), _FARTHEST)) - 1.0)
