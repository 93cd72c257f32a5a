"""Makes docs/harnesses.md from what the last runs of ``make e2e`` left behind: ``make harnesses``."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from launchers.agents.registry import HARNESSES
from tests.e2e.drivers import DRIVERS
from tests.e2e.scorecard import Row, cells, read

PAGE = Path(__file__).resolve().parents[2] / "docs" / "harnesses.md"
HEAD = """# Harnesses

What was tested, with which version of each client, and what the server had to compute twice. Made by `make
harnesses` from what `make e2e` measured: the real clients, started by `ft launch`, against a local server with scripted
answers and a tiny model, behind a proxy that refuses everything else.

*Replayed* are prompt tokens that were computed before and had to be computed again; *amplification* is computed over
new tokens, and 1.000 is perfect. Checked in every run: the files, the exit codes, and that nothing was computed again
without a named cause. Scenarios:

* **tool loop, restart, resume**: six requests that write, change and run a file, with a failing command and a long
  output; then the server is killed, and a new process of the client goes on with the conversation.
* **compaction**: the client shortens the conversation, on its own or when told to. **memory flush**: before that,
  openclaw asks beside the conversation, with two tools of its twelve, what is to be remembered.
* **interrupt**: the client is interrupted in the middle of an answer; the server gives up at once, and the next process
  goes on. **malformed calls**: an unknown tool, missing arguments, a call that breaks off.
* **sub-agent**: the client starts another agent beside the conversation.
* **terminal**: the client on a terminal of its own, with keys: its folder is trusted, an answer is interrupted with the
  interrupt key, a file is written, and the client is left by its own command; a side request came beside.
* **resume after changes**: the repository changes before a new process goes on, and Qwen Code writes its state into the
  middle of the system text.
* **over HTTP**: Codex without its WebSocket, which it uses in all other rows but for the last turn of the longest.

`ft launch codex` switches Codex's sub-agents off: its title is the side request. mini-swe-agent and aider have no
conversation beside the first, and are not in the first table.
"""
ITEMS = (
    "tool loop",
    "second turn in a new process",
    "interrupt",
    "side request",
    "compaction",
    "malformed call",
    "server restart",
)
SHOWN = {
    "tool loop, restart, resume": (0, 1, 6),
    "tool loop, restart, resume, compaction": (0, 1, 4, 6),
    "compaction": (0, 1, 4),
    "compaction, memory flush": (0, 1, 3, 4),
    "interrupt": (1, 2),
    "malformed calls": (5,),
    "sub-agent": (3,),
    "terminal: interrupt key, work, exit": (2, 3),
    "resume after changes": (1,),
}
"""Which items each scenario has."""


def matrix(rows: list[Row]) -> list[str]:
    """Client by item: how many scenarios with it passed, or why the client has no such thing, or that it is missing."""
    lines, notes = [f"| client | {' | '.join(ITEMS)} |", f"|---|{'---|' * len(ITEMS)}"], []
    for driver in DRIVERS.values():
        harness = driver.harness
        if harness.package.registry != "npm":
            continue
        shown: list[int] = []
        for row in rows:
            scenario, _, transport = row.scenario.partition(" over ")
            if (row.client, transport, row.result) == (harness.title, driver.transport, "passed"):
                shown += SHOWN[scenario]
        cells = [f"{harness.title} over {driver.transport}" if driver.transport else harness.title]
        for at, item in enumerate(ITEMS):
            lack = driver.lacks.get(item)
            cells.append(str(shown.count(at)) if at in shown else "has none" if lack else "**not tested**")
            if lack:
                notes.append(f"{harness.title} has no {item}: {lack.why}, as its `{lack.file}` says: “{lack.says}”.")
        lines.append(f"| {' | '.join(cells)} |")
    return ["Scenarios that passed, by what they show:\n", *lines, "", *(f"{note}\n" for note in notes)]


def page(rows: list[Row]) -> str:
    order = [harness.title for harness in HARNESSES]
    rows = sorted(rows, key=lambda row: (order.index(row.client), row.scenario))
    lines = [HEAD, *matrix(rows)]
    for title, found in groupby(rows, key=lambda row: row.client):
        (harness,) = (one for one in HARNESSES if one.title == title)
        lines += [f"## {title}\n", f"`ft launch {harness.name}`, package `{harness.package.name}`.\n"]
        lines.append("| version | scenario | requests | prompt tokens | replayed | amplification | result | date |")
        lines.append("|---|---|---:|---:|---:|---:|---|---|")
        lines += [f"| {' | '.join((*cells(row)[1:], row.date))} |" for row in found]
        lines.append("")
    missing = [harness.title for harness in HARNESSES if harness.title not in {row.client for row in rows}]
    if missing:
        lines.append(f"Not tested: {', '.join(missing)}.\n")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(read()), encoding="utf-8")
    print(f"wrote {PAGE}")
