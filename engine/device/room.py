"""Host memory that a device reads and writes, in rings and blocks of fixed size, and where things lie on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
_FLAGS = 64
"""Arrivals and looks that may be under way at once."""

Rows = NDArray[np.int64]
"""As ``engine.kernels.gather.move`` takes them."""


class Event(Protocol):
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Region:
    """Bytes of a ring, ``start`` and on. They are free when it was let go and the event is over."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size
        self.event: Event | None = None
        self._let_go = False

    def release(self, event: Event | None = None) -> None:
        self.event, self._let_go = event, True

    @property
    def free(self) -> bool:
        return self._let_go and (self.event is None or self.event.query())


class Ring:
    """Regions in the order in which they are taken; they become free in about that order."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken: deque[Region] = deque()

    def __len__(self) -> int:
        """Regions that are not free."""
        self._reclaim()
        return len(self._taken)

    @property
    def most(self) -> int:
        """Bytes that can be had now."""
        return max(size for _, size in self._gaps())

    def take(self, size: int) -> Region | None:
        for start, room in self._gaps():
            if 0 < size <= room:
                self._taken.append(Region(start, size))
                return self._taken[-1]
        return None

    def oldest(self) -> Region:
        """Taken off the ring: the caller sees to it that nothing overtakes it."""
        return self._taken.popleft()

    def _reclaim(self) -> None:
        while self._taken and self._taken[0].free:
            self._taken.popleft()

    def _gaps(self) -> list[tuple[int, int]]:
        """(start, size) after the last region, and before the first one if that is another."""
        self._reclaim()
        if not self._taken:
            return [(0, self.capacity)]
        first, end = self._taken[0].start, self._taken[-1].start + self._taken[-1].size
        return [(end, self.capacity - end), (0, first)] if end > first else [(end, first - end)]


@dataclass(frozen=True)
class Shape:
    """Where one kind of thing lies on the device: the address and bytes of each component of number 0; the next ones
    follow. ``half``: its numbers are bfloat16. ``tokens``: how many of a whole one its bytes are for."""

    bases: Rows
    sizes: Rows
    half: bool
    tokens: int = 1

    @classmethod
    def of(cls, tensors: Sequence[Tensor], tokens: int = 1) -> Shape:
        """Raises ValueError for components that are not whole words of 16 bytes."""
        sizes = np.array([tensor[0].nbytes for tensor in tensors], np.int64)
        if (sizes // tokens % ALIGNMENT).any():
            raise ValueError(
                f"components of {sizes.tolist()} bytes for {tokens} tokens are not multiples of {ALIGNMENT}"
            )
        bases = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
        return cls(bases, sizes, bool(tensors) and tensors[0].dtype is torch.bfloat16, tokens)

    @property
    def size(self) -> int:
        return int(self.sizes.sum())

    def lengths(self, tokens: int) -> Rows:
        """Bytes of each component of so many tokens."""
        return self.sizes // self.tokens * tokens

    def places(self, number: int, parts: slice) -> Rows:
        return self.bases[parts] + number * self.sizes[parts]


class Block:
    """Host memory for one page or one state. ``flag``: the word that tells what was found in it."""

    def __init__(self, number: int, offset: int, state: bool) -> None:
        self.flag, self.offset, self.state = number, offset, state


class Room:
    """Host memory that the device reads and writes: a ring for what is read from disk, blocks for what left.

    ``memory`` uint8, of ``Room.bytes`` at least; ``device``: its address there. ``reclaim`` is asked for a block where
    none is free: with whether it is for a state, and whether it may wait for one."""

    def __init__(self, memory: Tensor, device: int, shapes: tuple[Shape, Shape], ring: int, blocks: tuple[int, int]):
        self.memory, self.device = memory, device
        self.ring = Ring(ring)
        self.reclaim: Callable[[bool, bool], bool] = lambda state, wait: False
        words = _FLAGS + sum(blocks)
        self.flags = memory[: 4 * words].view(torch.int32).numpy()
        self.flags[:] = 0
        self._spare = list(range(_FLAGS))
        self._ring_start = _aligned(4 * words)
        self._view = memory.numpy().data
        self._free: tuple[deque[tuple[Block, Event | None]], ...] = (deque(), deque())
        at, number = self._ring_start + _aligned(ring), _FLAGS
        for state, (count, shape) in enumerate(zip(blocks, shapes, strict=True)):
            for _ in range(count):
                self._free[state].append((Block(number, at, bool(state)), None))
                at, number = at + _aligned(shape.size), number + 1
        if at > memory.numel():
            raise ValueError(f"{memory.numel()} bytes of host memory are less than {at}")

    @staticmethod
    def bytes(shapes: tuple[Shape, Shape], ring: int, blocks: tuple[int, int]) -> int:
        sizes = (count * _aligned(shape.size) for count, shape in zip(blocks, shapes, strict=True))
        return _aligned(4 * (_FLAGS + sum(blocks))) + _aligned(ring) + sum(sizes)

    @property
    def free(self) -> tuple[int, int]:
        """Blocks for pages and for states that nobody has."""
        return len(self._free[0]), len(self._free[1])

    def take(self, state: bool, *, wait: bool) -> Block | None:
        """None if none is free now, and nobody gives one."""
        free = self._free[state]
        for _ in range(len(free)):
            block, event = free.popleft()
            if event is None or event.query():
                self.flags[block.flag] = 0
                return block
            free.append((block, event))
        return self.take(state, wait=wait) if self.reclaim(state, wait) else None

    def give(self, block: Block, event: Event | None = None) -> None:
        """It is free when the event is over."""
        self._free[block.state].append((block, event))

    def flag(self) -> int | None:
        """A word of its own; None if all are in use."""
        if not self._spare:
            return None
        self.flags[self._spare[-1]] = 0
        return self._spare.pop()

    def read_flag(self, flag: int) -> bool:
        """Whether nothing was found; the word is another's now. What writes it is over."""
        self._spare.append(flag)
        return not self.flags[flag]

    def region(self, region: Region) -> int:
        """Where a region of the ring begins in the memory."""
        return self._ring_start + region.start

    def views(self, offset: int, lengths: Rows) -> list[memoryview]:
        places = zip((offset + starts(lengths)).tolist(), lengths.tolist(), strict=True)
        return [self._view[at : at + size] for at, size in places]


def starts(lengths: Rows) -> Rows:
    """Of components of so many bytes, one after the other."""
    return np.cumsum(lengths) - lengths


def _aligned(size: int) -> int:
    return -(-size // 4096) * 4096
