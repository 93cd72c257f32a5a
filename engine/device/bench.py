"""The GPU side of ``ft bench offload``: builds the model, forces its routing, times its steps."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from engine.api import PAGE
from engine.bandwidth import read_probe
from engine.bench_bandwidth import measure_experts
from engine.bench_offload import Bandwidths, Resident, Result, Work
from engine.bench_shapes import SHAPES, RandomSource
from engine.bench_trace import ForcedRouting
from engine.device.driver import CudaDriver
from engine.device.graph import DecodeSteps
from engine.device.link import Link
from engine.experts.executor import Executor
from engine.experts.layout import FORMATS, Layout
from engine.experts.offload import OffloadedExperts
from engine.experts.pool import Pool
from engine.experts.prefill import SUFFIX
from engine.experts.split import Split
from engine.kernels.experts import Sums
from engine.kernels.linear import DeviceWeight
from engine.kernels.ops import DeviceExperts, DeviceOps, add_to, sums_of
from engine.kernels.resident import ResidentExperts
from engine.layers.loader import Loader
from engine.layers.ops import Routing
from engine.models.qwen3_5_moe import Qwen35Moe
from engine.native.library import find_library, load_library
from engine.native.ops import NativeOps
from engine.runner import Rows, Runner

_SAMPLES, _SECONDS = 3, 0.2
"""Of each bandwidth."""
_SETTLE = 24
"""Steps before those that are timed: the split finds its share."""


class Experts:
    """Experts that are in the pool already; what computes them can be changed between steps."""

    now: DeviceExperts

    def __init__(self) -> None:
        self._layers = 0

    def pack(self, gate_up: Tensor, down: Tensor) -> int:
        self._layers += 1
        return self._layers - 1

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, layer: Any) -> Tensor:
        return self.now.run(x, ids, weights, layer)

    def add(self, base: Tensor, x: Tensor, ids: Tensor, weights: Tensor, layer: Any) -> Tensor:
        return add_to(self.now, base, x, ids, weights, layer)

    def sums(self, x: Tensor, routing: Routing, layer: Any) -> Sums | None:
        return sums_of(self.now, x, routing, layer)


class ForcedOps(DeviceOps):
    """The operations, but the routers' choices are read from ``routing``; counts the bytes of linear layers."""

    routing: ForcedRouting

    def __init__(self, experts: DeviceExperts, device: torch.device) -> None:
        super().__init__(experts, device)
        self.bytes = 0
        self._calls = 0

    def pack(self, weight: Tensor) -> DeviceWeight:
        self.bytes += weight.nbytes
        return super().pack(weight)

    def add_shared_experts(
        self, base: Tensor, x: Tensor, routing: Routing, experts: Any,
        gate_up: Tensor, gate: Tensor, down: DeviceWeight,
    ) -> Tensor:  # fmt: skip
        layer, self._calls = self._calls % self.routing.ids.shape[0], self._calls + 1
        routing = replace(routing, logits=self.routing.logits[layer])
        return super().add_shared_experts(base, x, routing, experts, gate_up, gate, down)


class Bench:
    """One model; ``tell`` is told of progress. Raises what building pool, executor, driver and model raise."""

    def __init__(self, options: argparse.Namespace, tell: Callable[[str], None]) -> None:
        self._options, self._tell = options, tell
        self._device = torch.device("cuda")
        config = SHAPES[options.shape](options.layers)
        layout = Layout(FORMATS[options.format], config.hidden, config.expert_inner)
        layers = len(config.kinds)
        self.title = f"{options.shape}, {layers} layers, {options.format}, {options.rows} x {options.context} tokens"
        library = options.library or find_library()

        start = time.perf_counter()
        self._pool = Pool(layout, layers, config.experts)
        self._pool.fill_random()
        tell(f"pool of {self._pool.nbytes / 1e9:.1f} GB filled in {time.perf_counter() - start:.1f} s")
        self._executor = Executor(
            self._pool,
            SUFFIX if options.prefill else options.rows,
            config.top_k,
            options.threads,
            exact=not options.rounded,
            library=library,
        )
        self._experts = Experts()
        self._ops = ForcedOps(self._experts, self._device)
        self._ops.routing = ForcedRouting(layers, config.experts, options.rows, config.top_k, self._device)
        source = RandomSource(torch.bfloat16, self._device)
        model = Qwen35Moe(config, Loader(source, self._ops, self._device), config.context, lambda *_: None)
        self._driver = CudaDriver(load_library(library))
        tell(f"memory operations: {'yes' if self._driver.memory_operations else 'no, host functions instead'}")
        pages = -(-(options.context + max([4096, *options.prefill])) // PAGE)
        self._runner = Runner(
            model, self._ops, torch.bfloat16,
            pages=options.rows * pages + 1, slots=options.rows + 2, device=self._device,
        )  # fmt: skip
        for tensor in (*self._runner.cache.keys, *self._runner.cache.values, *self._runner.cache.states):
            tensor.zero_()
        self._steps = self._brought = 0
        self._pages = pages
        self._link = Link(self._driver)
        self.bandwidths = self._measure()
        self._dense = self._dense_bytes()

    def all_resident(self) -> Resident:
        """The same model when all experts are on the device and nothing is decided."""
        self._experts.now = ResidentExperts.of_pool(self._pool, self._device)
        self._ops.routing.draw(torch.zeros(len(self._pool), dtype=torch.int32, device=self._device), 1.0)
        steps = self._decode_steps(lambda: None)
        self._tell("all experts on the device")
        seconds = median([self._step(steps) for _ in range(_SETTLE + self._options.steps)][_SETTLE:])
        if self._options.kernels:
            self._kernels(steps)
        return Resident(seconds, seconds - self._without_gaps(steps))

    def capped(self, gigabytes: float) -> Iterator[Result]:
        """For every wanted share of hits that so much memory for experts allows."""
        options, pool = self._options, self._pool
        slots = min(len(pool), int(gigabytes * 1e9) // pool.stride - 1)
        room = torch.empty(slots + 1, pool.stride, dtype=torch.uint8, device=self._device)
        experts = OffloadedExperts(pool, self._executor, self._driver, self._split(), room)
        experts.start()
        self._experts.now = experts
        steps = self._decode_steps(experts.report, experts.bringing)
        self._prime(experts, steps)
        for wanted in options.hits:
            if wanted == 100 or slots < len(pool):
                self._tell(f"{gigabytes:g} GB for experts, {wanted:g} % on the device")
                yield self._time(experts, steps, gigabytes, wanted / 100)
        experts.close()

    def close(self) -> None:
        self._executor.close()

    def _time(self, experts: OffloadedExperts, steps: DecodeSteps, gigabytes: float, wanted: float) -> Result:
        pool = self._pool
        for _ in range(_SETTLE):
            self._step(steps, experts, wanted)
        before, self._brought = experts.residency.counters.tolist(), 0
        times = [self._step(steps, experts, wanted) for _ in range(self._options.steps)]
        hits, fetched, left = (
            after - earlier for after, earlier in zip(experts.residency.counters.tolist()[:3], before[:3], strict=True)
        )
        brings = experts.brings(self._options.rows)
        self._tell(f"{self._brought} of {len(times)} steps did not ask the CPU")
        if self._options.kernels:
            self._kernels(steps, brings)
        used = hits + fetched + left
        routed = used / pool.layout.parts * pool.layout.nbytes / self._options.steps
        work = Work(pool.layers, self._dense, routed)
        return Result(
            rows=self._options.rows,
            gigabytes=gigabytes,
            resident=experts.residency.slots / len(pool),
            wanted=wanted,
            hits=hits / used,
            fetched=fetched / used,
            seconds=median(times),
            gap=median(times) - self._without_gaps(steps, brings) if left == fetched == 0 else None,
            bound=work.seconds(hits / used, self.bandwidths),
        )

    def _prime(self, experts: OffloadedExperts, steps: DecodeSteps) -> None:
        """Fetch until every slot is used; then find what the sides take besides misses."""
        self._tell(f"{experts.residency.slots} slots")
        per_step = self._pool.layers * self._options.rows * self._executor.layout.ranks
        experts.fix(1.0)
        for _ in range(2 * math.ceil(experts.residency.slots / per_step) + 1):
            self._step(steps, experts, 0.0)
        experts.fix(0.0)
        for _ in range(_SETTLE):
            self._step(steps, experts, 0.7)
        experts.fix(self._options.split)

    def _split(self) -> Split:
        """Begins with what each side does alone."""
        part = self._pool.layout.nbytes / self._pool.layout.parts
        return Split(self._pool.layers, 1e9 * part / self.bandwidths.cpu, 1e9 * part / self.bandwidths.link)

    def _step(self, steps: DecodeSteps, experts: OffloadedExperts | None = None, wanted: float = 1.0) -> float:
        """Seconds from when the tokens are known until the next ones are."""
        if experts is not None:
            self._ops.routing.draw(experts.residency.slot_of, wanted, experts.residency.lacks)
        parts = self._parts()
        torch.cuda.synchronize()
        start = time.perf_counter()
        brings = experts is not None and experts.brings(len(parts))
        launched = steps.launch(parts, other=brings)
        if experts is not None:
            experts.learn()
        steps.wait(launched).tolist()
        if experts is not None:
            experts.after_step(graph=True, brought=brings)
        self._brought += brings
        return time.perf_counter() - start

    def _kernels(self, steps: DecodeSteps, brings: bool = False) -> None:
        """Tell what a step spends its time on; for routing that may be repeated."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(4):
                steps.run(self._parts(), other=brings)
        table = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=24, max_name_column_width=48)
        self._tell(f"device time of 4 steps by kernel\n{table}")

    def _without_gaps(self, steps: DecodeSteps, brings: bool = False) -> float:
        """Seconds of a step when the next one is launched while it runs; for routing that may be repeated."""
        count, parts = int(self._options.steps), self._parts()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            steps.launch(parts, other=brings)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    def _parts(self) -> list[Rows]:
        """The next token of every sequence."""
        position = self._options.context + self._steps % PAGE
        self._steps += 1
        rows = range(self._options.rows)
        return [Rows((1,), position, range(row * self._pages, (row + 1) * self._pages), row + 1) for row in rows]

    def _decode_steps(
        self, report: Callable[[], None], way: Callable[[bool], AbstractContextManager[None]] = lambda _: nullcontext()
    ) -> DecodeSteps:
        """Greedy; the page and the state that no sequence has come last."""

        def finish(logits: Tensor, temperatures: Tensor) -> Tensor:
            report()
            return logits.argmax(dim=1)

        scratch = self._options.rows * self._pages, self._options.rows + 1
        return DecodeSteps(
            self._runner.model, self._runner.cache, finish, pages=self._pages, scratch=scratch, device=self._device,
            way=way,
        )  # fmt: skip

    def _dense_bytes(self) -> float:
        """What a step reads and writes besides experts: linear weights, states twice, keys and values."""
        manifest, options = self._runner.model.manifest, self._options
        context = options.context / PAGE * manifest.page_bytes(torch.bfloat16)
        return float(self._ops.bytes + options.rows * (2 * manifest.slot_bytes + context))

    def _measure(self) -> Bandwidths:
        read = read_probe(NativeOps(threads=self._options.threads, library=self._options.library))
        for _ in range(_SAMPLES + 1):
            read.sample()
        found = measure_experts(self._executor, self._link, _SAMPLES, _SECONDS)
        both = median(cpu + link for cpu, link in zip(found["both.cpu"], found["both.link"], strict=True))
        return Bandwidths(
            device=median(self._link.device_copies(_SAMPLES)),
            link=median(found["link"]),
            cpu=median(found["cpu"]),
            both=max(both, read.rate),
        )
