"""From configuration to a model that can run, with its memory."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.api import PAGE, EngineConfig, ModelInfo
from engine.device.arena import Arena, Division, Shapes
from engine.device.driver import DriverError
from engine.device.memory import Sizes
from engine.device.partition import Experts, Partition, Policy
from engine.device.virtual import HostMemory
from engine.experts.pool import Pool
from engine.experts.pooled import PooledOps
from engine.host import memory_bytes
from engine.layers.loader import Loader
from engine.layers.ops import CPU, Ops
from engine.layers.reference import ReferenceOps
from engine.memory.memory import Memory
from engine.memory.resize import DoesNotFit
from engine.memory.restore import layer_groups
from engine.memory.store import StateStore
from engine.models.fields import MOST_CONTEXT, read_config
from engine.models.model import Manifest, Progress
from engine.models.registry import Architecture, find_architecture
from engine.native.library import NativeLibraryError
from engine.native.ops import NativeOps
from engine.runner import Runner
from engine.weights.errors import BadConfig, CheckpointError
from engine.weights.fingerprint import fingerprint
from engine.weights.source import Source

if TYPE_CHECKING:
    from engine.device.machine import Machine

_log = logging.getLogger("engine.device")  # whose choices are told

OpenStore = Callable[[str, tuple[int, ...], tuple[int, ...], bool], StateStore | None]
"""Given the fingerprint, the bytes of each component of a page and of a state, and whether a tier in host memory will
be before the store, which then needs none of its own."""

CHUNK = 512
"""Tokens of a prompt that the CPU computes in one step."""
MAX_CHECKPOINTS = 4096
"""Only toy models reach it."""
_GRANULE = 256 << 10
"""In which memory is had where the processor computes."""
_SPARED = 16
"""That part of the memory is for everything else, however much pages and states are to have by command."""
_DEFAULTS = EngineConfig("")
_OF_A_GPU = ("experts", "gpu_bytes", "split", "attention")


@dataclass(frozen=True)
class Engine:
    """``longest``: tokens of a sequence that the model takes, if there are pages for them. ``chunk_tokens``: of a
    prompt in one step, unless the configuration says it."""

    info: ModelInfo
    runner: Runner
    memory: Memory
    partition: Partition
    longest: int
    chunk_tokens: int


@dataclass(frozen=True)
class _Checkpoint:
    """What is known of a model before its weights are read. ``context``: the longest it is served with."""

    directory: Path
    raw: Mapping[str, Any]
    architecture: Architecture
    context: int


@dataclass(frozen=True)
class _Built:
    """A model that can run. ``kernels`` and ``instruction_set``: what computes. ``division``: of its memory, by
    ``policy``; ``experts``, if there are slots for them. ``context``: the longest that there may be room for."""

    runner: Runner
    source: Source
    room: _Room
    kernels: str
    instruction_set: str
    chunk_tokens: int
    division: Division
    context: int
    policy: Policy = field(default_factory=Policy)
    experts: Experts | None = None


@dataclass(frozen=True)
class _Room:
    """How much of what a manifest describes there is room for."""

    pages: int
    checkpoints: int

    @classmethod
    def of(cls, config: EngineConfig, manifest: Manifest, dtype: torch.dtype) -> _Room:
        """Raises BadConfig."""
        pages = config.kv_bytes // manifest.page_bytes(dtype)
        if pages < 2:
            raise BadConfig(f"--kv-bytes {config.kv_bytes} is below two pages of {manifest.page_bytes(dtype)} bytes")
        checkpoints = min(MAX_CHECKPOINTS, config.checkpoint_bytes // manifest.slot_bytes) if manifest.recurrent else 0
        return cls(pages, checkpoints)

    def states(self, live: int) -> int:
        """The state of nothing, those of running sequences, and checkpoints."""
        return 1 + live + self.checkpoints

    def context(self, longest: int) -> int:
        return min(longest, (self.pages - 1) * PAGE)


def load_engine(
    config: EngineConfig,
    progress: Progress,
    open_store: OpenStore | None = None,
    machine: Machine | None = None,
) -> Engine:
    """Raises CheckpointError for a checkpoint, or a configuration, that cannot be served. ``machine``: the device to
    serve from, where the configuration wants one; None: whatever is there."""
    _check(config)
    directory = Path(config.model)
    raw = read_config(directory)
    try:
        architecture = find_architecture(raw)
    except CheckpointError as error:
        raise type(error)(f"{directory}: {error}") from error
    context = config.context_length or architecture.context
    if context > architecture.context:
        raise BadConfig(f"--context-length {context} is above the model's {architecture.context}: lower it")
    checkpoint = _Checkpoint(directory, raw, architecture, context)
    progress("device", 0, 1)
    built = _on_device(config, checkpoint, machine, progress) or _on_cpu(config, checkpoint, progress)
    return _engine(config, checkpoint, built, progress, open_store)


def _engine(
    config: EngineConfig, checkpoint: _Checkpoint, built: _Built, progress: Progress, open_store: OpenStore | None
) -> Engine:
    progress("fingerprint", 0, 1)
    source, room, manifest = built.source, built.room, built.runner.model.manifest
    dtype = str(source.dtype).removeprefix("torch.")
    identity = fingerprint(
        checkpoint.directory, source.shards, checkpoint.raw, dtype, built.kernels, built.instruction_set
    )
    store = None
    if open_store is not None:
        progress("store", 0, 1)
        components = manifest.page_components(source.dtype), manifest.state_components
        store = open_store(identity, *components, built.runner.hosted)
    memory = Memory(
        built.runner.mover,
        identity,
        pages=room.pages,
        live=config.max_sequences,
        checkpoints=room.checkpoints,
        recurrent=bool(manifest.recurrent),
        store=built.runner.tier(store),
        groups=layer_groups(manifest.page_layers, manifest.state_layers),
    )
    info = ModelInfo(
        path=str(checkpoint.directory),
        architecture=checkpoint.architecture.name,
        fingerprint=identity,
        vocab_size=built.runner.model.vocab_size,
        context_length=built.context,
        recurrent=bool(manifest.recurrent),
        max_sequences=config.max_sequences,
        instruction_set=built.instruction_set,
        dtype=dtype,
        incarnation=uuid.uuid4().hex,
    )
    partition = Partition(built.division, memory, built.policy, built.experts)
    return Engine(info, built.runner, memory, partition, checkpoint.context, built.chunk_tokens)


def _on_cpu(config: EngineConfig, checkpoint: _Checkpoint, progress: Progress) -> _Built:
    ops, instruction_set = make_ops(config) if config.expert_format == "auto" else _pooled_ops(config, checkpoint)
    kernels = config.kernels + (f", experts {config.expert_format}" if isinstance(ops, PooledOps) else "")
    source = Source(checkpoint.directory, config.dtype)
    model = checkpoint.architecture.build(Loader(source, ops), checkpoint.context, progress)
    manifest, live = model.manifest, config.max_sequences
    room = _Room.of(config, manifest, source.dtype)
    size = room.pages * manifest.page_bytes(source.dtype) + room.states(live) * manifest.slot_bytes
    machine = memory_bytes()
    wanted = f"--kv-bytes {config.kv_bytes}, --checkpoint-bytes {config.checkpoint_bytes} and --max-sequences {live}"
    wanted = f"{wanted} need {size} bytes"
    if size > machine:
        raise BadConfig(f"{wanted}, and this machine has {machine}: lower them")
    beside = _taken() + machine // _SPARED
    budget = machine - beside if size + size // 8 < machine - beside else machine  # what was asked for goes first
    sizes = Sizes(0, room.pages, room.states(live))
    most = replace(sizes, pages=machine // manifest.page_bytes(source.dtype))
    if manifest.recurrent:
        most = replace(most, states=min(machine // manifest.slot_bytes, room.states(live) + MAX_CHECKPOINTS))
    shapes = Shapes(manifest, source.dtype, stride=0)
    try:
        arena = Arena(HostMemory(machine, _GRANULE), shapes, sizes=sizes, most=most, budget=budget, device=CPU)
    except (DoesNotFit, DriverError) as error:
        raise BadConfig(f"{wanted}, which cannot be had ({error}): lower them") from error
    runner = Runner(model, ops, source.dtype, cache=arena.memory.cache)
    context = room.context(checkpoint.context)
    return _Built(runner, source, room, kernels, instruction_set, CHUNK, arena, context)


def _taken() -> int:
    """Bytes of memory that this process has: now that the model is loaded, mostly its weights."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _on_device(
    config: EngineConfig, checkpoint: _Checkpoint, machine: Machine | None, progress: Progress
) -> _Built | None:
    """None where the CPU is to serve. With ``auto`` it is, and says why, unless something was asked of a GPU."""
    asked = [name for name in _OF_A_GPU if getattr(config, name) != getattr(_DEFAULTS, name)]
    if config.device == "cpu":
        for name in asked:
            raise BadConfig(f"{_flag(name)} {getattr(config, name)} is for a GPU: add --device cuda, or leave it out")
        return None
    from engine.device.machine import NoGpu, find_machine
    from engine.device.outline import outline
    from engine.device.plan import make_plan

    try:
        machine = machine or find_machine()
        architecture, context = checkpoint.architecture, checkpoint.context
        what = outline(checkpoint.directory, config.dtype, architecture, context)
        room = _Room.of(config, what.manifest, what.dtype)
        plan = make_plan(config, what, machine, room.pages, room.states(config.max_sequences))
    except BadConfig as error:
        if config.device == "cuda" or asked:
            raise type(error)(f"{error}; or serve with --device cpu") from error
        _log.log(logging.INFO if isinstance(error, NoGpu) else logging.WARNING, "serving from the CPU: %s", error)
        return None
    from engine.device.load import load_runner  # Triton, which a machine without a GPU need not have

    source = Source(checkpoint.directory, config.dtype)
    loaded = load_runner(config, architecture, source, context, plan, machine, progress)
    return _Built(
        loaded.runner, source, room, loaded.kernels, f"{machine.kind}, experts {plan.layout.format.name}",
        plan.chunk_tokens, loaded.division, min(context, (loaded.division.most.pages - 1) * PAGE), loaded.policy,
        loaded.experts,
    )  # fmt: skip


def _check(config: EngineConfig) -> None:
    """Numbers that cannot be meant; raises BadConfig."""
    for name, value, least, most in (
        ("threads", config.threads, 0, 1 << 12),
        ("context_length", config.context_length, 0, MOST_CONTEXT),
        ("kv_bytes", config.kv_bytes, 1, 1 << 60),
        ("checkpoint_bytes", config.checkpoint_bytes, 0, 1 << 60),
        ("max_sequences", config.max_sequences, 1, 1 << 12),
        ("chunk_tokens", config.chunk_tokens, 0, 1 << 20),
        ("queue", config.queue, 1, 1 << 20),
        ("gpu_bytes", config.gpu_bytes, 0, 1 << 60),
        ("split", config.split or 0, 0, 1),
    ):
        if not least <= value <= most:
            raise BadConfig(f"{_flag(name)} {value} is not from {least} to {most}: change it")


def _flag(name: str) -> str:
    """Of ``ft serve``, for a setting."""
    return f"--{name.replace('_', '-')}"


def make_ops(config: EngineConfig) -> tuple[Ops, str]:
    """The operations that configuration names, and their instruction set."""
    if config.kernels == "reference":
        torch.set_num_threads(config.threads or torch.get_num_threads())
        return ReferenceOps(), "torch"
    try:
        native = NativeOps(config.instruction_set, config.threads)
    except NativeLibraryError as error:
        raise BadConfig(str(error)) from error
    torch.set_num_threads(1)  # torch only adds and copies here; its threads would compete with the kernels'
    return native, native.instruction_set


def _pooled_ops(config: EngineConfig, checkpoint: _Checkpoint) -> tuple[Ops, str]:
    """The same, with routed experts in the configuration's format."""
    from engine.device.outline import outline
    from engine.device.plan import expert_layout

    what = outline(checkpoint.directory, config.dtype, checkpoint.architecture, checkpoint.context)
    if config.kernels != "native" or not what.layers:
        cannot = "models without routed experts" if config.kernels == "native" else f"--kernels {config.kernels}"
        raise BadConfig(f"--expert-format {config.expert_format} is not for {cannot}; leave it out")
    try:
        pool = Pool(expert_layout(config, what), what.layers, what.experts)
        pooled = PooledOps(pool, what.top_k, config.instruction_set, config.threads)
    except NativeLibraryError as error:
        raise BadConfig(str(error)) from error
    except (BadConfig, MemoryError) as error:
        raise BadConfig(f"{error}; or leave --expert-format out") from error
    torch.set_num_threads(1)
    return pooled, pooled.instruction_set
