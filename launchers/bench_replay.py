"""``ft bench replay`` and ``ft bench trace``: how much of an agent's traffic is computed more than once."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from rich.console import Console

from launchers.bench import failed, make_tiny, table
from launchers.child_server import ChildServer, ChildServerError
from launchers.replay import Replay, ReplayError, Row, write_script
from launchers.trace import Trace, TraceError
from launchers.trace_generate import Plan, generate
from parsers.load import FamilyError, load_family

SHIPPED = Path(__file__).with_name("data") / "trace.jsonl"
TINY = ("--context", "65536", "--hidden", "32", "--dtype", "bfloat16", "--tied")
MEMORY = ("--kv-bytes", "24m", "--checkpoint-bytes", "2m", "--host-cache", "16m", "--store-quota", "1g")
"""About four of the shipped trace's conversations fit on the tiny model's device, so that the others are restored."""
MAX_APPEND, MAX_WHOLE = 1.10, 1.25
MAX_EXCESS_MEAN, MAX_EXCESS_P95 = 1_000.0, 4_000.0
IDLE = 3600.0
STATS = ("prefilled_tokens", "background_tokens", "background_wasted_tokens", "store_bytes_written")
REPLAY_EXAMPLES = """examples:
  ft bench replay
  ft bench replay trace.jsonl --rows rows.jsonl
  ft bench replay trace.jsonl --model DIR --url http://127.0.0.1:8000"""
TRACE_EXAMPLES = """examples:
  ft bench trace --out trace.jsonl --sessions 2 --turns 3
  ft bench trace --out trace.jsonl --script rules.jsonl --edits 0 --no-restarts"""
MUST_BE_ZERO = ("restored_unused", "misses_without_cause", "script_misses")


@dataclass(frozen=True)
class Rate:
    requests: int
    prompt: int
    resumed: int

    @property
    def hit(self) -> float:
        return self.resumed / max(self.prompt, 1)


@dataclass(frozen=True)
class Excess:
    """Tokens computed beyond what was new, per request."""

    requests: int
    mean: float
    p95: float


class LocalServer:
    """A server of our own, through its restarts; sums up what each of its lives counted."""

    def __init__(self, server: ChildServer) -> None:
        self.totals: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self._server = server

    @property
    def url(self) -> str:
        return self._server.url

    def restart(self, how: str) -> bool:
        self.count()
        self._server.restart(kill=how == "kill")
        return True

    def count(self) -> None:
        """Add this life's counters to the totals."""
        self.gauges = _gauges(self.url)
        self.totals.update({name: int(value) for name, value in self.gauges.items() if _counts(name)})


class OtherServer:
    """One that is running already: it cannot be restarted, and what it counted before is taken off."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.totals: Counter[str] = Counter()
        self.gauges = self._before = _gauges(self.url)

    def restart(self, how: str) -> bool:
        return False

    def count(self) -> None:
        self.gauges, before = _gauges(self.url), self._before
        counted = ((name, value) for name, value in self.gauges.items() if _counts(name))
        self.totals = Counter({name: int(value - before.get(name, 0.0)) for name, value in counted})


def _gauges(url: str) -> dict[str, float]:
    """All numbers of a server by name. Raises httpx.HTTPError."""
    response = httpx.get(f"{url}/v1/stats", timeout=10.0, trust_env=False)
    response.raise_for_status()
    rooms: list[dict[str, float]] = [room for room in response.json().values() if isinstance(room, dict)]
    return {name: value for room in rooms for name, value in room.items()}


def _counts(name: str) -> bool:
    return name in (*STATS, *MUST_BE_ZERO) or name.startswith("cause_")


# ── what came out ───────────────────────────────────────────────────────────────────────────────────────────────────


def amplification(rows: Iterable[Row]) -> float:
    """Tokens that clients waited for over new tokens. A request that was cut off counts with its repetition."""
    counted = [row for row in rows if not row.stopped]
    return sum(row.computed for row in counted) / max(1, sum(row.fresh for row in counted))


def excess(rows: Iterable[Row]) -> Excess:
    found = sorted(row.excess for row in rows if not row.stopped)
    if not found:
        return Excess(0, 0.0, 0.0)
    return Excess(len(found), fmean(found), float(found[math.ceil(0.95 * len(found)) - 1]))


def report(replay: Replay, totals: Counter[str], gauges: dict[str, float]) -> dict[str, Any]:
    """Everything that is printed, as plain data."""
    rows = replay.rows
    edits: dict[str, list[Row]] = {}
    for row in rows:
        for edit in row.ask.edits:
            edits.setdefault(edit.kind, []).append(row)
        if row.ask.trigger == "retry":
            edits.setdefault("sent_again", []).append(row)
    selections: dict[str, Callable[[Row], bool]] = {
        "first request": lambda row: row.ask.trigger == "first",
        "tool result": lambda row: row.ask.trigger == "tool",
        "user": lambda row: row.ask.trigger == "user",
        "user after > 1 h": lambda row: row.ask.trigger == "user" and row.ask.idle > IDLE,
        "repeated": lambda row: row.ask.trigger == "retry",
        "after a restart": lambda row: row.restarted and row.ask.trigger != "first",
    }
    held = gauges.get("store_live_bytes", 0.0)
    fresh = sum(row.fresh for row in rows if not row.stopped)
    all_edits = excess(row for row in rows if row.edited)
    result: dict[str, Any] = {
        "requests": len(rows),
        "prompt_tokens": sum(row.prompt for row in rows),
        "fresh_tokens": fresh,
        "computed_tokens": sum(row.computed for row in rows if not row.stopped),
        **{name: totals[name] for name in STATS},
        "amplification_append": amplification(row for row in rows if row.append and not row.edited),
        "amplification": totals["prefilled_tokens"] / max(1, fresh),
        "excess": {
            "all edits": asdict(all_edits),
            **{kind: asdict(excess(some)) for kind, some in sorted(edits.items())},
        },
        "hits": {name: _rate(filter(select, rows)) for name, select in selections.items()},
        "causes": dict(Counter(row.cause for row in rows).most_common()),
        "store_live_bytes": held,
        "write_amplification": totals["store_bytes_written"] / held if held else 0.0,
        "prompts_unlike_expected": sum(row.prompt != row.expected for row in rows if row.cause != "pending"),
        "restarts_skipped": replay.skipped_restarts,
        **{name: totals[name] for name in MUST_BE_ZERO},
    }
    result["missed"] = missed(result)
    return result


def _rate(rows: Iterable[Row]) -> dict[str, float]:
    some = [row for row in rows if row.cause != "pending"]
    rate = Rate(len(some), sum(row.prompt for row in some), sum(row.resumed for row in some))
    return {**asdict(rate), "hit": rate.hit}


def missed(result: dict[str, Any]) -> list[str]:
    """The goals that were not reached, in words."""
    edits = result["excess"]["all edits"]
    goals = [
        ("amplification of what only appends", result["amplification_append"], MAX_APPEND),
        ("amplification of everything", result["amplification"], MAX_WHOLE),
        ("mean replay per edit beyond what is new", edits["mean"], MAX_EXCESS_MEAN),
        ("its 95th percentile", edits["p95"], MAX_EXCESS_P95),
        *((name, result[name], 0) for name in MUST_BE_ZERO),
    ]
    return [f"{name} is {value:.3f}, allowed are {limit}" for name, value, limit in goals if value > limit]


def show(console: Console, result: dict[str, Any]) -> None:
    hits = table("prompt tokens resumed, by what made the client ask", "requests", "prompt", "resumed", "hit")
    for name, rate in result["hits"].items():
        numbers = (f"{rate[key]:,}" for key in ("requests", "prompt", "resumed"))
        hits.add_row(name, *numbers, f"{100 * rate['hit']:.1f} %" if rate["requests"] else "")
    edits = table("tokens computed again, by what the client edited", "requests", "mean", "p95")
    for name, one in result["excess"].items():
        edits.add_row(name, f"{one['requests']:,}", f"{one['mean']:,.0f}", f"{one['p95']:,.0f}")
    causes = table("causes named by the server", "requests")
    for name, count in result["causes"].items():
        causes.add_row(name, f"{count:,}")
    for shown in (hits, edits, causes):
        console.print(shown, "")
    console.print(
        f"{result['requests']:,} requests, {result['prompt_tokens']:,} prompt tokens, {result['fresh_tokens']:,} of "
        f"them new; the engine prefilled {result['prefilled_tokens']:,}, {result['background_tokens']:,} of them ahead "
        f"({result['background_wasted_tokens']:,} in vain), and {result['computed_tokens']:,} while a client waited.\n"
        f"amplification {result['amplification_append']:.3f} where clients only append (at most {MAX_APPEND:.2f}), "
        f"{result['amplification']:.3f} in all (at most {MAX_WHOLE:.2f})\n"
        f"store: {result['store_bytes_written'] / 1e6:,.1f} MB written, "
        f"{result['write_amplification']:.2f} times what it holds in the end\n"
        + ", ".join(f"{name} {result[name]}" for name in MUST_BE_ZERO)
    )
    if result["prompts_unlike_expected"]:
        console.print(f"{result['prompts_unlike_expected']} prompts had another length than a perfect server's.")
    if result["restarts_skipped"]:
        console.print(f"{result['restarts_skipped']} restarts were left out: the server is not ours.")
    for text in result["missed"]:
        console.print(f"missed: {text}", style="red")


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────────


def replay(arguments: Sequence[str]) -> int:
    """1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="ft bench replay",
        description="Replay a trace of agents against a server, and count what is computed twice.\n"
        "The shipped trace takes minutes. Ends with 1 when a goal is missed.",
        epilog=REPLAY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "trace", nargs="?", type=Path, default=SHIPPED, metavar="TRACE", help="default: the one that comes with ft"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint to serve (default: a tiny hybrid with random weights)"
    )
    parser.add_argument(
        "--url",
        help="a running server of --model, started with the script of ft bench trace (default: one is started)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--rows", type=new_file, metavar="FILE", help="also write what each request reused, as JSONL")
    options = parser.parse_args(arguments)
    if options.url and options.model is None:
        parser.error("--url needs --model: the tokens are counted here too")
    console = Console(highlight=False, stderr=options.json)
    try:
        with TemporaryDirectory(prefix="ft-replay-") as scratch:
            run, totals, gauges = _run(console, Path(scratch), options)
    except (TraceError, ReplayError, FamilyError, ChildServerError, subprocess.SubprocessError, httpx.HTTPError) as e:
        return failed(console, "bench replay", e)
    if options.rows is not None:
        lines = (json.dumps({**asdict(row), "ask": row.ask.model_dump(exclude_defaults=True)}) for row in run.rows)
        options.rows.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    result = report(run, totals, gauges)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(console, result)
    return 1 if result["missed"] else 0


def new_file(text: str) -> Path:
    """A path that can be written. Checked before minutes of work, not after."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file in a folder that is there")
    return path


def _run(console: Console, scratch: Path, options: argparse.Namespace) -> tuple[Replay, Counter[str], dict[str, float]]:
    trace = Trace.load(options.trace)
    model = options.model or make_tiny(scratch / "model", *TINY)
    run = Replay(trace, load_family(model))
    with ExitStack() as stack:
        status = stack.enter_context(console.status("starting"))
        server: LocalServer | OtherServer
        if options.url:
            server = OtherServer(options.url)
        else:
            script = scratch / "script.jsonl"
            write_script(trace, script)
            memory = MEMORY if options.model is None else ()
            arguments = ("--model", str(model), "--script", str(script), *memory)
            server = LocalServer(stack.enter_context(ChildServer(arguments, scratch / "server")))
        run.run(server, lambda done, total: status.update(f"request {done} of {total}"))
        server.count()
        return run, server.totals, server.gauges


def trace(arguments: Sequence[str]) -> int:
    plan = Plan()
    parser = argparse.ArgumentParser(
        prog="ft bench trace",
        description="Make a trace shaped like real agents' use.",
        epilog=TRACE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=new_file, required=True, metavar="FILE", help="JSONL, for ft bench replay")
    parser.add_argument("--script", type=new_file, metavar="FILE", help="also write the rules for ft serve --script")
    number: type[int] | type[float]
    for name, number, text in (
        ("seed", int, "the same one makes the same trace"),
        ("sessions", int, "side by side"),
        ("turns", int, "of the user, in each session"),
        ("steps", float, "mean requests per turn"),
        ("scale", float, "of all lengths; 1 is like real agents"),
        ("edits", float, "share of turns that edit the history; 0: none"),
    ):
        default = getattr(plan, name)
        parser.add_argument(f"--{name}", type=number, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--no-restarts", dest="restarts", action="store_false", help="leave the server's restarts out")
    options = vars(parser.parse_args(arguments))
    out, script = options.pop("out"), options.pop("script")
    made = generate(Plan(**options))
    made.save(out)
    if script is not None:
        write_script(made, script)
    print(f"{len(made.steps)} steps in {out}")
    return 0
