"""Between sessions and the disk: what is written when, and under which names."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

from sessions.digest import digest
from sessions.partings import Leads, split
from sessions.persist import Nowhere, Persist
from sessions.prior import KINDS, Counts, Divergence
from sessions.records import RecordError, asleep, changes_of, head_of, pack_value, unpack_value, values_of, wake
from sessions.session import Branch, Limits, Session

_log = logging.getLogger(__name__)

_HABITS = digest("habits of harnesses")
"""Namespace of what is known about clients, whatever the model."""
_LEADS = digest("leads of harnesses")
"""Namespace of what leads to where their openings part, as tokens of one model."""
RESPONSES = digest("responses")
"""Namespace of responses that are kept: text, and no tokens of a model."""
_NO_SESSIONS = (_HABITS, _LEADS, RESPONSES)
_ELSEWHERE = 1 << 17
"""About so many names and keys of other models' sessions are remembered, 100 bytes each."""


class Keeper:
    """Does nothing without a ``persist``. ``identity``: whose tokens these are; those of others are never read."""

    def __init__(self, persist: Persist | None, identity: bytes, limits: Limits) -> None:
        self.identity = identity
        self._persist: Persist | Nowhere = persist or Nowhere()
        self._limits = limits

    @property
    def on(self) -> bool:
        return self._persist.on

    def sleeping(self) -> Iterator[Session]:
        """All sessions that are kept, the least recently used first."""
        for group, head in self._persist.heads(self.identity):
            try:
                yield asleep(group[len(self.identity) :].hex(), head, self._limits)
            except RecordError as error:
                _log.warning("a remembered session was dropped: %s", error)

    def elsewhere(self) -> set[bytes]:
        """The names of sessions that have tokens of another tokenizer or template, and what their turns are found by;
        of the most recently used."""
        found: set[bytes] = set()
        for group, head in reversed(self._persist.heads(b"")):
            if len(found) >= _ELSEWHERE or group.startswith((self.identity, *_NO_SESSIONS)):
                continue
            found.add(group[len(self.identity) :])
            with contextlib.suppress(RecordError):  # it is looked at again by those whose tokens it has
                for branch in asleep("", head, self._limits).branches.values():
                    found.update(branch.keys)
        return found

    def wake(self, session: Session) -> None:
        """Values that cannot be read are treated as missing."""
        try:
            wake(session, self._persist.read(self._group(session)))
        except RecordError as error:
            _log.warning("what is remembered of session %s was dropped: %s", session.id, error)

    def save(self, session: Session, branch: Branch | None = None) -> None:
        """After a request of ``branch``, or after a change of the session alone."""
        if self.on:  # else all of it would be packed for nothing
            self._write(session, changes_of(session, branch) if branch is not None else {})

    def save_all(self, session: Session) -> None:
        if self.on:
            self._write(session, values_of(session))

    def forget(self, session: Session, *, erase: bool = False) -> None:
        """``erase``: a person asked for it, so no trace may be left."""
        self._persist.drop(self._group(session), erase=erase)

    def flush(self, timeout: float) -> bool:
        """Whether everything is written, or erased, within so many seconds. In any thread."""
        return self._persist.flush(timeout)

    def forget_all(self) -> int:
        """Drops everything, of every model; how many sessions that were."""
        return sum(not group.startswith(_NO_SESSIONS) for group in self._persist.drop_all())

    def habits(self) -> dict[str, Counts]:
        """How prompts of each harness diverge."""
        found: dict[str, Counts] = {}
        for _, head in self._persist.heads(_HABITS):
            try:
                (harness, counts), _ = unpack_value(head)
                found[harness] = {kind: int(counts.get(kind, 0)) for kind in KINDS}
            except (RecordError, TypeError, ValueError, AttributeError) as error:
                _log.warning("the habits of a harness were dropped: %s", error)
        return found

    def save_habit(self, harness: str, counts: dict[Divergence, int], now: float) -> None:
        self._persist.write(_HABITS + digest(harness), pack_value([harness, counts]), {}, used=now, pinned=True)

    def leads(self) -> dict[str, Leads]:
        """To where the openings of each harness part."""
        found: dict[str, Leads] = {}
        for _, head in self._persist.heads(_LEADS):
            try:
                (harness, identity), packed = unpack_value(head)
                if identity == self.identity.hex():
                    found[harness] = split(packed)
            except (RecordError, TypeError, ValueError) as error:
                _log.warning("what leads to where openings of a harness part was dropped: %s", error)
        return found

    def save_leads(self, harness: str, known: Leads, now: float) -> None:
        head = pack_value([harness, self.identity.hex()], b"".join(known))
        self._persist.write(self._leads(harness), head, {}, used=now, pinned=True)

    def forget_leads(self, harness: str) -> None:
        """Leaves no trace: leads are words from somebody's prompts."""
        self._persist.drop(self._leads(harness), erase=True)

    def close(self) -> None:
        self._persist.close()

    def stats(self) -> dict[str, float]:
        return self._persist.stats()

    def _write(self, session: Session, values: Mapping[bytes, bytes | None]) -> None:
        group, head = self._group(session), head_of(session)
        self._persist.write(group, head, values, used=session.last_used, pinned=session.pinned)

    def _leads(self, harness: str) -> bytes:
        return _LEADS + digest(self.identity, harness)

    def _group(self, session: Session) -> bytes:
        return self.identity + bytes.fromhex(session.id)
