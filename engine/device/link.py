"""How fast bytes come to the device: from its own memory, and over the link from the host's."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from engine.device.driver import Driver
from engine.experts.offload import whole_pages
from engine.experts.pool import Pool, aligned
from engine.experts.residency import Decision
from engine.kernels.experts import fetch

_COPY = 1 << 30
_GPU = torch.device("cuda")
_LISTS = 64
"""Fetches in a row, each of other experts."""


class Timed:
    """Work on the current stream between two events."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = nbytes
        self._begin, self._end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        self._begin.record()

    def end(self) -> None:
        self._end.record()

    def busy(self) -> bool:
        return not self._end.query()

    def rate(self) -> float:
        """Bytes per second; waits for the end."""
        return self._bytes / self.seconds()

    def seconds(self) -> float:
        """Waits for the end."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


class Fetching:
    """Experts of a pool fetched into slots, ``count`` at a time, with the kernel that decoding uses."""

    def __init__(self, driver: Driver, pool: Pool, count: int) -> None:
        self._driver, self._pool, self._count = driver, pool, count
        self._pointer = driver.register(pool.address(0), whole_pages(pool.nbytes))
        self._slots = torch.empty(count, pool.stride, dtype=torch.uint8, device=_GPU)
        self._part_bytes = torch.tensor(pool.layout.offsets, dtype=torch.int32, device=_GPU)
        self._lists = [self._list(number * count) for number in range(_LISTS)]
        self._next = 0
        self._fetch(_LISTS)
        timed = Timed(0)
        self._fetch(_LISTS)
        timed.end()
        self._seconds_each = timed.seconds() / _LISTS

    def start(self, seconds: float) -> Timed:
        """About so many seconds of fetching; does not wait."""
        times = max(1, round(seconds / self._seconds_each))
        timed = Timed(times * self._count * self._pool.layout.nbytes)
        self._fetch(times)
        timed.end()
        return timed

    def close(self) -> None:
        torch.cuda.synchronize()
        self._driver.unregister(self._pool.address(0))

    def _fetch(self, times: int) -> None:
        for _ in range(times):
            fetch(self._pointer, self._pool.stride, self._slots, self._lists[self._next], self._part_bytes)
            self._next = (self._next + 1) % _LISTS

    def _list(self, first: int) -> Decision:
        decision = Decision.create(1, self._count, _GPU)
        numbers = torch.arange(self._count)
        parts = torch.full_like(numbers, self._pool.layout.parts)
        decision.fetch.copy_(torch.stack((numbers, (first + numbers) % len(self._pool), parts), dim=1))
        decision.counts.copy_(torch.tensor([self._count, 0]))
        return decision


class Link:
    """Measures the current device."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def fetching(self, pool: Pool, count: int) -> Fetching:
        return Fetching(self._driver, pool, count)

    def device_copies(self, samples: int) -> list[float]:
        """Bytes per second, read and written."""
        source = torch.ones(_COPY, dtype=torch.uint8, device=_GPU)
        return [2 * _copy_rate(source, torch.empty_like(source)) for _ in range(samples)]

    def host_copies(self, samples: int) -> list[float]:
        """Bytes per second of one large copy from pinned memory."""
        source = aligned(_COPY, mmap.PAGESIZE).fill_(1)
        self._driver.register(source.data_ptr(), _COPY)
        target = torch.empty(_COPY, dtype=torch.uint8, device=_GPU)
        try:
            return [_copy_rate(source, target) for _ in range(samples)]
        finally:
            self._driver.unregister(source.data_ptr())


def _copy_rate(source: Tensor, target: Tensor) -> float:
    """Of one copy; another one goes before."""
    target.copy_(source, non_blocking=True)
    timed = Timed(source.nbytes)
    target.copy_(source, non_blocking=True)
    timed.end()
    return timed.rate()
