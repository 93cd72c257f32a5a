"""``ft bench api``, small: that it runs, and finds what is over its goals."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from launchers import bench_api
from launchers.bench_api import IdleRow, RequestRow, Results, StreamRow, main, show
from launchers.bench_api_parts import NAMES, Part, Times


def test_it_measures_all_that_it_promises(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROUNDS": 2, "STREAM_TOKENS": 20, "STREAMS": 5}.items():
        monkeypatch.setattr(bench_api, name, value)
    code = main(["--tokens", "3000", "--idle-seconds", "0.2", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == bool(found["missed"])
    paths = ["/v1/messages", "/v1/responses", "/v1/chat/completions"]
    assert [row["path"] for row in found["requests"]] == [row["path"] for row in found["streams"]] == paths
    for row in found["requests"]:
        assert 0 < row["before_engine"]["p50"] <= row["before_engine"]["p99"] and row["busy"]["p50"] > 0
        assert [part["name"] for part in row["parts"]] == [*NAMES]
        assert all(part["p99"] >= part["p50"] >= 0 for part in row["parts"])
        assert 2000 < row["tokens"] < 4000
    assert found["idle"][0]["streams"] == 5


def row(busy: float) -> RequestRow:
    times = Times(busy, busy)
    return RequestRow("/a", 1, 1.0, Times(90.0, 91.0), times, Times(1.0, 1.0), [Part(name, 0.1, 0.2) for name in NAMES])


def test_goals() -> None:
    good = Results([row(5.0)], [StreamRow("/b", 60.0, 10.0)], [IdleRow(1, 1.0, 0.02)])
    bad = Results([row(5.1)], [StreamRow("/b", 61.0, 10.0)], [IdleRow(1, 1.0, 0.021)])
    assert good.missed == []
    assert bad.missed == ["requests to /a", "streams of /b", "idle streams"]
    console = Console(width=200, record=True, file=io.StringIO())
    show(console, bad)
    shown = console.export_text()
    assert all(name in shown for name in NAMES) and shown.count("missed") == 3
