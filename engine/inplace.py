"""Pages and states where the processor computes: they are read and written in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from engine.api import PAGE
from engine.layers.ops import Ops
from engine.memory.mover import ALL, Landing
from engine.memory.store import Staged
from engine.models.model import Cache


class Views(Staged):
    """``check``: whether all of it is finite."""

    def __init__(self, views: Iterable[memoryview], check: Callable[[], bool]) -> None:
        super().__init__(views)
        self._check = check

    def wait(self) -> bool:
        return self._check()


@dataclass(frozen=True, slots=True)
class Place:
    """Implements ``engine.memory.mover.Landing``. ``slot``: the state of which ``parts`` come, -1: a page."""

    data: Sequence[memoryview]
    slot: int
    parts: slice

    @property
    def rest(self) -> None:
        return None

    def drop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Here:
    """Implements ``engine.memory.mover.Arrival``."""

    finite: Callable[[], bool]

    def join(self) -> None: ...

    def done(self) -> bool:
        return True


class InPlace:
    """Implements ``engine.memory.mover.Mover``: nothing is copied but by ``copy_page`` and ``copy_state``."""

    def __init__(self, cache: Cache, ops: Ops) -> None:
        self._cache = cache
        self._ops = ops

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> None:
        for pages in (*self._cache.keys, *self._cache.values):
            pages[target] = pages[source]

    @torch.inference_mode()
    def copy_state(self, source: int, target: int, parts: slice = ALL) -> None:
        for state in self._cache.states[parts]:
            self._ops.copy_state(state, source, target)

    def captured(self, slots: Sequence[int]) -> None: ...

    @torch.inference_mode()
    def page_finite(self, page: int, tokens: int) -> bool:
        return all(_finite(pages[page, :tokens]) for pages in (*self._cache.keys, *self._cache.values))

    @torch.inference_mode()
    def state_finite(self, slot: int, parts: slice = ALL) -> bool:
        return all(_finite(state[slot]) for state in self._cache.states[parts])

    def stage_pages(self, pages: Sequence[tuple[int, int]], *, wait: bool = False) -> list[Staged]:
        return [Views(self._page(page, tokens, ALL), partial(self.page_finite, page, tokens)) for page, tokens in pages]

    def stage_state(self, slot: int, *, wait: bool = False) -> Staged:
        """It was looked at when it was kept."""
        return Staged(self._state(slot, ALL))

    def page_in(self, page: int, tokens: int, parts: slice, source: Staged | None = None) -> Place:
        return Place(self._page(page, tokens, parts), -1, parts)

    def pages_in(self, pages: Sequence[int], parts: slice, sources: Sequence[Staged]) -> Place:
        for page, source in zip(pages, sources, strict=True):
            for view, data in zip(self._page(page, PAGE, parts), source[parts], strict=True):
                view[:] = data
        return Place((), -1, parts)

    def state_in(self, slot: int, parts: slice, source: Staged | None = None) -> Place:
        return Place(self._state(slot, parts), slot, parts)

    def mark(self) -> None: ...

    def land(self, landings: Sequence[Landing], after: object) -> Here:
        states = [one for one in landings if isinstance(one, Place) and one.slot >= 0]
        return Here(lambda: all(self.state_finite(one.slot, one.parts) for one in states))

    @cached_property
    def _pages(self) -> list[tuple[memoryview, int]]:
        """Each component's memory, and bytes of it in a page."""
        each = zip(self._cache.keys, self._cache.values, strict=True)
        return [(_flat(pages), pages[0].nbytes) for layer in each for pages in layer]

    @cached_property
    def _states(self) -> list[tuple[memoryview, int]]:
        return [(_flat(states), states[0].nbytes) for states in self._cache.states]

    def _page(self, page: int, tokens: int, parts: slice) -> list[memoryview]:
        return [every[page * size : page * size + size // PAGE * tokens] for every, size in self._pages[parts]]

    def _state(self, slot: int, parts: slice) -> list[memoryview]:
        return [every[slot * size : (slot + 1) * size] for every, size in self._states[parts]]


def _finite(tensor: Tensor) -> bool:
    """One pass: what is not finite makes the sum so. Finite numbers seldom do, and are then looked at one by one."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def _flat(tensor: Tensor) -> memoryview:
    """A contiguous tensor's own memory. Raises RuntimeError for what the processor cannot address."""
    if tensor.device.type != "cpu":
        raise RuntimeError(f"pages and states on {tensor.device} cannot be read in place")
    return tensor.view(torch.uint8).reshape(-1).numpy().data
