"""Looking after a store that is in use: whether it is whole, forgetting sessions, pinning them. In any thread."""

from __future__ import annotations

from collections.abc import Set

from sessions.store.core import Core
from sessions.store.disk import Disk
from sessions.store.erasure import Erasure
from sessions.store.format import BLOCK, Shape
from sessions.store.mirror import Entry, Mirror


def verify(core: Core, disk: Disk | None) -> dict[str, float]:
    """Read and check every extent on disk; what is damaged is forgotten."""
    with core.changed:
        entries = core.mirror.all()
    damaged = 0
    for entry in entries:
        if disk is None or intact(disk, entry):
            continue
        with core.changed:
            if not entry.gone:
                core.drop(entry, "corrupt_extents")
                damaged += 1
    return {"extents": float(len(entries)), "damaged": float(damaged)}


def forget(core: Core, session: str | None) -> int:
    """Drop what a session has and nothing else needs, or everything; how many extents. The writer overwrites it."""
    with core.changed:
        gone = set(core.mirror.all()) if session is None else needed_by(core.mirror, {session})
        states = {one for one in gone if session is None or one.shape is Shape.STATE}
        for entry in states:
            core.drop(entry, "forgotten")
        count = len(states)
        for entry in sorted(gone - states, key=lambda one: one.position, reverse=True):
            if not _needed(core, entry):
                core.drop(entry, "forgotten")
                count += 1
        if session is None:
            core.erasing.everything = True
        else:
            core.erasing.sessions.add(session)
        core.changed.notify_all()
    if session is None:
        core.pins.clear()
    else:
        core.pins.set(session, pinned=False)
    return count


def forget_again(core: Core, erasing: Erasure) -> None:
    """Goes on with what an earlier process had begun to forget: after a crash it may be indexed still, or again."""
    with core.changed:
        core.erasing.add(erasing)
    for session in (None,) if erasing.everything else sorted(erasing.sessions):
        forget(core, session)


def pin(core: Core, session: str, *, pinned: bool) -> int:
    """Whether what a session needs is kept at any price; how many checkpoints, or ends, it has."""
    core.pins.set(session, pinned=pinned)
    with core.changed:
        return len(core.mirror.session(session))


def needed_by(mirror: Mirror, sessions: Set[str]) -> set[Entry]:
    """What these sessions wrote, and all pages before it. With the lock."""
    mine = [one for one in mirror.all() if one.session in sessions]
    return {*mine, *mirror.before(mine)}


def _needed(core: Core, page: Entry) -> bool:
    """Whether something goes on from a page, or a checkpoint lies in it. With the lock."""
    if page.holds or (page.key is not None and core.mirror.after(page.key)):
        return True
    beside = core.mirror.after(page.parent)
    return any(one.shape is Shape.STATE and one.tokens and page.tokens.startswith(one.tokens) for one in beside)


def intact(disk: Disk, entry: Entry) -> bool:
    """Whether an entry's extent is whole. True also if it was moved meanwhile: moving checks it."""
    place = entry.place
    segment = None if place is None else disk.segments.all.get(place.segment)
    if place is None or segment is None:
        return True
    header = next(disk.segments.scan(segment, place.block * BLOCK), None)
    whole = header is not None and header.place == place and disk.segments.verify(header, disk.cipher)
    return whole or entry.place != place
