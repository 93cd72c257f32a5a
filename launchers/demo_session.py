"""What ``ft demo`` runs: the chat, the session, and the table."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from rich.console import Console
from rich.table import Table

from launchers.bench import make_tiny
from launchers.child_server import ChildServer, ChildServerError
from launchers.demo_agents import SDK_ERRORS, MessagesAgent, OpenAIAgent, Record, Row, chat
from launchers.demo_project import Workspace, WorkspaceError

SCRIPT = Path(__file__).with_name("demo_script.jsonl")
QUESTIONS = ("What is the capital of France?", "Tell me in one sentence why the sea is salty.")
MAX_AMPLIFICATION = 1.10


class DemoError(RuntimeError):
    """The server did not do what it should have done."""


def run(flags: Sequence[str] = ()) -> int:
    """Runs the whole demonstration on servers with these flags; its exit code."""
    console = Console(highlight=False)
    try:
        with TemporaryDirectory(prefix="ft-demo-") as scratch:
            free_chat(console, Path(scratch), flags)
            rows, seconds = agent_session(console, Path(scratch), flags)
    except (DemoError, WorkspaceError, ChildServerError, subprocess.SubprocessError, httpx.HTTPError, *SDK_ERRORS) as e:
        console.print(f"ft demo: error: {e}", style="red", markup=False, soft_wrap=True)
        return 1
    console.print(table(rows), "")
    return verdict(console, rows, seconds)


def free_chat(console: Console, scratch: Path, flags: Sequence[str]) -> None:
    console.print("A chat with the embedded model, which is built on first use.", style="bold")
    with ChildServer(flags, scratch / "chat") as server:
        tell_placed(console, server)
        for question in QUESTIONS:
            console.print(f"\n> {question}")
            chat(server.url, question, lambda text: console.out(text, end="", highlight=False))
            console.print()


def agent_session(console: Console, scratch: Path, flags: Sequence[str] = ()) -> tuple[list[Row], float]:
    """The rows of the table, and the seconds from the worker's death to the error that its client saw."""
    console.print("\nAn agent session: real requests and tools; what the model says is scripted.", style="bold")
    console.print(
        "It runs on a tiny random-weight model with recurrent state (the kind that cannot be rewound), "
        "so the times are those of the server, not of a useful model.",
        style="dim",
    )
    model, project = scratch / "model", scratch / "project"
    make_tiny(model, "--dtype", "bfloat16")  # which a GPU serves too
    project.mkdir()
    rows: list[Row] = []
    arguments = ("--model", str(model), "--script", str(SCRIPT), "--max-sequences", "2", *flags)
    with console.status("starting") as status, ChildServer(arguments, scratch / "session") as server:

        def record(row: Row) -> None:
            rows.append(row)
            status.update(f"{row.protocol}: {row.name}")

        tell_placed(console, server)
        workspace = Workspace(project)
        seconds = requests(server, workspace, record)
        workspace.check()
        check_counters(server)
    return rows, seconds


def tell_placed(console: Console, server: ChildServer) -> None:
    """Prints what computes, and what the worker says about where it put things."""
    lines = server.log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line.partition(": ")[2] for line in lines if " engine.device" in line.partition(":")[0]]
    runs_on = server.get("/health")["engine"]["runs_on"]
    console.print("\n".join([f"Computed with {runs_on}.", *told]), style="dim", markup=False)


def requests(server: ChildServer, workspace: Workspace, record: Record) -> float:
    """Everything a harness does to a conversation, in one session."""
    agent = MessagesAgent(server.url, workspace, record)
    agent.user("test_stats.py fails. Find out why and fix it.")
    agent.step("first request")
    agent.step("tool output")
    agent.drop_thinking()
    agent.step("thinking cut")
    agent.step("long tool output")
    agent.step("tool output")
    agent.step("tool output")
    agent.title("title on the side")
    agent.user("Add a median.")
    agent.step("next user turn")
    agent.step("tool output")
    agent.clear_outputs(keep=1)
    agent.user("Which files did you change?")
    agent.step("outputs cleared")

    other = OpenAIAgent(server.url, workspace, record)
    other.responses("Review stats.py.", ["first request", "tool output"])
    other.chat("How long is stats.py?", ["first request", "tool output"])

    agent.user("Write a report.")
    seconds = kill_during(server, agent)
    agent.step("the same again")
    agent.user("Thank you.")
    agent.step("next user turn")
    return seconds


def kill_during(server: ChildServer, agent: MessagesAgent) -> float:
    """After a pause, kill the worker when a request's answer begins; the seconds until its stream said so."""
    server.wait_until_stored()
    killed = 0.0

    def kill() -> None:
        nonlocal killed
        if not killed:
            killed = time.monotonic()
            os.kill(server.worker_pid, signal.SIGKILL)

    try:
        agent.step("worker killed", kill)
    except SDK_ERRORS:
        return time.monotonic() - killed
    raise DemoError("the worker was killed, but the stream ended as if nothing had happened")


def check_counters(server: ChildServer) -> None:
    """Counters that must be 0 whatever happens."""
    stats = server.get("/v1/stats")
    for room, name in (
        ("server", "script_misses"),
        ("sessions", "misses_without_cause"),
        ("engine", "restored_unused"),
    ):
        if value := stats[room][name]:
            raise DemoError(f"{name} is {value} and must be 0")


def table(rows: list[Row]) -> Table:
    """Narrow enough for 80 columns."""
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("request", no_wrap=True)
    for name in ("prompt", "device", "stored", "replayed", "new"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("cause", no_wrap=True)
    shown.add_column("TTFT", justify="right", no_wrap=True)
    protocol = ""
    for row in rows:
        if row.protocol != protocol:
            protocol = row.protocol
            shown.add_row(protocol, style="bold")
        numbers = (f"{n:,}" for n in (row.prompt, row.device, row.stored, row.replayed, row.new))
        shown.add_row(f"  {row.name}", *numbers, row.cause, f"{row.ttft:.2f}s")
    return shown


def verdict(console: Console, rows: list[Row], seconds: float) -> int:
    """Amplification, and whether it is small enough."""
    new = sum(row.new for row in rows)
    computed = new + sum(row.replayed for row in rows)
    amplification = computed / new
    console.print(
        f"{sum(row.prompt for row in rows):,} prompt tokens, {computed:,} computed, {new:,} of them new:\n"
        f"amplification {amplification:.3f}, at most {MAX_AMPLIFICATION:.2f} is allowed."
    )
    console.print(
        "New: what lies behind the longest prefix ever computed. Where thinking is stripped from the past or a "
        "client edits it, all that follows reads differently to the model and is new (outputs cleared, above); "
        "replayed is what was computed before and had to be computed again.\n"
        f"The stream of the killed worker ended with an error after {seconds:.2f} s; the next worker went on with "
        "what the store had kept (stored).",
        style="dim",
    )
    return 0 if amplification <= MAX_AMPLIFICATION else 1
