"""Every system call on segment files goes through one object, so that tests can make any of them fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

Buffer = bytes | bytearray | memoryview

_PIECE = 512
"""Buffers per vectored call; Linux allows 1024."""
_NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class Files:
    """Raises OSError as the system calls do. Reads and writes are whole: short ones are continued."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self, path: Path, *, write: bool) -> int:
        """A file descriptor; with ``write`` the file is made if it is not there."""
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def write(self, descriptor: int, parts: Sequence[Buffer], offset: int) -> None:
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        while left:
            count = os.pwritev(descriptor, left[:_PIECE], offset)
            offset += count
            left = _after(left, count)

    def read(self, descriptor: int, parts: Sequence[memoryview | bytearray], offset: int) -> int:
        """Fill the buffers; fewer bytes than they hold only at the end of the file."""
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        total = 0
        while left:
            count = os.preadv(descriptor, left[:_PIECE], offset + total)
            if count == 0:
                break
            total += count
            left = _after(left, count)
        return total

    def allocate(self, descriptor: int, size: int) -> None:
        """Reserve the file's blocks where the file system can."""
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                raise

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Make names of new files durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def free(self, path: Path) -> tuple[int, int]:
        """(bytes an ordinary user may still write, bytes in all) of the disk."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize

    def point(self, name: str) -> None:
        """Called at moments between which a crash must be harmless; does nothing."""


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first ``count`` bytes."""
    for at, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[at + 1 :]]
        count -= len(part)
    return []
