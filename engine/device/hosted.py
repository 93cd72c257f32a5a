"""Host memory for what leaves the device's pages and states, as large as was asked for."""

from __future__ import annotations

import mmap

import torch

from engine.device.driver import Driver
from engine.device.room import Room, Shape
from engine.device.staging import Lanes, Staging, shapes
from engine.experts.pool import aligned
from engine.memory.host import HostTier
from engine.memory.store import StateStore
from engine.models.model import Cache

GATHERED = 96 << 20
"""Bytes of the device in which is gathered what leaves: a state of 63 MB and pages beside it hold up nothing."""
RING = 64 << 20
"""Bytes of host memory for what is read from disk, on its way to the device."""


class Hosted:
    """What moves pages and states between a device and ``nbytes`` of host memory, at the most, and keeps them there.
    ``staging`` is a runner's mover. Raises DriverError, and ValueError where the memory is too small."""

    def __init__(self, cache: Cache, lanes: Lanes, driver: Driver, nbytes: int, device: torch.device) -> None:
        shaped = shapes(cache)
        largest = max(int(shape.sizes.max(initial=0)) for shape in shaped)
        blocks = _blocks(shaped, nbytes - RING)
        if min(blocks) < 1 and (blocks[0] < 1 or cache.states):
            raise ValueError(f"{nbytes} bytes of host memory have no room for a page and a state besides {RING}")
        size = -(-Room.bytes(shaped, RING, blocks) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = aligned(size, mmap.PAGESIZE)
        self._driver, self._address = driver, memory.data_ptr()
        self._room = Room(memory, driver.register(self._address, size), shaped, RING, blocks)
        gathered = torch.empty(max(GATHERED, largest), dtype=torch.uint8, device=device)
        self.staging = Staging(cache, lanes, self._room, gathered)

    def tier(self, store: StateStore | None) -> StateStore:
        """The store behind this memory."""
        tier = HostTier(store)
        self._room.reclaim = tier.reclaim
        return tier

    def gauges(self) -> dict[str, float]:
        """Blocks that nothing is kept in."""
        pages, states = self._room.free
        return {"host_pages_free": float(pages), "host_states_free": float(states)}

    def close(self) -> None:
        """Nothing may be on its way any more."""
        self._driver.unregister(self._address)


def _blocks(shaped: tuple[Shape, Shape], nbytes: int) -> tuple[int, int]:
    """Pages, and states if there are any, for half of the memory each."""
    page, state = (shape.size for shape in shaped)
    if not state:
        return max(0, nbytes // _stride(page)), 0
    return max(0, nbytes // 2 // _stride(page)), max(0, nbytes // 2 // _stride(state))


def _stride(size: int) -> int:
    """Of a block: whole pages of memory, and a word."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + 4
