"""Replaces a database file by a copy of its live entries: LMDB never overwrites what was deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb

from sessions.store.files import Files

DATA, FRESH = "data.mdb", "data.mdb.new"
_BATCH = 4096


def write_fresh(
    environment: lmdb.Environment, folder: Path, names: Sequence[bytes], skip: Callable[[bytes, bytes], bool]
) -> None:
    """A copy beside the file, durable, without the entries to ``skip``: (database, key). Raises lmdb.Error, OSError."""
    remove_fresh(folder)
    size = environment.info()["map_size"]
    fresh = lmdb.open(
        str(folder / FRESH), map_size=size, max_dbs=len(names), subdir=False, lock=False, mode=0o600, metasync=True
    )
    try:
        with environment.begin() as source:
            for name in names:
                database = environment.open_db(name, txn=source, create=False)
                target = fresh.open_db(name)
                entries = [(bytes(key), value) for key, value in source.cursor(database) if not skip(name, bytes(key))]
                for at in range(0, len(entries), _BATCH):
                    with fresh.begin(write=True, db=target) as transaction:
                        for key, value in entries[at : at + _BATCH]:
                            transaction.put(key, value, append=True)
        fresh.sync(True)
    finally:
        fresh.close()


def take_fresh(folder: Path) -> None:
    """The copy takes the file's place; nobody has it open. Raises OSError."""
    (folder / FRESH).rename(folder / DATA)
    Files().sync_directory(folder)


def remove_fresh(folder: Path) -> None:
    """What a crash has left. Raises OSError."""
    (folder / FRESH).unlink(missing_ok=True)
