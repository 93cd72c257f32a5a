"""``ft bench parsers``: it runs for every family, and says what is missed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.weights.tiktoken import build_byte_tokenizer
from launchers import bench_parsers
from launchers.bench_parsers import ParseRow, PromptRow
from launchers.cli import main
from parsers.families.registry import FORMATS

TEMPLATES = Path(__file__).resolve().parents[2] / "engine" / "templates"


@pytest.mark.parametrize("wire_format", FORMATS, ids=lambda known: known.name)
def test_every_family_is_measured(wire_format: bench_parsers.Format) -> None:
    row = bench_parsers.bench_parse(wire_format, 300)
    assert 0 < row.characters_p50 <= row.characters_p99 and 0 < row.tokens_p50 <= row.tokens_p99
    assert 1 < row.growth < 100


def test_a_checkpoint_is_measured_and_goals_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_byte_tokenizer(tmp_path)
    shutil.copy(TEMPLATES / "hermes.jinja", tmp_path / "chat_template.jinja")
    command = ["bench", "parsers", "--family", "qwen3", "--size", "300", "--tokens", "2000", "--model", str(tmp_path)]
    monkeypatch.setattr(bench_parsers, "MAX_STEP_US", 1e9)
    monkeypatch.setattr(bench_parsers, "MAX_GROWTH", 1e9)
    monkeypatch.setattr(bench_parsers, "MAX_SCAN_US", 1e9)
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["family"] for row in result["parse"]] == ["hermes"]
    assert [row["what"] for row in result["prompts"]] == ["agent session", "one long message"]
    monkeypatch.setattr(bench_parsers, "MAX_SCAN_US", 0.0)
    assert main(command) == 1
    assert "missed" in capsys.readouterr().out


def test_goals() -> None:
    row = ParseRow("f", 1.0, 50.0, 1.0, 50.0, 15.0, 1.0, 1.0)
    assert not row.missed
    assert ParseRow("f", 1.0, 50.1, 1.0, 50.0, 15.0, 1.0, 1.0).missed
    assert ParseRow("f", 1.0, 50.0, 1.0, 50.0, 15.1, 1.0, 1.0).missed
    assert not PromptRow("f", "w", 1000, 1.0, 0.001).missed and PromptRow("f", "w", 1000, 1.0, 0.0011).missed


def test_what_cannot_be_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "parsers", "--family", "nobody"])
    assert "there is no family 'nobody'" in capsys.readouterr().err
    command = ["bench", "parsers", "--family", "hermes", "--size", "300", "--model", str(tmp_path / "none")]
    assert main(command) == 1
    assert "does not exist" in capsys.readouterr().out
