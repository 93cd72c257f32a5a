"""Reads all of an LMDB environment, in a process of its own: LMDB trusts its file, and may die of a damaged one.

``python -P -m sessions.persist_check DIRECTORY`` exits with 0 when all of it can be read, and with DAMAGED when not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lmdb

DAMAGED = 3


def readable(directory: Path) -> bool:
    """True if every page that belongs to a value is there and is what LMDB expects."""
    try:
        with lmdb.open(str(directory), readonly=True, lock=False, create=False, max_dbs=8) as environment:
            pages = environment.info()["last_pgno"] + 1
            if pages * environment.stat()["psize"] > (directory / "data.mdb").stat().st_size:
                return False
            with environment.begin() as transaction:
                names = [bytes(name) for name, _ in transaction.cursor()]
            for name in names:
                database = environment.open_db(name, create=False)
                with environment.begin(db=database) as transaction:
                    found = sum(1 for _, value in transaction.cursor() if value is not None)
                    if found != transaction.stat(database)["entries"]:
                        return False
    except (lmdb.Error, OSError, MemoryError, ValueError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(0 if readable(Path(sys.argv[1])) else DAMAGED)
