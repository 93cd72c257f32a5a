"""Times decoding on a GPU that does not hold the experts, against what the machine's own bandwidths allow.

A model of published sizes with random weights; the experts that each step needs are drawn so that a given share of them
is on the device. The bound is that of a machine that reads everything once at the bandwidths measured in the same run:
the dense weights and the experts that hit from device memory, the others over the link and by the CPU at once.

Needs an NVIDIA GPU, and host memory for all experts: fewer --layers need less.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from engine.bench_shapes import SHAPES
from engine.device.driver import DriverError
from engine.experts.executor import ExecutorError
from engine.experts.layout import FORMATS
from engine.native.library import NativeLibraryError

EXAMPLES = """examples:
  ft bench offload                                     Qwen3.6-35B-A3B in MXFP4 with 8 GB for experts
  ft bench offload --format bf16 --layers 20           as many layers as host memory holds
  ft bench offload --shape deepseek-v4 --layers 12 --caps 8,24,32 --hits 70,90
  ft bench offload --layers 10 --caps 2 --prefill 16,200,1000,8192 --behind 60000
  ft bench offload --caps 8,24,32 --prefill 8192 --cold 100000
"""

SYNC = 5e-6
"""Seconds that a layer's exchange with the CPU takes at the least."""


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second, measured in the same run: the device's memory; the link alone and the CPU's experts alone; and
    both together at once, which memory may limit."""

    device: float
    link: float
    cpu: float
    both: float


@dataclass(frozen=True)
class Work:
    """Bytes of a step: ``dense`` is read by the device in any case, ``routed`` are all experts of all layers."""

    layers: int
    dense: float
    routed: float

    def seconds(self, hits: float, bandwidths: Bandwidths) -> float:
        """At the least, when a share ``hits`` of the routed bytes is on the device."""
        missing = (1 - hits) * self.routed
        together = min(bandwidths.both, bandwidths.link + bandwidths.cpu)
        on_device = (self.dense + hits * self.routed) / bandwidths.device
        return on_device + missing / together + (self.layers * SYNC if missing else 0.0)


@dataclass(frozen=True)
class Result:
    """One line of the table. Shares are of experts' parts, ``seconds`` the median step; ``gap`` is what it takes
    besides the graph, where that can be told apart: without misses."""

    rows: int
    gigabytes: float
    resident: float
    wanted: float
    hits: float
    fetched: float
    seconds: float
    gap: float | None
    bound: float

    @property
    def fraction(self) -> float:
        """Of the bound."""
        return self.bound / self.seconds


@dataclass(frozen=True)
class Resident:
    """Seconds of a step when all experts are on the device and nothing is decided, and of it besides the graph."""

    seconds: float
    gap: float


@dataclass(frozen=True)
class Suffix:
    """A forward of ``rows`` tokens: ``seconds``, the median; ``moved`` bytes over the link; experts that were found,
    brought after they were routed, left to the CPU, of all layers; ``ahead``: whether whole layers were brought before
    they were routed. ``dense``: seconds when all experts are on the device; ``split``: seconds that the link or the CPU
    takes at the least for what each did; ``pool``: seconds to bring all experts."""

    rows: int
    gigabytes: float
    seconds: float
    moved: float
    found: int
    brought: int
    left: int
    ahead: bool
    dense: float
    split: float
    pool: float

    @property
    def bound(self) -> float:
        """Ahead of time bytes come while layers are computed; otherwise layers wait for theirs."""
        return max(self.dense, self.split) if self.ahead else self.dense + self.split

    @property
    def fraction(self) -> float:
        return self.bound / self.seconds


@dataclass(frozen=True)
class FirstToken:
    """Of a prompt of ``tokens`` in chunks of ``chunk``, the last one counted whole, with no expert on the device at the
    beginning. Measured are three chunks: ``cold``, seconds of the first one; ``first``, of the same one when experts
    are there; ``last``, of the last one. Those between take as much more as attention has more to read."""

    gigabytes: float
    tokens: int
    chunk: int
    cold: float
    first: float
    last: float

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.chunk)

    @property
    def seconds(self) -> float:
        more = self.chunks - 1
        return self.cold + sum(self.first + (self.last - self.first) * at / more for at in range(1, more + 1))


def show_first_tokens(results: Sequence[FirstToken]) -> None:
    for one in results:
        print(
            f"first token of {one.tokens:,} cold ones in chunks of {one.chunk:,}, {one.gigabytes:g} GB for experts: "
            f"{one.seconds:.2f} s, interpolated from the first chunk ({1e3 * one.cold:.0f} ms, {1e3 * one.first:.0f} "
            f"with experts there) and the last one ({1e3 * one.last:.0f} ms)"
        )


def show_suffixes(title: str, bandwidths: Bandwidths, results: Sequence[Suffix]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"link {bandwidths.link / 1e9:.1f}, CPU {bandwidths.cpu / 1e9:.1f} GB/s", highlight=False)
    table = Table(title=title, title_justify="left")
    for column in (
        "GB", "tokens", "ms", "tok/s", "GB moved", "found", "link", "CPU", "layers", "all on device ms", "of bound",
        "of whole pool",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for one in results:
        table.add_row(
            f"{one.gigabytes:g}", str(one.rows), f"{1e3 * one.seconds:.1f}", f"{one.rows / one.seconds:.0f}",
            f"{one.moved / 1e9:.2f}", str(one.found), str(one.brought), str(one.left),
            "ahead" if one.ahead else "routed", f"{1e3 * one.dense:.1f}", f"{one.fraction:.0%}",
            f"{one.seconds / one.pool:.0%}",
        )  # fmt: skip
    console.print(table)


def show(title: str, bandwidths: Bandwidths, resident: Resident | None, results: Sequence[Result]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        f"device {bandwidths.device / 1e9:.0f}, link {bandwidths.link / 1e9:.1f}, CPU {bandwidths.cpu / 1e9:.1f}, "
        f"link and CPU at once {bandwidths.both / 1e9:.1f} GB/s",
        highlight=False,
    )
    table = Table(title=title, title_justify="left")
    for column in (
        "GB", "on the device", "hits wanted", "hits", "fetched", "ms", "tok/s", "bound tok/s", "of bound", "gap us"
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for one in results:
        table.add_row(
            f"{one.gigabytes:g}", f"{one.resident:.0%}", f"{one.wanted:.0%}", f"{one.hits:.1%}", f"{one.fetched:.1%}",
            f"{1e3 * one.seconds:.2f}", f"{one.rows / one.seconds:.1f}", f"{one.rows / one.bound:.1f}",
            f"{one.fraction:.0%}", "" if one.gap is None else f"{1e6 * one.gap:.0f}",
        )  # fmt: skip
    console.print(table)
    if resident is not None:
        line = f"all experts on the device, nothing to decide: {1e3 * resident.seconds:.2f} ms a step, "
        line += f"{1e6 * resident.gap:.0f} us of them between graphs"
        without = [one.seconds for one in results if one.gap is not None]
        if without:
            line += f"; a step without a miss takes {min(without) / resident.seconds - 1:+.1%}"
        console.print(line, highlight=False)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ft bench offload",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3.6", help="default: %(default)s")
    parser.add_argument("--format", choices=sorted(FORMATS), default="mxfp4", help="of experts (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=0, help="default: as many as the model has")
    parser.add_argument(
        "--caps", type=numbers, default=[8.0], metavar="GB,...", help="device memory for experts (default: 8)"
    )
    parser.add_argument(
        "--hits", type=numbers, default=[40.0, 70.0, 90.0, 100.0], metavar="%,...",
        help="share of experts on the device (default: 40,70,90,100)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=60, help="to time for each (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="sequences decoded at once, to 16 (default: %(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence (default: %(default)s)")
    parser.add_argument(
        "--split", type=float, default=None, metavar="SHARE",
        help="of the missing parts, fixed, to go over the link, 0 to 1 (default: a closed loop decides)",
    )  # fmt: skip
    parser.add_argument(
        "--prefill", type=counts, default=[], metavar="TOKENS,...",
        help="time forwards of so many tokens with equally likely experts, instead of decode steps",
    )  # fmt: skip
    parser.add_argument(
        "--behind", type=int, default=0, metavar="TOKENS", help="of the sequence, before those (default: %(default)s)"
    )
    parser.add_argument(
        "--cold", type=int, default=0, metavar="TOKENS",
        help="also state when the first token of so long a prompt is there that nothing is known of, in chunks of the "
        "largest of --prefill",
    )  # fmt: skip
    parser.add_argument(
        "--rounded", action="store_true", help="CPU experts of int8 and mxfp4 round activations to int8"
    )
    parser.add_argument("--no-resident", action="store_true", help="do not time all experts on the device")
    parser.add_argument("--kernels", action="store_true", help="also say what kernels the steps' time goes to")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU (default: every core but one)")
    parser.add_argument("--library", type=Path, metavar="FILE", help="the native library, if it is not installed")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    if options.layers < 0 or options.threads < 0 or options.context < 1 or options.steps < 1:
        parser.error("--layers, --threads, --context and --steps cannot be negative")
    if not 1 <= options.rows <= 16 or not all(cap > 0 for cap in options.caps):
        parser.error("--rows is from 1 to 16, and --caps are above 0")
    if not all(0 <= hits <= 100 for hits in options.hits) or not 0 <= (options.split or 0) <= 1:
        parser.error("--hits are from 0 to 100 and --split from 0 to 1")
    if not all(rows > 0 for rows in options.prefill) or options.behind < 0 or options.cold < 0:
        parser.error("--prefill, --behind and --cold are numbers of tokens")
    if options.cold and not options.prefill:
        parser.error("--cold needs --prefill, the size of its chunks")
    if options.prefill and (options.rows != 1 or options.kernels):
        parser.error("--prefill is for one sequence; leave --rows and --kernels out")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("ft bench offload: torch finds no NVIDIA GPU; ft bench decode times the CPU alone", file=sys.stderr)
        return 1
    tell = Console(stderr=True)
    if options.prefill:
        return suffixes(options, lambda text: tell.print(text, highlight=False))
    from engine.device.bench import Bench  # Triton, which a machine without a GPU need not have

    try:
        bench = Bench(options, lambda text: tell.print(text, highlight=False))
        resident = None if options.no_resident else bench.all_resident()
        results = [one for cap in options.caps for one in bench.capped(cap)]
        bench.close()
    except (NativeLibraryError, DriverError, ExecutorError, MemoryError) as error:
        print(f"ft bench offload: {error}", file=sys.stderr)
        return 1
    if options.json:
        lines = [{**asdict(one), "fraction": one.fraction} for one in results]
        found = {
            "title": bench.title,
            "bandwidths": asdict(bench.bandwidths),
            "resident": resident and asdict(resident),
            "results": lines,
        }
        print(json.dumps(found))
    else:
        show(bench.title, bench.bandwidths, resident, results)
    return 0 if all(math.isfinite(one.seconds) for one in results) else 1


def suffixes(options: argparse.Namespace, tell: Callable[[str], None]) -> int:
    from engine.device.bench_prefill import PrefillBench

    try:
        bench = PrefillBench(options, tell)
        results = bench.run()
    except (NativeLibraryError, DriverError, ExecutorError, MemoryError) as error:
        print(f"ft bench offload: {error}", file=sys.stderr)
        return 1
    if options.json:
        lines = [{**asdict(one), "bound": one.bound, "fraction": one.fraction} for one in results]
        cold = [{**asdict(one), "seconds": one.seconds} for one in bench.first_tokens]
        found = {"title": bench.title, "bandwidths": asdict(bench.bandwidths), "suffixes": lines, "first_tokens": cold}
        print(json.dumps(found))
    else:
        show_suffixes(bench.title, bench.bandwidths, results)
        show_first_tokens(bench.first_tokens)
    return 0 if all(math.isfinite(one.seconds) for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
