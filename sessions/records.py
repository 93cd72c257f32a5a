"""Sessions as named values: what is written when something changed, and how it is read again.

A value is JSON with raw bytes behind it. ``journal/N`` is an answer with its tokens, ``request/N`` a line of the
timeline, ``tools/B`` and ``branch/B`` describe branch B, ``tokens/B/S`` and ``turns/B/S`` are one of its remembered
prompts. The head has what is needed to recognise a request that continues the session.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from parsers.conversation import Block, Sampled, Text, Thinking, Tool, ToolCall, ToolOutput
from sessions.causes import Asked
from sessions.digest import Part, TurnDigest, unpack
from sessions.exact import Entry
from sessions.session import PASTS, Branch, Limits, RequestRecord, Session

Values = dict[bytes, bytes | None]

_LENGTH = struct.Struct("<I")


class RecordError(ValueError):
    """Values that no session of ours was written as."""


def pack_value(fields: object, raw: bytes = b"") -> bytes:
    text = json.dumps(fields, separators=(",", ":"), default=dict).encode()
    return _LENGTH.pack(len(text)) + text + raw


def unpack_value(value: bytes) -> tuple[Any, bytes]:
    """Raises RecordError."""
    try:
        (length,) = _LENGTH.unpack_from(value)
        end = _LENGTH.size + length
        return json.loads(value[_LENGTH.size : end]), value[end:]
    except (struct.error, ValueError, RecursionError) as error:
        raise RecordError(f"not a value: {error}") from error


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def head_of(session: Session) -> bytes:
    branches = [(b.name, b.number, b.head.hex(), len(b.keys)) for b in session.branches.values()]
    fields = {
        "client_id": session.client_id,
        "namespace": session.namespace,
        "harness": session.harness,
        "created": session.created,
        "last_used": session.last_used,
        "requests": session.requests,
        "prompt": session.prompt,
        "tokens": session.stored_tokens if session.asleep else session.tokens,
        "pinned": session.pinned,
        "branches": branches,
    }
    return pack_value(fields, b"".join(key for branch in session.branches.values() for key in branch.keys))


def changes_of(session: Session, branch: Branch) -> Values:
    """What is to be written after a request of ``branch``; asked once for every change."""
    values: Values = {}
    dropped, session.dropped = session.dropped, []
    for number in dropped:
        values.update(dict.fromkeys(_names(number)))
    values.update(_branch_values(branch, branch.slots[-1:]))
    for number, entry in session.journal.changes():
        values[b"journal/%d" % number] = None if entry is None else _pack_entry(entry)
    if session.history:
        values.update(_line(session, session.history[-1]))
    return values


def values_of(session: Session) -> dict[bytes, bytes]:
    """Everything but the head."""
    values: dict[bytes, bytes] = {}
    for branch in session.branches.values():
        values.update(_branch_values(branch, branch.slots))
    for number, entry in session.journal.entries():
        values[b"journal/%d" % number] = _pack_entry(entry)
    for record in session.history:
        values.update(_line(session, record))
    return values


def _names(number: int) -> list[bytes]:
    parts = [b"%s/%d/%d" % (kind, number, slot) for kind in (b"tokens", b"turns") for slot in range(PASTS)]
    return [b"tools/%d" % number, b"branch/%d" % number, *parts]


def _branch_values(branch: Branch, slots: tuple[int, ...]) -> dict[bytes, bytes]:
    """``slots``: those of the prompts that are to be written."""
    number = branch.number
    places = dict(zip(branch.slots, branch.pasts, strict=True))
    described = [
        (
            slot,
            past.tools.hex(),
            past.system.hex(),
            past.head,
            past.kind,
            past.incarnation,
            past.fingerprint,
            past.effort,
        )
        for slot, past in places.items()
    ]
    values = {
        b"tools/%d" % number: pack_value([(t.name, t.description, t.parameters, t.freeform) for t in branch.tools]),
        b"branch/%d" % number: pack_value(described),
    }
    for slot in slots:
        values[b"tokens/%d/%d" % (number, slot)] = pack_value([], places[slot].tokens)
        values[b"turns/%d/%d" % (number, slot)] = pack_value([], b"\n".join(_turn_lines(places[slot])))
    return values


def _turn_lines(past: Asked) -> Iterator[bytes]:
    for turn, exact in zip(past.turns, past.exact, strict=True):
        parts = [(part.kind, part.id, part.digest.hex()) for part in turn.parts]
        yield json.dumps((turn.role, turn.key.hex(), exact, parts), separators=(",", ":")).encode()


def _line(session: Session, record: RequestRecord) -> dict[bytes, bytes]:
    """Old lines are overwritten."""
    return {b"request/%d" % (record.number % (session.history.maxlen or 1)): pack_value(asdict(record))}


def _pack_entry(entry: Entry) -> bytes:
    blocks = [_pack_block(block) for block in entry.blocks]
    fields = [blocks, entry.thinking_end, entry.thinking_rest, entry.opener, entry.before.hex(), entry.branch]
    return pack_value(fields, entry.ids)


def _pack_block(block: Block) -> tuple[object, ...]:
    match block:
        case Text(text):
            return ("text", text)
        case Thinking(text, ticket):
            return ("thinking", text, ticket)
        case ToolCall(id, name, arguments, freeform):
            return ("call", id, name, arguments, freeform)
        case ToolOutput(call_id, text, is_error):
            return ("output", call_id, text, is_error)


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────


def asleep(id: str, head: bytes, limits: Limits) -> Session:
    """The session of a head, without its values. Raises RecordError."""
    fields, keys = unpack_value(head)
    try:
        session = Session(id, fields["client_id"], fields["namespace"], fields["harness"], limits, fields["created"])
        session.last_used, session.requests = fields["last_used"], fields["requests"]
        session.prompt, session.stored_tokens = fields["prompt"], fields["tokens"]
        session.pinned, session.asleep = fields["pinned"], True
        for name, number, digest, count in fields["branches"]:
            mine, keys = keys[: 16 * count], keys[16 * count :]
            branch = Branch(name, number, bytes.fromhex(digest))
            branch.keys = dict.fromkeys(mine[at : at + 16] for at in range(0, len(mine), 16))
            session.branches[name] = branch
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"not a session: {error!r}") from error
    return session


def wake(session: Session, values: Mapping[bytes, bytes]) -> None:
    """Gives a session its values back; what is missing was lost. Raises RecordError."""
    session.empty()
    session.asleep = False
    try:
        for known in session.branches.values():
            _wake_branch(known, values)
        for number, value in _numbered(values, b"journal"):
            (blocks, thinking_end, rest, opener, before, branch), ids = unpack_value(value)
            sampled = Sampled(unpack(ids), thinking_end, rest, tuple(opener))
            session.journal.record([_block(*b) for b in blocks], sampled, bytes.fromhex(before), branch, number)
        session.journal.changes()
        records = [RequestRecord(**unpack_value(value)[0]) for _, value in _numbered(values, b"request")]
        session.history.extend(sorted(records, key=lambda record: record.number))
    except (KeyError, TypeError, ValueError) as error:
        session.empty()
        raise RecordError(f"not a session's values: {error!r}") from error


def _wake_branch(branch: Branch, values: Mapping[bytes, bytes]) -> None:
    number = branch.number
    if b"tools/%d" % number in values:
        tools, _ = unpack_value(values[b"tools/%d" % number])
        branch.tools = tuple(Tool(*tool) for tool in tools)
    places: OrderedDict[int, Asked] = OrderedDict()
    described = unpack_value(values.get(b"branch/%d" % number, pack_value([])))[0]
    for slot, tool_key, system, head, kind, *worker in described:
        names = b"tokens/%d/%d" % (number, slot), b"turns/%d/%d" % (number, slot)
        if all(name in values for name in names):
            tokens, turns = (unpack_value(values[name])[1] for name in names)
            digests, exact = _turns(turns)
            sums = bytes.fromhex(tool_key), bytes.fromhex(system)
            places[slot] = Asked(tokens, *sums, head, digests, exact, kind, *worker)
    branch.slots, branch.pasts = tuple(places), tuple(places.values())


def _turns(lines: bytes) -> tuple[tuple[TurnDigest, ...], tuple[bool, ...]]:
    read = [json.loads(line) for line in lines.split(b"\n") if line]
    digests = tuple(
        TurnDigest(role, bytes.fromhex(key), tuple(Part(kind, id, bytes.fromhex(sum)) for kind, id, sum in parts))
        for role, key, _, parts in read
    )
    return digests, tuple(exact for _, _, exact, _ in read)


def _block(kind: str, *fields: Any) -> Block:
    kinds: dict[str, type[Block]] = {"text": Text, "thinking": Thinking, "call": ToolCall, "output": ToolOutput}
    return kinds[kind](*fields)


def _numbered(values: Mapping[bytes, bytes], kind: bytes) -> list[tuple[int, bytes]]:
    """Values called ``kind/N``, in the order of their numbers."""
    found = [(name.split(b"/"), value) for name, value in values.items()]
    return sorted((int(parts[1]), value) for parts, value in found if parts[0] == kind)
