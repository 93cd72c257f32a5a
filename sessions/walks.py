"""What was found out about the turns of a conversation when they came before: each request brings them all again."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from parsers.conversation import Conversation, Tool, Turn, same_tools
from sessions.digest import TurnDigest
from sessions.exact import Journal, Restored

_KEPT = 32
_TURNS = 1 << 16
"""Of all that are kept; each takes a kilobyte or two beside its text."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Turns as they were restored, their digests, and the links up to them; what was ``found`` of the assistant's, with
    their numbers."""

    turns: list[Turn]
    digests: list[TurnDigest]
    links: list[bytes]
    found: list[tuple[int, Restored]]

    def first(self, count: int) -> Steps:
        found = self.found[: bisect_left(self.found, count, key=itemgetter(0))]
        return Steps(self.turns[:count], self.digests[:count], self.links[:count], found)

    @property
    def link(self) -> bytes:
        return self.links[-1] if self.links else b""


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """``digests`` of the turns as they came, and their ``links`` in the index of prefixes, from the turn ``head`` on.
    The ``steps`` are good for one branch of one journal, and the same tools."""

    turns: tuple[Turn, ...] = ()
    digests: Sequence[TurnDigest] = ()
    scope: bytes = b""
    head: int = 0
    links: Sequence[bytes] = ()
    journal: Journal | None = None
    branch: str = ""
    tools: tuple[Tool, ...] = ()
    steps: Steps = field(default_factory=lambda: Steps([], [], [], []))

    def restored(self, journal: Journal, branch: str, tools: Sequence[Tool], common: int) -> Steps:
        """The steps of the first ``common`` turns, as far as they would come out the same."""
        if journal is not self.journal or branch != self.branch or not same_tools(tools, self.tools):
            return self.steps.first(0)
        fallen = (at for at, found in self.steps.found if at >= common or not journal.stands(found))
        return self.steps.first(min(common, next(fallen, common)))


class Walks:
    """The latest ones."""

    def __init__(self) -> None:
        self._known: deque[Walk] = deque(maxlen=_KEPT)

    def find(self, conversation: Conversation) -> tuple[Walk, int]:
        """One that shares most turns with this conversation, and how many."""
        best = Walk(), 0
        for walk in reversed(self._known):
            count = _common(walk.turns, conversation.turns)
            best = (walk, count) if count > best[1] else best
        return best

    def keep(self, walk: Walk, instead: Walk) -> None:
        """``instead``: one that may go, if this one goes on where it ends."""
        if _common(walk.turns, instead.turns) >= len(instead.turns) - 1 and instead in self._known:
            self._known.remove(instead)
        self._known.append(walk)
        while sum(len(one.turns) for one in self._known) > _TURNS:
            self._known.popleft()


def _common(some: Sequence[Turn], others: Sequence[Turn]) -> int:
    """How many turns both begin with: the same objects, for to compare what they say would take as long as to walk. The
    first may only be equal: harnesses change what says nothing in it (``harness``), and it is made anew."""
    if not some or not others or some[0] != others[0]:
        return 0
    size = min(len(some), len(others))
    if all(map(operator.is_, some[1:], others[1:])):
        return size
    return next(at for at in range(1, size) if some[at] is not others[at])
