"""Measures the CPU's experts against reading the same memory: `python -P -m engine.bench_experts`.

Every format sweeps a pool far larger than the caches, each expert once, in requests as a decode step makes them. What
counts is the time from when a request is seen until it is answered. Sweeps take turns with plain reads of the same pool
by the same threads, so that both see the same machine, busy or not. On a machine that has other things to do,
`--threads 1 --cpu-time` counts only the time that the one thread had a core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.experts.executor import Executor
from engine.experts.layout import FORMATS, Layout
from engine.experts.pool import Pool
from engine.native.library import NativeLibraryError, physical_cores

EXAMPLES = """examples:
  python -P -m engine.bench_experts
  python -P -m engine.bench_experts --formats mxfp4 --rows 4
  python -P -m engine.bench_experts --threads 1 --cpu-time --instruction-set avx2
"""


@dataclass(frozen=True)
class Options:
    hidden: int
    inner: int
    ranks: int
    rows: int
    threads: int
    megabytes: int
    repeats: int
    instruction_set: str
    cpu_time: bool


@dataclass(frozen=True)
class Measured:
    """Rates in bytes of weights per second, each read once for all ``rows``; medians over sweeps. ``error`` is relative
    to the exact result."""

    format: str
    exact: bool
    rate: float
    read: float
    of_read: float
    low: float
    high: float
    request_seconds: float
    error: float


def measure(options: Options, name: str) -> Iterator[Measured]:
    """The format with exact activations and, unless it is bf16, with rounded ones."""
    layout = Layout(FORMATS[name], options.hidden, options.inner)
    experts = -(-options.megabytes * 1_000_000 // layout.nbytes // options.ranks) * options.ranks
    pool = Pool(layout, 1, max(experts, options.ranks))
    pool.fill_random()
    x, weights = torch.randn(options.rows, options.hidden), torch.rand(options.rows, options.ranks)
    plans = _plans(pool, options)
    truth: Tensor | None = None
    for exact in (True, False) if name != "bf16" else (True,):
        executor = Executor(pool, options.rows, options.ranks, options.threads, exact, options.instruction_set)
        y = executor.run(0, x, plans[0], weights)
        truth = y if truth is None else truth
        sweeps, reads = list[float](), list[float]()
        for _ in range(options.repeats + 1):  # the first round only warms up
            reads.append(_read_rate(executor, options.cpu_time))
            seconds = sum(_request_seconds(executor, x, plan, weights, options.cpu_time) for plan in plans)
            sweeps.append(len(pool) * layout.nbytes / seconds)
        executor.close()
        ratios = sorted(a / b for a, b in zip(sweeps[1:], reads[1:], strict=True))
        yield Measured(
            name,
            exact,
            median(sweeps[1:]),
            median(reads[1:]),
            median(ratios),
            ratios[0],
            ratios[-1],
            options.ranks * layout.nbytes / median(sweeps[1:]),
            float((y - truth).norm() / truth.norm()),
        )


def _read_rate(executor: Executor, cpu_time: bool) -> float:
    clock = time.thread_time if cpu_time else time.perf_counter
    start = clock()
    return executor.read() / (clock() - start)


def _request_seconds(executor: Executor, x: Tensor, plan: Tensor, weights: Tensor, cpu_time: bool) -> float:
    start = time.thread_time()
    executor.run(0, x, plan, weights)
    return time.thread_time() - start if cpu_time else float(executor.times[0, 0]) / 1e9


def _plans(pool: Pool, options: Options) -> list[Tensor]:
    """Every expert in one request; all rows of it with the same experts."""
    order = torch.randperm(pool.experts, generator=torch.Generator().manual_seed(1)).view(-1, options.ranks)
    plans = torch.stack((order, torch.zeros_like(order)), dim=2).int()
    return [plan.expand(options.rows, -1, -1).contiguous() for plan in plans]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -P -m engine.bench_experts",
        description="How fast the CPU computes experts, next to how fast it reads memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    for name, default, what in (
        ("hidden", 2048, "size of a row"),
        ("inner", 512, "columns of an expert"),
        ("ranks", 8, "experts of a row"),
        ("rows", 1, "rows of a request"),
        ("threads", 0, "threads; 0: one on every core"),
        ("megabytes", 1000, "size of the pool"),
        ("repeats", 7, "sweeps of the pool"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--instruction-set", default="auto", help="auto, avx512, avx2 or scalar")
    parser.add_argument("--cpu-time", action="store_true", help="count the thread's own time; needs --threads 1")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    given = vars(parser.parse_args(arguments))
    formats, as_json = given.pop("formats"), given.pop("json")
    options = Options(**given | {"threads": given["threads"] or physical_cores()})
    if min(options.rows, options.ranks, options.megabytes, options.repeats) < 1:
        parser.error("sizes and counts must be at least 1")
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time needs --threads 1: it is the time of the thread that asks")
    table = Table("format", "activations", "GB/s", "read GB/s", "of read", "µs per request", "off the exact")
    try:
        for name in formats:
            for one in measure(options, name):
                if as_json:
                    print(json.dumps({**asdict(one), **asdict(options)}), flush=True)
                table.add_row(*_row(one))
    except (NativeLibraryError, ValueError) as error:
        print(f"cannot measure: {error}", file=sys.stderr)
        return 1
    if not as_json:
        Console().print(table)
    return 0


def _row(one: Measured) -> tuple[str, ...]:
    return (
        one.format,
        "float32" if one.format == "bf16" else "23 bits" if one.exact else "16 bits",
        f"{one.rate / 1e9:.1f}",
        f"{one.read / 1e9:.1f}",
        f"{one.of_read:.0%} ({one.low:.0%} to {one.high:.0%})",
        f"{one.request_seconds * 1e6:.0f}",
        f"{one.error:.1e}",
    )


if __name__ == "__main__":
    sys.exit(main())
