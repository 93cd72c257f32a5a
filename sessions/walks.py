"""What was found out about the turns of a conversation when they came before: each request brings them all again."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from parsers.conversation import Conversation, Tool, Turn, same_tools
from sessions.digest import TurnDigest
from sessions.exact import Journal, Restored, Verdict

_KEPT = 32
_TURNS = 1 << 16
"""Of all that are kept; each takes a kilobyte or two beside its text."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Turns as they were restored, their digests, and the links up to them. What was found of the assistant's is kept
    in columns, for it is compared all at once: the ``verdicts`` on the turns ``told``, and the ``numbers`` of the
    answers that they are; the ``names`` that were looked up for the turns ``named``, and who had them (``holders``)."""

    turns: list[Turn] = field(default_factory=list)
    digests: list[TurnDigest] = field(default_factory=list)
    links: list[bytes] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    named: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    holders: list[tuple[int, ...] | None] = field(default_factory=list)

    def add(self, turn: Turn, described: TurnDigest, link: bytes) -> None:
        self.turns.append(turn)
        self.digests.append(described)
        self.links.append(link)

    def add_found(self, found: Restored) -> None:
        at = len(self.turns)
        self.told.append(at)
        self.verdicts.append(found.verdict)
        self.numbers.append(found.number)
        for name, holders in found.seen:
            self.named.append(at)
            self.names.append(name)
            self.holders.append(holders)
        self.add(found.turn, found.digest, found.link)

    def first(self, count: int) -> Steps:
        told, named = bisect_left(self.told, count), bisect_left(self.named, count)
        return Steps(
            *(self.turns[:count], self.digests[:count], self.links[:count]),
            *(self.told[:told], self.verdicts[:told], self.numbers[:told]),
            *(self.named[:named], self.names[:named], self.holders[:named]),
        )

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
    steps: Steps = field(default_factory=Steps)

    def restored(self, journal: Journal, branch: str, tools: Sequence[Tool], common: int) -> Steps:
        """The steps of the first ``common`` turns, as far as they would come out the same."""
        if journal is not self.journal or branch != self.branch or not same_tools(tools, self.tools):
            return Steps()
        standing = journal.standing(self.steps.names, self.steps.holders)
        steps = self.steps.first(min([common, *self.steps.named[standing : standing + 1]]))
        journal.echoed(steps.numbers)
        return steps


class Walks:
    """The latest walks."""

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
        """``instead``: an earlier walk that is dropped if this one continues it."""
        if _common(walk.turns, instead.turns) >= len(instead.turns) - 1 and instead in self._known:
            self._known.remove(instead)
        self._known.append(walk)
        while sum(len(one.turns) for one in self._known) > _TURNS:
            self._known.popleft()


def _common(some: Sequence[Turn], others: Sequence[Turn]) -> int:
    """How many turns both begin with. They must be the same objects, because comparing their contents would take as
    long as walking them anew. The first may be merely equal: volatile lines are taken out of it (``harness``), which
    makes a new object."""
    if not some or not others or some[0] != others[0]:
        return 0
    same = [*map(operator.is_, some, others)]
    same[0] = True
    return len(same) if all(same) else same.index(False)
