"""Runs the model: owns its weights, pages and state slots, and turns rows of sequences into one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.api import PAGE
from engine.grammar import Mask
from engine.inplace import InPlace
from engine.layers.ops import CPU, Batch, Ops
from engine.memory.mover import Mover
from engine.memory.restore import AFTER
from engine.memory.store import StateStore
from engine.models.model import Cache, Manifest, Model, Wait, all_there
from engine.sampling import Row


@dataclass(frozen=True)
class Rows:
    """Tokens of one sequence to feed, at ``position`` and on. ``table``: its pages. ``slot``: its state.
    ``snapshots``: (after how many of these tokens, into which slot) the recurrent state is to be copied.
    ``temperature``: what for, if the ``logits`` are wanted; ``mask``: of the token drawn from them, if only what it
    allows is wanted."""

    tokens: Sequence[int]
    position: int
    table: Sequence[int]
    slot: int
    snapshots: Sequence[tuple[int, int]] = ()
    logits: bool = False
    temperature: float = 1.0
    mask: Future[Mask] | None = None


class Runner:
    """``pages`` and ``slots`` are how many of each are allocated, unless a ``cache`` is given; memory is touched as it
    is first used. ``mover``: what moves its bytes, unless they are read and written in place.

    ``device`` is where they are, and the model's weights."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        dtype: torch.dtype,
        *,
        pages: int = 0,
        slots: int = 0,
        cache: Cache | None = None,
        mover: Mover | None = None,
        device: torch.device = CPU,
    ) -> None:
        manifest = model.manifest
        self.model = model
        self.dtype = dtype
        self.device = device
        self.cache = cache or make_cache(manifest, dtype, pages, slots, device)
        for state in self.cache.states:
            state[0] = 0
        self.mover = mover or InPlace(self.cache, ops)

    @torch.inference_mode()
    def forward(self, parts: Sequence[Rows], wait: Wait = all_there) -> Tensor:
        """float32 logits [m, vocab]: of the last row of each part that wants them, in order. Raises what ``wait``
        does."""
        logits = self.model.forward(make_batch(parts, self.device), replace(self.cache, wait=wait))
        self.mover.captured([slot for part in parts for _, slot in part.snapshots])
        wait(AFTER)
        return logits

    def score(
        self, parts: Sequence[Rows], wait: Wait = all_there, meanwhile: Callable[[], None] = lambda: None
    ) -> Sequence[Row]:
        """What tokens are drawn from: of each part that wants its logits, in order; good until the next call.
        ``meanwhile`` is called once, while a device computes, if there is one. Raises what ``wait`` does."""
        meanwhile()
        return list(self.forward(parts, wait).numpy())

    def gauges(self) -> dict[str, float]:
        """What it has to tell of itself, by name."""
        return {}

    @property
    def hosted(self) -> bool:
        """Whether a tier in host memory takes what gives way on a device."""
        return False

    def tier(self, store: StateStore | None) -> StateStore | None:
        """Where pages and states go when they give way: to the ``store``, or to what is before it."""
        return store

    def close(self) -> None:
        """Nothing more will be asked of it."""


def make_cache(manifest: Manifest, dtype: torch.dtype, pages: int, slots: int, device: torch.device) -> Cache:
    """Pages and state slots of their own, with nothing in them."""
    shape = (pages, PAGE, manifest.kv_heads, manifest.head_dim)
    return Cache(
        keys=tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(manifest.attention_layers)),
        values=tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(manifest.attention_layers)),
        states=tuple(torch.empty(slots, *each, device=device) for each in manifest.recurrent),
    )


def make_batch(parts: Sequence[Rows], device: torch.device = CPU) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[tuple[int, int, int, int]] = []
    snapshots: list[tuple[int, int, int]] = []
    logit_rows: list[int] = []
    table = torch.full((len(parts), max(len(part.table) for part in parts)), -1, dtype=torch.int32)
    for number, part in enumerate(parts):
        count = len(part.tokens)
        segments.append((len(tokens), count, part.position, part.slot))
        snapshots += ((number, after, slot) for after, slot in part.snapshots)
        table[number, : len(part.table)] = torch.tensor(part.table, dtype=torch.int32)
        tokens += part.tokens
        positions += range(part.position, part.position + count)
        if part.logits:
            logit_rows.append(len(tokens) - 1)
    return Batch(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int32, device=device),
        segments=torch.tensor(segments, dtype=torch.int32, device=device),
        page_table=table.to(device),
        snapshots=torch.tensor(snapshots, dtype=torch.int32, device=device).reshape(-1, 3),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
    )
