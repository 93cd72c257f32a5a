"""One process per directory, and nobody else's eyes in it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sessions.store.config import StoreBusy


def own(directory: Path) -> int:
    """The descriptor that holds the directory's lock until it is closed. Raises StoreBusy, OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    descriptor = os.open(directory / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(descriptor, 20, 0).decode("ascii", "replace")
        os.close(descriptor)
        raise StoreBusy(directory, int(pid) if pid.isdecimal() else None) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor
