"""Which segment to compact. Pure: the writer thread does the copying."""

from __future__ import annotations

from collections.abc import Iterable

from sessions.store.segments import Segment

DEAD_SHARE = 0.6
"""A segment with more dead bytes than this is compacted when there is time."""


def empty(segments: Iterable[Segment]) -> list[Segment]:
    """Segments of which nothing is wanted any more."""
    return [segment for segment in segments if segment.live <= 0]


def worst(segments: Iterable[Segment], *, share: float = DEAD_SHARE) -> Segment | None:
    """The segment with the greatest share of dead bytes, if that is more than ``share``."""
    best: tuple[float, Segment] | None = None
    for segment in segments:
        dead = segment.dead / max(segment.size, 1)
        if dead > share and (best is None or dead > best[0]):
            best = dead, segment
    return None if best is None else best[1]
