"""Digests of turns: what makes two messages the same, for finding sessions and for naming what changed.

A turn has two digests. ``key`` is lenient: it survives what harnesses do to an echo (re-spelled arguments, dropped
whitespace, left-out thinking, ids without punctuation) and only *finds* things. ``parts`` is exact in meaning, block by
block, and says which block changed.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parsers.conversation import Block, Conversation, Role, Text, Thinking, Tool, ToolCall, Turn, same_tools

_TURN = 64
_TOOLS = 16
"""Lists of tools whose digests are remembered."""
_NOT_ALNUM = re.compile(r"[^0-9A-Za-z]")


@dataclass(frozen=True, slots=True)
class Part:
    """One block: ``kind`` is text, thinking, call or output; ``id`` the normalised call id; ``digest`` its content."""

    kind: str
    id: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class TurnDigest:
    role: Role
    key: bytes
    parts: tuple[Part, ...]

    def of_kind(self, kind: str) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.kind == kind)


class Digests:
    """Remembers digests of turns, because each request of a conversation brings all its turns again. Bounded by their
    weight in tokens. The least recently used go first, and a turn that would displace most others is not remembered."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._known: OrderedDict[Turn, TurnDigest] = OrderedDict()
        self._tools: deque[tuple[Sequence[Tool], bytes]] = deque(maxlen=_TOOLS)

    def empty(self) -> Digests:
        return Digests(self._most)

    def of_tools(self, tools: Sequence[Tool]) -> bytes:
        """Remembered for the same objects."""
        known = next((made for some, made in self._tools if same_tools(some, tools)), None)
        if known is None:
            known = tools_digest(tools)
            self._tools.append((tools, known))
        return known

    def of(self, turn: Turn) -> TurnDigest:
        known = self._known.get(turn)
        if known is not None:
            self._known.move_to_end(turn)
            return known
        known, size = turn_digest(turn), _size(turn)
        if size > self._most // 2:
            return known
        self._known[turn] = known
        self._size += size
        while self._size > self._most:
            self._size -= _size(self._known.popitem(last=False)[0])
        return known


def digest(*fields: str | bytes) -> bytes:
    """16 bytes over length-prefixed fields, so that no two lists of fields run together."""
    state = hashlib.blake2b(digest_size=16)
    for item in fields:
        raw = item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.digest()


def normal_id(text: str) -> str:
    """Letters and digits only: some harnesses strip punctuation from the ids they echo."""
    return _NOT_ALNUM.sub("", text)


def without_space(text: str) -> str:
    return "".join(text.split())


def canonical_json(text: str) -> str:
    """The JSON value in one spelling; text that is no JSON as it is."""
    try:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text


def turn_digest(turn: Turn) -> TurnDigest:
    """Blank text in an assistant turn does not count, because clients drop it. Elsewhere it does."""
    answer = turn.role == "assistant"
    parts = tuple(_part(block) for block in turn.blocks if not (answer and _is_blank(block)))
    return TurnDigest(turn.role, answer_key(turn) if answer else _key(turn, parts), parts)


def answer_key(turn: Turn) -> bytes:
    """The key of an assistant turn: its call ids, which nobody else has, or its text."""
    calls = [normal_id(block.id) for block in turn.blocks if isinstance(block, ToolCall)]
    return digest(turn.role, *(calls or [without_space("".join(texts(turn)))]))


def system_digest(conversation: Conversation) -> bytes:
    """Of the system turns that open the conversation."""
    return digest(*(text for turn in conversation.turns[: head_turns(conversation)] for text in texts(turn)))


def tools_digest(tools: Iterable[Tool]) -> bytes:
    return digest(*(field for tool in tools for field in _tool_fields(tool)))


def head_turns(conversation: Conversation) -> int:
    """How many system turns open the conversation."""
    turns = conversation.turns
    return next((index for index, turn in enumerate(turns) if turn.role != "system"), len(turns))


def texts(turn: Turn) -> list[str]:
    return [block.text for block in turn.blocks if isinstance(block, Text)]


def pack(ids: Sequence[int]) -> bytes:
    """Token ids as u32, a tenth of the memory of a tuple."""
    return array("I", ids).tobytes()


def unpack(packed: bytes) -> tuple[int, ...]:
    return tuple(memoryview(packed).cast("I"))


def common_prefix(one: bytes, other: bytes) -> int:
    """Tokens that two packed sequences share from the start; linear in the shorter one."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * 4 : middle * 4] == other[low * 4 : middle * 4]:
            low = middle
        else:
            high = middle - 1
    return low


def _size(turn: Turn) -> int:
    """About its tokens, and what every turn has beside them."""
    letters = sum(len(block.arguments if isinstance(block, ToolCall) else block.text) for block in turn.blocks)
    return _TURN + letters // 4


def _is_blank(block: Block) -> bool:
    return isinstance(block, Text | Thinking) and not block.text.strip()


def _part(block: Block) -> Part:
    match block:
        case Text(text):
            return Part("text", "", digest(text))
        case Thinking(text):
            return Part("thinking", "", digest(text))
        case ToolCall(id, name, arguments, freeform):
            spelled = arguments if freeform else canonical_json(arguments)
            return Part("call", normal_id(id), digest(name, spelled))
        case _:
            return Part("output", normal_id(block.call_id), digest(block.text, str(block.is_error)))


def _key(turn: Turn, parts: Sequence[Part]) -> bytes:
    return digest(turn.role, *(field for part in parts for field in (part.kind, part.id, part.digest)))


def _tool_fields(tool: Tool) -> tuple[str, ...]:
    return (tool.name, tool.description, json.dumps(tool.parameters, sort_keys=True, default=dict), str(tool.freeform))
