"""Responses that are kept for clients that ask for one, or name one instead of sending its conversation again.

They lie in the database of sessions, as groups of their own, and the newest in memory too; without a database they are
in memory alone. An API key sees its own responses only.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from server.dump import dump
from sessions.digest import digest
from sessions.keeper import RESPONSES
from sessions.persist import Nowhere, Persist
from sessions.store.config import DAY

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bounds:
    """The oldest responses go when there are more, or when they are older. ``memory`` and ``bytes``: of their JSON."""

    count: int = 1000
    bytes: int = 64 << 20
    memory: int = 16 << 20
    days: float = 30.0


@dataclass(frozen=True)
class _Entry:
    session: str
    size: int
    used: float


@dataclass(frozen=True)
class Kept:
    """A response, and the ``items`` that led to it."""

    response: dict[str, Any]
    items: list[Any]


class Stored:
    """All calls come from the server's event loop."""

    def __init__(
        self, persist: Persist | None = None, bounds: Bounds = Bounds(), clock: Callable[[], float] = time.time
    ) -> None:
        self._persist: Persist | Nowhere = persist or Nowhere()
        self._bounds = bounds
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """By group, the oldest first."""
        self._bytes = 0
        self._recent: OrderedDict[bytes, bytes] = OrderedDict()
        self._recent_bytes = 0
        for group, head in self._persist.heads(RESPONSES):
            try:
                session, size, used = from_json(head)
                self._add(group, _Entry(str(session), int(size), float(used)))
            except (ValueError, TypeError) as error:
                _log.warning("a stored response was dropped: %s", error)
        self._drop_surplus()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, namespace: str, id: str) -> Kept | None:
        group = _group(namespace, id)
        self._drop_surplus()
        if group not in self._entries:
            return None
        data = self._recent.get(group) or self._persist.read(group).get(b"response")
        try:
            response, items = from_json(data or b"")
        except (ValueError, TypeError):
            _log.warning("a stored response cannot be read and is dropped")
            self._drop(group)
            return None
        return Kept(response, items)

    def find(self, namespace: str, id: str) -> list[Any] | None:
        kept = self.get(namespace, id)
        return None if kept is None else [*kept.items, *kept.response["output"]]

    def keep(self, namespace: str, session: str, response: dict[str, Any], items: list[Any]) -> None:
        if not response["store"]:
            return
        group, data = _group(namespace, response["id"]), dump([response, items])
        if len(data) > self._bounds.bytes:
            return
        now = self._clock()
        entry = _Entry(session, len(data), now)
        self._add(group, entry)
        self._recent[group] = data
        self._recent_bytes += len(data)
        self._persist.write(group, dump([session, len(data), now]), {b"response": data}, used=now)
        self._drop_surplus()

    def delete(self, namespace: str, id: str) -> bool:
        """True if there was one; no trace of it stays on disk."""
        group = _group(namespace, id)
        found = group in self._entries
        if found:
            self._drop(group, erase=True)
        return found

    def forget(self, session: str) -> None:
        """Those of a session that is forgotten."""
        for group in [group for group, entry in self._entries.items() if entry.session == session]:
            self._drop(group, erase=True)

    def forget_all(self) -> None:
        for group in list(self._entries):
            self._drop(group, erase=True)

    def _add(self, group: bytes, entry: _Entry) -> None:
        self._entries[group] = entry
        self._bytes += entry.size

    def _drop(self, group: bytes, *, erase: bool = False) -> None:
        self._bytes -= self._entries.pop(group).size
        self._recent_bytes -= len(self._recent.pop(group, b""))
        self._persist.drop(group, erase=erase)

    def _drop_surplus(self) -> None:
        bounds = self._bounds
        most = bounds.bytes if self._persist.on else min(bounds.bytes, bounds.memory)
        oldest = self._clock() - bounds.days * DAY
        while self._entries:
            group, entry = next(iter(self._entries.items()))
            if len(self._entries) <= bounds.count and self._bytes <= most and entry.used >= oldest:
                break
            self._drop(group)
        while self._recent_bytes > bounds.memory:
            _, data = self._recent.popitem(last=False)
            self._recent_bytes -= len(data)


def _group(namespace: str, id: str) -> bytes:
    return RESPONSES + digest(namespace, id)
