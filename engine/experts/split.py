"""How much of what a layer misses goes over the link: a closed loop on when both sides were done.

CPU and link work at the same time, so the best share lets them end together: cpu / (cpu + link), in ns per part while
both work. What a part costs is measured in every step (an exponential average); fixed costs show as dearer parts, so
the loop settles where the times are equal all the same. Where both together take longer than the better one alone, as
when they starve each other of memory bandwidth, that one does everything; the costs then drift back to those of each
alone, and after some thousand steps both are tried again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.experts.residency import CPU, FETCHED, ONE

_WEIGHT = 1 / 8
"""Of the newest measurement."""
_DRIFT = 1 / 2048
"""How fast costs that cannot be measured go back to those of each side alone."""
_HOLD = 0.5
"""Parts: a share that is closer to its target stays."""

_TRIES = 32
"""Once in so many steps, or as many times that as the link is slower, a layer that is the CPU's alone brings all that
it misses: what is on the device would never change, however often it is missed."""

Floats = npt.NDArray[np.float64]


class Split:
    """Shares for ``layers`` layers. ``cpu_ns`` and ``link_ns``: what a part takes on each side alone, to begin with."""

    def __init__(self, layers: int, cpu_ns: float, link_ns: float) -> None:
        if layers < 1:
            raise ValueError(f"a split needs layers, not {layers}")
        self._layers = layers
        self._fixed: float | None = None
        self._linked = layers
        self._steps = 0
        self.expect(cpu_ns, link_ns)

    def expect(self, cpu_ns: float, link_ns: float) -> None:
        """Begin anew, from what a part takes on each side alone."""
        if not (cpu_ns > 0 and link_ns > 0):
            raise ValueError(f"a split needs times above 0, not {cpu_ns} and {link_ns}")
        layers = self._layers
        self._cpu_alone, self._link_alone = np.full(layers, cpu_ns), np.full(layers, link_ns)
        self._cpu, self._link = self._cpu_alone.copy(), self._link_alone.copy()
        self._cpu_fixed, self._link_fixed, self._missing = np.zeros(layers), np.zeros(layers), np.ones(layers)
        self._cpu_part = cpu_ns
        self._target = np.zeros(layers)
        self._aim()
        self._share = self._target.copy()
        self.link_alone = link_ns

    @property
    def fixed(self) -> float | None:
        """The share of all layers, if it does not follow what is measured."""
        return self._fixed

    @property
    def share(self) -> npt.NDArray[np.int32]:
        """int32 [layers], as ``Residency.share`` takes it."""
        share = self._share.copy() if self._fixed is None else np.full_like(self._share, self._fixed)
        share[self._linked :] = 0.0
        return np.rint(share * ONE).astype(np.int32)

    @property
    def now(self) -> npt.NDArray[np.int32]:
        """The same for the next step: layers that are the CPU's alone may be in for all that they miss."""
        share = self.share
        if self._fixed is None:
            every = np.ceil(_TRIES * np.maximum(self._link_alone / self._cpu_alone, 1.0))
            tries = (self._share == 0) & ((np.arange(self._layers) + self._steps) % every == 0)
            share[: self._linked][tries[: self._linked]] = ONE
        return share

    def link(self, layers: int) -> None:
        """Nothing goes over the link for others than the first ``layers``: the device cannot read their experts."""
        self._linked = layers

    def fix(self, share: float) -> None:
        """The same share for all layers and steps, for results that can be repeated."""
        if not 0 <= share <= 1:
            raise ValueError(f"a share is between 0 and 1, not {share}")
        self._fixed = share

    def free(self) -> None:
        """Back to what was measured."""
        self._fixed = None

    def update(self, times: npt.NDArray[np.int64], work: npt.NDArray[np.int32]) -> bool:
        """After a step: ``times`` [layers, 3] as the executor has them (ns until the CPU was done, ns until the device
        was; they count where the CPU had work) and ``work`` [layers, 3] as ``Residency`` has it. Whether ``now``
        changed. While it is fixed at 0 what the sides take besides parts is learnt, and at others nothing."""
        on_cpu, on_link = work[:, CPU], work[:, FETCHED]
        if self._fixed is not None:
            if self._fixed == 0:
                besides = np.maximum(times[:, 0] - self._cpu_part * on_cpu, 0.0)
                _blend(self._cpu_fixed, besides, on_cpu > 0, _WEIGHT)
                _blend(self._link_fixed, times[:, 1].astype(np.float64), (on_cpu > 0) & (times[:, 1] > 0), _WEIGHT)
            return False
        self._steps += 1
        moved = (on_cpu + on_link).any() and self._learn(times, on_cpu, on_link)
        return bool(moved or (self._share == 0).any())

    def _learn(
        self, times: npt.NDArray[np.int64], on_cpu: npt.NDArray[np.int32], on_link: npt.NDArray[np.int32]
    ) -> bool:
        """From what was missing somewhere. Whether a share moved."""
        missing = on_cpu + on_link
        _blend(self._missing, missing.astype(np.float64), missing > 0, _WEIGHT)
        cpu, link = times[:, 0] / np.maximum(on_cpu, 1), times[:, 1] / np.maximum(on_link, 1)
        both, one = (on_cpu > 0) & (on_link > 0), (on_cpu > 0) ^ (on_link > 0)
        measured = both & self._pays  # on the way to one side, the other's few parts tell little
        _blend(self._cpu, cpu, measured, _WEIGHT)
        _blend(self._link, link, measured, _WEIGHT)
        of_parts = np.maximum(times[:, 0] - self._cpu_fixed, 1.0) / np.maximum(on_cpu, 1)
        _blend(self._cpu_alone, of_parts, one & (on_cpu > 0), _WEIGHT)  # the link's alone is not measured
        drifts = one | (both & ~self._pays)
        cpu_alone, link_alone = self._alone()
        _blend(self._cpu, cpu_alone, drifts, _DRIFT)
        _blend(self._link, link_alone, drifts, _DRIFT)
        self._aim()

        step = self._target - self._share
        part = 1 / np.maximum(missing, 1)
        moves = (missing > 0) & ((np.abs(step) >= _HOLD * part) | (self._target == 0) | (self._target == 1))
        step = np.where(moves, np.clip(step, -part, part), 0.0)
        self._share += step
        return bool(step.any())

    def _alone(self) -> tuple[Floats, Floats]:
        """ns per part, for as many parts as are missing of late, when one side does everything."""
        return self._cpu_alone + self._cpu_fixed / self._missing, self._link_alone + self._link_fixed / self._missing

    def _aim(self) -> None:
        cpu_alone, link_alone = self._alone()
        together = self._cpu * self._link / (self._cpu + self._link)
        self._pays = together <= np.minimum(cpu_alone, link_alone)
        alone = np.where(link_alone < cpu_alone, 1.0, 0.0)
        self._target = np.where(self._pays, self._cpu / (self._cpu + self._link), alone)


def _blend(average: Floats, new: Floats, where: npt.NDArray[np.bool_], weight: float) -> None:
    np.add(average, (new - average) * weight, out=average, where=where)
