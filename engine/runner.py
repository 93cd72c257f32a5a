"""Runs the model: owns its weights, pages and state slots, and turns rows of sequences into one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from engine.api import PAGE
from engine.layers.ops import CPU, Batch, Ops
from engine.memory.restore import ALL
from engine.models.model import Cache, Manifest, Model, Wait, all_there
from engine.sampling import Row


@dataclass(frozen=True)
class Rows:
    """Tokens of one sequence to feed, at ``position`` and on. ``table``: its pages. ``slot``: its state.
    ``snapshots``: (after how many of these tokens, into which slot) the recurrent state is to be copied.
    ``temperature``: what for, if the ``logits`` are wanted."""

    tokens: Sequence[int]
    position: int
    table: Sequence[int]
    slot: int
    snapshots: Sequence[tuple[int, int]] = ()
    logits: bool = False
    temperature: float = 1.0


class Runner:
    """``pages`` and ``slots`` are how many of each are allocated, unless a ``cache`` is given; memory is touched as it
    is first used.

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
        device: torch.device = CPU,
    ) -> None:
        manifest = model.manifest
        self.model = model
        self.dtype = dtype
        self.device = device
        self.cache = cache or make_cache(manifest, dtype, pages, slots, device)
        for state in self.cache.states:
            state[0] = 0
        self._ops = ops
        self._page_size = manifest.page_components(dtype)
        self._state_size = manifest.state_components

    @torch.inference_mode()
    def forward(self, parts: Sequence[Rows], wait: Wait = all_there) -> Tensor:
        """float32 logits [m, vocab]: of the last row of each part that wants them, in order. Raises what ``wait``
        does."""
        return self.model.forward(make_batch(parts, self.device), replace(self.cache, wait=wait))

    def score(self, parts: Sequence[Rows], wait: Wait = all_there) -> Sequence[Row]:
        """What tokens are drawn from: of each part that wants its logits, in order; good until the next call. Raises
        what ``wait`` does."""
        return list(self.forward(parts, wait).numpy())

    def gauges(self) -> dict[str, float]:
        """What it has to tell of itself, by name."""
        return {}

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> None:
        for pages in (*self.cache.keys, *self.cache.values):
            pages[target] = pages[source]

    @torch.inference_mode()
    def copy_state(self, source: int, target: int, parts: slice = ALL) -> None:
        for state in self.cache.states[parts]:
            self._ops.copy_state(state, source, target)

    @torch.inference_mode()
    def page_finite(self, page: int, tokens: int) -> bool:
        """Whether all numbers of the first tokens of a page are finite."""
        return all(_finite(pages[page, :tokens]) for pages in (*self.cache.keys, *self.cache.values))

    @torch.inference_mode()
    def state_finite(self, slot: int, parts: slice = ALL) -> bool:
        return all(_finite(state[slot]) for state in self.cache.states[parts])

    @cached_property
    def _pages(self) -> list[memoryview]:
        return [_flat(pages) for layer in zip(self.cache.keys, self.cache.values, strict=True) for pages in layer]

    @cached_property
    def _states(self) -> list[memoryview]:
        return [_flat(states) for states in self.cache.states]

    def page_bytes(self, page: int, tokens: int) -> list[memoryview]:
        """The first tokens of a page in place: keys, then values, of each attention layer."""
        sizes = zip(self._pages, self._page_size, strict=True)
        return [every[page * size : page * size + size // PAGE * tokens] for every, size in sizes]

    def state_bytes(self, slot: int) -> list[memoryview]:
        """A recurrent state in place, tensor by tensor."""
        sizes = zip(self._states, self._state_size, strict=True)
        return [every[slot * size : (slot + 1) * size] for every, size in sizes]


def make_cache(manifest: Manifest, dtype: torch.dtype, pages: int, slots: int, device: torch.device) -> Cache:
    """Pages and state slots of their own, with nothing in them."""
    shape = (pages, PAGE, manifest.kv_heads, manifest.head_dim)
    return Cache(
        keys=tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(manifest.attention_layers)),
        values=tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(manifest.attention_layers)),
        states=tuple(torch.empty(slots, *each, device=device) for each in manifest.recurrent),
    )


def _finite(tensor: Tensor) -> bool:
    """One pass: what is not finite makes the sum so. Finite numbers seldom do, and are then looked at one by one."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def _flat(tensor: Tensor) -> memoryview:
    """A contiguous tensor's own memory. Raises RuntimeError for what the processor cannot address."""
    if tensor.device.type != "cpu":
        raise RuntimeError(f"pages and states on {tensor.device} cannot be read in place; they are not stored yet")
    return tensor.view(torch.uint8).reshape(-1).numpy().data


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
