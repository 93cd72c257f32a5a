"""A model on a device: dense weights, pages and states there, experts wherever they fit. Imports Triton."""

from __future__ import annotations

import logging
import resource
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.api import PAGE, EngineConfig, StoreSettings
from engine.device.arena import Division
from engine.device.attention import choose
from engine.device.divide import divide, policy
from engine.device.driver import Driver, DriverError
from engine.device.hosted import Hosted
from engine.device.machine import Machine
from engine.device.memory import DeviceMemory
from engine.device.partition import Policy
from engine.device.plan import Plan
from engine.device.rehearse import keep_privately, rehearse
from engine.device.runner import DeviceRunner
from engine.experts.executor import Executor
from engine.experts.offload import OffloadedExperts
from engine.experts.pool import Pool
from engine.experts.prefill import SUFFIX
from engine.experts.split import Split
from engine.kernels.experts import Sums
from engine.kernels.ops import DeviceExperts, DeviceOps, add_to, sums_of
from engine.kernels.resident import ResidentExperts
from engine.layers.loader import Loader
from engine.layers.ops import Routing
from engine.models.model import Progress
from engine.models.registry import Architecture
from engine.native.library import NativeLibraryError
from engine.weights.errors import BadConfig
from engine.weights.source import Source

_log = logging.getLogger(__name__)


class _Filling:
    """Implements ``DeviceExperts``: takes the experts of one layer after the other into a pool, until ``use`` says what
    computes with them."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._layers = pool, 0

    def use(self, then: DeviceExperts) -> None:
        """All are there. Who needs the pool has it."""
        self._then = then
        del self._pool

    def pack(self, gate_up: Tensor, down: Tensor) -> int:
        layer, self._layers = self._layers, self._layers + 1
        self._pool.put_layer(layer, gate_up, down)
        return layer

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, layer: Any) -> Tensor:
        return self._then.run(x, ids, weights, layer)

    def add(self, base: Tensor, x: Tensor, ids: Tensor, weights: Tensor, layer: Any) -> Tensor:
        return add_to(self._then, base, x, ids, weights, layer)

    def sums(self, x: Tensor, routing: Routing, layer: Any) -> Sums | None:
        return sums_of(self._then, x, routing, layer)


@dataclass(frozen=True)
class Loaded:
    """``kernels``: what computes. ``experts``: those whose number on the device may change."""

    runner: DeviceRunner
    kernels: str
    division: Division
    policy: Policy
    experts: OffloadedExperts | None


def load_runner(
    config: EngineConfig,
    architecture: Architecture,
    source: Source,
    context: int,
    plan: Plan,
    machine: Machine,
    progress: Progress,
) -> Loaded:
    """``context`` tokens at the most. Raises CheckpointError."""
    what, device = plan.outline, machine.device
    try:
        pool = Pool(plan.layout, what.layers, what.experts)
        filling = _Filling(pool)
        attention = choose(config.attention)
        ops = DeviceOps(filling, device, attention)
        model = architecture.build(Loader(source, ops, device), context, progress)
        division = divide(plan, machine)
    except (RuntimeError, MemoryError, ValueError) as error:  # torch has no error of its own for memory
        raise BadConfig(f"the model cannot be loaded: {error}") from error
    memory = division.memory
    driver = _opened(machine)
    with ExitStack() as undone:  # what is pinned would stay so
        hosted = _host(config, memory, machine, driver)
        if hosted is not None:
            undone.callback(hosted.close)
        offloaded: OffloadedExperts | None = None
        if plan.mode == "device":
            memory.slots[: len(pool)].copy_(pool.slots)
            slots = memory.slots[: len(pool)].view(what.layers, what.experts, plan.stride)
            filling.use(ResidentExperts.of_slots(plan.layout, slots))
        else:
            offloaded = _offload(config, plan, pool, memory, driver, progress)
            undone.callback(offloaded.executor.close)
            undone.callback(offloaded.close)
            offloaded.resize(division.sizes.slots)
            filling.use(offloaded)
        pages = min(-(-context // PAGE) + 1, division.most.pages)
        most = min(plan.rows, config.max_sequences)
        runner = DeviceRunner(
            model, ops, what.dtype, memory.cache, offloaded, hosted, pages=pages, most=most, device=device
        )
        torch.set_num_threads(1)  # they would compete with those that compute experts
        if device.type == "cuda":  # not in the interpreter
            keep_privately()
            rehearse(
                model, memory.cache, offloaded, pages=pages, most=most, live=config.max_sequences,
                chunk=plan.chunk_tokens, device=device,
                progress=lambda done, total: progress("compiling kernels", done, total),
            )  # fmt: skip
        runner.prepare(progress)
        undone.pop_all()
    _log.info("%s: %s", machine.gpu, plan.told(division.sizes))
    kernels = f"triton, attention {attention.name}"
    return Loaded(runner, kernels, division, policy(plan, machine), None if plan.mode == "cpu" else offloaded)


def _offload(
    config: EngineConfig, plan: Plan, pool: Pool, memory: DeviceMemory, driver: Driver, progress: Progress
) -> OffloadedExperts:
    part = plan.layout.nbytes / plan.layout.parts
    costs = (1e9 * part / plan.rates.cpu, 1e9 * part / plan.rates.link) if plan.rates else (1.0, 1.0)
    split = Split(pool.layers, *costs)
    share = {"offload": 1.0, "cpu": 0.0}.get(plan.mode, config.split)
    if share is not None:
        split.fix(share)
    try:
        executor = Executor(pool, SUFFIX, plan.outline.top_k, config.threads, instruction_set=config.instruction_set)
        experts = OffloadedExperts(pool, executor, driver, split, memory.slots)
    except NativeLibraryError as error:
        raise BadConfig(str(error)) from error
    try:
        experts.start(
            fetches=plan.mode != "cpu", measures=plan.rates is None,
            progress=lambda done, total: progress("pinning experts", done, total),
        )  # fmt: skip
    except DriverError as error:
        experts.close()
        executor.close()
        raise _unpinned(executor.layout.nbytes, "requests to the CPU", "serve with --device cpu", error) from error
    return experts


def _opened(machine: Machine) -> Driver:
    try:
        return machine.driver()
    except (NativeLibraryError, DriverError) as error:
        raise BadConfig(str(error)) from error


def _host(config: EngineConfig, memory: DeviceMemory, machine: Machine, driver: Driver) -> Hosted | None:
    """None where the processor can address what is on the device."""
    if machine.lanes is None:
        return None
    nbytes = StoreSettings("").host_bytes if config.store is None else config.store.host_bytes
    unpinned: BadConfig | None = None
    while True:
        try:
            return Hosted(memory.cache, machine.lanes(), driver, nbytes, machine.device)
        except (ValueError, MemoryError) as error:
            raise unpinned or BadConfig(f"the host cache cannot be had: {error}; see --host-cache") from error
        except DriverError as error:
            unpinned = _unpinned(nbytes, "host cache", "lower it (--host-cache)", error)
            _log.warning("%s; trying half of it", unpinned)
            nbytes //= 2


def _unpinned(nbytes: int, what: str, instead: str, error: DriverError) -> BadConfig:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "not limited" if soft == resource.RLIM_INFINITY else f"limited to {soft} bytes"
    return BadConfig(
        f"{nbytes} bytes of host memory ({what}) cannot be pinned for the device ({error}); locked memory is {limit} "
        f"here (RLIMIT_MEMLOCK, `ulimit -l`): raise that, or {instead}"
    )
