"""A bounded cache of results by what they were made from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Memory(Generic[Key, Value]):
    """At most ``limit`` bytes as ``size`` tells them; what was used least recently goes first. Values are shared, so
    nobody may change one. Safe to share between threads."""

    def __init__(self, limit: int, size: Callable[[Key, Value], int]) -> None:
        self.limit = limit
        self.used = 0
        self._size = size
        self._known: OrderedDict[Key, Value] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Key) -> Value | None:
        with self._lock:
            value = self._known.get(key)
            if value is not None:
                self._known.move_to_end(key)
            return value

    def put(self, key: Key, value: Value) -> None:
        size = self._size(key, value)
        if size > self.limit // 4:  # it would displace much, and is too rare to come again
            return
        with self._lock:
            if key not in self._known:
                self.used += size
                self._known[key] = value
            while self.used > self.limit:
                self.used -= self._size(*self._known.popitem(last=False))

    def forget(self) -> None:
        with self._lock:
            self._known.clear()
            self.used = 0

    def of(self, key: Key, make: Callable[[], Value]) -> Value:
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value
