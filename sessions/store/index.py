"""The LMDB index: a list of extents and when they were last used. A cache of what the segments say.

Written by one thread; read once, at the start. Before LMDB opens a file, every page of it is checked, since a damaged
one could crash the process.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
from lmdb import verify

from sessions.store.compact import DATA, remove_fresh, take_fresh, write_fresh
from sessions.store.crypt import Cipher, Unreadable
from sessions.store.files import Files
from sessions.store.format import FORMAT, Place, open_record, seal_record

MAP_SIZE = 64 << 20
_NAMES = (b"extent", b"used", b"meta")


class IndexDamaged(Exception):
    """The index is to be thrown away and rebuilt."""


@dataclass
class Changes:
    """What one transaction writes."""

    extents: dict[Place, bytes] = field(default_factory=dict)
    gone: set[Place] = field(default_factory=set)
    used: dict[Place, bytes] = field(default_factory=dict)
    meta: dict[bytes, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.extents or self.gone or self.used or self.meta)


class Index:
    """``extent`` and ``used`` map places to records, ``meta`` names to values; all sealed or checksummed."""

    def __init__(self, directory: Path, cipher: Cipher | None, files: Files, *, map_size: int, writable: bool) -> None:
        """Raises IndexDamaged, OSError."""
        self.growths = 0
        self.damaged = 0
        self._cipher = cipher
        self._files = files
        self._data = directory / DATA
        self._writable = writable
        fresh = not self._data.exists()
        if writable:
            remove_fresh(directory)
        if not fresh:
            _check(self._data)
        try:
            self._open(map_size + self.total)
            try:
                if fresh:
                    self.commit(Changes(meta={b"format": str(FORMAT).encode()}))
                elif self.meta(b"format") != str(FORMAT).encode():
                    raise IndexDamaged("written by another version, or with another key")
            except BaseException:
                self._env.close()
                raise
        except lmdb.Error as error:
            raise IndexDamaged(str(error)) from error

    def _open(self, map_size: int) -> None:
        """Raises lmdb.Error."""
        self._env = lmdb.open(
            str(self._data.parent), map_size=map_size, max_dbs=len(_NAMES), mode=0o600, metasync=False,
            readahead=False, readonly=not self._writable, lock=self._writable, create=self._writable,
        )  # fmt: skip
        try:
            self._extents, self._used, self._meta = (self._env.open_db(name, create=self._writable) for name in _NAMES)
        except BaseException:
            self._env.close()
            raise

    @property
    def total(self) -> int:
        return self._data.stat().st_size if self._data.exists() else 0

    def meta(self, name: bytes) -> bytes | None:
        """None if absent or damaged."""
        with self._env.begin(self._meta) as transaction:
            stored = transaction.get(name)
        try:
            return None if stored is None else open_record(stored, self._cipher)
        except Unreadable:
            return None

    def extents(self) -> Iterator[tuple[Place, bytes, bytes | None]]:
        """(place, record, record of use); those that cannot be read are counted in ``damaged``."""
        with self._env.begin() as transaction:
            for key, stored in transaction.cursor(self._extents):
                used = transaction.get(key, db=self._used)
                try:
                    record = open_record(stored, self._cipher)
                    place = Place.unpack(key)
                    yield place, record, None if used is None else open_record(used, self._cipher)
                except (Unreadable, ValueError):
                    self.damaged += 1

    def commit(self, changes: Changes) -> None:
        """All or nothing. Raises lmdb.Error, OSError."""
        self._files.point("index.commit")
        while True:
            try:
                self._write(changes)
                return
            except lmdb.MapFullError:
                self._files.point("map.grow")
                self._env.set_mapsize(2 * self._env.info()["map_size"])
                self.growths += 1
            except lmdb.MapResizedError:
                self._env.set_mapsize(0)

    def compact(self) -> None:
        """Only what is indexed is left in the file. After a crash the index is the old one or the new one. Raises
        lmdb.Error, OSError."""
        folder = self._data.parent
        write_fresh(self._env, folder, _NAMES, lambda *_: False)
        self._files.point("index.copied")
        size = self._env.info()["map_size"]
        self._env.close()
        try:
            take_fresh(folder)
        finally:
            self._open(size)
        self._files.point("index.compacted")

    def clear_stale_readers(self) -> int:
        return self._env.reader_check()

    def close(self) -> None:
        self._env.close()

    def _write(self, changes: Changes) -> None:
        with self._env.begin(write=True) as transaction:
            for place in changes.gone:
                transaction.delete(place.pack(), db=self._extents)
                transaction.delete(place.pack(), db=self._used)
            for database, records in ((self._extents, changes.extents), (self._used, changes.used)):
                for place, record in records.items():
                    transaction.put(place.pack(), seal_record(record, self._cipher), db=database)
            for name, value in changes.meta.items():
                transaction.put(name, seal_record(value, self._cipher), db=self._meta)


def remove_index(directory: Path) -> None:
    """Raises OSError."""
    shutil.rmtree(directory, ignore_errors=False)


def _check(data: Path) -> None:
    try:
        problems = verify.verify(str(data))  # type: ignore[no-untyped-call]
    except (verify.VerifyError, OSError) as error:
        raise IndexDamaged(str(error)) from error
    if problems:
        raise IndexDamaged(problems[0])
