"""What the demonstration counts, and when it fails."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from launchers.demo_agents import Row, Stopwatch
from launchers.demo_session import table, verdict


def row(replayed: int, new: int, cause: str = "none") -> Row:
    return Row("Messages", "tool output", 900, 100, replayed, new, cause, 0.1)


def test_a_row_is_read_from_the_header_of_the_first_token_only() -> None:
    rows: list[Row] = []
    watch = Stopwatch("Messages", "first request", rows.append)
    watch.token({"x-ft-reuse": "resumed=128, device=28, host=90, disk=10, replayed=3, new=40, cause=side_request"})
    watch.token({"x-ft-reuse": "pending"})
    assert rows == [Row("Messages", "first request", 28, 100, 3, 40, "side_request", rows[0].ttft)]
    assert rows[0].prompt == 171
    assert rows[0].ttft >= 0


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([row(0, 100)], 0),
        ([row(10, 100)], 0),
        ([row(11, 100)], 1),
        ([row(0, 100), row(1000, 1, "worker_restart")], 1),
    ],
)
def test_more_than_a_tenth_computed_twice_fails(rows: list[Row], code: int) -> None:
    assert verdict(Console(file=StringIO()), rows, 0.1) == code


def test_the_table_fits_80_columns() -> None:
    out = StringIO()
    long = Row("Chat Completions", "title on the side", 10000, 9999, 63, 9999, "tool_args_changed", 12.34)
    Console(file=out, width=80).print(table([long]))
    assert "…" not in out.getvalue()
    assert max(len(line.rstrip()) for line in out.getvalue().splitlines()) <= 80
