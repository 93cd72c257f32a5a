"""Physical pages: who holds them, and which are free. Numbers only; the bytes are the runner's."""

from __future__ import annotations

from array import array


class PagePool:
    """``total`` pages. A page is *held* by sequences and *kept* by the cache, both counted; free when neither."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.held_pages = 0
        """Pages that at least one sequence holds: what cannot be evicted."""
        self.released = 0
        """How often a holder or the cache let a page go: what did not fit will not, until this grows."""
        self._holders = array("I", bytes(4 * total))
        self._keepers = array("I", bytes(4 * total))
        self._free: list[int] = []
        self._unused = 0

    @property
    def free(self) -> int:
        return len(self._free) + self.total - self._unused

    def take(self) -> int:
        """A free page, held once. The caller has checked that there is one."""
        if self._free:
            page = self._free.pop()
        else:
            page = self._unused
            self._unused += 1
        self.hold(page)
        return page

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
