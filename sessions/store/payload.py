"""Copies of what is to be stored, in memory that is used again."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

POOLED = 1 << 20
"""Smaller payloads are left to the allocator."""
SPARE = 128 << 20
"""Bytes kept for the next payloads, per size."""


class Payload:
    """Bytes of an entry, ``view``. Whoever uses the view keeps the object: once nobody does, its memory gets others'
    bytes."""

    __slots__ = ("_pool", "view")

    def __init__(self, view: memoryview, pool: Pool | None = None) -> None:
        self.view = view
        self._pool = pool

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.give(self.view)


class Pool:
    """Reuses memory for payloads of these sizes: fresh memory for a checkpoint costs several times the copying.
    (Huge pages are as cheap as used memory when there are any, and stall for long when there are none.)

    One thread takes, any thread gives."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._spare: dict[int, list[memoryview]] = {size: [] for size in sizes if size >= POOLED}

    def gather(self, parts: Sequence[memoryview]) -> Payload:
        """A copy of the parts, one after the other."""
        size = sum(len(part) for part in parts)
        spare = self._spare.get(size)
        if spare is None:
            return Payload(memoryview(b"".join(parts)))
        view, at = spare.pop() if spare else _memory(size), 0
        for part in parts:
            view[at : at + len(part)] = part
            at += len(part)
        return Payload(view, self)

    def give(self, view: memoryview) -> None:
        spare = self._spare[len(view)]
        if (len(spare) + 1) * len(view) <= SPARE:
            spare.append(view)


def _memory(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
