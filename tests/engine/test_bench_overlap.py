"""The bench of turns that are restored measures what it says: read from the store, overlapped or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import bench_overlap


def test_every_way_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[bool | None, float]] = []
    restored = bench_overlap._Turns.restored

    def watched(turns: bench_overlap._Turns, suffix: int, overlap: bool | None) -> tuple[float, float]:
        before = turns.overlapped
        result = restored(turns, suffix, overlap)
        taken.append((overlap, turns.overlapped - before))
        return result

    monkeypatch.setattr(bench_overlap._Turns, "restored", watched)
    found = bench_overlap.overlap(tmp_path, 4, 2)
    assert list(found) == ["16", "64", "256"] and len(bench_overlap.rows(found)) == 3
    assert len(taken) == 3 * (1 + 2 * 3)
    assert {overlapped for way, overlapped in taken if way is False} == {0}
    assert {overlapped for way, overlapped in taken if way is True} == {1}
