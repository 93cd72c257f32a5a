"""What left the device and is kept in host memory, before any store that lasts.

Its bytes lie in blocks that the mover fills from the device and that the device reads from, so nothing is copied on the
way back. What is on its way here can be found already. A store behind it gets everything that arrives, in order, as it
takes it; here the least recently used gives way, pages only after those that come after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.memory.queue import LeastFirst
from engine.memory.store import Buffers, PageRef, Part, Reading, Staged, StateRef, StateStore

PAGE_BYTES = 256
"""Of a whole page's tokens."""
SHARE = 8 << 20
"""Bytes that the store behind is given in a step, or one thing that is larger."""
RETRY_SECONDS = 10.0
"""When it is asked again after it took nothing."""


@dataclass(eq=False, slots=True)
class Held:
    """A page, or a state, in host memory, or on its way there. ``arrived``: seen to be here, and to have only finite
    numbers. ``pending``: not so, or not taken by the store behind. ``left``: the device has it no more. ``gone``: only
    who holds it still needs it."""

    parent: bytes
    key: bytes | None
    tokens: bytes
    data: Staged
    position: int
    session: str
    state: bool = False
    kind: str = ""
    priority: float = 0.0
    pinned: bool = False
    superseded: bool = False
    used: int = 0
    holds: int = 0
    arrived: bool = False
    pending: bool = True
    left: bool = False
    gone: bool = False
    tier: Literal["host"] = "host"
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.data))

    @property
    def tail(self) -> bytes:
        return self.tokens

    def wait(self) -> bool:
        """Until it is here; False if some of its numbers are not finite."""
        return self.arrived or self.data.wait()


@dataclass(frozen=True, slots=True)
class _Copied:
    """A reading that is over."""

    right: bool

    def done(self) -> bool:
        return True

    def wait(self) -> bool:
        return self.right


class HostTier:
    """Implements ``engine.memory.store.StateStore``, before ``behind``, if there is one. ``reclaim`` is what gives the
    mover room when it has none. ``not_finite`` counts pages that turned out so."""

    def __init__(self, behind: StateStore | None = None) -> None:
        self.behind = behind
        self.not_finite = 0
        self.evicted = 0
        self._clock = 0
        self._keys: dict[bytes, Held] = {}
        self._after: dict[bytes, list[Held]] = {}
        """By what comes before them, states too."""
        self._lines = {False: LeastFirst(self._worth), True: LeastFirst(self._worth)}
        """Pages, and states."""
        self._arriving: deque[Held] = deque()
        self._untaken: deque[Held] = deque()
        self._retry = 0.0
        self._bytes = 0
        self._now = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._after.values()))

    @property
    def busy(self) -> bool:
        """Whether ``tick`` has something to do."""
        return bool(self._arriving) or bool(self._untaken and self._now >= self._retry)

    def tick(self, now: float) -> None:
        """See what has arrived, and give the store behind its share."""
        self._now = now
        self._see()
        share = SHARE
        while share > 0 and self._untaken and now >= self._retry:
            share -= self._untaken[0].size
            if not self._give(self._untaken[0]):
                self._retry = now + RETRY_SECONDS
                return
            self._untaken.popleft()

    def reclaim(self, state: bool, wait: bool) -> bool:
        """Give up the least of what is here; False if all of it is needed. ``wait``: for what is on its way."""
        if self._give_up(state):
            return True
        while wait and self._arriving:
            self._arriving[0].data.wait()
            self._see()
            if self._give_up(state):
                return True
        return False

    def has_page(self, parent: bytes, tokens: bytes) -> bool:
        """Whether it is here, or more of it."""
        return self._page(parent, tokens) is not None

    def has_state(self, parent: bytes, tail: bytes) -> bool:
        return self._state(parent, tail) is not None

    def left(self, parent: bytes, tokens: bytes, *, state: bool) -> None:
        """The device does not have it any more."""
        known = self._state(parent, tokens) if state else self._page(parent, tokens)
        if known is not None:
            known.left = True
            self._touch(known)

    def renew(self, parent: bytes, tail: bytes, *, kind: str, priority: float, pinned: bool, session: str) -> bool:
        """A checkpoint is wanted once more; False if it is not here."""
        known = self._state(parent, tail)
        if known is None:
            return False
        if priority >= known.priority:
            known.kind, known.priority = kind, priority
        known.pinned, known.superseded, known.session = known.pinned or pinned, False, session
        self._touch(known)
        if self.behind is not None and not known.pending:
            self._put(self.behind, known)
        return True

    # ── as a store ──────────────────────────────────────────────────────────────────────────────────────────────

    def page(self, parent: bytes, key: bytes, tokens: bytes) -> PageRef | None:
        found = self._keys.get(key)
        if found is not None and found.tokens == tokens and found.parent == parent:
            return found
        return None if self.behind is None else self.behind.page(parent, key, tokens)

    def pages(self, parent: bytes, keys: Sequence[bytes], tokens: bytes) -> Sequence[PageRef]:
        found: list[PageRef] = []
        while (at := len(found)) < len(keys):
            here = self._keys.get(keys[at])
            start = PAGE_BYTES * at
            if here is not None and here.parent == parent and here.tokens == tokens[start : start + PAGE_BYTES]:
                found.append(here)
            elif self.behind is not None and (more := self._until_here(parent, keys[at:], tokens[start:])):
                found += more
            else:
                break
            parent = keys[len(found) - 1]
        return found

    def partial(self, parent: bytes, rest: bytes) -> Sequence[PageRef]:
        here = [one for one in self._after.get(parent, ()) if not one.state and rest and one.tokens[:4] == rest[:4]]
        return here if self.behind is None else [*here, *self.behind.partial(parent, rest)]

    def states(self, parent: bytes, rest: bytes) -> Sequence[StateRef]:
        here = [one for one in self._after.get(parent, ()) if one.state and rest.startswith(one.tokens)]
        return here if self.behind is None else [*here, *self.behind.states(parent, rest)]

    def put_page(
        self, parent: bytes, key: bytes | None, tokens: bytes, data: Buffers, *, position: int, session: str = "",
    ) -> None:  # fmt: skip
        """``data`` is the mover's, and belongs to the tier from now on."""
        staged = _staged(data)
        if self.has_page(parent, tokens) or key in self._keys:
            staged.drop()
            return
        for one in list(self._after.get(parent, ())):
            if not one.state and one.key is None and not one.holds and tokens.startswith(one.tokens):
                self._remove(one)
        self._add(Held(parent, key, tokens, staged, position, session))

    def put_state(
        self, parent: bytes, tail: bytes, data: Buffers, *,
        position: int, kind: str, priority: float, pinned: bool, session: str,
    ) -> None:  # fmt: skip
        staged = _staged(data)
        if self.renew(parent, tail, kind=kind, priority=priority, pinned=pinned, session=session):
            staged.drop()
        else:
            self._add(Held(parent, None, tail, staged, position, session, True, kind, priority, pinned))

    def put_end(self, parent: bytes, tail: bytes, *, position: int, session: str) -> None:
        if self.behind is not None:
            self.behind.put_end(parent, tail, position=position, session=session)

    def demote(self, parent: bytes, tail: bytes) -> None:
        known = self._state(parent, tail)
        if known is not None:
            known.pinned, known.superseded = False, True
            self._lines[True].push(known)
        if self.behind is not None:
            self.behind.demote(parent, tail)

    def read_parts(self, parts: Sequence[Part]) -> Sequence[Reading]:
        """What is here is copied at once: for who cannot take it from where it is."""
        readings: list[Reading | None] = [None] * len(parts)
        rest: list[tuple[int, Part]] = []
        for at, (ref, into, first) in enumerate(parts):
            if isinstance(ref, Held):
                readings[at] = _Copied(right := ref.data.wait() and not ref.gone)
                for view, source in zip(into, ref.data[first:] if right else (), strict=False):
                    view[:] = source
            else:
                rest.append((at, (ref, into, first)))
        if self.behind is not None and rest:
            for (at, _), reading in zip(rest, self.behind.read_parts([part for _, part in rest]), strict=True):
                readings[at] = reading
        return [one for one in readings if one is not None]

    def hold(self, refs: Sequence[PageRef | StateRef]) -> None:
        for one in reversed([ref for ref in refs if isinstance(ref, Held)]):
            one.holds, one.left = one.holds + 1, False  # the device will have it
            self._touch(one)
            if not one.gone:
                self._lines[one.state].push(one)
        if self.behind is not None:
            self.behind.hold([ref for ref in refs if not isinstance(ref, Held)])

    def release(self, refs: Sequence[PageRef | StateRef]) -> None:
        for one in refs:
            if isinstance(one, Held):
                one.holds -= 1
                if one.gone and not one.holds:
                    one.data.drop()
        if self.behind is not None:
            self.behind.release([ref for ref in refs if not isinstance(ref, Held)])

    def stats(self) -> dict[str, float]:
        own = {"host_bytes": self._bytes, "host_extents": len(self), "host_evicted": self.evicted}
        more = {} if self.behind is None else self.behind.stats()
        return {**more, **own, "host_bytes": self._bytes + more.get("host_bytes", 0)}

    def flush(self, timeout: float) -> bool:
        """What the store behind takes of what waits for it; then that is written."""
        while self._arriving:
            self._arriving[0].data.wait()
            self._see()
        while self._untaken and self._give(self._untaken[0]):
            self._untaken.popleft()
        return not self._untaken and (self.behind is None or self.behind.flush(timeout))

    def close(self) -> None:
        for one in self._all():
            one.data.wait()
        if self.behind is not None:
            self.behind.close()

    def verify(self) -> dict[str, float]:
        return {} if self.behind is None else self.behind.verify()

    def collect(self, timeout: float) -> bool:
        return self.behind is None or self.behind.collect(timeout)

    def forget(self, session: str | None) -> int:
        """What is here must have been forgotten before, on the engine's thread, by ``drop``."""
        return 0 if self.behind is None else self.behind.forget(session)

    def pin(self, session: str, pinned: bool) -> int:
        return 0 if self.behind is None else self.behind.pin(session, pinned)

    def drop(self, session: str | None) -> None:
        """Forget what one session left here, its checkpoints and the pages that nothing else comes after; or all."""
        for one in self._all():
            if session is None or (one.state and one.session == session):
                self._remove(one)
        while session is not None:
            alone = [one for one in self._all() if one.session == session and not self._needed(one)]
            if not alone:
                return
            for one in alone:
                self._remove(one)

    # ── what is here ────────────────────────────────────────────────────────────────────────────────────────────

    def _all(self) -> list[Held]:
        return [one for ones in self._after.values() for one in ones]

    def _needed(self, one: Held) -> bool:
        """Whether something here comes after a page, or a state lies in it."""
        if one.key is not None and one.key in self._after:
            return True
        beside = self._after.get(one.parent, ())
        return not one.state and any(other.state and one.tokens.startswith(other.tokens) for other in beside)

    def _page(self, parent: bytes, tokens: bytes) -> Held | None:
        beside = self._after.get(parent, ())
        return next((one for one in beside if not one.state and one.tokens.startswith(tokens)), None)

    def _state(self, parent: bytes, tail: bytes) -> Held | None:
        return next((one for one in self._after.get(parent, ()) if one.state and one.tokens == tail), None)

    def _until_here(self, parent: bytes, keys: Sequence[bytes], tokens: bytes) -> list[PageRef]:
        """The run that the store behind has, up to the first page that is here."""
        if self.behind is None:
            return []
        here = next((at for at, key in enumerate(keys) if key in self._keys), len(keys))
        return list(self.behind.pages(parent, keys[: max(here, 1)], tokens[: PAGE_BYTES * max(here, 1)]))

    def _worth(self, one: Held) -> tuple[bool, bool, int]:
        """Least goes first: what the device has, too, for it comes again from there; pages that nothing comes after;
        superseded states, pinned ones last."""
        if one.state:
            return one.left and one.pinned, one.left and not one.superseded, one.used
        return one.key is not None and one.key in self._after, one.left, one.used

    def _touch(self, one: Held) -> None:
        self._clock += 1
        one.used = self._clock

    def _add(self, one: Held) -> None:
        self._touch(one)
        self._after.setdefault(one.parent, []).append(one)
        if one.key is not None:
            self._keys[one.key] = one
        self._bytes += one.size
        self._lines[one.state].push(one)
        self._arriving.append(one)

    def _remove(self, one: Held) -> None:
        """Its block goes when nobody holds it."""
        one.gone = True
        beside = self._after[one.parent]
        beside.remove(one)
        if not beside:
            del self._after[one.parent]
            if one.parent in self._keys:
                self._lines[False].push(self._keys[one.parent])
        if one.key is not None:
            del self._keys[one.key]
        self._lines[one.state].discard(one)
        self._bytes -= one.size
        for line in (self._arriving, self._untaken):
            if one in line:
                line.remove(one)
        if not one.holds:
            one.data.drop()

    def _give_up(self, state: bool) -> bool:
        """The least of what has arrived and nobody holds."""
        line, passed = self._lines[state], []
        while (least := line.pop()) is not None and (least.holds or not least.data.ready()):
            passed.append(least)
        for one in passed:
            line.push(one)
        if least is None:
            return False
        if least.pending and self.behind is not None and least.data.wait():
            self._give(least)
        self._remove(least)
        self.evicted += 1
        return True

    def _see(self) -> None:
        """What has arrived, in order."""
        while self._arriving and self._arriving[0].data.ready():
            one = self._arriving.popleft()
            one.arrived = one.data.wait()
            if not one.arrived:
                self.not_finite += not one.state
                self._remove(one)
            elif self.behind is None:
                one.pending = False
            else:
                self._untaken.append(one)

    def _give(self, one: Held) -> bool:
        """Whether the store behind has it now."""
        store = self.behind
        if store is None:
            return True
        self._put(store, one)
        if one.state:
            taken = any(other.tail == one.tokens for other in store.states(one.parent, one.tokens))
        elif one.key is not None:
            taken = store.page(one.parent, one.key, one.tokens) is not None
        else:
            taken = any(other.tokens.startswith(one.tokens) for other in store.partial(one.parent, one.tokens))
        one.pending = not taken
        return taken

    def _put(self, store: StateStore, one: Held) -> None:
        if not one.state:
            store.put_page(one.parent, one.key, one.tokens, one.data, position=one.position, session=one.session)
            return
        store.put_state(
            one.parent, one.tokens, one.data,
            position=one.position, kind=one.kind, priority=one.priority, pinned=one.pinned, session=one.session,
        )  # fmt: skip
        if one.superseded:
            store.demote(one.parent, one.tokens)


def _staged(data: Buffers) -> Staged:
    if not isinstance(data, Staged):
        raise TypeError("the host tier keeps only what a mover has staged")
    return data
