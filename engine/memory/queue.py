"""The least valuable of many items, without looking at all of them."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LeastFirst(Generic[T]):
    """Items by ``value``, which is compared. A value may rise at any time; of one that falls, ``push`` must be told."""

    def __init__(self, value: Callable[[T], Any]) -> None:
        self._value = value
        self._queued: dict[T, Any] = {}
        """No more than each item's value."""
        self._heap: list[tuple[Any, int, T]] = []
        self._pushed = 0

    def push(self, item: T) -> None:
        """Add an item, or note that its value fell."""
        value = self._value(item)
        if item in self._queued and self._queued[item] <= value:
            return
        self._queued[item] = value
        self._pushed += 1
        heappush(self._heap, (value, self._pushed, item))
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [(queued, at, one) for at, (one, queued) in enumerate(self._queued.items())]
            heapify(self._heap)

    def discard(self, item: T) -> None:
        self._queued.pop(item, None)

    def pop(self) -> T | None:
        """Take out the item of least value; of equal ones that which was pushed first."""
        while self._heap:
            queued, _, item = heappop(self._heap)
            if self._queued.get(item) != queued:
                continue
            del self._queued[item]
            if self._value(item) == queued:
                return item
            self.push(item)
        return None
