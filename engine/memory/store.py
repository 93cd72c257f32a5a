"""What the engine needs of the tiers below the device: host memory and disk behind one face.

The engine computes all keys; a store treats them as opaque and compares tokens on every hit. Tokens are u32
little-endian, ``parent`` is the chain's key before a page. All calls come from the engine's thread and return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

Buffers = Sequence[memoryview]
"""Contiguous bytes, one per component: keys and values of each attention layer, in layer order; or each tensor of a
recurrent state."""


class Staged(list[memoryview]):
    """Such bytes, which may still be on their way from the device. As it is here: bytes in place, which are there."""

    def ready(self) -> bool:
        """Whether they are there; until then nobody may look at them."""
        return True

    def wait(self) -> bool:
        """Until they are. Whether all of them are finite numbers, as far as that was to be looked at."""
        return True

    def drop(self) -> None:
        """Nobody needs them any more."""


Tier = Literal["host", "disk"]


class PageRef(Protocol):
    """A page the store has: 1 to 64 ``tokens``, ``size`` bytes."""

    @property
    def tokens(self) -> bytes: ...
    @property
    def tier(self) -> Tier: ...
    @property
    def size(self) -> int: ...


class StateRef(Protocol):
    """A checkpoint the store has, after ``tail`` (0 to 63 tokens) after a page; with what it was wanted for."""

    @property
    def tail(self) -> bytes: ...
    @property
    def tier(self) -> Tier: ...
    @property
    def size(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def priority(self) -> float: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def session(self) -> str: ...


Part = tuple[PageRef | StateRef, Buffers, int]
"""What to read, where to, and from which component on."""


class Reading(Protocol):
    """Bytes on their way. ``wait``: True when they are there and verified; False when they are lost or corrupt, which
    the store has counted, and it will not offer them again."""

    def done(self) -> bool: ...
    def wait(self) -> bool: ...


class StateStore(Protocol):
    def page(self, parent: bytes, key: bytes, tokens: bytes) -> PageRef | None:
        """The whole page with these tokens, also while it is being written."""

    def pages(self, parent: bytes, keys: Sequence[bytes], tokens: bytes) -> Sequence[PageRef]:
        """The longest run of whole pages after ``parent`` with these tokens, of which ``keys`` are the keys."""

    def partial(self, parent: bytes, rest: bytes) -> Sequence[PageRef]:
        """Pages after ``parent``, whole or not, that begin like ``rest``."""

    def states(self, parent: bytes, rest: bytes) -> Sequence[StateRef]:
        """Checkpoints after ``parent`` whose tail ``rest`` begins with."""

    def put_page(
        self, parent: bytes, key: bytes | None, tokens: bytes, data: Buffers, *, position: int, session: str = "",
    ) -> None:  # fmt: skip
        """Copy a page, which ends after ``position`` tokens; one that is known is ignored. ``key`` None: partial."""

    def put_end(self, parent: bytes, tail: bytes, *, position: int, session: str) -> None:
        """Where there are no checkpoints: a session needs all pages before this."""

    def put_state(
        self, parent: bytes, tail: bytes, data: Buffers, *,
        position: int, kind: str, priority: float, pinned: bool, session: str,
    ) -> None:  # fmt: skip
        """Copy a checkpoint; of one that is known, take over what it is wanted for."""

    def demote(self, parent: bytes, tail: bytes) -> None:
        """A checkpoint was superseded or is no longer pinned."""

    def read_parts(self, parts: Sequence[Part]) -> Sequence[Reading]:
        """Begin to read components of pages and checkpoints, about in this order. The buffers must stay as they are
        until their reading is done."""

    def hold(self, refs: Sequence[PageRef | StateRef]) -> None:
        """Keep these until they are released."""

    def release(self, refs: Sequence[PageRef | StateRef]) -> None: ...

    def stats(self) -> dict[str, float]: ...

    def flush(self, timeout: float) -> bool:
        """Write what waits to be written; False when it took longer than ``timeout`` seconds."""

    def close(self) -> None: ...

    def verify(self) -> dict[str, float]:
        """Read and check everything. Takes as long as that, and may be called from any thread."""

    def collect(self, timeout: float) -> bool:
        """Retention and garbage collection now. May be called from any thread."""

    def forget(self, session: str | None) -> int:
        """Forget what only a session needs, or everything, and overwrite it; how many extents that were. Takes as long
        as that, and may be called from any thread."""

    def pin(self, session: str, pinned: bool) -> int:
        """Keep what a session has for good, or no longer; how many checkpoints it has."""
