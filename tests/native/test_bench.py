"""The bench on a tiny stack: the figures hang together, and wrong options are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import bench
from engine.bandwidth import Probe
from engine.checkpoint import write_tiny


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_report(what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "read_probe", lambda ops: bench_probe())
    monkeypatch.setattr(bench, "matmul_probe", lambda dtype: bench_probe())
    assert bench.main([what, "--shape", "tiny", "--repeats", "3", "--tokens", "40", "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["what"] == what
    assert report["threads"] == 1
    assert report["tokens_per_second"] > 0
    assert report["bytes_per_second"] == pytest.approx(report["tokens_per_second"] * report["bytes_per_token"])
    assert report["of_read"] == pytest.approx(report["bytes_per_second"] / report["limits"]["read"])
    assert report["of_torch_float32"] == pytest.approx(report["flops"] / report["limits"]["float32"])


def bench_probe() -> Probe:
    return Probe(1000, lambda: None)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["decode", "--shape", "tiny", "--repeats", "1", "--layers", "1", "--threads", "1"]) == 0
    assert "moved per token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--layers", "0"], "--layers must be at least 1"),
        (["decode", "--model", "x", "--sequences", "2"], "for the random stack only"),
        (["decode", "--context", "-1"], "cannot be negative"),
        ([], "required"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err


def test_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "read_probe", lambda ops: bench_probe())
    monkeypatch.setattr(bench, "matmul_probe", lambda dtype: bench_probe())
    model = write_tiny("qwen3_5_moe", tmp_path / "model")
    for what in ("decode", "prefill"):
        assert (
            bench.main([what, "--model", str(model), "--repeats", "4", "--tokens", "70", "--threads", "1", "--json"])
            == 0
        )
        assert json.loads(capsys.readouterr().out)["bytes_per_token"] > 0
    assert bench.main(["decode", "--model", str(tmp_path / "absent")]) == 1
    assert "is not a directory" in capsys.readouterr().err
