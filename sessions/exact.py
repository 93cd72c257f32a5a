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
from sessions.digest import TurnDigest, digest, normal_id, pack, turn_digest, unpack
from sessions.echo import Schemas, same_turn

Verdict = Literal["exact", "edited", "unknown"]


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    blocks: tuple[Block, ...]
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

    def record(self, blocks: Sequence[Block], sampled: Sampled, previous: TurnDigest | None) -> None:
        """``previous`` is the turn that this one answered."""
        turn = Turn("assistant", tuple(blocks))
        names = (*_own_names(turn), _text_name(turn_digest(turn), previous))
        number, self._next = self._next, self._next + 1
        entry = _Entry(turn.blocks, pack(sampled.ids), sampled.thinking_end, sampled.thinking_rest, names)
        self._entries[number] = entry
        self._by_name.update(dict.fromkeys(names, number))
        self.tokens += len(sampled.ids)
        while self.tokens > self._max_tokens:
            self._drop(next(iter(self._entries)))

    def restore(self, turn: Turn, previous: TurnDigest | None, schemas: Schemas) -> tuple[Turn, Verdict]:
        """The turn with its exact tokens and its own thinking, if it is an echo of a sampled one; else as it came."""
        found = [self._by_name[name] for name in _own_names(turn) if name in self._by_name]
        if not found:
            number = self._by_name.get(_text_name(turn_digest(turn), previous))
            if number is None:
                return turn, "unknown"
            found = [number]
        entry = self._entries[found[0]]
        if any(number != found[0] for number in found) or not same_turn(entry.blocks, turn.blocks, schemas):
            return turn, "edited"
        self._entries.move_to_end(found[0])
        sampled = Sampled(unpack(entry.ids), entry.thinking_end, entry.thinking_rest)
        return Turn("assistant", _with_ids_of(entry.blocks, turn), sampled), "exact"

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


def _text_name(turn: TurnDigest, previous: TurnDigest | None) -> bytes:
    return digest("text", previous.key if previous else b"", turn.key)


def _with_ids_of(blocks: Sequence[Block], echo: Turn) -> tuple[Block, ...]:
    """The sampled blocks, with call ids as the client spells them, because its tool outputs refer to those."""
    ids = iter([block.id for block in echo.blocks if isinstance(block, ToolCall)])
    return tuple(
        ToolCall(next(ids), block.name, block.arguments, block.freeform) if isinstance(block, ToolCall) else block
        for block in blocks
    )
