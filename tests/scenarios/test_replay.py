"""``ft bench replay`` against a server of its own: a small trace always, the shipped one and its goals in ``deep``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launchers import bench_replay
from launchers.trace_generate import Plan, generate


def test_a_small_trace(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    trace = generate(Plan(seed=2, sessions=3, turns=2, steps=2.0, scale=0.02, edits=1.0, restarts=False))
    trace.save(path)
    bench_replay.replay([str(path), "--model", str(tiny), "--json", "--rows", str(tmp_path / "rows.jsonl")])
    result = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert result["requests"] == len(rows) == len(trace.steps)
    assert (result["misses_without_cause"], result["script_misses"], result["restored_unused"]) == (0, 0, 0)
    whole = [row for row in rows if not row["stopped"]]
    assert result["fresh_tokens"] == sum(row["fresh"] for row in whole)
    assert sum(row["resumed"] for row in whole) > 0.5 * sum(row["prompt"] for row in whole)


@pytest.mark.deep
def test_the_shipped_trace_meets_its_goals(capsys: pytest.CaptureFixture[str]) -> None:
    code = bench_replay.replay(["--json"])
    result = json.loads(capsys.readouterr().out)
    assert (code, result["missed"]) == (0, [])
    assert result["restarts_skipped"] == 0
