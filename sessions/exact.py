"""The journal of one session: which tokens each assistant turn was sampled as.

A turn that the client sends back is found by a normalised tool-call id, by the ticket we gave out with its thinking,
or by (the turn before it, its text). It is taken for the sampled one only when it still means the same (see ``echo``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from parsers.conversation import Block, Sampled, Thinking, ToolCall, Turn
from parsers.events import Boundary
from sessions.digest import TurnDigest, answer_key, digest, normal_id, pack, turn_digest, unpack
from sessions.echo import Schemas, same_turn

Verdict = Literal["exact", "edited", "unknown"]


@dataclass(frozen=True, slots=True)
class Restored:
    """A turn as it is to be rendered, its digest, and whether it is one that was sampled."""

    turn: Turn
    digest: TurnDigest
    verdict: Verdict


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    blocks: tuple[Block, ...]
    digest: TurnDigest
    ids: bytes
    thinking_end: int
    thinking_rest: str
    names: tuple[bytes, ...]


class Journal:
    """Bounded by ``max_tokens``; the least recently echoed turns go first."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens = 0
        self._max_tokens = max_tokens
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._by_name: dict[bytes, int] = {}
        self._next = 0

    def record(self, blocks: Sequence[Block], sampled: Sampled, previous: bytes) -> None:
        """``previous`` is the key of the turn that this one answered, empty if there was none."""
        turn = Turn("assistant", tuple(blocks))
        described = turn_digest(turn)
        names = (*_own_names(turn), _text_name(described.key, previous))
        number, self._next = self._next, self._next + 1
        packed = pack(sampled.ids)
        entry = _Entry(turn.blocks, described, packed, sampled.thinking_end, sampled.thinking_rest, names)
        self._entries[number] = entry
        self._by_name.update(dict.fromkeys(names, number))
        self.tokens += len(sampled.ids)
        while self.tokens > self._max_tokens:
            self._drop(next(iter(self._entries)))

    def restore(self, turn: Turn, previous: bytes, schemas: Schemas) -> Restored:
        """The turn with its exact tokens and its own thinking, if it is an echo of a sampled one; else as it came."""
        numbers = {self._by_name[name] for name in _own_names(turn) if name in self._by_name}
        if not numbers:
            number = self._by_name.get(_text_name(answer_key(turn), previous))
            if number is None:
                return Restored(turn, turn_digest(turn), "unknown")
            numbers = {number}
        number = min(numbers)
        entry = self._entries[number]
        if len(numbers) > 1 or not same_turn(entry.blocks, turn.blocks, schemas):
            return Restored(turn, turn_digest(turn), "edited")
        self._entries.move_to_end(number)
        sampled = Sampled(unpack(entry.ids), entry.thinking_end, entry.thinking_rest)
        return Restored(Turn("assistant", _with_ids_of(entry.blocks, turn), sampled), entry.digest, "exact")

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number)
        self.tokens -= len(entry.ids) // 4
        for name in entry.names:
            if self._by_name.get(name) == number:
                del self._by_name[name]


def sampled_turn(ids: Sequence[int], blocks: Sequence[Block], boundaries: Sequence[Boundary]) -> Sampled:
    """What was sampled, with the end of its thinking. Thinking that never ended is all of the tokens."""
    for boundary in boundaries:
        if boundary.kind == "thinking_end":
            straddling = 0 if boundary.exact else 1
            return Sampled(tuple(ids), boundary.token + straddling, boundary.rest)
    endless = any(isinstance(block, Thinking) for block in blocks)
    return Sampled(tuple(ids), len(ids) if endless else 0)


def _own_names(turn: Turn) -> tuple[bytes, ...]:
    """What names a turn by itself, whatever stands around it: its calls, else its tickets."""
    calls = tuple(digest("call", normal_id(block.id)) for block in turn.blocks if isinstance(block, ToolCall))
    tickets = tuple(
        digest("ticket", normal_id(block.ticket))
        for block in turn.blocks
        if isinstance(block, Thinking) and block.ticket
    )
    return calls + tickets


def _text_name(key: bytes, previous: bytes) -> bytes:
    return digest("text", previous, key)


def _with_ids_of(blocks: Sequence[Block], echo: Turn) -> tuple[Block, ...]:
    """The sampled blocks, with call ids as the client spells them, because its tool outputs refer to those."""
    ids = iter([block.id for block in echo.blocks if isinstance(block, ToolCall)])
    return tuple(
        ToolCall(next(ids), block.name, block.arguments, block.freeform) if isinstance(block, ToolCall) else block
        for block in blocks
    )
