"""What owns the bytes of pages and states, and moves them: on the device, out of it and into it.

Where the processor computes, they are read and written in place, and everything here is there at once. A device has its
own order of work: what leaves it (``Staged``) and what comes to it (``Arrival``) is there later, and nobody waits for
that but who needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.memory.store import Buffers, Staged

ALL = slice(None)


class Landing(Protocol):
    """Where components of a page or of a state are to be read to, on their way to the device."""

    @property
    def data(self) -> Buffers:
        """What is to be filled; nothing, if it comes from elsewhere in host memory."""

    @property
    def rest(self) -> slice | None:
        """The components for which there was no room."""

    def drop(self) -> None:
        """What was read is not right, and goes nowhere."""


class Arrival(Protocol):
    """What has landed, on its way to the device."""

    def join(self) -> None:
        """What is computed from now on finds it there."""

    def done(self) -> bool: ...

    def finite(self) -> bool:
        """Whether all numbers of the states that came are finite. Waits until they are there."""


class Mover(Protocol):
    """``parts``: components, in the order in which ``Buffers`` have them. Of a page, only the first ``tokens`` tokens
    move. What is computed later changes nothing of what was staged before."""

    def copy_page(self, source: int, target: int) -> None: ...
    def copy_state(self, source: int, target: int, parts: slice = ALL) -> None: ...

    def captured(self, slots: Sequence[int]) -> None:
        """A forward wrote these states: they will be asked for soon."""

    def page_finite(self, page: int, tokens: int) -> bool:
        """Whether all numbers in them are finite."""

    def state_finite(self, slot: int) -> bool: ...

    def stage_pages(self, pages: Sequence[tuple[int, int]], *, wait: bool = False) -> Sequence[Staged]:
        """(page, tokens) each: as many of the first ones as there is room for now. ``wait``: for room for all of
        them."""

    def stage_state(self, slot: int, *, wait: bool = False) -> Staged | None:
        """None if there is no room now."""

    def page_in(self, page: int, tokens: int, parts: slice, source: Staged | None = None) -> Landing | None:
        """Room for what is to be read into a page; None if there is none now. ``source``: where it is already, all
        components of it; it must stay until the arrival is done."""

    def pages_in(self, pages: Sequence[int], parts: slice, sources: Sequence[Staged]) -> Landing:
        """Many whole pages that are in host memory already, each."""

    def state_in(self, slot: int, parts: slice, source: Staged | None = None) -> Landing | None: ...

    def mark(self) -> object:
        """This moment, in the order of what is computed."""

    def land(self, landings: Sequence[Landing], after: object) -> Arrival:
        """What was read is there and right: bring it to the device. ``after``: a moment from which on nothing computed
        needs what was there before."""
