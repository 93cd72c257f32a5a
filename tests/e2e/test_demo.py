"""The demonstration's session, as `make demo` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from launchers.demo_session import agent_session, table, verdict

pytestmark = pytest.mark.e2e


def test_agent_session(tmp_path: Path) -> None:
    console = Console(width=80)
    rows, seconds = agent_session(console, tmp_path)
    console.print(table(rows))
    assert verdict(console, rows, seconds) == 0
    assert seconds < 1.0
    causes = [row.cause for row in rows]
    (again,) = (row for row in rows if row.name == "the same again")
    assert again.device == 0 and again.stored > 0.9 * again.prompt
    assert {"side_request", "history_edited"} < set(causes)
    queries = [row for row in rows if row.name == "next user turn"]
    assert all(row.replayed == 0 and row.new < 64 for row in queries)  # their thinking stays where it was
    assert all(row.replayed == 0 for row in rows if "tool output" in row.name)
