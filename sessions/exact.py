"""The journal of one session: which tokens each assistant turn was sampled as.

A turn that the client sends back is found by a normalised tool-call id, by the ticket we gave out with its thinking,
or by its link: a hash chain over the keys of all turns up to it, so that the same words after the same words are told
apart by what came before them. It is taken for the sampled one only when it still means the same (see ``echo``).

A turn that is found continues the chain with the link it was recorded with, whatever has become of the turns before it.
So after an edit, answers without calls or tickets lose their exact tokens only up to the next answer that has some.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from parsers.conversation import Block, Sampled, Thinking, ToolCall, Turn
from parsers.events import Boundary
from sessions.digest import TurnDigest, digest, normal_id, pack, turn_digest, unpack
from sessions.echo import Schemas, same_turn

Verdict = Literal["exact", "edited", "unknown"]

NAMESAKES = 8
"""How many answers one name finds at most, the latest ones: equal answers to the same turns share a name."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A turn as it is to be rendered, its digest, its link, and whether it is one that was sampled. ``number``: which
    one; ``seen``: its names, and who had them then."""

    turn: Turn
    digest: TurnDigest
    link: bytes
    verdict: Verdict
    number: int = -1
    seen: tuple[tuple[bytes, tuple[int, ...] | None], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """``ids`` are packed; ``branch`` is the one it was recorded on; ``names`` ends with the link, and ``before`` is the
    link that it answered."""

    blocks: tuple[Block, ...]
    digest: TurnDigest
    ids: bytes
    thinking_end: int
    thinking_rest: str
    opener: tuple[int, ...]
    branch: str
    names: tuple[bytes, ...]
    before: bytes


class Journal:
    """Bounded by ``max_tokens``; the least recently echoed turns go first."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens = 0
        self._max_tokens = max_tokens
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._by_name: dict[bytes, tuple[int, ...]] = {}
        self._next = 0
        self._changed: set[int] = set()

    def record(
        self, blocks: Sequence[Block], sampled: Sampled, before: bytes, branch: str, number: int | None = None
    ) -> None:
        """``before`` is the link of the turns that this one answered, on the branch of that name. ``number``: the one
        it had, if it is recorded again."""
        turn = Turn("assistant", tuple(blocks))
        described = turn_digest(turn)
        names = (*_own_names(turn), next_link(before, described.key))
        number = self._next if number is None else number
        self._next = max(self._next, number + 1)
        packed = pack(sampled.ids)
        entry = Entry(
            blocks=turn.blocks,
            digest=described,
            ids=packed,
            thinking_end=sampled.thinking_end,
            thinking_rest=sampled.thinking_rest,
            opener=sampled.opener,
            branch=branch,
            names=names,
            before=before,
        )
        self._entries[number] = entry
        self._changed.add(number)
        for name in set(names):
            self._by_name[name] = (*self._by_name.get(name, ()), number)[-NAMESAKES:]
        self.tokens += len(sampled.ids)
        while self.tokens > self._max_tokens:
            self._drop(next(iter(self._entries)))

    def changes(self) -> list[tuple[int, Entry | None]]:
        """What was recorded (or dropped: None) since this was asked last, by number."""
        changed, self._changed = self._changed, set()
        return [(number, self._entries.get(number)) for number in sorted(changed)]

    def entries(self) -> list[tuple[int, Entry]]:
        return sorted(self._entries.items())

    def restore(
        self, turn: Turn, before: bytes, branch: str, schemas: Schemas, described: TurnDigest | None = None
    ) -> Restored:
        """The turn with its exact tokens and its own thinking, if it is an echo of a sampled one; else as it came.
        Among equal answers to the same turns, the thinking that came back decides, then the branch, then the time.
        ``described``: the turn's digest, where it is known."""
        described = described or turn_digest(turn)
        link = next_link(before, described.key)
        seen = tuple((name, self._by_name.get(name)) for name in (*_own_names(turn), link))
        named = [numbers for _, numbers in seen[:-1] if numbers is not None] or [seen[-1][1] or ()]
        if not any(named):
            return Restored(turn, described, link, "unknown", seen=seen)
        numbers = set(named[0]).intersection(*named)
        for number in sorted(numbers, key=lambda n: (self._entries[n].branch == branch, n), reverse=True):
            entry = self._entries[number]
            if same_turn(entry.blocks, turn.blocks, schemas):
                self._entries.move_to_end(number)
                sampled = Sampled(unpack(entry.ids), entry.thinking_end, entry.thinking_rest, entry.opener)
                exact = Turn("assistant", _with_ids_of(entry.blocks, turn), sampled)
                return Restored(exact, entry.digest, entry.names[-1], "exact", number, seen)
        return Restored(turn, described, link, "edited", seen=seen)

    def standing(self, names: Sequence[bytes], holders: Sequence[tuple[int, ...] | None]) -> int:
        """How many of the first of these names still find what they found, when those were their holders."""
        same = [*map(operator.is_, map(self._by_name.get, names), holders)]
        return len(same) if all(same) else same.index(False)

    def echoed(self, numbers: Iterable[int]) -> None:
        """Answers that were asked for again; -1 is none."""
        for number in [number for number in numbers if number >= 0]:
            self._entries.move_to_end(number)

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number)
        self._changed.add(number)
        self.tokens -= len(entry.ids) // 4
        for name in entry.names:
            left = tuple(other for other in self._by_name.get(name, ()) if other != number)
            if left:
                self._by_name[name] = left
            else:
                self._by_name.pop(name, None)


def next_link(before: bytes, key: bytes) -> bytes:
    """The link of the turns with the link ``before`` (empty if there are none) and of one more with that key. System
    turns are left out of it: clients move and re-word them."""
    return digest("link", before, key)


def sampled_turn(
    ids: Sequence[int], blocks: Sequence[Block], boundaries: Sequence[Boundary], opener: tuple[int, ...]
) -> Sampled:
    """What was sampled behind ``opener``, with the end of its thinking. Thinking that never ended is all of the
    tokens."""
    for boundary in boundaries:
        if boundary.kind == "thinking_end":
            straddling = 0 if boundary.exact else 1
            return Sampled(tuple(ids), boundary.token + straddling, boundary.rest, opener)
    endless = any(isinstance(block, Thinking) for block in blocks)
    return Sampled(tuple(ids), len(ids) if endless else 0, "", opener)


def _own_names(turn: Turn) -> tuple[bytes, ...]:
    """What names a turn by itself, whatever stands around it: its calls, else its tickets."""
    calls = tuple(digest("call", normal_id(block.id)) for block in turn.blocks if isinstance(block, ToolCall))
    tickets = tuple(
        digest("ticket", normal_id(block.ticket))
        for block in turn.blocks
        if isinstance(block, Thinking) and block.ticket
    )
    return calls + tickets


def _with_ids_of(blocks: Sequence[Block], echo: Turn) -> tuple[Block, ...]:
    """The sampled blocks, with call ids as the client spells them, because its tool outputs refer to those."""
    ids = iter([block.id for block in echo.blocks if isinstance(block, ToolCall)])
    return tuple(
        ToolCall(next(ids), block.name, block.arguments, block.freeform) if isinstance(block, ToolCall) else block
        for block in blocks
    )
