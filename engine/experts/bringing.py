"""Whether the next step of decoding brings all that it misses, and does not ask the CPU at all.

A layer that may ask waits for an answer, whether it has asked or not. A step that asks nobody saves that in each of its
layers; what the CPU would have taken off the link it has to bring besides. How much that is, every step that asks
tells: where the CPU was done in ``cpu`` ns and the device in ``link``, to bring the CPU's parts, too, would have taken
``link`` and as much as they take over the link alone, in place of the longer of both. So a step that asks nobody pays
where little is missing, or where the CPU is no help.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.experts.residency import CPU, FETCHED

WAIT = 6_000.0
"""ns that a layer of the device takes longer when it may ask the CPU (5.9 us on an H200): the wait, which is no kernel,
and two kernels at it that are not launched early."""
_WEIGHT = 1 / 8
"""Of the newest step in how much is missing."""
_PARTS = 256
"""Missing parts that tell as much of the costs as all before them."""
_DRIFT = 1 / 2048
"""How fast, in steps that ask nobody, a part's cost goes back to all of its time on the link: in the end, steps that
ask tell it again, unless not even that would make them worth it."""
_SURE = 1.25
"""What is saved, over what is lost, for it to begin; it ends where they are equal."""


class Bringing:
    """``layers`` that may ask; ``link_ns``: what a part takes over the link alone. What is ``asked`` and ``brought``
    are steps' ``work`` [layers, 3], as ``Residency`` has it."""

    def __init__(self, layers: int, link_ns: float) -> None:
        self._saved = layers * WAIT
        self._missing = 0.0
        self._pays = False
        self.expect(link_ns)

    def expect(self, link_ns: float) -> None:
        """Nothing is known of the CPU: as if it computed in no time."""
        self._link_ns = self._cost = link_ns

    @property
    def pays(self) -> bool:
        return self._pays

    def asked(self, times: npt.NDArray[np.int64], work: npt.NDArray[np.int32]) -> None:
        """After a step that might ask the CPU; ``times`` as ``Split.update`` takes them."""
        if missing := self._missed(work):
            on_cpu, on_link = work[:, CPU], work[:, FETCHED]
            cpu, link = times[:, 0], times[:, 1]
            known = (on_cpu == 0) | (link > 0)
            more = np.where((on_cpu > 0) & known, link + self._link_ns * on_cpu - np.maximum(cpu, link), 0.0)
            if parts := missing - int((on_cpu + on_link)[~known].sum()):
                self._cost += (float(more.sum()) / parts - self._cost) * parts / (parts + _PARTS)
        self._decide()

    def brought(self, work: npt.NDArray[np.int32]) -> None:
        """After a step that asked nobody."""
        self._missed(work)
        self._cost += (self._link_ns - self._cost) * _DRIFT
        self._decide()

    def _missed(self, work: npt.NDArray[np.int32]) -> int:
        missing = int(work[:, FETCHED : CPU + 1].sum())
        self._missing += (missing - self._missing) * _WEIGHT
        return missing

    def _decide(self) -> None:
        lost = self._missing * max(self._cost, 0.0)
        self._pays = self._saved > lost * (1.0 if self._pays else _SURE)
