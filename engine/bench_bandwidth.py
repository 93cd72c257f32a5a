"""Measures what moves the bytes of an offloaded model: memory, the CPU's experts, the link, and both at once.

Everything is measured with the kernels that decoding uses, several times, each in every format of the weights. Memory
is read by the threads that compute experts, in turn with their requests, so that both see the same machine. The samples
are added to those of earlier runs on the same GPU and processor; nothing is overwritten.

Without an NVIDIA GPU, memory and the CPU's experts alone are measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.bandwidth_profile import Profile, ProfileError, Rate, default_profile, machine_name
from engine.bench_shapes import SHAPES
from engine.device.driver import CudaDriver, DriverError
from engine.experts.executor import Executor
from engine.experts.layout import FORMATS, Layout
from engine.experts.pool import Pool
from engine.native.library import NativeLibraryError, cache_bytes, find_library, load_library

if TYPE_CHECKING:
    from engine.device.link import Link

EXAMPLES = """examples:
  ft bench bw                          everything, added to the profile of this machine
  ft bench bw --formats mxfp4          one format
  ft bench bw --show                   what is known of this machine, without measuring
"""

MEANINGS = {
    "dram.read": "memory, read by the threads that compute experts",
    "device.copy": "the GPU's memory, read and written",
    "link.copy": "host to GPU, one large copy",
    "cpu": "experts computed on the CPU",
    "link": "experts fetched by the GPU",
    "both.cpu": "experts computed while others are fetched",
    "both.link": "experts fetched while others are computed",
}
"""By the name of the measure; those of a format end in ``.<format>``."""

Samples = dict[str, list[float]]


class CpuExperts:
    """Requests of one row to an executor, over a pool that no cache holds."""

    def __init__(self, executor: Executor) -> None:
        hidden, self._ranks = executor.pool.layout.hidden, executor.layout.ranks
        self._executor = executor
        self._x = torch.randn(1, hidden, generator=torch.Generator().manual_seed(1))
        self._weights = torch.full((1, self._ranks), 1 / self._ranks)
        self._requests = self._all_experts()  # made before, so that their making is not measured
        self._next = self._layer = 0

    def _all_experts(self) -> list[tuple[int, Tensor]]:
        """Layer and plan of requests for all experts of the pool, in order."""
        pool, requests = self._executor.pool, []
        for layer in range(pool.layers):
            for first in range(0, pool.experts, self._ranks):
                chosen = (first + torch.arange(self._ranks)) % pool.experts
                plan = torch.stack((chosen, torch.zeros_like(chosen)), dim=1).int()[None]
                requests.append((layer, plan))
        return requests

    def request(self) -> int:
        """One request for the experts that were not asked for longest. -> bytes of weights read."""
        layer, plan = self._requests[self._next]
        self._next = (self._next + 1) % len(self._requests)
        self._executor.run(layer, self._x, plan, self._weights)
        self._layer = layer
        return self._ranks * self._executor.pool.layout.nbytes

    def rate(self, go_on: Callable[[], bool]) -> float:
        """Bytes per second of requests: one, and more as long as ``go_on()``. What lies between them does not count."""
        moved, taken = self.request(), self._taken()
        while go_on():
            moved, taken = moved + self.request(), taken + self._taken()
        return moved / taken

    def _taken(self) -> float:
        """Seconds of the last request."""
        return float(self._executor.times[self._layer, 0]) / 1e9

    def rate_for(self, seconds: float) -> float:
        end = time.perf_counter() + seconds
        return self.rate(lambda: time.perf_counter() < end)


def measure_experts(executor: Executor, link: Link | None, count: int, seconds: float) -> Samples:
    """``count`` samples of so many seconds of ``read`` (the pool, by the same threads) and ``cpu``, and with a link
    ``link``, ``both.cpu`` and ``both.link``."""
    cpu, samples = CpuExperts(executor), defaultdict[str, list[float]](list)
    fetching = None if link is None else link.fetching(executor.pool, executor.layout.ranks)
    cpu.rate_for(seconds / 4)
    for _ in range(count):
        start = time.perf_counter()
        samples["read"].append(executor.read() / (time.perf_counter() - start))
        samples["cpu"].append(cpu.rate_for(seconds))
        if fetching is not None:
            samples["link"].append(fetching.start(seconds).rate())
            running = fetching.start(seconds)
            samples["both.cpu"].append(cpu.rate(running.busy))
            samples["both.link"].append(running.rate())
    if fetching is not None:
        fetching.close()
    return samples


def measure_format(name: str, options: argparse.Namespace, link: Link | None) -> Samples:
    config = SHAPES[options.shape](1)
    layout = Layout(FORMATS[name], config.hidden, config.expert_inner)
    pool = Pool(layout, 1, max(2 * config.top_k, int(options.gigabytes * 1e9) // layout.nbytes))
    pool.fill_random()
    executor = Executor(pool, 1, config.top_k, options.threads, library=options.library)
    samples = measure_experts(executor, link, options.samples, options.seconds)
    executor.close()
    return {"dram.read": samples.pop("read")} | {f"{what}.{name}": found for what, found in samples.items()}


def measure(options: argparse.Namespace, link: Link | None, tell: Callable[[str], None]) -> Samples:
    """Every measure, by name: bytes per second."""
    samples = defaultdict[str, list[float]](list)
    if link is not None:
        tell("link")
        samples["device.copy"] = link.device_copies(options.samples)
        samples["link.copy"] = link.host_copies(options.samples)
    for name in options.formats:
        tell(f"experts in {name}")
        for what, found in measure_format(name, options, link).items():
            samples[what] += found
    return samples


def show(machine: str, rates: Mapping[str, Rate], now: Mapping[str, Sequence[float]], console: Console) -> None:
    table = Table(title=machine, title_justify="left")
    read = Rate(tuple(now["dram.read"])).middle if "dram.read" in now else 0.0
    for column in ("measure", "what", "this run, GB/s", "its spread", "of memory", "all runs, GB/s", "samples"):
        table.add_column(column, justify="left" if column in ("measure", "what") else "right")
    for name, rate in rates.items():
        run = Rate(tuple(now[name])) if name in now else None
        meaning = MEANINGS.get(name) or MEANINGS.get(name.rpartition(".")[0], "")
        table.add_row(
            name, meaning, f"{run.middle / 1e9:.1f}" if run else "", f"{run.spread:.0%}" if run else "",
            f"{run.middle / read:.0%}" if run and name.startswith("cpu.") else "",
            f"{rate.middle / 1e9:.1f}", str(len(rate.samples)),
        )  # fmt: skip
    console.print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ft bench bw", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=",".join(FORMATS), help="of the experts, with commas (default: all)")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="qwen3.6", help="sizes of the experts (default: %(default)s)"
    )
    parser.add_argument("--samples", type=int, default=5, help="of every measure (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of every sample (default: %(default)s)")
    parser.add_argument(
        "--gigabytes", type=float, help="of experts (default: 2, or eight times the last cache if that is more)"
    )
    parser.add_argument("--quick", action="store_true", help="less of all these: 3 samples of 0.1 s, half of the GB")
    parser.add_argument("--threads", type=int, default=0, help="default: as many as decoding uses")
    parser.add_argument("--profile", type=Path, default=default_profile(), metavar="FILE", help="default: %(default)s")
    parser.add_argument("--show", action="store_true", help="show the profile, measure nothing")
    parser.add_argument("--library", type=Path, metavar="FILE", help="the native library, if it is not installed")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    options.formats = [name for name in options.formats.split(",") if name]
    if unknown := set(options.formats) - set(FORMATS):
        parser.error(f"there is no format {', '.join(sorted(unknown))}; there are {', '.join(FORMATS)}")
    if options.gigabytes is None:
        options.gigabytes = max(2.0, 8 * cache_bytes() / 1e9)
    if options.quick:
        options.samples, options.seconds, options.gigabytes = 3, 0.1, options.gigabytes / 2
    if options.samples < 1 or options.seconds <= 0 or options.gigabytes <= 0 or options.threads < 0:
        parser.error("--samples, --seconds and --gigabytes must be above 0, --threads not below")
    return options


def find_link(library: Path | None) -> Link | None:
    """None on a machine without a GPU."""
    if not torch.cuda.is_available():
        return None
    from engine.device.link import Link  # Triton, which a machine without a GPU need not have

    torch.zeros(1, device="cuda")  # makes the context that the driver needs
    return Link(CudaDriver(load_library(library or find_library())))


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(stderr=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    machine, profile, samples = machine_name(gpu), Profile(options.profile), Samples()
    try:
        if not options.show:
            profile.rates(machine)  # a bad file is better known before measuring than after
            samples = measure(options, find_link(options.library), lambda what: console.print(what, highlight=False))
            profile.add(machine, samples)
        rates = profile.rates(machine)
    except (NativeLibraryError, DriverError, ProfileError, OSError, MemoryError) as error:
        print(f"ft bench bw: {error}", file=sys.stderr)
        return 1
    if options.json:
        known = {name: {"median": rate.middle, "samples": list(rate.samples)} for name, rate in rates.items()}
        print(json.dumps({"machine": machine, "run": samples, "profile": known}))
    elif not rates:
        print(f"nothing is known of this machine ({machine}); run: ft bench bw")
    else:
        show(machine, rates, samples, Console(width=None if sys.stdout.isatty() else 120))
    return 0


if __name__ == "__main__":
    sys.exit(main())
