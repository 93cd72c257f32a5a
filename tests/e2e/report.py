"""Makes docs/harnesses.md from what the last runs of ``make e2e`` left behind: ``make harnesses``."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from launchers.agents.registry import HARNESSES
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
* **compaction**: the client shortens the conversation, on its own or when told to.
* **interrupt**: the client is interrupted in the middle of an answer; the server gives up at once, and the next process
  goes on. **malformed calls**: an unknown tool, missing arguments, a call that breaks off.
* **sub-agent**: the client starts another agent beside the conversation.
* **terminal**: the client on a terminal of its own, with keys: its folder is trusted, an answer is interrupted with the
  interrupt key, a file is written, and the client is left by its own command; a side request came beside.
* **resume after changes**: the repository changes before a new process goes on, and Qwen Code writes its state into the
  middle of the system text. The first project shows the server where, the next one has a checkpoint there.
* **over HTTP**: Codex without its WebSocket, which it uses in all other rows but for the last turn of the longest.

What is not in the tables: `ft launch codex` switches Codex's sub-agents off (its title is the side request), pi and
openclaw start none here, and the work of these tests is too short for openclaw to compact it. mini-swe-agent and aider
have no second conversation beside the first.
"""


def page(rows: list[Row]) -> str:
    order = [harness.title for harness in HARNESSES]
    rows = sorted(rows, key=lambda row: (order.index(row.client), row.scenario))
    lines = [HEAD]
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
