"""From configuration to a model that can run, with its memory."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.api import PAGE, EngineConfig, ModelInfo
from engine.layers.loader import Loader
from engine.layers.ops import Ops
from engine.layers.reference import ReferenceOps
from engine.memory.memory import Memory
from engine.memory.restore import layer_groups
from engine.memory.store import StateStore
from engine.models.fields import MOST_CONTEXT, read_config
from engine.models.model import Progress
from engine.models.registry import find_architecture
from engine.native.library import NativeLibraryError
from engine.native.ops import NativeOps
from engine.runner import Runner
from engine.weights.errors import BadConfig
from engine.weights.fingerprint import fingerprint
from engine.weights.source import Source

OpenStore = Callable[[str, tuple[int, ...], tuple[int, ...]], StateStore | None]
"""Given the fingerprint and the bytes of each component of a page and of a state."""

MAX_CHECKPOINTS = 4096
"""Only toy models reach it."""


@dataclass(frozen=True)
class Engine:
    info: ModelInfo
    runner: Runner
    memory: Memory


def load_engine(config: EngineConfig, progress: Progress, open_store: OpenStore | None = None) -> Engine:
    """Raises CheckpointError for a checkpoint, or a configuration, that cannot be served."""
    _check(config)
    directory = Path(config.model)
    raw = read_config(directory)
    architecture = find_architecture(raw)
    context = config.context_length or architecture.context
    if context > architecture.context:
        raise BadConfig(f"context_length {context} is above the model's {architecture.context}; lower it")
    ops, instruction_set = make_ops(config)
    progress("weights", 0, 1)
    source = Source(directory, config.dtype)
    model = architecture.build(Loader(source, ops), context, progress)
    progress("fingerprint", 0, 1)
    dtype = str(source.dtype).removeprefix("torch.")
    identity = fingerprint(directory, source.shards, raw, dtype, config.kernels, instruction_set)
    manifest = model.manifest
    pages = config.kv_bytes // manifest.page_bytes(source.dtype)
    if pages < 2:
        raise BadConfig(f"kv_bytes {config.kv_bytes} is below two pages of {manifest.page_bytes(source.dtype)} bytes")
    checkpoints = min(MAX_CHECKPOINTS, config.checkpoint_bytes // manifest.slot_bytes) if manifest.recurrent else 0
    live = config.max_sequences
    size = pages * manifest.page_bytes(source.dtype) + (1 + live + checkpoints) * manifest.slot_bytes
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = f"kv_bytes {config.kv_bytes}, checkpoint_bytes {config.checkpoint_bytes} and {live} sequences need {size}"
    if size > machine:
        raise BadConfig(f"{wanted} bytes and this machine has {machine}; lower them")
    try:
        runner = Runner(model, ops, source.dtype, pages=pages, slots=1 + live + checkpoints)
    except (RuntimeError, MemoryError) as error:  # torch has no error of its own for it
        raise BadConfig(f"{wanted} bytes, which cannot be had ({error}); lower them") from error
    store = None
    if open_store is not None:
        progress("store", 0, 1)
        store = open_store(identity, manifest.page_components(source.dtype), manifest.state_components)
    memory = Memory(
        runner,
        identity,
        pages=pages,
        live=live,
        checkpoints=checkpoints,
        recurrent=bool(manifest.recurrent),
        store=store,
        groups=layer_groups(manifest.page_layers, manifest.state_layers),
    )
    info = ModelInfo(
        path=str(directory),
        architecture=architecture.name,
        fingerprint=identity,
        vocab_size=model.vocab_size,
        context_length=min(context, (pages - 1) * PAGE),
        recurrent=bool(manifest.recurrent),
        max_sequences=live,
        instruction_set=instruction_set,
        dtype=dtype,
        incarnation=uuid.uuid4().hex,
    )
    return Engine(info, runner, memory)


def _check(config: EngineConfig) -> None:
    """Numbers that cannot be meant; raises BadConfig."""
    for name, value, least, most in (
        ("threads", config.threads, 0, 1 << 12),
        ("context_length", config.context_length, 0, MOST_CONTEXT),
        ("kv_bytes", config.kv_bytes, 1, 1 << 60),
        ("checkpoint_bytes", config.checkpoint_bytes, 0, 1 << 60),
        ("max_sequences", config.max_sequences, 1, 1 << 12),
        ("chunk_tokens", config.chunk_tokens, 1, 1 << 20),
        ("queue", config.queue, 1, 1 << 20),
    ):
        if not least <= value <= most:
            raise BadConfig(f"{name} {value} is not from {least} to {most}; change it")


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
