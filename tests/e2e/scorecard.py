"""What each run of a real client came to: one table at the end, and a file from which docs/harnesses.md is made."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.client import Client

RESULTS = Path(__file__).resolve().parents[2] / ".e2e" / "results.json"


@dataclass(frozen=True)
class Row:
    """``prompt``, ``replayed`` and ``new`` are tokens, over all requests of the run."""

    client: str
    version: str
    scenario: str
    requests: int
    prompt: int
    replayed: int
    new: int
    result: str
    date: str
    seconds: float

    @property
    def amplification(self) -> float:
        return (self.new + self.replayed) / max(self.new, 1)


class Scorecard:
    """The rows of this run of pytest."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    @contextmanager
    def run(self, client: Client, scenario: str) -> Iterator[None]:
        """Whatever happens inside becomes a row."""
        start, began, result = time.monotonic(), time.time(), "failed"
        try:
            yield
            result = "passed"
        finally:
            seconds = round(time.monotonic() - start, 1)
            self.rows.append(measured(client, scenario, result, began, seconds))
            write(self.rows)  # at once: a run may be ended before its end


def measured(client: Client, scenario: str, result: str, began: float, seconds: float) -> Row:
    try:
        requests = [request for request in client.requests() if request["time"] >= began]
    except httpx.HTTPError:
        requests = []  # the server is gone, which is what the test says
    return Row(
        client=client.driver.harness.title,
        version=client.version(),
        scenario=f"{scenario} over {client.driver.transport}" if client.driver.transport else scenario,
        requests=len(requests),
        prompt=sum(request["prompt"] for request in requests),
        replayed=sum(request["replayed"] for request in requests),
        new=sum(request["new"] for request in requests),
        result=result,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        seconds=seconds,
    )


HEADINGS = ("client", "version", "scenario", "requests", "prompt tokens", "replayed", "amplification", "result")
NUMBERS = range(3, 7)


def cells(row: Row) -> tuple[str, ...]:
    numbers = (f"{row.requests}", f"{row.prompt:,}", f"{row.replayed:,}", f"{row.amplification:.3f}")
    return (row.client, row.version, row.scenario, *numbers, row.result)


def table(rows: Sequence[Row]) -> list[str]:
    lines = [HEADINGS, *map(cells, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEADINGS))]
    return [
        "  ".join(
            cell.rjust(widths[at]) if at in NUMBERS else cell.ljust(widths[at]) for at, cell in enumerate(line)
        ).rstrip()
        for line in lines
    ]


def read(path: Path = RESULTS) -> list[Row]:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return [Row(**row) for row in found]


def write(rows: Sequence[Row], path: Path = RESULTS) -> None:
    """Rows of other scenarios stay: a run may have been of some tests only."""
    kept = {(row.client, row.scenario): row for row in (*read(path), *rows)}
    path.parent.mkdir(exist_ok=True)
    text = json.dumps([asdict(row) for row in kept.values()], indent=1)
    path.write_text(f"{text}\n", encoding="utf-8")
