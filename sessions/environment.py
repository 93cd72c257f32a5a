"""The LMDB environment under remembered sessions: heads and values by group, transactions, and a map that grows.

Every page is checked before LMDB opens the file: it trusts what it reads, and a damaged file could take the process
down with it.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import lmdb
from lmdb import verify

from sessions.pieces import Envelope, cut, fingerprint, join
from sessions.store.compact import remove_fresh, take_fresh, write_fresh
from sessions.store.config import StoreKeyError
from sessions.store.crypt import SALT, Cipher, Unreadable
from sessions.store.files import Files

_log = logging.getLogger(__name__)

GROUP = 32
"""Bytes of a group's name; the first half says whose tokens it has."""
FORMAT = b"ft sessions 1"
_ERASING = b"erasing"
_HEAD = struct.Struct("<d?")
"""When a group was last used, and whether it is pinned."""
_DAMAGE = (
    verify.VerifyError,
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
    Unreadable,
)
_LARGEST = 4
"""Times its limit that the map may have: the file is larger than what is in use by what a commit replaces."""
_REMEMBERED = 1 << 14
"""Values of several pieces whose last writing is remembered."""


class DiskFault(Exception):
    """The environment cannot be used, or this change cannot be made; nothing has changed."""


class Damaged(Exception):
    """The environment is not what was written."""


@dataclass
class Changes:
    """Of one group; a value of None is deleted, ``fresh`` deletes everything that was there before, ``erase`` so that
    no trace of it is left in the file after ``erase``."""

    fresh: bool = False
    erase: bool = False
    head: bytes | None = None
    used: float = 0.0
    pinned: bool = False
    values: dict[bytes, bytes | None] = field(default_factory=dict)


class Environment:
    """Raises Damaged, DiskFault, StoreKeyError for a wrong, missing or needless key. One thread writes; others may
    read meanwhile."""

    def __init__(self, folder: Path, key: bytes | None, map_bytes: int, limit: int, files: Files) -> None:
        """``limit``: bytes that are meant to be in use at most."""
        cipher = Cipher(key) if key else None
        self.ages: dict[bytes, tuple[float, bool]] = {}
        """When each group was last used, and whether it is pinned."""
        self.bytes = 0
        """Of the pages in use."""
        self.corrupt = 0
        """Values that could not be read."""
        self._envelope = Envelope(cipher)
        self._files = files
        self._limit = limit
        self._map = Lock()
        """Held while the map is read or resized."""
        self._written: dict[bytes, list[bytes]] = {}
        data = folder / "data.mdb"
        try:
            if data.exists() and (problems := verify.verify(str(data))):  # type: ignore[no-untyped-call]
                raise Damaged(problems[0])
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(0o700)
            (folder / "lock.mdb").unlink(missing_ok=True)  # of an owner that is gone
            remove_fresh(folder)
            self._folder = folder
            self._map_bytes = max(map_bytes, 2 * data.stat().st_size if data.exists() else 0)
            self._open()
        except _DAMAGE as error:
            raise Damaged(str(error)) from error
        except (lmdb.Error, OSError) as error:
            raise DiskFault(str(error)) from error
        try:
            self._check_key(cipher)
            self._load_ages()
            self._measure()
            if self._erasing():
                self.erase()
        except StoreKeyError:
            self.close()
            raise
        except _DAMAGE as error:
            self.close()
            raise Damaged(str(error)) from error
        except lmdb.Error as error:
            self.close()
            raise DiskFault(str(error)) from error

    def heads(self, namespace: bytes) -> list[tuple[bytes, bytes]]:
        """(group, head) of a namespace's groups, the least recently used first."""
        found: list[tuple[float, bytes, bytes]] = []
        with self._map, self._env.begin(db=self._heads) as transaction:
            for group, stored in _from(transaction, namespace):
                if (payload := self._unseal(group, stored)) is not None:
                    found.append((_HEAD.unpack_from(payload)[0], group, payload[_HEAD.size :]))
        return [(group, head) for _, group, head in sorted(found)]

    def values(self, group: bytes) -> dict[bytes, bytes]:
        """Those that can be read."""
        pieces: dict[bytes, list[bytes]] = {}
        with self._map, self._env.begin(db=self._values) as transaction:
            for key, stored in _from(transaction, group):
                pieces.setdefault(key[GROUP:-2], []).append(self._unseal(key, stored) or b"")
        values = {}
        for name, found in pieces.items():
            try:
                values[name] = join(found)
            except Unreadable as error:
                self._lost(group, error)
        return values

    def commit(self, changes: Mapping[bytes, Changes]) -> None:
        """All of it or nothing. Raises DiskFault."""
        try:
            self._files.point("sessions.commit")
            while not self._try(changes):
                self._grow()
            self._files.point("sessions.committed")
        except (lmdb.Error, OSError) as error:
            self._written.clear()  # nobody knows what is there: what is written next is written whole
            raise DiskFault(str(error)) from error

    def erase(self) -> None:
        """Rewrites the file without what was deleted. After a crash, the next open does it again. Raises lmdb.Error,
        OSError."""
        with self._map:
            write_fresh(self._env, self._folder, (b"heads", b"values", b"meta"), lambda _, key: key == _ERASING)
            self._files.point("sessions.copied")
            self._env.close()
            try:
                take_fresh(self._folder)
            finally:
                self._open()
        self._files.point("sessions.erased")

    def close(self) -> None:
        self._env.close()

    def _open(self) -> None:
        self._env = lmdb.open(
            str(self._folder), map_size=self._map_bytes, mode=0o600, metasync=False, readahead=False, max_dbs=4
        )
        self._heads, self._values = self._env.open_db(b"heads"), self._env.open_db(b"values")

    def _erasing(self) -> bool:
        with self._env.begin(db=self._env.open_db(b"meta")) as transaction:
            return transaction.get(_ERASING) is not None

    def _check_key(self, cipher: Cipher | None) -> None:
        """Raises StoreKeyError; Unreadable for another format."""
        with self._env.begin(db=self._env.open_db(b"meta"), write=True) as transaction:
            if transaction.get(b"format") is None:
                salt = os.urandom(SALT)
                transaction.put(b"format", FORMAT)
                transaction.put(b"key", salt + cipher.check(salt) if cipher else b"")
                return
            if transaction.get(b"format") != FORMAT:
                raise Unreadable(f"its format is not {FORMAT.decode()!r}")
            known = bytes(transaction.get(b"key") or b"")
        if known and cipher is None:
            raise StoreKeyError("remembered sessions are encrypted: give their key file, or remove them")
        if cipher is not None and not known:
            raise StoreKeyError("remembered sessions are not encrypted: leave the key file out, or remove them")
        if cipher is not None and cipher.check(known[:SALT]) != known[SALT:]:
            raise StoreKeyError("remembered sessions are encrypted with another key: give that one, or remove them")

    def _load_ages(self) -> None:
        with self._env.begin(db=self._heads) as transaction:
            for group, stored in _from(transaction, b""):
                payload = self._unseal(group, stored)
                self.ages[group] = (0.0, False) if payload is None else _HEAD.unpack_from(payload)

    def _try(self, changes: Mapping[bytes, Changes]) -> bool:
        """False when the map is too small; nothing has changed then."""
        written: dict[bytes, list[bytes]] = {}
        try:
            meta = self._env.open_db(b"meta")
            with self._env.begin(write=True) as transaction:
                if any(change.erase for change in changes.values()):
                    transaction.put(_ERASING, b"1", db=meta)
                for group, change in changes.items():
                    if change.fresh:
                        self._delete(transaction, group)
                    for name, payload in change.values.items():
                        written[group + name] = self._put(transaction, group + name, payload)
                    if change.head is not None:
                        head = _HEAD.pack(change.used, change.pinned) + change.head
                        transaction.put(group, self._envelope.close(group, head), db=self._heads)
        except lmdb.MapFullError:
            return False
        for group, change in changes.items():
            if change.head is not None:
                self.ages[group] = change.used, change.pinned
            elif change.fresh:
                self.ages.pop(group, None)
        if len(self._written) > _REMEMBERED:
            self._written.clear()
        self._written.update(written)
        self._measure()
        return True

    def _put(self, transaction: lmdb.Transaction, key: bytes, payload: bytes | None) -> list[bytes]:
        """Writes the pieces that are not there already, and returns the fingerprints of all; none for None."""
        pieces = [] if payload is None else cut(payload)
        marks = [fingerprint(piece) for piece in pieces]
        known = self._written.get(key, [])
        for number, (piece, mark) in enumerate(zip(pieces, marks, strict=True)):
            if number >= len(known) or known[number] != mark:
                place = _place(key, number)
                transaction.put(place, self._envelope.close(place, piece), db=self._values)
        surplus = len(pieces)
        while transaction.delete(_place(key, surplus), db=self._values):
            surplus += 1
        return marks

    def _delete(self, transaction: lmdb.Transaction, group: bytes) -> None:
        transaction.delete(group, db=self._heads)
        with transaction.cursor(db=self._values) as cursor:
            alive = cursor.set_range(group)
            while alive and (key := bytes(cursor.key())).startswith(group):
                self._written.pop(key[:-2], None)
                alive = cursor.delete()

    def _grow(self) -> None:
        """Doubles the map. Raises lmdb.Error at its largest size, and where the system has no room for more."""
        if self._map_bytes > _LARGEST * self._limit:
            raise lmdb.MapFullError("what is to be written does not fit")
        with self._map:
            self._env.set_mapsize(2 * self._map_bytes)
        self._map_bytes *= 2

    def _measure(self) -> None:
        with self._env.begin() as transaction:
            stats = [transaction.stat(database) for database in (self._heads, self._values)]
        pages = sum(stat["leaf_pages"] + stat["branch_pages"] + stat["overflow_pages"] for stat in stats)
        self.bytes = pages * stats[0]["psize"]

    def _unseal(self, key: bytes, stored: bytes) -> bytes | None:
        try:
            return self._envelope.open(key, stored)
        except Unreadable as error:
            self._lost(key[:GROUP], error)
            return None

    def _lost(self, group: bytes, error: Unreadable) -> None:
        self.corrupt += 1
        _log.warning("a remembered value of session %s was dropped: %s", group[GROUP // 2 :].hex(), error)


def _place(key: bytes, number: int) -> bytes:
    return key + number.to_bytes(2, "big")


def _from(transaction: lmdb.Transaction, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Entries of the transaction's database whose keys begin so, in order."""
    with transaction.cursor() as cursor:
        entries: Any = cursor
        if cursor.set_range(prefix):
            for key, value in entries:
                if not key.startswith(prefix):
                    return
                yield key, value
