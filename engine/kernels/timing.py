"""How long a device's operations take, and the sizes of Qwen3.6-35B-A3B, which they are checked and timed at.

Times are of CUDA graph replays over several sets of tensors, so that the cache of the GPU does not hold what memory is
to be measured by; the bandwidth counts what has to be moved once.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.api import PAGE
from engine.layers.ops import Batch

GPU = torch.device("cuda")
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, ROTARY = 2048, 16, 2, 256, 64
KEY_HEADS, VALUE_HEADS, LINEAR_DIM, WIDTH = 16, 32, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * LINEAR_DIM
EXPERTS, TOP_K, VOCAB = 256, 8, 248320
SETS_BYTES = 256 << 20
"""Several times the cache of a large GPU."""


def make_batch(
    segments: Sequence[tuple[int, int, int]],
    device: torch.device,
    snapshots: Sequence[tuple[int, int, int]] = (),
    width: int = 0,
) -> Batch:
    """Segments as (rows, position, slot), one after another; pages are dealt out in a mixed order."""
    firsts = list(itertools.accumulate((rows for rows, _, _ in segments), initial=0))
    width = width or max(-(-(position + rows) // PAGE) for rows, position, _ in segments)
    pages = torch.randperm(len(segments) * width, generator=torch.Generator().manual_seed(1)).view(-1, width)
    positions = [position + i for rows, position, _ in segments for i in range(rows)]
    return Batch(
        tokens=torch.zeros(firsts[-1], dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int32, device=device),
        segments=torch.tensor(
            [(first, *segment) for first, segment in zip(firsts, segments, strict=False)],
            dtype=torch.int32, device=device,
        ),
        page_table=pages.to(torch.int32).to(device),
        snapshots=torch.tensor(list(snapshots), dtype=torch.int32, device=device).reshape(-1, 3),
        logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
    )  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """``microseconds``: median and spread (largest less smallest) of the samples."""

    microseconds: float
    spread: float


def elapsed(work: Callable[[], object]) -> float:
    """Microseconds that the device takes for what is put on its stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def measure(sets: Sequence[Callable[[], object]], samples: int = 7) -> Timing:
    """One call, as one of many in a captured graph that goes through the sets in turn."""
    calls = list(itertools.islice(itertools.cycle(sets), max(len(sets), 20)))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in sets:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = [elapsed(graph.replay) / len(calls) for _ in range(samples)]
    return Timing(statistics.median(times), max(times) - min(times))


def sets_for(nbytes: int) -> int:
    return max(1, min(32, -(-SETS_BYTES // nbytes)))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=torch.float32 if dtype == torch.float32 else dtype)


def read_bandwidth() -> float:
    """Bytes a second of torch's sum over 4 GiB, which reads and hardly writes, as these operations do."""
    source = torch.zeros(1 << 30, device=GPU)
    return source.nbytes / measure([source.sum]).microseconds * 1e6


def report(name: str, nbytes: int, timing: Timing, reading: float, note: str = "") -> None:
    rate = nbytes / timing.microseconds * 1e6
    print(
        f"{name:44} {timing.microseconds:9.2f} µs ± {timing.spread:6.2f} {nbytes / 1e6:9.2f} MB {rate / 1e9:8.0f} GB/s "
        f"{100 * rate / reading:4.0f} % {note}"
    )


def decode_attention(rows: int, context: int) -> tuple[Tensor, Tensor, Tensor, Batch, int]:
    """Queries, pages, a batch and the bytes of its keys and values."""
    batch = make_batch([(1, context - 1, slot) for slot in range(rows)], GPU)
    shape = (batch.page_table.numel(), PAGE, KV_HEADS, HEAD_DIM)
    keys, values = random(*shape, dtype=torch.bfloat16), random(*shape, dtype=torch.bfloat16)
    return random(rows, HEADS, HEAD_DIM), keys, values, batch, keys.nbytes + values.nbytes
