"""Moves the border between experts, pages and states of a running engine, at safe points: between two steps.

A person may say how much each is to have. Where nobody does there are more pages when they run short, and every few
seconds the division that saves most time, if it is worth the move. Memory that other programs need goes to them within
a second, and comes back when it has been free for a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from engine.api import PAGE
from engine.device.arena import Division, describe
from engine.device.driver import DriverError
from engine.device.memory import Sizes
from engine.experts.residency import CPU, FETCHED, HITS, Residency
from engine.memory.memory import Memory
from engine.memory.resize import DoesNotFit, check_resize, resize
from engine.memory.worth import Bounds, PageWorth, SlotWorth, Split, better

LOOK_SECONDS = 0.5
"""How often to look whether others need memory,"""
PLAN_SECONDS = 5.0
"""and whether another division is better."""
CALM_SECONDS = 10.0
"""So long must memory have been free before it is taken again."""
KEEP_SECONDS = 60.0
"""Pages that were made because they ran short stay as long."""
CHUNK = 1 / 16
"""By what share pages grow at least, so that they do not have to for every token."""
FADE = 0.8
"""What counts of older measurements when there are new ones."""


class Experts(Protocol):
    """What the border needs of ``engine.experts.offload.OffloadedExperts``."""

    @property
    def residency(self) -> Residency: ...

    def resize(self, limit: int) -> None: ...


@dataclass(frozen=True)
class Policy:
    """``least_slots`` and ``least_pages`` are never given up. ``experts`` there are, and what a part of one costs
    in seconds that is not on the device. ``floor``: bytes of the device that are left to others; None: nobody is.
    ``grows``: there are more pages when they run short."""

    least_slots: int = 1
    least_pages: int = 2
    experts: int = 0
    part_seconds: float = 0.0
    floor: int | None = None
    grows: bool = False


class Partition:
    """Of ``division``, among ``memory`` (pages and states) and ``experts`` (slots; None: there are none). What it has
    at the start, it may have again. ``states`` here are those that hold checkpoints."""

    def __init__(
        self, division: Division, memory: Memory, policy: Policy | None = None, experts: Experts | None = None
    ) -> None:
        self._division, self._memory, self._experts = division, memory, experts
        self._policy = policy or Policy()
        self._beside = Sizes(
            0, division.sizes.pages - memory.pool.total, division.sizes.states - memory.checkpoints.total
        )
        self._own = division.budget
        self._slots = division.sizes.slots
        self._named: frozenset[str] = frozenset()
        """What a person has decided."""
        self._now = self._looked = self._planned = self._pressed = 0.0
        self._enlarged = -KEEP_SECONDS
        self._recent = _Recent()
        self._counts = Counter(dict.fromkeys(("moves", "given_back_bytes", "taken_bytes"), 0))
        if self._policy.grows:
            memory.enlarge = self.enlarge

    @property
    def grows(self) -> bool:
        """Whether there are more pages when they run short."""
        return self._policy.grows

    @property
    def sizes(self) -> Sizes:
        return Sizes(self._division.sizes.slots, self._memory.pool.total, self._memory.checkpoints.total)

    @property
    def most(self) -> Sizes:
        most, beside = self._division.most, self._beside
        states = most.states - beside.states if self._memory.recurrent else 0
        return Sizes(most.slots, most.pages - beside.pages, states)

    def set(self, **wanted: int) -> None:
        """What a person wants of ``slots``, ``pages`` and ``states``; slots that are not named are what is left. Raises
        DoesNotFit before anything is touched."""
        if "slots" in wanted and self._experts is None:
            raise DoesNotFit("experts have no slots here: they are computed where they are")
        if wanted.get("states") and not self._memory.recurrent:
            raise DoesNotFit("this model has no recurrent states")
        sizes = replace(self.sizes, **wanted)
        if sizes.pages < self._policy.least_pages:
            raise DoesNotFit(f"{PAGE * sizes.pages} tokens are below the least, {PAGE * self._policy.least_pages}")
        if self._experts is not None and sizes.slots < self._policy.least_slots:
            raise DoesNotFit(f"{sizes.slots} experts are below the least, {self._policy.least_slots}")
        named = self._named | wanted.keys()
        self._resize(sizes if "slots" in named else self._filled(sizes))
        self._named = named

    def release(self) -> None:
        """Nothing is decided by a person any more. Raises DoesNotFit where nobody else would."""
        policy = self._policy
        if self._experts is None and policy.floor is None and not policy.grows:
            raise DoesNotFit("here nothing but the sizes that you name divides memory: without a GPU, name them")
        self._named = frozenset()

    def enlarge(self, pages: int) -> bool:
        """Have so many pages more, at the experts' cost. False if they have no more to give."""
        if self._named:
            return False
        now, most = self.sizes, self.most.pages
        for more in (max(pages, round(CHUNK * now.pages)), pages):
            if now.pages + more <= most and self._try(self._filled(replace(now, pages=now.pages + more))):
                self._enlarged = self._now
                return True
        return False

    def tick(self, now: float, token_seconds: Callable[[], float]) -> None:
        """Between steps. ``token_seconds``: what one more token of a prompt takes."""
        self._now = now
        if not self._division.elastic:
            return
        if self._policy.floor is not None and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._make_way(self._policy.floor)
        if self._experts is not None and now - self._planned >= PLAN_SECONDS:
            self._planned = now
            self._plan(self._experts, token_seconds())

    def give_back(self, nbytes: int) -> int:
        """Leave so many bytes to others: of experts first, then of pages that no sequence has. -> how many were."""
        division, before, now = self._division, self._division.held, self.sizes
        wanted = before - nbytes
        slots = _largest(
            self._policy.least_slots, now.slots, lambda count: self._needed(replace(now, slots=count)) <= wanted
        )
        pages = _largest(
            self._least_pages(), now.pages, lambda count: self._needed(replace(now, slots=slots, pages=count)) <= wanted
        )
        if self._try(replace(now, slots=slots, pages=pages)):
            division.budget = division.held
        self._counts["given_back_bytes"] += before - division.held
        return before - division.held

    def take(self, nbytes: int) -> int:
        """Have so many bytes again that were given back, or as many as others have left. -> how many it is."""
        division, before = self._division, self._division.held
        budget, division.budget = division.budget, min(self._own, division.budget + nbytes)
        if not self._try(self._filled(self.sizes)):
            division.budget = budget
        self._counts["taken_bytes"] += division.held - before
        return division.held - before

    def report(self) -> dict[str, float]:
        """Sizes and the most they could be, bytes, hits."""
        sizes, most, shapes = self.sizes, self.most, self._division.shapes
        told: dict[str, float] = {
            "kv_tokens": PAGE * sizes.pages,
            "kv_tokens_most": PAGE * most.pages,
            "kv_bytes": sizes.pages * shapes.page_bytes,
            "states": sizes.states,
            "states_most": most.states,
            "states_bytes": sizes.states * shapes.state_bytes,
            "held_bytes": self._division.held,
            "budget_bytes": self._division.budget,
            **self._counts,
        }
        if self._experts is not None:
            hits, fetched, cpu = self._counted(self._experts)
            told |= {
                "experts": sizes.slots,
                "experts_most": most.slots,
                "experts_bytes": sizes.slots * shapes.stride,
                "experts_hit_rate": hits / max(1, hits + fetched + cpu),
            }
        return {name: float(value) for name, value in told.items()}

    def audit(self) -> None:
        """Waits for the device. Raises AssertionError where sizes and owners do not agree."""
        if self._needed(self.sizes) != self._division.held:
            raise AssertionError(f"{self._division.held} bytes are held, and {self._needed(self.sizes)} needed")
        if self._experts is not None:
            self._experts.residency.check()

    def _make_way(self, floor: int) -> None:
        """Less than the floor is given back with half as much again, and more than twice that is taken, so that neither
        calls for the other."""
        free, slack = self._division.free_bytes(), floor // 2
        if free < floor:
            self.give_back(floor + slack - free)
            self._pressed = self._now
        elif free < floor + 2 * slack or self._division.budget >= self._own:
            self._pressed = self._now
        elif self._now - self._pressed >= CALM_SECONDS:
            self.take(free - floor - slack)
            self._pressed = self._now

    def _plan(self, experts: Experts, token_seconds: float) -> None:
        """Move the border if another division saves more time, as far as a person has not decided it."""
        index, shapes, policy, now = self._memory.index, self._division.shapes, self._policy, self.sizes
        found, fetched, cpu = self._counted(experts)
        recent = self._recent.update(found, fetched + cpu, index.clock, index.evicted, self._now)
        if recent is None or self._named or not recent[0] + recent[1]:
            return
        hits, misses, admissions, evicted, seconds = recent
        slots = SlotWorth.measured(
            policy.experts, shapes.stride, now.slots, hits / (hits + misses), misses * policy.part_seconds / seconds
        )
        pages = PageWorth(shapes.page_bytes, PAGE * token_seconds, admissions / seconds, self._ages(), evicted >= 1)
        beside = self._needed(now) - now.slots * shapes.stride - now.pages * shapes.page_bytes
        least = now.pages if self._now - self._enlarged < KEEP_SECONDS else self._least_pages()
        bounds = Bounds(
            self._division.budget - beside,
            least,
            self.most.pages,
            policy.least_slots,
            min(self.most.slots, policy.experts),
        )
        target = better(Split(now.slots, now.pages), slots, pages, bounds)
        if target.pages != now.pages:
            self._try(self._filled(replace(now, pages=target.pages)))

    def _ages(self) -> list[tuple[int, int]]:
        """As ``PageWorth`` takes them, ages twice as old together."""
        clock = self._memory.index.clock
        counts = Counter((clock - node.used).bit_length() for node in self._memory.index.nodes())
        return [((1 << bits) * 3 // 4, count) for bits, count in sorted(counts.items())]

    def _counted(self, experts: Experts) -> tuple[int, int, int]:
        counters = experts.residency.counters.tolist()
        return counters[HITS], counters[FETCHED], counters[CPU]

    def _least_pages(self) -> int:
        """What running sequences have, and an eighth to go on."""
        held = self._memory.pool.held_pages
        return max(self._policy.least_pages, min(held + held // 8 + 1, self._memory.pool.total))

    def _filled(self, sizes: Sizes) -> Sizes:
        """With as many slots as there is room for; the least where there is none."""
        if self._experts is None:
            return sizes
        budget, least = self._division.budget, self._policy.least_slots
        fits = lambda count: self._needed(replace(sizes, slots=count)) <= budget  # noqa: E731
        return replace(sizes, slots=_largest(least, self.most.slots, fits))

    def _whole(self, sizes: Sizes) -> Sizes:
        """With what is beside those that can be used."""
        return Sizes(sizes.slots, sizes.pages + self._beside.pages, sizes.states + self._beside.states)

    def _needed(self, sizes: Sizes) -> int:
        return self._division.needed(self._whole(sizes))

    def _try(self, wanted: Sizes) -> bool:
        try:
            self._resize(wanted)
        except DoesNotFit:
            return False
        return True

    def _resize(self, wanted: Sizes) -> None:
        """Nothing is given up before it is certain that it fits; unless others are quicker to take the memory: then
        what was given up is all that has happened. Raises DoesNotFit."""
        now, division = self.sizes, self._division
        if wanted == now:
            return
        division.check(self._whole(wanted))
        check_resize(self._memory, wanted.pages, wanted.states)
        self._use(Sizes(min(wanted.slots, now.slots), min(wanted.pages, now.pages), min(wanted.states, now.states)))
        try:
            division.resize(self._whole(wanted))
        except DriverError as error:
            self._use(now)
            more = self._needed(wanted) - division.held
            raise DoesNotFit(
                f"{describe(wanted)} need {more} bytes more, and {division.free_bytes()} are free ({error})"
            ) from error
        self._use(wanted)
        self._counts["moves"] += 1

    def _use(self, sizes: Sizes) -> None:
        """Tell the owners."""
        if self._experts is not None and sizes.slots != self._slots:
            self._experts.resize(sizes.slots)
            self._slots = sizes.slots
        if (sizes.pages, sizes.states) != (self._memory.pool.total, self._memory.checkpoints.total):
            resize(self._memory, sizes.pages, sizes.states)


class _Recent:
    """Counts since the start as counts of late: older ones count ever less."""

    def __init__(self) -> None:
        self._before: tuple[float, ...] = ()
        self._recent: tuple[float, ...] = ()

    def update(self, *counts: float) -> tuple[float, ...] | None:
        """None the first time."""
        before, self._before = self._before, counts
        if not before:
            return None
        old = self._recent or (0.0,) * len(counts)
        self._recent = tuple(FADE * one + new - last for one, new, last in zip(old, counts, before, strict=True))
        return self._recent


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, where all below it do; ``least`` if none does."""
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least
