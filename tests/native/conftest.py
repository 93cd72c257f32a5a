"""Native operations per instruction set, and batches to run them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from engine.api import PAGE
from engine.layers.ops import Batch
from engine.native.library import find_library, load_library, supported_instruction_sets
from engine.native.ops import NativeOps

MakeBatch = Callable[..., Batch]


@pytest.fixture(scope="session")
def all_native() -> dict[str, NativeOps]:
    """Every instruction set this processor has; with different thread counts, because they must not matter either."""
    names = supported_instruction_sets(load_library(find_library()))
    return {name: NativeOps(name, threads=1 + i) for i, name in enumerate(names)}


@pytest.fixture(scope="session")
def native() -> NativeOps:
    return NativeOps(threads=2)


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """Segments as (rows, position, slot), laid out one after another; ``pages`` overrides the page table."""

    def make(
        segments: Sequence[tuple[int, int, int]],
        snapshots: Sequence[tuple[int, int, int]] = (),
        pages: Sequence[Sequence[int]] | None = None,
    ) -> Batch:
        first, rows = 0, []
        for count, position, slot in segments:
            rows.append((first, count, position, slot))
            first += count
        width = max((-(-(position + count) // PAGE) for count, position, _ in segments), default=1)
        if pages is None:  # dealt out backwards, so that physical and absolute order differ
            last = width * len(segments) - 1
            pages = [[last - index * width - page for page in range(width)] for index in range(len(segments))]
        positions = [position + i for count, position, _ in segments for i in range(count)]
        return Batch(
            tokens=torch.zeros(first, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int32),
            segments=torch.tensor(rows, dtype=torch.int32).reshape(-1, 4),
            page_table=torch.tensor(pages, dtype=torch.int32).reshape(len(segments), max(map(len, pages), default=0)),
            snapshots=torch.tensor(list(snapshots), dtype=torch.int32).reshape(-1, 3),
            logit_rows=torch.zeros(0, dtype=torch.int64),
        )

    return make
