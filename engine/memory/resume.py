"""The one planner: from where a prompt can go on, given what the device and the store have.

A resume point is the greatest position that every component reaches: pages cover everything before it and, on a
recurrent model, a checkpoint lies exactly there. Attention pages are valid for any prefix of themselves, so a model
of attention alone resumes at any position. Pages on the device come first, the rest of the chain from the store; where
both have something, the device's is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.api import PAGE, Reuse, WorkerCause
from engine.memory.history import History
from engine.memory.index import Node, PageIndex
from engine.memory.keys import PAGE_BYTES, common_tokens, page_keys
from engine.memory.states import Checkpoint
from engine.memory.store import PageRef, StateRef, StateStore


@dataclass(frozen=True)
class Plan:
    """Go on at ``position``: ``pages`` are whole and on the device, ``stored`` are whole and to be read behind them,
    ``partial`` (if any) is to be copied or read up to ``position``, and ``checkpoint`` (on a recurrent model, unless
    position is 0) is the state there. ``reuse`` is what to report."""

    root: bytes
    position: int
    pages: tuple[Node, ...]
    stored: tuple[PageRef, ...]
    partial: Node | PageRef | None
    checkpoint: Checkpoint | StateRef | None
    reuse: Reuse

    @property
    def reads(self) -> bool:
        """Whether anything has to be read from the store."""
        return bool(self.stored) or self.partial_read is not None or self.state_read is not None

    @property
    def partial_read(self) -> PageRef | None:
        return None if isinstance(self.partial, Node) else self.partial

    @property
    def state_read(self) -> StateRef | None:
        return None if isinstance(self.checkpoint, Checkpoint) else self.checkpoint

    @property
    def disk_bytes(self) -> int:
        """What has to be read from the disk."""
        refs = (*self.stored, self.partial_read, self.state_read)
        return sum(ref.size for ref in refs if ref is not None and ref.tier == "disk")


def plan(
    index: PageIndex,
    store: StateStore | None,
    history: History,
    root: bytes,
    tokens: bytes,
    *,
    recurrent: bool,
    limit: int | None = None,
) -> Plan:
    """``tokens`` u32 little-endian. At least the last token is left to feed; it counts as new. ``limit``: a position
    not to go beyond."""
    last = len(tokens) // 4 - 1
    keys = page_keys(root, tokens)
    way = _Way(index, store, keys, tokens, last if limit is None else min(limit, last))
    tail, shared = way.tail()
    reached = PAGE * way.whole + shared
    if recurrent:
        position, partial, checkpoint = way.deepest_checkpoint()
    else:
        position, partial, checkpoint = reached, tail, None
    pages = way.nodes[: position // PAGE]
    stored = way.refs[: position // PAGE - len(pages)]
    partial = partial if position % PAGE else None
    tiers = Counter(page.tier for page in stored)
    counts = {"device": PAGE * len(pages), "host": PAGE * tiers["host"], "disk": PAGE * tiers["disk"]}
    if partial is not None:
        counts["device" if isinstance(partial, Node) else partial.tier] += position % PAGE
    known = history.look_up(keys, tokens)
    divergence = max(position, min(max(known.tokens, reached), last))
    cause: WorkerCause = "none"
    if position < divergence and known.tokens <= position:
        cause = "worker_restart"
    elif divergence > position:
        lost = not recurrent or any(position < one <= divergence for one in known.checkpoints)
        cause = "evicted" if lost else "no_anchor"
    return Plan(
        root=root,
        position=position,
        pages=tuple(pages),
        stored=tuple(stored),
        partial=partial,
        checkpoint=checkpoint,
        reuse=Reuse(
            counts["device"], counts["host"], counts["disk"], divergence - position, last + 1 - divergence, cause
        ),
    )


class _Way:
    """The chain of whole pages of a prompt: ``nodes`` on the device, ``refs`` behind them in the store: ``whole``
    of them. ``keys``: of what comes before each page."""

    def __init__(
        self, index: PageIndex, store: StateStore | None, keys: list[bytes], tokens: bytes, limit: int
    ) -> None:
        self.keys = keys
        self._index = index
        self._store = store
        self._tokens = tokens
        self._limit = limit
        self._first = index.root(keys[0])
        most = limit // PAGE
        self.nodes = index.run(self._first, keys[1 : most + 1], tokens)
        self.refs: Sequence[PageRef] = ()
        cached = len(self.nodes)
        if store is not None and cached < most:
            rest = tokens[PAGE_BYTES * cached : PAGE_BYTES * most]
            self.refs = store.pages(keys[cached], keys[cached + 1 : most + 1], rest)
        self.whole = cached + len(self.refs)

    def tail(self) -> tuple[Node | PageRef | None, int]:
        """The page after the whole ones that shares the longest start with the prompt, and how many tokens of it."""
        rest = self._page(self.whole)
        best: tuple[Node | PageRef | None, int] = (None, 0)
        if not self.refs:
            best = self._index.closest(self._parent(self.whole), rest)
        for ref in self._store.partial(self.keys[self.whole], rest) if self._store is not None and rest else ():
            shared = common_tokens(ref.tokens, rest)
            if shared > best[1]:
                best = ref, shared
        return best

    def deepest_checkpoint(self) -> tuple[int, Node | PageRef | None, Checkpoint | StateRef | None]:
        """(position, a page it lies in, the checkpoint) of the last checkpoint on the way."""
        for at in range(self.whole, -1, -1):
            best = max(self._checkpoints(at), key=lambda one: one[0], default=None)
            if best is not None:
                return best
        return 0, None, None

    def _checkpoints(self, at: int) -> Iterator[tuple[int, Node | PageRef | None, Checkpoint | StateRef]]:
        """Those after ``at`` whole pages and less than one more; the device's first."""
        before, page = PAGE * at, self._page(at)
        if 0 < at <= len(self.nodes) and PAGE in self.nodes[at - 1].checkpoints:
            yield before, None, self.nodes[at - 1].checkpoints[PAGE]
        if at <= len(self.nodes):
            for checkpoint in self._index.checkpoints(self._parent(at), page[: PAGE_BYTES - 4]):
                yield checkpoint.position, checkpoint.node, checkpoint
        for state in () if self._store is None else self._store.states(self.keys[at], page):
            holding = self._holding(at, state.tail) if state.tail else None
            if holding is not None:
                yield before + len(state.tail) // 4, holding, state
            elif at and not state.tail:
                yield before, None, state

    def _holding(self, at: int, tail: bytes) -> Node | PageRef | None:
        """A page after ``at`` whole ones that starts with ``tail``."""
        found = self._index.holding(self._parent(at), tail) if at <= len(self.nodes) else None
        if found is not None:
            return found
        if at < self.whole:
            return self.refs[at - len(self.nodes)]
        pages = () if self._store is None else self._store.partial(self.keys[at], tail)
        return next((page for page in pages if page.tokens.startswith(tail)), None)

    def _parent(self, at: int) -> Node:
        return self.nodes[at - 1] if at else self._first

    def _page(self, at: int) -> bytes:
        """The prompt's tokens of a page, as far as the limit."""
        return self._tokens[PAGE_BYTES * at : min(PAGE_BYTES * (at + 1), 4 * self._limit)]
