"""A store in a dict, with faults and delays on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.memory.store import Buffers


@dataclass(eq=False)
class Extent:
    """A page or a state. ``lost``: reading it finds it corrupt; ``bad``: only one component is."""

    parent: bytes
    key: bytes | None
    tokens: bytes
    data: list[bytes]
    position: int
    state: bool = False
    kind: str = ""
    priority: float = 0.0
    pinned: bool = False
    session: str = ""
    superseded: bool = False
    lost: bool = False
    bad: int = -1
    holds: int = 0
    tier: Literal["host", "disk"] = "host"

    @property
    def tail(self) -> bytes:
        return self.tokens

    @property
    def size(self) -> int:
        return sum(map(len, self.data))


@dataclass
class FakeReading:
    """Done after having been asked ``delay`` times, or waited for. The bytes come only then."""

    store: FakeStore
    extent: Extent
    into: Buffers
    first: int
    delay: int
    result: bool | None = None

    def done(self) -> bool:
        self.delay -= 1
        return self.result is not None or self.delay < 0

    def wait(self) -> bool:
        if self.result is None:
            parts = range(self.first, self.first + len(self.into))
            self.result = not self.extent.lost and self.extent.bad not in parts
            self.store.reading -= 1
            self.store.ended += 1
            for view, part in zip(self.into, self.extent.data[self.first : parts.stop], strict=True):
                view[:] = part if self.result else b"\xff" * len(part)
            if not self.result and not self.store.stubborn:
                self.store.remove(self.extent)
        return self.result


@dataclass
class FakeStore:
    """``full``: takes nothing more. ``delay``: for each reading. ``stubborn``: offers again what was corrupt.
    ``reading`` parts are on their way, ``ended`` ones were."""

    by_key: dict[bytes, Extent] = field(default_factory=dict)
    after: dict[bytes, list[Extent]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    ends: dict[str, int] = field(default_factory=dict)
    delay: int = 0
    full: bool = False
    stubborn: bool = False
    reading: int = 0
    ended: int = 0
    closed: bool = False

    @property
    def extents(self) -> list[Extent]:
        return [one for ones in self.after.values() for one in ones]

    @property
    def states_kept(self) -> list[Extent]:
        return [one for one in self.extents if one.state]

    def page(self, parent: bytes, key: bytes, tokens: bytes) -> Extent | None:
        found = self.by_key.get(key)
        return found if found is not None and found.tokens == tokens and found.parent == parent else None

    def pages(self, parent: bytes, keys: Sequence[bytes], tokens: bytes) -> Sequence[Extent]:
        found: list[Extent] = []
        for at, key in enumerate(keys):
            one = self.page(parent, key, tokens[256 * at : 256 * (at + 1)])
            if one is None:
                break
            found.append(one)
            parent = key
        return found

    def partial(self, parent: bytes, rest: bytes) -> Sequence[Extent]:
        return [one for one in self.after.get(parent, ()) if not one.state and rest and one.tokens[:4] == rest[:4]]

    def states(self, parent: bytes, rest: bytes) -> Sequence[Extent]:
        return [one for one in self.after.get(parent, ()) if one.state and rest.startswith(one.tokens)]

    def put_page(
        self, parent: bytes, key: bytes | None, tokens: bytes, data: Buffers, *, position: int, session: str = ""
    ) -> None:
        if self.full or (key in self.by_key if key is not None else self._covered(parent, tokens)):
            return
        for one in self.partial(parent, tokens):
            if one.key is None and not one.holds and tokens.startswith(one.tokens):
                self.remove(one)
        self._add(Extent(parent, key, tokens, [bytes(part) for part in data], position, session=session))

    def put_end(self, parent: bytes, tail: bytes, *, position: int, session: str) -> None:
        self.ends[session] = position

    def put_state(
        self, parent: bytes, tail: bytes, data: Buffers, *,
        position: int, kind: str, priority: float, pinned: bool, session: str,
    ) -> None:  # fmt: skip
        for known in self.states(parent, tail):
            if known.tokens == tail:
                known.kind, known.priority, known.pinned, known.session = kind, priority, pinned, session
                known.superseded = False
                return
        if not self.full:
            copied = [bytes(part) for part in data]
            self._add(Extent(parent, None, tail, copied, position, True, kind, priority, pinned, session))

    def demote(self, parent: bytes, tail: bytes) -> None:
        for known in self.states(parent, tail):
            if known.tokens == tail:
                known.pinned, known.superseded = False, True

    def read_parts(self, parts: Sequence[tuple[Extent, Buffers, int]]) -> list[FakeReading]:
        readings = []
        for ref, into, first in parts:
            sizes = [len(part) for part in ref.data[first : first + len(into)]]
            assert ref.holds > 0 and into and [len(view) for view in into] == sizes
            self.counts[f"reads_{ref.tier}"] += first == 0
            self.reading += 1
            readings.append(FakeReading(self, ref, into, first, self.delay))
        return readings

    def hold(self, refs: Sequence[Extent]) -> None:
        for ref in refs:
            ref.holds += 1

    def release(self, refs: Sequence[Extent]) -> None:
        for ref in refs:
            ref.holds -= 1
            assert ref.holds >= 0

    def stats(self) -> dict[str, float]:
        return {"extents": float(len(self.extents))}

    def flush(self, timeout: float) -> bool:
        return not self.full

    def close(self) -> None:
        self.closed = True

    def verify(self) -> dict[str, float]:
        return {"damaged": float(sum(one.lost for one in self.extents))}

    def collect(self, timeout: float) -> bool:
        return True

    def forget(self, session: str | None) -> int:
        gone = [one for one in self.extents if session is None or (one.state and one.session == session)]
        for one in gone:
            self.remove(one)
        return len(gone)

    def pin(self, session: str, pinned: bool) -> int:
        found = [one for one in self.states_kept if one.session == session]
        for one in found:
            one.pinned = pinned
        return len(found)

    def restarted(self) -> FakeStore:
        """What another process would find, on disk."""
        for one in self.extents:
            one.holds, one.tier = 0, "disk"
        return FakeStore(self.by_key, self.after)

    def remove(self, extent: Extent) -> None:
        if extent in self.after.get(extent.parent, ()):
            self.after[extent.parent].remove(extent)
            if extent.key is not None:
                del self.by_key[extent.key]

    def _covered(self, parent: bytes, tokens: bytes) -> bool:
        return any(one.tokens.startswith(tokens) for one in self.partial(parent, tokens))

    def _add(self, extent: Extent) -> None:
        self.after.setdefault(extent.parent, []).append(extent)
        if extent.key is not None:
            self.by_key[extent.key] = extent
