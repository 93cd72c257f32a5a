"""All experts of a model in host memory, as the CPU's kernels read them and as a device fetches them."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.experts.layout import Layout
from engine.experts.numa import interleave, memory_nodes

ALIGNMENT = 2 << 20
"""A large page: fewer translations for the readers, and far fewer pages for a driver to pin."""
STRIDE = 256

Progress = Callable[[int, int], None]
"""Experts there, and experts altogether."""


class Pool:
    """``layers * experts`` blobs of ``layout``, ``stride`` bytes apart, in one anonymous mapping. Memory is taken as
    blobs are filled. Different experts may be put from different threads."""

    def __init__(self, layout: Layout, layers: int, experts: int) -> None:
        """Raises MemoryError where the system has no room for the addresses, and ValueError without experts."""
        if layers < 1 or experts < 1:
            raise ValueError(f"a pool needs layers and experts, not {layers} and {experts}")
        self.layout = layout
        self.layers = layers
        self.experts = experts
        self.stride = stride_of(layout)
        self.nbytes = layers * experts * self.stride
        self.tensor = aligned(self.nbytes, ALIGNMENT)
        interleave(self.address(0), self.nbytes, memory_nodes())

    def __len__(self) -> int:
        return self.layers * self.experts

    @property
    def slots(self) -> Tensor:
        """uint8 [layers * experts, stride]"""
        return self.tensor[: len(self) * self.stride].view(len(self), self.stride)

    def address(self, flat: int) -> int:
        """Of the blob ``flat`` = layer * experts + expert."""
        return self.tensor.data_ptr() + flat * self.stride

    def blob(self, flat: int) -> Tensor:
        """uint8 [layout.nbytes]"""
        return self.tensor[flat * self.stride : flat * self.stride + self.layout.nbytes]

    def put(self, layer: int, expert: int, gate_up: Tensor, down: Tensor) -> None:
        """``gate_up`` [2 * inner, hidden] (gate rows first) and ``down`` [hidden, inner]; raises as Layout.encode."""
        if not (0 <= layer < self.layers and 0 <= expert < self.experts):
            raise ValueError(f"there is no expert {expert} of layer {layer} in {self.layers} x {self.experts}")
        self.layout.encode(gate_up, down, self.blob(layer * self.experts + expert))

    def put_layer(self, layer: int, gate_up: Tensor, down: Tensor, threads: int = 0) -> None:
        """All experts of a layer: ``gate_up`` [experts, 2 * columns, hidden] and ``down`` [experts, hidden, columns],
        followed by columns of zeros up to ``layout.inner``."""
        gate_up, down = _widened(gate_up, down, self.layout.inner)

        def put(expert: int) -> None:
            self.put(layer, expert, gate_up[expert], down[expert])

        _for_all(put, self.experts, lambda done, total: None, threads)

    def fill(
        self,
        weights: Callable[[int, int], tuple[Tensor, Tensor]],
        progress: Progress = lambda done, total: None,
        threads: int = 0,
    ) -> None:
        """Every expert from ``weights(layer, expert)``, which several threads call (0: one per processor)."""

        def put(flat: int) -> None:
            layer, expert = divmod(flat, self.experts)
            self.put(layer, expert, *weights(layer, expert))

        _for_all(put, len(self), progress, threads)

    def fill_random(self, seed: int = 0, progress: Progress = lambda done, total: None, threads: int = 0) -> None:
        """A few experts of small random weights, again and again: for measuring."""
        generator = torch.Generator().manual_seed(seed)
        layout, samples = self.layout, []
        for _ in range(min(8, len(self))):
            blob = torch.empty(layout.nbytes, dtype=torch.uint8)
            gate_up = torch.randn(2 * layout.inner, layout.hidden, generator=generator) * layout.hidden**-0.5
            layout.encode(
                gate_up, torch.randn(layout.hidden, layout.inner, generator=generator) * layout.inner**-0.5, blob
            )
            samples.append(blob)
        _for_all(lambda flat: self.blob(flat).copy_(samples[flat % len(samples)]), len(self), progress, threads)


def stride_of(layout: Layout) -> int:
    """Bytes from one blob to the next."""
    return -(-layout.nbytes // STRIDE) * STRIDE


def _for_all(work: Callable[[int], object], total: int, progress: Progress, threads: int) -> None:
    """``work`` on the numbers below ``total``. Each thread does torch's work alone: as many threads again for every one
    of them would be too many."""
    count, before = threads or os.cpu_count() or 1, torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as workers:
            waiting = iter(range(total))
            pending = deque(workers.submit(work, number) for number in islice(waiting, 2 * count))
            for done in range(total):
                pending.popleft().result()
                pending.extend(workers.submit(work, number) for number in islice(waiting, 1))
                progress(done + 1, total)
    finally:
        torch.set_num_threads(before)


def _widened(gate_up: Tensor, down: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    experts, hidden, columns = down.shape
    if columns == inner:
        return gate_up, down
    halves = gate_up.reshape(experts, 2, columns, hidden)
    wide = pad(halves, (0, 0, 0, inner - columns)).view(experts, 2 * inner, hidden)
    return wide, pad(down, (0, inner - columns))


def aligned(nbytes: int, alignment: int) -> Tensor:
    """uint8 [nbytes] of zeros at a multiple of ``alignment``, taken from the system page by page as it is written.
    Raises MemoryError."""
    try:
        mapping = mmap.mmap(-1, nbytes + alignment, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{nbytes} bytes of host memory cannot be had: {error}") from error
    if alignment == ALIGNMENT and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(mapping, dtype=torch.uint8)
    return room[-room.data_ptr() % alignment :][:nbytes]
