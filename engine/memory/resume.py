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
    node = index.root(root)
    while PAGE * (len(path) + 1) <= limit:
        found = index.find(node, tokens[PAGE_BYTES * len(path) : PAGE_BYTES * (len(path) + 1)])
        if found is None:
            break
        path.append(found)
        node = found
    room = limit - PAGE * len(path)
    rest = tokens[PAGE_BYTES * len(path) : PAGE_BYTES * len(path) + 4 * min(PAGE, room)]
    if recurrent:
        position, partial, checkpoint = _deepest_checkpoint(index, path, node, rest)
    else:
        partial, shared = max(index.reachable(node, rest), key=lambda one: one[1], default=(None, 0))
        position, checkpoint = PAGE * len(path) + shared, None
    return Plan(
        root=root,
        position=position,
        pages=tuple(path[: position // PAGE]),
        partial=partial if position % PAGE else None,
        checkpoint=checkpoint,
        reuse=_reuse(history, root, tokens, position, recurrent=recurrent),
    )


def _deepest_checkpoint(
    index: PageIndex, path: list[Node], node: Node, rest: bytes
) -> tuple[int, Node | None, Checkpoint | None]:
    """(position, the page it lies in, the checkpoint) of the last checkpoint on the way of a prompt."""
    best: tuple[int, Node | None, Checkpoint | None] = (0, None, None)
    for child, shared in index.reachable(node, rest):
        for offset, checkpoint in child.checkpoints.items():
            if offset <= shared and checkpoint.position > best[0]:
                best = (checkpoint.position, child, checkpoint)
    for page in reversed(path):
        if best[2] is not None:
            break
        for checkpoint in page.checkpoints.values():
            if checkpoint.position > best[0]:
                best = (checkpoint.position, page, checkpoint)
    return best


def _reuse(history: History, root: bytes, tokens: bytes, position: int, *, recurrent: bool) -> Reuse:
    known = history.look_up(root, tokens)
    total = len(tokens) // 4
    divergence = max(position, min(known.tokens, total - 1))
    cause: Literal["none", "no_anchor", "evicted"] = "none"
    if divergence > position:
        lost = not recurrent or any(position < one <= divergence for one in known.checkpoints)
        cause = "evicted" if lost else "no_anchor"
    return Reuse(position, 0, 0, divergence - position, total - divergence, cause)
