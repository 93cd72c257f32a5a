"""The measurement on a tiny pool: its figures hang together, and wrong options are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import bench_experts
from engine.experts.executor import COARSE
from engine.native.library import cache_bytes

TINY = ["--hidden", "64", "--inner", "96", "--ranks", "3", "--megabytes", "2", "--repeats", "1", "--threads", "1"]
TINY += ["--pauses", "1"]


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_experts.main([*TINY, "--rows", "2", "--cpu-time", "--json"]) == 0
    *reports, pause = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (
        pause["pause_ms"] == 1
        and 0 < pause["nothing"] <= pause["nothing_worst"]
        and pause["one"] > 0
        and pause["roused"] > 0
    )
    assert [(one["format"], one["exact"]) for one in reports] == [
        ("bf16", True),
        ("int8", True),
        ("int8", False),
        ("mxfp4", True),
        ("mxfp4", False),
    ]
    for one in reports:
        assert one["of_read"] == pytest.approx(one["rate"] / one["read"])
        assert (one["error"] == 0.0) == one["exact"]
        assert one["error"] < COARSE


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_experts.main([*TINY, "--formats", "int8"]) == 0
    out = capsys.readouterr().out
    assert "of read" in out and "µs for one expert" in out
    assert ("TOO SMALL A POOL" in out) == (cache_bytes() > 500_000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "sizes and counts must be at least 1"),
        (["--cpu-time", "--threads", "2"], "--cpu-time needs --threads 1"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_experts.main(arguments)
    assert message in capsys.readouterr().err


def test_sizes_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_experts.main([*TINY, "--inner", "40"]) == 1
    assert "experts need inner to be a multiple of 32, not 40" in capsys.readouterr().err


def test_last_caches_are_added_up(tmp_path: Path) -> None:
    def cache(cpu: int, index: int, level: int, size: str | None, shared: str) -> None:
        files = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
        files.mkdir(parents=True)
        for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
            if text is not None:
                (files / name).write_text(text + "\n")

    assert cache_bytes(tmp_path) == 0
    for cpu in range(4):
        cache(cpu, 0, 1, "32K", str(cpu))
        cache(cpu, 1, 2, "1024K", str(cpu))
    assert cache_bytes(tmp_path) == 4 << 20
    for cpu in range(4):
        cache(cpu, 2, 3, "32768K", "0-1" if cpu < 2 else "2-3")
        cache(cpu, 3, 4, None, "0-3")
    assert cache_bytes(tmp_path) == 64 << 20
