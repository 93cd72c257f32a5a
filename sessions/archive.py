"""One session as a file of JSON lines, to be taken in by another server with the same tokenizer and template.

The first line says what it is; one line per value follows: ``key`` (see ``records``; the head's is empty), ``value``,
and ``raw``, bytes in base64. The last line has a checksum of the lines before it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

from sessions.digest import digest
from sessions.records import asleep, head_of, pack_value, unpack_value, values_of, wake
from sessions.session import Limits, Session

FORMAT = "ft-session"
VERSION = 1


class ArchiveError(ValueError):
    """A text that cannot be taken in; the message says why."""


def dump(session: Session, identity: bytes) -> str:
    """``session`` is awake; ``identity`` says whose tokens it has."""
    first = {"format": FORMAT, "version": VERSION, "id": session.id, "tokens_of": identity.hex()}
    lines = [json.dumps(first), *_lines(session)]
    return "\n".join([*lines, json.dumps({"digest": digest(*lines).hex()}), ""])


def load(text: str, identity: bytes, limits: Limits) -> Session:
    """Raises ArchiveError."""
    lines = text.rstrip("\n").split("\n")
    try:
        first, last = json.loads(lines[0]), json.loads(lines[-1])
        if first["format"] != FORMAT or first["version"] != VERSION:
            raise ArchiveError(f"not a session archive of version {VERSION}")
        if last.get("digest") != digest(*lines[:-1]).hex():
            raise ArchiveError("the archive is damaged: its checksum is another")
        if first["tokens_of"] != identity.hex():
            raise ArchiveError("the archive has tokens of another tokenizer or chat template")
        values = dict(map(_read, lines[1:-1]))
        session = asleep(bytes.fromhex(first["id"]).hex(), values.pop(b""), limits)
        wake(session, values)
    except ArchiveError:
        raise
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ArchiveError(f"not a session archive ({error})") from error
    return session


def _lines(session: Session) -> Iterator[str]:
    for key, value in [(b"", head_of(session)), *values_of(session).items()]:
        fields, raw = unpack_value(value)
        yield json.dumps({"key": key.decode(), "value": fields, "raw": base64.b64encode(raw).decode()})


def _read(line: str) -> tuple[bytes, bytes]:
    entry = json.loads(line)
    return entry["key"].encode(), pack_value(entry["value"], base64.b64decode(entry["raw"]))
