"""Physical pages: who holds them, and which are free. Numbers only; the bytes are the runner's."""

from __future__ import annotations

from array import array
from collections.abc import Callable


class PagePool:
    """``total`` pages. A page is *held* by sequences and *kept* by the cache, both counted; free when neither."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.held_pages = 0
        """Pages that at least one sequence holds: what cannot be evicted."""
        self.released = 0
        """How often a holder or the cache let a page go, or there were more: what did not fit will not, until this
        grows."""
        self._holders = array("I", bytes(4 * total))
        self._keepers = array("I", bytes(4 * total))
        self._free: list[int] = []
        self._unused = 0

    @property
    def free(self) -> int:
        return len(self._free) + self.total - self._unused

    def resize(self, total: int, move: Callable[[int, int], None]) -> None:
        """Have ``total`` pages from now on. Of those beyond, what is used becomes a free page below: ``move`` is told
        of each (from, to). The caller has checked that so many are not used."""
        if total > len(self._holders):
            more = bytes(4 * (total - len(self._holders)))
            self._holders.frombytes(more)
            self._keepers.frombytes(more)
        beyond = [page for page in range(total, self._unused) if self._holders[page] or self._keepers[page]]
        self._free = [page for page in self._free if page < total]
        self.released += total > self.total
        self._unused, self.total = min(self._unused, total), total
        for page in beyond:
            below = self._next()
            for counts in (self._holders, self._keepers):
                counts[below], counts[page] = counts[page], 0
            move(page, below)

    def take(self) -> int:
        """A free page, held once. The caller has checked that there is one."""
        page = self._next()
        self.hold(page)
        return page

    def _next(self) -> int:
        if self._free:
            return self._free.pop()
        self._unused += 1
        return self._unused - 1

    def hold(self, page: int) -> None:
        self.held_pages += self._holders[page] == 0
        self._holders[page] += 1

    def release(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self.released += 1
            self.held_pages -= 1
            self._reclaim(page)

    def keep(self, page: int) -> None:
        self._keepers[page] += 1

    def drop(self, page: int) -> None:
        self._keepers[page] -= 1
        self.released += 1
        self._reclaim(page)

    def held(self, page: int) -> bool:
        return self._holders[page] > 0

    def counts(self, page: int) -> tuple[int, int]:
        """(holders, keepers), for checks."""
        return self._holders[page], self._keepers[page]

    def _reclaim(self, page: int) -> None:
        if self._holders[page] == 0 and self._keepers[page] == 0:
            self._free.append(page)
