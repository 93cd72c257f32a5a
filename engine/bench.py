"""Times decode and prefill, and says what part of the machine's own limits they reach.

Decode is bound by reading weights: its yardstick is the memory bandwidth measured in the same run. Prefill is bound
by arithmetic: its yardstick is torch's own matrix product, in float32 (the type of our activations) and in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from engine.api import EngineConfig
from engine.bandwidth import matmul_probe, read_probe
from engine.bench_model import ModelRun
from engine.bench_shapes import SHAPES
from engine.bench_stack import Cost, CountedOps, Stack
from engine.models.model import Progress
from engine.native.library import NativeLibraryError
from engine.native.ops import NativeOps
from engine.weights.errors import CheckpointError

EXAMPLES = """examples:
  ft bench decode                          one token at a time through a Qwen3.6-shaped stack
  ft bench prefill --tokens 1024           chunks of 1024 tokens
  ft bench decode --sequences 4 --json     four sequences at once, one JSON object on stdout
  ft bench decode --model DIR              a real checkpoint through the real scheduler
"""

PROBE_EVERY = 4
"""Decode steps between two looks at what the machine can do."""


@dataclass(frozen=True)
class Limits:
    """Measured in the same run: bytes per second read, and torch's floating-point operations per second."""

    read: float
    float32: float
    bfloat16: float


@dataclass(frozen=True)
class Report:
    """Rates are per second. ``bytes_per_token`` counts what must move; ``of_read`` is of the measured bandwidth."""

    what: str
    subject: str
    instruction_set: str
    threads: int
    tokens_per_second: float
    bytes_per_token: float
    bytes_per_second: float
    of_read: float
    flops: float
    of_torch_float32: float
    of_torch_bfloat16: float
    limits: Limits

    @classmethod
    def of(
        cls, what: str, subject: str, ops: NativeOps, tokens: int, seconds: float, cost: Cost, limits: Limits
    ) -> Report:
        moved, flops = cost.bytes / seconds, cost.flops / seconds
        return cls(
            what,
            subject,
            ops.instruction_set,
            ops.threads,
            tokens / seconds,
            cost.bytes / tokens,
            moved,
            moved / limits.read,
            flops,
            flops / limits.float32,
            flops / limits.bfloat16,
            limits,
        )


class Yardsticks:
    """The three limits, sampled while the thing itself is timed."""

    def __init__(self, ops: NativeOps) -> None:
        self._threads = ops.threads
        self._read = read_probe(ops)
        self._float32, self._bfloat16 = matmul_probe(torch.float32), matmul_probe(torch.bfloat16)
        self.sample()

    def sample(self) -> None:
        torch.set_num_threads(self._threads)
        for probe in (self._read, self._float32, self._bfloat16):
            probe.sample()
        # Our own threads do the work of a step; torch's would only spin beside them.
        torch.set_num_threads(1)

    def limits(self) -> Limits:
        return Limits(self._read.rate, self._float32.rate, self._bfloat16.rate)


def progress(console: Console) -> Progress:
    def tell(what: str, done: int, total: int) -> None:
        if total > 1:
            console.print(f"{what}: {done} of {total}", highlight=False)

    return tell


def time_model(options: argparse.Namespace, ops: NativeOps, console: Console) -> Report:
    """The median decode step, or prompt, of a real checkpoint; raises CheckpointError."""
    config = EngineConfig(
        model=str(options.model),
        dtype=options.dtype,
        instruction_set=options.instruction_set,
        threads=options.threads,
        max_sequences=1,
    )
    model, yardsticks = ModelRun(config, progress(console)), Yardsticks(ops)
    times = []
    for _ in range(PROBE_EVERY):
        if options.what == "decode":
            times += model.decode(options.context, ceil(options.repeats / PROBE_EVERY))
        else:
            times.append(model.prefill(options.tokens))
        yardsticks.sample()
    tokens = 1 if options.what == "decode" else options.tokens
    cost = model.decode_cost() if options.what == "decode" else model.prefill_cost(tokens)
    return Report.of(options.what, options.model.name, ops, tokens, median(times), cost, yardsticks.limits())


def time_stack(options: argparse.Namespace, ops: CountedOps, console: Console) -> Report:
    """The median step of a random stack; decode: one token of every sequence, prefill: one chunk of one."""
    decode = options.what == "decode"
    sequences, rows = (options.sequences, 1) if decode else (1, options.tokens)
    repeats = options.repeats
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16

    yardsticks = Yardsticks(ops)
    context = options.context + (repeats + 1) * rows
    stack = Stack(ops, options.shape, options.layers, sequences, context, dtype, progress(console))
    times, costs = [], []
    for repeat in range(repeats + 1):
        seconds, cost = stack.step(rows, options.context + repeat * rows)
        times.append(seconds)
        costs.append(cost)
        if repeat % (PROBE_EVERY if decode else 1) == 0:
            yardsticks.sample()
    middle = sorted(range(1, repeats + 1), key=times.__getitem__)[repeats // 2]
    subject = f"{options.shape} x {options.layers} layers, {str(dtype).removeprefix('torch.')}"
    return Report.of(options.what, subject, ops, sequences * rows, times[middle], costs[middle], yardsticks.limits())


def show(report: Report, console: Console) -> None:
    table = Table(title=f"{report.what}: {report.subject}", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    rows = [
        ("kernels", f"{report.instruction_set}, {report.threads} threads"),
        ("speed", f"{report.tokens_per_second:.1f} tok/s"),
        ("moved per token", f"{report.bytes_per_token / 1e6:.1f} MB"),
        ("moved", f"{report.bytes_per_second / 1e9:.1f} GB/s"),
        ("memory read, measured", f"{report.limits.read / 1e9:.1f} GB/s"),
        ("part of what memory allows", f"{report.of_read:.0%}"),
        ("arithmetic", f"{report.flops / 1e9:.3g} GFLOP/s"),
        ("torch float32 product", f"{report.limits.float32 / 1e9:.0f} GFLOP/s"),
        ("part of torch float32", f"{report.of_torch_float32:.0%}"),
        ("torch bfloat16 product", f"{report.limits.bfloat16 / 1e9:.0f} GFLOP/s"),
        ("part of torch bfloat16", f"{report.of_torch_bfloat16:.0%}"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def add_options(chosen: argparse._SubParsersAction[argparse.ArgumentParser], what: str) -> argparse.ArgumentParser:
    parser = chosen.add_parser(
        what, description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint to time instead of a random stack")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="qwen3.6", help="sizes of the random stack (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=4, help="layers of the random stack, each 1.7 GB of memory in qwen3.6 (default 4)"
    )
    parser.add_argument("--tokens", type=int, default=512, help="tokens per prefill chunk (default 512)")
    parser.add_argument("--sequences", type=int, default=1, help="sequences decoded at once (default 1)")
    parser.add_argument("--context", type=int, default=1024, help="tokens already in the context (default 1024)")
    parser.add_argument("--repeats", type=int, default=0, help="steps to time (default: 40 decode, 4 prefill)")
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the weights (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=0, help="default: one per physical core")
    parser.add_argument("--instruction-set", default="auto", help="auto, avx512, avx2 or scalar (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    whole = argparse.ArgumentParser(prog="ft bench")
    chosen = whole.add_subparsers(dest="what", required=True)
    parsers = {what: add_options(chosen, what) for what in ("decode", "prefill")}
    options = whole.parse_args(arguments)
    parser = parsers[options.what]
    options.repeats = options.repeats or (40 if options.what == "decode" else 4)
    for name in ("layers", "tokens", "sequences", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.context < 0 or options.threads < 0:
        parser.error("--context and --threads cannot be negative")
    if options.model is not None and options.sequences != 1:
        parser.error("--sequences is for the random stack only")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(stderr=True)
    try:
        ops = CountedOps(options.instruction_set, options.threads)
        report = (time_stack if options.model is None else time_model)(options, ops, console)
    except (NativeLibraryError, CheckpointError, ValueError) as error:
        print(f"ft bench {options.what}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        show(report, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
