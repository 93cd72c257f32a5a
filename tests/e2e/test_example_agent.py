"""The example agent, as its docstring starts it, against a server that speaks by script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launchers.child_server import ChildServer

pytestmark = pytest.mark.e2e

AGENT = Path(__file__).resolve().parents[2] / "examples" / "agent_loop" / "agent.py"
RULES = [
    {"when": {"step": 0}, "say": [{"tool_call": {"name": "bash", "args": {"command": "echo seen > trace; exit 3"}}}]},
    {"when": {"step": 1}, "say": [{"text": "It failed with 3."}]},
]


def test_it_runs_a_command_and_answers(checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, RULES)), encoding="utf-8")
    with ChildServer(("--model", str(checkpoint), "--script", str(script)), tmp_path / "server") as server:
        done = subprocess.run(
            [sys.executable, str(AGENT), "Try something", "--url", server.url],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert (tmp_path / "trace").read_text() == "seen\n"
    assert "It failed with 3." in done.stdout
    assert done.stderr.count("resumed=") == 2 and "replayed=0" in done.stderr
