"""Measures the CPU's experts against reading the same memory: `python -P -m engine.bench_experts`.

Every format sweeps a pool that exceeds the last cache several times, each expert once, in requests as a decode step
makes them. What counts is the time from when a request is seen until it is answered. Sweeps take turns with plain reads
of the same pool by the same threads, so that both see the same machine, busy or not. On a machine that has other things
to do, `--threads 1 --cpu-time` counts only the time that the one thread had a core.

Then requests are made as a device makes them, after pauses in which the threads may have gone to sleep, or were roused
just before: from when one is made until its answer is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.experts.executor import Executor
from engine.experts.layout import FORMATS, Layout
from engine.experts.pool import Pool
from engine.native.library import NativeLibraryError, cache_bytes

EXAMPLES = """examples:
  python -P -m engine.bench_experts
  python -P -m engine.bench_experts --formats mxfp4 --rows 4
  python -P -m engine.bench_experts --threads 1 --cpu-time --instruction-set avx2
"""


_TIMES = 8
"""As large as the last cache is the pool, unless told otherwise. Half of it is enough."""
_COLUMNS = ("format", "activations", "GB/s", "read GB/s", "of read", "µs per request", "off the exact")
_PAUSE_COLUMNS = ("µs for nothing", "µs for one expert", "for one, roused before")


@dataclass(frozen=True)
class Options:
    """``threads`` 0: as many as decoding uses, where it has them; ``megabytes`` 0: eight times the last cache."""

    hidden: int
    inner: int
    ranks: int
    rows: int
    threads: int
    megabytes: int
    repeats: int
    instruction_set: str
    cpu_time: bool
    pauses: tuple[float, ...]


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


@dataclass(frozen=True)
class Pause:
    """Seconds that requests for ``nothing`` and for one expert take after so many milliseconds without one, and for one
    after ``Executor.rouse``: medians and the slowest."""

    format: str
    pause_ms: float
    nothing: float
    nothing_worst: float
    one: float
    one_worst: float
    roused: float
    roused_worst: float


def pool_bytes(options: Options) -> int:
    return options.megabytes * 1_000_000 or max(1_000_000_000, _TIMES * cache_bytes())


def measure(options: Options, name: str) -> Iterator[Measured]:
    """The format with exact activations and, unless it is bf16, with rounded ones."""
    layout = Layout(FORMATS[name], options.hidden, options.inner)
    experts = -(-pool_bytes(options) // layout.nbytes // options.ranks) * options.ranks
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


def measure_pauses(options: Options, name: str) -> Iterator[Pause]:
    pool = Pool(Layout(FORMATS[name], options.hidden, options.inner), 1, max(64, options.ranks))
    pool.fill_random()
    executor = Executor(pool, 1, options.ranks, options.threads, instruction_set=options.instruction_set)
    for pause in options.pauses:
        taken: tuple[list[float], list[float], list[float]] = [], [], []
        for number in range(3 * options.repeats):
            way = number % 3
            time.sleep(pause / 1e3)
            if way == 2:
                executor.rouse()
            taken[way].append(_asked_seconds(executor, number // 3, min(1, way)))
        yield Pause(name, pause, *(fold(seconds) for seconds in taken for fold in (median, max)))
    executor.close()


def _asked_seconds(executor: Executor, number: int, experts: int) -> float:
    """Of a request through the mailbox for so many experts, from ``number`` on."""
    box, memory, pool = executor.layout, executor.mailbox.numpy(), executor.pool
    ready, done = (memory[at : at + 8].view(np.uint64) for at in (box.ready, box.done))
    plan = memory[box.plan : box.weights].view(np.int32)[: 2 * box.ranks].reshape(box.ranks, 2)
    plan[:, 0], plan[:, 1] = -1, 0
    plan[:experts, 0] = (number + np.arange(experts)) % pool.experts
    done[0] = 0
    start = time.perf_counter()
    ready[0] = 1 << 32 | 1
    while not done[0]:
        pass
    return time.perf_counter() - start


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
        ("threads", 0, "threads; 0: as many as decoding uses"),
        ("megabytes", 0, "size of the pool; 0: eight times the last cache, at least 1000"),
        ("repeats", 7, "sweeps of the pool"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--pauses", nargs="*", type=float, default=[0, 1, 10, 100, 1000], help="milliseconds")
    parser.add_argument("--instruction-set", default="auto", help="auto, amx, avx512, avx2 (and AVX-VNNI) or scalar")
    parser.add_argument("--cpu-time", action="store_true", help="count the thread's own time; needs --threads 1")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    given = vars(parser.parse_args(arguments))
    formats, as_json = given.pop("formats"), given.pop("json")
    options = Options(**given)
    if min(options.rows, options.ranks, options.repeats) < 1 or min(options.threads, options.megabytes) < 0:
        parser.error("sizes and counts must be at least 1")
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time needs --threads 1: it is the time of the thread that asks")
    table, pauses = Table(*_COLUMNS, title=_caption(options)), Table("without a request for", *_PAUSE_COLUMNS)
    try:
        for name in formats:
            for one in measure(options, name):
                if as_json:
                    print(json.dumps({**asdict(one), **asdict(options)}), flush=True)
                table.add_row(*_row(one))
        for pause in measure_pauses(options, formats[-1]):
            if as_json:
                print(json.dumps(asdict(pause)), flush=True)
            pauses.add_row(*_pause_row(pause))
    except (NativeLibraryError, ValueError) as error:
        print(f"cannot measure: {error}", file=sys.stderr)
        return 1
    if not as_json:
        Console().print(table, *((pauses,) if options.pauses else ()))
    return 0


def _caption(options: Options) -> str:
    pool, cache = pool_bytes(options), cache_bytes()
    size = f"a pool of {pool / 1e6:.0f} MB; the last cache holds {cache / 1e6:.0f}"
    return size if pool >= _TIMES / 2 * cache else f"{size}: TOO SMALL A POOL, part of what is read lies there"


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


def _pause_row(one: Pause) -> tuple[str, ...]:
    taken = ((one.nothing, one.nothing_worst), (one.one, one.one_worst), (one.roused, one.roused_worst))
    return f"{one.pause_ms:g} ms", *(f"{middle * 1e6:.0f} (to {worst * 1e6:.0f})" for middle, worst in taken)


if __name__ == "__main__":
    sys.exit(main())
