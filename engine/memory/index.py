"""Which pages are cached: a tree of pages over token prefixes, each full page also found by its key.

A node is one page after its parent's. Full pages have a key; a partial page has only its literal tokens. Siblings
never contain one another: a page that continues a partial one takes its place. Nodes are evicted leaves first, so a
cached page always has everything before it.

A checkpoint needs a page that holds its last token. Of several siblings that do, any will: it lies on one of them,
moves to another when that one goes, and is found by its tokens, whichever branch a prompt takes after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.api import PAGE
from engine.memory.keys import PAGE_BYTES, common_tokens, page_key
from engine.memory.pages import PagePool
from engine.memory.queue import LeastFirst
from engine.memory.states import Checkpoint


@dataclass(eq=False, slots=True)
class Node:
    """``tokens``: u32 little-endian, at most a page. ``key``: the chain's key after this page, None while partial.
    ``checkpoints`` on this page, by how many tokens of it they come after; ``tails``: those on the pages after this
    one, by their tokens there. ``children``: sorted by their tokens. ``start``: tokens before it. ``side``: left by a
    side request; ``background``: computed in advance, not asked for yet. ``saved``: the store had it when asked.
    ``session``: the one that used it last."""

    parent: Node | None
    tokens: bytes
    page: int
    key: bytes | None
    used: int
    side: bool
    start: int = -PAGE
    background: bool = False
    saved: bool = False
    session: str = ""
    children: list[Node] = field(default_factory=list)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    tails: dict[bytes, Checkpoint] = field(default_factory=dict)


class PageIndex:
    """``evicted`` counts pages given up for others; ``on_evict`` hears of a page before it goes, ``on_drop`` of
    checkpoints that go with their page."""

    def __init__(
        self,
        pool: PagePool,
        recurrent: bool,
        on_evict: Callable[[Node], None],
        on_drop: Callable[[Checkpoint], None],
    ) -> None:
        self.evicted = 0
        self.clock = 0
        self.pages = 0
        self._pool = pool
        self._recurrent = recurrent
        self._on_evict = on_evict
        self._on_drop = on_drop
        self._by_key: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self._leaves = LeastFirst(self._value)
        self._side: set[Node] = set()

    def root(self, key: bytes) -> Node:
        """The node before the first page of a namespace; remembered while it has pages."""
        return self._roots.get(key) or Node(None, b"", -1, key, 0, False)

    def run(self, root: Node, keys: Sequence[bytes], tokens: bytes) -> list[Node]:
        """The longest run of full pages after ``root`` with exactly these tokens, of which ``keys`` are the keys;
        those alone are not trusted."""
        found: list[Node] = []
        parent = root
        for start, key in zip(range(0, len(tokens), PAGE_BYTES), keys, strict=False):
            node = self._by_key.get(key)
            if node is None or node.parent is not parent or node.tokens != tokens[start : start + PAGE_BYTES]:
                break
            found.append(node)
            parent = node
        return found

    def put(self, parent: Node, tokens: bytes, page: int, side: bool, session: str = "") -> Node | None:
        """The node for these tokens after ``parent``: one that is there already, or a new one that keeps ``page``.

        None if another page happens to have the same key; what follows is then not cached."""
        key = None
        if len(tokens) == PAGE_BYTES and parent.key is not None:
            key = page_key(parent.key, tokens)
            known = self._by_key.get(key)
            if known is not None and (known.parent is not parent or known.tokens != tokens):
                return None
        at = _place(parent, tokens)
        shorter = parent.children[at - 1] if at else None
        node = self.holding(parent, tokens)
        if node is None and shorter is not None and tokens.startswith(shorter.tokens):
            node = self._extend(shorter, tokens, page, key)
        if node is None:
            node = Node(parent, tokens, page, key, self.clock, side, parent.start + PAGE)
            self._pool.keep(page)
            self.pages += 1
            parent.children.insert(at, node)
            if parent.parent is None and parent.key is not None:
                self._roots[parent.key] = parent
            self._leaves.discard(parent)
            self._leaves.push(node)
            if side:
                self._side.add(node)
            if key is not None:
                self._by_key[key] = node
        self.touch(node, side, session)
        return node

    def touch(self, node: Node, side: bool, session: str | None) -> None:
        """A page is used, by ``session``; by nobody that would need it where only some of it is copied."""
        node.used = self.clock
        if not side and session is not None:
            node.session = session
        if node.side and not side:
            node.side = False
            self._side.discard(node)

    def fell(self, node: Node) -> None:
        """What lies on a page is no longer wanted as much."""
        if not node.children:
            self._leaves.push(node)

    def holding(self, parent: Node, tokens: bytes) -> Node | None:
        """A page after ``parent`` that starts with these tokens."""
        at = _place(parent, tokens)
        found = parent.children[at] if at < len(parent.children) else None
        return found if found is not None and found.tokens.startswith(tokens) else None

    def closest(self, parent: Node, tokens: bytes) -> tuple[Node | None, int]:
        """The page after ``parent`` that shares the longest start with ``tokens``, and how many tokens of it."""
        at = _place(parent, tokens)
        best: tuple[Node | None, int] = None, 0
        for child in parent.children[max(0, at - 1) : at + 1]:
            shared = common_tokens(child.tokens, tokens)
            if shared > best[1]:
                best = child, shared
        return best

    def checkpoints(self, parent: Node, tokens: bytes) -> Iterator[Checkpoint]:
        """Those on the way of a prompt that has ``tokens`` (a page at most) after ``parent``, deepest first."""
        for size in range(len(tokens) if parent.tails else 0, 0, -4):
            checkpoint = parent.tails.get(tokens[:size])
            if checkpoint is not None:
                yield checkpoint

    def attach(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint on its page."""
        tails, tail, offset = _spot(checkpoint)
        tails[tail] = checkpoint.node.checkpoints[offset] = checkpoint

    def detach(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint off its page."""
        tails, tail, offset = _spot(checkpoint)
        del tails[tail], checkpoint.node.checkpoints[offset]
        self.fell(checkpoint.node)

    def evict(self, *, side: bool, pinned: bool = True) -> bool:
        """Give up the least valuable page that no sequence holds; ``side``: only what side requests left. ``pinned``:
        even if a checkpoint on it must be kept."""
        passed: list[Node] = []
        while (victim := self._leaves.pop()) is not None and self._pool.held(victim.page):
            passed.append(victim)
        if victim is not None and ((side and not victim.side) or (not pinned and _pinned(victim))):
            passed.append(victim)
            victim = None
        for leaf in passed:
            self._leaves.push(leaf)
        if victim is None:
            return False
        self._on_evict(victim)
        self.remove(victim)
        self.evicted += 1
        return True

    def clear(self, *, useless: bool = False, session: str | None = None) -> None:
        """Drop everything that no sequence holds; ``useless``: only what no checkpoint needs; ``session``: only what
        that one used last and nothing goes on from."""

        def going(node: Node) -> bool:
            mine = session is None or node.session == session
            return mine and not (node.children or self._pool.held(node.page) or (useless and node.checkpoints))

        for node in reversed(list(self.nodes())):  # children before their parents
            if going(node):
                self.remove(node)

    def remove(self, node: Node) -> None:
        """Drop a leaf, and the checkpoints on it that no other page holds."""
        on_it = list(node.checkpoints.items())
        for _, checkpoint in on_it:
            self.detach(checkpoint)
        if node.key is not None:
            self._by_key.pop(node.key)
        parent = self._unlink(node)
        for offset, checkpoint in on_it:
            other = self.holding(parent, node.tokens[: 4 * offset])
            if other is None:
                self._on_drop(checkpoint)
            else:
                checkpoint.node = other
                self.attach(checkpoint)

    def side_pages(self) -> int:
        """Pages that a side request could have."""
        return sum(not self._pool.held(node.page) for node in self._side)

    def nodes(self) -> Iterator[Node]:
        """Every cached page."""
        stack = [child for root in self._roots.values() for child in root.children]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def _value(self, leaf: Node) -> tuple[bool, bool, bool, int]:
        """Lowest goes first. On a recurrent model a leaf without a checkpoint cannot be resumed from."""
        useless = self._recurrent and not leaf.checkpoints
        return not leaf.side, not useless, _pinned(leaf), leaf.used

    def _extend(self, node: Node, tokens: bytes, page: int, key: bytes | None) -> Node:
        """A partial page that goes on: same node, more tokens."""
        if node.page != page:
            self._pool.keep(page)
            self._pool.drop(node.page)
            node.page = page
        node.tokens, node.key, node.saved = tokens, key, False
        if key is not None:
            self._by_key[key] = node
        return node

    def _unlink(self, node: Node) -> Node:
        parent = node.parent
        assert parent is not None  # noqa: S101 - roots are never removed this way
        parent.children.pop(_place(parent, node.tokens))
        self._leaves.discard(node)
        self._side.discard(node)
        self._pool.drop(node.page)
        self.pages -= 1
        if parent.children:
            return parent
        if parent.parent is not None:
            self._leaves.push(parent)
        elif parent.key is not None:
            self._roots.pop(parent.key, None)
        return parent


def _place(parent: Node, tokens: bytes) -> int:
    """Where a page with these tokens stands among its siblings. A page that starts with them stands there, one that
    they start with stands before it: no sibling comes between, as it would contain that one."""
    return bisect_left(parent.children, tokens, key=lambda child: child.tokens)


def _pinned(node: Node) -> bool:
    return any(one.must_keep for one in node.checkpoints.values())


def _spot(checkpoint: Checkpoint) -> tuple[dict[bytes, Checkpoint], bytes, int]:
    """(the tails that list a checkpoint, its tokens there, how many)"""
    node, offset = checkpoint.node, (checkpoint.position - 1) % PAGE + 1
    assert node.parent is not None  # noqa: S101 - a root holds no token
    return node.parent.tails, node.tokens[: 4 * offset], offset
