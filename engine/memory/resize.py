"""More or less memory for what is cached, while sequences run: at safe points, between two steps."""

from __future__ import annotations

from engine.api import PAGE
from engine.memory.index import Node
from engine.memory.memory import Memory


class DoesNotFit(ValueError):
    """Sizes that cannot be had; the text has the numbers."""


def check_resize(memory: Memory, pages: int, checkpoints: int) -> None:
    """Whether what runs could go on with so many pages and checkpoints. Raises DoesNotFit."""
    pool, kept = memory.pool, memory.checkpoints
    if pool.held_pages > pages:
        raise DoesNotFit(
            f"room for {PAGE * pages} tokens is less than the {PAGE * pool.held_pages} that running sequences have; "
            "ask for more, or try again when they have ended"
        )
    reading = sum(page >= pages for lease in memory.leases if lease.restore is not None for page in lease.table)
    if reading:
        raise DoesNotFit(
            f"{PAGE * reading} tokens beyond {PAGE * pages} are being read into; try again when the request has begun"
        )
    beyond = sum(slot >= kept.first + checkpoints for slot in kept.pending)
    if beyond:
        raise DoesNotFit(f"{beyond} checkpoints beyond {checkpoints} are being taken; try again in a step")


def resize(memory: Memory, pages: int, checkpoints: int) -> None:
    """Have so many pages and checkpoint slots. What does not fit any more is evicted, the least valuable first; what
    lies beyond the new bounds moves below. Raises DoesNotFit before anything is touched."""
    check_resize(memory, pages, checkpoints)
    pool, nodes = memory.pool, dict[int, Node]()
    while pool.total - pool.free > pages:
        if not memory.index.evict(side=False):
            raise RuntimeError(f"{pool.total - pool.free} pages cannot be made {pages}")
    if pages < pool.total:
        nodes = {node.page: node for node in memory.index.nodes() if node.page >= pages}
    moved: dict[int, int] = {}

    def move(source: int, target: int) -> None:
        memory.mover.copy_page(source, target)
        moved[source] = target
        if source in nodes:
            nodes[source].page = target

    pool.resize(pages, move)
    for lease in memory.leases if moved else ():
        lease.table[:] = [moved.get(page, page) for page in lease.table]
    memory.reserve = pages // 8
    memory.checkpoints.resize(checkpoints, memory.mover.copy_state)
