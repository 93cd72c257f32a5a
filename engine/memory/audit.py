"""Whether everything that memory owns is accounted for exactly once."""

from __future__ import annotations

from collections import Counter

from engine.api import PAGE
from engine.memory.memory import Memory


class Unaccounted(AssertionError):
    """What does not add up."""


def audit(memory: Memory) -> None:
    """Pages, prefixes and checkpoints agree about each other. Raises Unaccounted."""
    pool, index, checkpoints = memory.pool, memory.index, memory.checkpoints
    nodes = list(index.nodes())
    keepers = Counter(node.page for node in nodes)
    _must(index.pages == len(nodes), "pages of prefixes")
    free = held = 0
    for page in range(pool.total):
        holders, kept = pool.counts(page)
        _must(kept == keepers[page], f"who keeps page {page}")
        free += holders == 0 and kept == 0
        held += holders > 0
    _must((pool.free, pool.held_pages) == (free, held), "free and held pages")
    attached = [one for node in nodes for one in node.checkpoints.values()]
    _must(set(attached) == checkpoints.all and len(attached) == len(checkpoints.all), "checkpoints of prefixes")
    _must(len({one.slot for one in attached}) == len(attached), "slots of checkpoints")
    for node in nodes:
        _must(node.parent is not None and node in node.parent.children, "a prefix of a prefix")
        for offset, one in node.checkpoints.items():
            _must(one.node is node and _offset(one.position) == offset <= len(node.tokens) // 4, "a checkpoint's place")
        siblings = [child.tokens for child in node.children]
        _must(not any(a.startswith(b) for a in siblings for b in siblings if a is not b), "prefixes that go on alike")
        _must(siblings == sorted(siblings), "the order of prefixes")
    for one in attached:
        parent = one.node.parent
        _must(parent is not None and parent.tails[one.node.tokens[: 4 * _offset(one.position)]] is one, "a tail")
    _must(sum(len(node.tails) for node in {node.parent for node in nodes if node.parent}) == len(attached), "tails")


def audit_at_rest(memory: Memory, live: int) -> None:
    """Likewise, while no sequence runs: none of the ``live`` states and no page is held. Raises Unaccounted."""
    audit(memory)
    checkpoints = memory.checkpoints
    _must(not memory.draining and memory.pool.held_pages == 0, "pages that are held")
    _must(len(memory.free_live) == live, "states that are live")
    _must(checkpoints.total == checkpoints.free + len(checkpoints.all), "slots of checkpoints that are neither")


def _offset(position: int) -> int:
    """Within its page, from 1 on."""
    return (position - 1) % PAGE + 1


def _must(right: bool, what: str) -> None:
    if not right:
        raise Unaccounted(f"{what} do not add up")
