"""``ft families``: the table, the page made of it, and what it says of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.weights.tiktoken import build_byte_tokenizer
from launchers.cli import main
from launchers.families_cmd import COLUMNS, markdown, rows, survives
from parsers.families.registry import ALIASES, FORMATS
from parsers.probe import Probe
from tests.parsers.families_page import PAGE, page

TEMPLATES = Path(__file__).resolve().parents[2] / "engine" / "templates"


def test_the_page_is_what_the_command_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/families.md is stale: run `make families`"


def test_every_family_and_alias_has_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].removeprefix("| ").split(", ")[0] for line in lines[2:]] == [f.name for f in FORMATS]
    assert all(alias in "".join(lines) for alias in ALIASES)
    unescaped = [line.replace(r"\|", "") for line in lines]
    assert {line.count("|") for line in unescaped} == {len(COLUMNS) + 1}


def test_wire_texts_are_those_of_the_format() -> None:
    table = {row.family.split(",")[0]: row for row in rows({})}
    assert table["hermes"].call == '<tool_call>⏎{"name": "probe", "arguments": {"n": 2}}⏎</tool_call>'
    assert table["kimi_k2"].ids == "functions.NAME:N"
    assert table["llama3"].reasoning == ""
    assert "````" in markdown([table["deepseek_v3"]]) and "`` `" not in markdown([table["hermes"]])


@pytest.mark.parametrize(
    ("kept", "wanted"),
    [
        ((False, False, False), "nothing: even the system turn changes"),
        ((True, False, False), "all up to the previous query"),
        ((True, True, False), "whole turns"),
        ((True, True, True), "everything"),
    ],
)
def test_what_survives(kept: tuple[bool, bool, bool], wanted: str) -> None:
    header, turn_end, prompt_end = kept
    probe = Probe(
        opener_prefilled=True,
        thinking_in_loop=True,
        thinking_survives=turn_end,
        header_survives=header,
        prompt_end_survives=prompt_end,
        turn_end_survives=turn_end,
    )
    assert survives(probe) == wanted


def test_a_checkpoint_is_told_its_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_byte_tokenizer(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text((TEMPLATES / "hermes.jinja").read_text())
    assert main(["families", "check", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "hermes is taken" in said and "survives a new user turn: " in said
    assert "does not fit: " in said and "kimi_k2" in said
    assert "hy3: no control token of the vocabulary is like <｜hy_User…｜>" in said
    template.write_text("{{ messages[0].content }}")
    assert main(["families", "check", str(tmp_path)]) == 1
    said, problem = capsys.readouterr()
    assert "is taken" not in said and "no family fits" in problem
    template.unlink()
    assert main(["families", "check", str(tmp_path)]) == 1
    assert "error: " in capsys.readouterr().err
    assert main(["families", "check", str(tmp_path / "absent")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["families"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 200 and "[TOOL_CALLS]" in said
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["families"]) == 0
    said = capsys.readouterr().out
    assert "…" not in said and "mistral_v3 " in said  # nothing is cut off
