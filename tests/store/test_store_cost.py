"""What the store costs, as far as that can be said without a clock, and its measuring functions."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

from storekit import settings

from sessions.store.format import About, Place, Shape
from sessions.store.measure import look_up, read_bandwidth
from sessions.store.mirror import Entry, Mirror

COUNT = 4000


def test_the_mirror_is_small() -> None:
    """13 MB per million stored tokens is what its docstring says."""
    mirror = Mirror()
    key = os.urandom(16)
    tracemalloc.start()
    for number in range(COUNT):
        after = os.urandom(16)
        entry = Entry(About(Shape.PAGE, key, after, os.urandom(256), 64 * number), 1 << 20)
        entry.place = Place(number, 1)
        mirror.add(entry)
        key = after
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 600 * COUNT < used < 900 * COUNT


def test_measuring(tmp_path: Path) -> None:
    found = look_up(settings(tmp_path / "a"), 6400)
    assert found.pages == 100 and found.hashing > 0 and found.finding > 0
    speed = read_bandwidth(settings(tmp_path / "b", page_components=(40_000, 40_000)), 4 << 20)
    assert speed.size == 52 * 80_000 and speed.restore > 0 and speed.plain > 0
