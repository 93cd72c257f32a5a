"""Finds the branch that a conversation continues when the client does not say so: the longest common prefix of turns.

Every turn of a known branch is one entry, keyed by a hash chain over the turns before it, so a look-up hashes the
request once and probes from its end; it never scans sessions. Until the first assistant turn the key covers system and
tools too: many conversations begin with the same words. After it they may change, because no two answers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from sessions.digest import TurnDigest, digest
from sessions.session import Branch, Session


def linked(scope: bytes, turns: Sequence[TurnDigest], known: Sequence[bytes] = ()) -> list[bytes]:
    """One link per turn, each of which depends on all turns up to it. ``known``: those of the first turns. ``scope``
    separates namespaces (and sessions whose ids are known); ``turns`` come without the opening system turns."""
    links = [*known]
    link = links[-1] if links else scope
    for turn in turns[len(links) :]:
        link = digest(link, turn.key)
        links.append(link)
    return links


def chain(links: Sequence[bytes], head: bytes, turns: Sequence[TurnDigest]) -> list[bytes]:
    """One key per turn that can be matched, from the first user turn on. ``head`` is the digest of system and tools."""
    asked, answered = (
        next((at for at, turn in enumerate(turns) if turn.role == role), len(turns)) for role in ("user", "assistant")
    )
    first = max(asked, answered)
    return [*(digest(link, head) for link in links[asked:first]), *links[first:]]


class Lineage:
    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._known: dict[bytes, tuple[Session, Branch]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, keys: Sequence[bytes]) -> tuple[Session, Branch] | None:
        return next((self._known[key] for key in reversed(keys) if key in self._known), None)

    def add(self, session: Session, branch: Branch, keys: Sequence[bytes]) -> None:
        """The oldest keys of a branch go when it has too many."""
        for key in keys[-self._max_keys :]:
            owner = self._known.get(key)
            if owner is not None and owner[1] is not branch:
                owner[1].keys.pop(key, None)
            self._known[key] = (session, branch)
            branch.keys[key] = None
        while len(branch.keys) > self._max_keys:
            del self._known[self._oldest(branch)]

    def forget(self, branch: Branch) -> None:
        while branch.keys:
            del self._known[self._oldest(branch)]

    @staticmethod
    def _oldest(branch: Branch) -> bytes:
        key = next(iter(branch.keys))
        del branch.keys[key]
        return key
