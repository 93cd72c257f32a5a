"""The one planner: from where a prompt can go on, given what is cached.

A resume point is the greatest position that every component reaches: pages cover everything before it and, on a
recurrent model, a checkpoint lies exactly there. Attention pages are valid for any prefix of themselves, so a model
of attention alone resumes at any position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.api import PAGE, Reuse
from engine.memory.history import History
from engine.memory.index import Node, PageIndex
from engine.memory.keys import PAGE_BYTES
from engine.memory.states import Checkpoint


@dataclass(frozen=True)
class Plan:
    """Go on at ``position``: ``pages`` are whole, ``partial`` (if any) is to be copied up to ``position``, and
    ``checkpoint`` (on a recurrent model, unless position is 0) is the state there. ``reuse`` is what to report."""

    root: bytes
    position: int
    pages: tuple[Node, ...]
    partial: Node | None
    checkpoint: Checkpoint | None
    reuse: Reuse


def plan(index: PageIndex, history: History, root: bytes, tokens: bytes, *, recurrent: bool) -> Plan:
    """``tokens`` u32 little-endian. At least the last token is left to feed; it counts as new."""
    limit = len(tokens) // 4 - 1
    path: list[Node] = []
    node = first = index.root(root)
    while PAGE * (len(path) + 1) <= limit:
        found = index.find(node, tokens[PAGE_BYTES * len(path) : PAGE_BYTES * (len(path) + 1)])
        if found is None:
            break
        path.append(found)
        node = found
    room = limit - PAGE * len(path)
    rest = tokens[PAGE_BYTES * len(path) : PAGE_BYTES * len(path) + 4 * min(PAGE, room)]
    if recurrent:
        checkpoint = _deepest_checkpoint(index, [first, *path], tokens[: 4 * limit])
        position, partial = (checkpoint.position, checkpoint.node) if checkpoint else (0, None)
    else:
        partial, shared = index.closest(node, rest)
        position, checkpoint = PAGE * len(path) + shared, None
    return Plan(
        root=root,
        position=position,
        pages=tuple(path[: position // PAGE]),
        partial=partial if position % PAGE else None,
        checkpoint=checkpoint,
        reuse=_reuse(history, root, tokens, position, recurrent=recurrent),
    )


def _deepest_checkpoint(index: PageIndex, path: list[Node], tokens: bytes) -> Checkpoint | None:
    """The last checkpoint on the way of a prompt, which ``path`` (its root first) follows as far as it can."""
    for at in range(len(path) - 1, -1, -1):
        for checkpoint in index.checkpoints(path[at], tokens[PAGE_BYTES * at : PAGE_BYTES * (at + 1)]):
            return checkpoint
    return None


def _reuse(history: History, root: bytes, tokens: bytes, position: int, *, recurrent: bool) -> Reuse:
    known = history.look_up(root, tokens)
    total = len(tokens) // 4
    divergence = max(position, min(known.tokens, total - 1))
    cause: Literal["none", "no_anchor", "evicted"] = "none"
    if divergence > position:
        lost = not recurrent or any(position < one <= divergence for one in known.checkpoints)
        cause = "evicted" if lost else "no_anchor"
    return Reuse(position, 0, 0, divergence - position, total - divergence, cause)
