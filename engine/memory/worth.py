"""How to divide a device's memory between experts and attention pages: where the next byte saves more time.

Slots save misses. Over the share of experts that are resident, hits follow a power law well enough between few and all
of them; its exponent is fitted to what was measured at the present size. Pages save prefill: of pages that were last
used so many admissions ago, a share 1 / (1 + ago) is asked for by the next. Both grow ever more slowly with memory, so
the best division is where their slopes meet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 1.25
"""A better division is worth its move when one side wins so many times what the other loses,"""
MOVED = 1 / 16
"""and when the pages change by such a share: what was measured varies."""
_STEEPEST, _FLATTEST = 1.0, 0.02


@dataclass(frozen=True)
class SlotWorth:
    """``experts`` there are, of ``nbytes`` each. Without any resident, misses would take ``seconds`` of a second."""

    experts: int
    nbytes: int
    seconds: float
    exponent: float

    @staticmethod
    def measured(experts: int, nbytes: int, slots: int, hits: float, seconds: float) -> SlotWorth:
        """``hits``: share of uses that ``slots`` slots served. ``seconds``: what misses took of a second."""
        share = min(slots / experts, 1.0)
        hits = min(max(hits, 1e-3), 1 - 1e-6)
        exponent = math.log(hits) / math.log(share) if share < 1 else _FLATTEST
        exponent = min(max(exponent, _FLATTEST), _STEEPEST)
        return SlotWorth(experts, nbytes, seconds / (1 - hits), exponent)

    def saved(self, slots: float) -> float:
        """Seconds of a second."""
        return self.seconds * float(min(slots / self.experts, 1.0) ** self.exponent)

    def slope(self, slots: float) -> float:
        """Seconds of a second that one more byte saves."""
        if slots >= self.experts:
            return 0.0
        share = max(slots, 1.0) / self.experts
        return float(self.seconds * self.exponent * share ** (self.exponent - 1) / self.experts / self.nbytes)


@dataclass(frozen=True)
class PageWorth:
    """A page of ``nbytes`` takes ``seconds`` to compute again; ``admissions`` a second. ``ages``: (admissions since it
    was used, pages), youngest first, of what is cached. ``full``: older pages had to go."""

    nbytes: int
    seconds: float
    admissions: float
    ages: Sequence[tuple[int, int]]
    full: bool

    def saved(self, pages: float) -> float:
        """Seconds of a second."""
        total = 0.0
        for age, count in self.ages:
            total += min(pages, count) / (1 + age)
            pages -= min(pages, count)
        if self.full and self.ages:  # pages beyond would be as much older as there are more of them
            oldest, kept = self.ages[-1][0], sum(count for _, count in self.ages)
            growth = oldest / kept
            total += math.log1p(growth * pages / (1 + oldest)) / growth if growth else pages
        return self.seconds * self.admissions * total

    def slope(self, pages: float) -> float:
        """Seconds of a second that one more byte saves."""
        each = self.seconds * self.admissions / self.nbytes
        before = 0
        for age, count in self.ages:
            before += count
            if pages < before:
                return each / (1 + age)
        oldest = self.ages[-1][0] if self.ages else 0
        return each / (1 + oldest * pages / before) if self.full and before else 0.0


@dataclass(frozen=True)
class Bounds:
    """What ``pages`` and ``slots`` may be, in ``nbytes`` together."""

    nbytes: int
    least_pages: int
    most_pages: int
    least_slots: int
    most_slots: int


@dataclass(frozen=True)
class Split:
    """So much for each."""

    slots: int
    pages: int


def best(slots: SlotWorth, pages: PageWorth, bounds: Bounds) -> Split:
    """The division that saves most time. Minima come first: of pages, then of slots."""
    room = (bounds.nbytes - bounds.least_slots * slots.nbytes) // pages.nbytes
    high = max(min(bounds.most_pages, room), bounds.least_pages)
    low = max(min((bounds.nbytes - bounds.most_slots * slots.nbytes) // pages.nbytes, high), bounds.least_pages)
    while low < high:  # the first page that is worth less than the slots that it takes
        middle = (low + high) // 2
        if pages.slope(middle) > slots.slope(_slots(middle, slots, pages, bounds)):
            low = middle + 1
        else:
            high = middle
    return Split(_slots(low, slots, pages, bounds), low)


def better(now: Split, slots: SlotWorth, pages: PageWorth, bounds: Bounds) -> Split:
    """The best division if it is worth the move, else ``now``."""
    target = best(slots, pages, bounds)
    forced = not bounds.least_pages <= now.pages <= bounds.most_pages or now.slots < bounds.least_slots
    small = abs(target.pages - now.pages) < MOVED * now.pages
    of_slots = slots.saved(target.slots) - slots.saved(now.slots)
    of_pages = pages.saved(target.pages) - pages.saved(now.pages)
    gain = max(of_slots, of_pages) > GAIN * max(0.0, -min(of_slots, of_pages))
    return target if forced or (gain and not small) else now


def _slots(count: int, slots: SlotWorth, pages: PageWorth, bounds: Bounds) -> int:
    """What so many pages leave."""
    return min((bounds.nbytes - count * pages.nbytes) // slots.nbytes, bounds.most_slots)
