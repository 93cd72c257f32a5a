"""Looking after a store that is in use: whether it is whole, forgetting sessions, pinning them. In any thread."""

from __future__ import annotations

from sessions.store.core import Core
from sessions.store.disk import Disk
from sessions.store.format import BLOCK, Shape
from sessions.store.mirror import Entry


def verify(core: Core, disk: Disk | None) -> dict[str, float]:
    """Read and check every extent on disk; what is damaged is forgotten."""
    with core.changed:
        entries = core.mirror.all()
    damaged = 0
    for entry in entries:
        if disk is None or _intact(disk, entry):
            continue
        with core.changed:
            if not entry.gone:
                core.drop(entry, "corrupt_extents")
                damaged += 1
    return {"extents": float(len(entries)), "damaged": float(damaged)}


def forget(core: Core, session: str | None) -> int:
    """Drop a session's checkpoints and the pages that nothing else needs, or everything; how many extents."""
    with core.changed:
        entries = core.mirror.all()
        if session is None:
            gone = entries
        else:
            gone = list(core.mirror.session(session))
            pages = _pages_before(entries, gone)
            for entry in gone:
                core.drop(entry, "forgotten")
            gone += pages
        count = 0
        for entry in sorted(gone, key=lambda one: -one.position):
            if session is None or entry.gone or not _needed(core, entry):
                core.drop(entry, "forgotten")
                count += 1
        core.changed.notify_all()
        return count


def pin(core: Core, session: str, *, pinned: bool) -> int:
    """How many checkpoints the session has; they are pinned from now on, or no longer."""
    with core.changed:
        states = core.mirror.session(session)
        for entry in states:
            entry.pinned = pinned
            core.touched.add(entry)
        return len(states)


def _pages_before(entries: list[Entry], states: list[Entry]) -> list[Entry]:
    """The pages that checkpoints lie in and on, each once."""
    by_key = {entry.key: entry for entry in entries if entry.key is not None}
    found: set[Entry] = set()
    for state in states:
        if state.tokens:
            same = (one for one in entries if one.parent == state.parent and one.shape is not Shape.STATE)
            found.update(one for one in same if one.tokens.startswith(state.tokens))
        page = by_key.get(state.parent)
        while page is not None and page not in found:
            found.add(page)
            page = by_key.get(page.parent)
    return list(found)


def _needed(core: Core, page: Entry) -> bool:
    """Whether something goes on from a page, or a checkpoint lies in it. With the lock."""
    if page.holds or (page.key is not None and core.mirror.after(page.key)):
        return True
    beside = core.mirror.after(page.parent)
    return any(one.shape is Shape.STATE and one.tokens and page.tokens.startswith(one.tokens) for one in beside)


def _intact(disk: Disk, entry: Entry) -> bool:
    """True also when it is no longer where it was: then it was moved, and checked in doing so."""
    place = entry.place
    segment = None if place is None else disk.segments.all.get(place.segment)
    if place is None or segment is None:
        return True
    header = next(disk.segments.scan(segment, place.block * BLOCK), None)
    whole = header is not None and header.place == place and disk.segments.verify(header, disk.cipher)
    return whole or entry.place != place
