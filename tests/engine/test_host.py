"""Memory that a control group leaves, of either version and of any ancestor, is all there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine import host

ALL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("mine", "limits", "left"), [
    ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 4096),
    ("0::/a\n", {"a/memory.max": f"{ALL * 2}\n"}, ALL),
    ("0::/not/seen/from/here\n", {"memory.max": "8192\n"}, 8192),
    ("3:cpu:/a\n4:hugetlb,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "12288\n"}, 12288),
    ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, ALL),
    (None, {}, ALL),
])  # fmt: skip
def test_memory_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str | None, limits: dict[str, str], left: int
) -> None:
    monkeypatch.setattr(host, "GROUPS", tmp_path)
    monkeypatch.setattr(host, "MINE", tmp_path / "cgroup")
    if mine is not None:
        (tmp_path / "cgroup").write_text(mine)
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host.memory_bytes() == left
