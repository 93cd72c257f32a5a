"""The memory of this machine, as far as this process may have it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_bytes() -> int:
    """All there is, or what the control groups leave that this process is in, as in a container."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits()])


def _limits() -> Iterator[int]:
    with suppress(OSError):
        for line in MINE.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, name = (GROUPS / "memory", "memory.limit_in_bytes") if controllers else (GROUPS, "memory.max")
            mine = root / path.lstrip("/")
            for group in (mine, *mine.parents):
                if group.is_relative_to(root):
                    with suppress(OSError, ValueError):  # a container sees its own group as the root; "max"
                        yield int((group / name).read_text())
