"""How long the device's operations take at the sizes of Qwen3.6-35B-A3B; run by ``engine.kernels.check``.

Times are of CUDA graph replays over several sets of tensors, so that the cache of the GPU does not hold what memory is
to be measured by; the bandwidth counts what has to be moved once.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.api import PAGE
from engine.kernels.ops import DeviceOps
from engine.layers.ops import Batch

GPU = torch.device("cuda")
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, ROTARY = 2048, 16, 2, 256, 64
KEY_HEADS, VALUE_HEADS, LINEAR_DIM, WIDTH = 16, 32, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * LINEAR_DIM
EXPERTS, TOP_K, VOCAB = 256, 8, 248320
BATCHES, CONTEXTS = (1, 4, 8, 16), (1 << 10, 1 << 15, 1 << 17)
SETS_BYTES = 256 << 20
"""Several times the cache of a large GPU."""
SMALL = 90 << 10
"""Shared memory that every GPU of the last years has."""


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


LINEARS = (
    ("gdn inputs", CHANNELS + (LINEAR_DIM + 2) * VALUE_HEADS, HIDDEN), ("out_proj", HIDDEN, 4096),
    ("attention inputs", 2 * (HEADS + KV_HEADS) * HEAD_DIM, HIDDEN), ("router and shared", EXPERTS + 1025, HIDDEN),
    ("shared down", HIDDEN, 512), ("lm_head", VOCAB, HIDDEN),
)  # fmt: skip


def time_linears(ops: DeviceOps, reading: float) -> None:
    for name, out, inner in LINEARS:
        size = 2 * out * inner
        packed = [ops.pack(random(out, inner, dtype=torch.bfloat16)) for _ in range(sets_for(size))]
        for rows in BATCHES:
            x = random(rows, inner)
            timing = measure([partial(ops.linear, x, each) for each in packed])
            half = x.bfloat16()
            torch_s = measure([partial(torch.mm, half, each.matrix.t()) for each in packed])
            moved = size + 4 * rows * (inner + out)
            report(
                f"linear {name} {rows} x {out} x {inner}", moved, timing, reading, f"torch {torch_s.microseconds:.2f}"
            )


def time_pointwise(ops: DeviceOps, reading: float) -> None:
    norm, small, head_norm, bias = random(HIDDEN), random(LINEAR_DIM), random(HEAD_DIM), random(VALUE_HEADS)
    table = ops.rope_table(1 << 12, ROTARY, 1e7)
    for rows in BATCHES:
        x, wide, heads = random(rows, HIDDEN), random(rows, 4096), random(rows, VALUE_HEADS, LINEAR_DIM)
        logits, gates, q = random(rows, EXPERTS), random(rows, VALUE_HEADS), random(rows, HEADS, HEAD_DIM)
        k, positions = random(rows, KV_HEADS, HEAD_DIM), torch.zeros(rows, dtype=torch.int32, device=GPU)
        batch = make_batch([(1, 100, slot) for slot in range(rows)], GPU)
        pages = random(batch.page_table.numel(), PAGE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        up = random(rows, 1024)
        for name, nbytes, call in (
            ("rms_norm", 2 * x.nbytes, partial(ops.rms_norm, x, norm, 1e-6)),
            ("gated_rms_norm", 3 * heads.nbytes, partial(ops.gated_rms_norm, heads, heads, small, 1e-6)),
            ("rms_norm of heads", 2 * q.nbytes, partial(ops.rms_norm, q, head_norm, 1e-6)),
            ("silu_mul", up.nbytes // 2 * 3, partial(ops.silu_mul, up)),
            ("sigmoid_mul", 3 * wide.nbytes, partial(ops.sigmoid_mul, wide, wide)),
            ("sigmoid_mul and sum", 3 * x.nbytes, partial(ops.sigmoid_mul, x, x[:, :1], x)),
            ("gdn_gates", 4 * gates.nbytes, partial(ops.gdn_gates, gates, gates, bias, bias)),
            ("rope", 2 * q.nbytes // 4, partial(ops.rope, q, positions, table)),
            ("route", logits.nbytes, partial(ops.route, logits, TOP_K, True)),
            ("write_pages", 3 * k.nbytes, partial(ops.write_pages, k, k, pages, pages, batch)),
        ):
            report(f"{name} {rows}", nbytes, measure([call]), reading)


def time_recurrences(ops: DeviceOps, reading: float) -> None:
    weight = random(CHANNELS, WIDTH)
    for rows in BATCHES:
        size = 2 * 4 * rows * VALUE_HEADS * LINEAR_DIM**2
        batch = make_batch([(1, 100, slot) for slot in range(rows)], GPU)
        x, decay = random(rows, CHANNELS), -random(rows, VALUE_HEADS).abs()
        q, v = random(rows, KEY_HEADS, LINEAR_DIM), random(rows, VALUE_HEADS, LINEAR_DIM)
        states = [random(rows, VALUE_HEADS, LINEAR_DIM, LINEAR_DIM) for _ in range(sets_for(size))]
        windows = [random(rows, CHANNELS, WIDTH - 1) for _ in states]
        conv = measure([partial(ops.conv, x, weight, each, batch) for each in windows])
        report(f"conv {rows}", 2 * windows[0].nbytes + 2 * x.nbytes + weight.nbytes, conv, reading)
        delta = measure([partial(ops.gated_delta, q, q, v, decay, decay, each, batch) for each in states])
        report(f"gated_delta {rows}", size, delta, reading)


def decode_attention(rows: int, context: int) -> tuple[Tensor, Tensor, Tensor, Batch, int]:
    """Queries, pages, a batch and the bytes of its keys and values."""
    batch = make_batch([(1, context - 1, slot) for slot in range(rows)], GPU)
    shape = (batch.page_table.numel(), PAGE, KV_HEADS, HEAD_DIM)
    keys, values = random(*shape, dtype=torch.bfloat16), random(*shape, dtype=torch.bfloat16)
    return random(rows, HEADS, HEAD_DIM), keys, values, batch, keys.nbytes + values.nbytes


def time_attention(ops: DeviceOps, reading: float) -> None:
    for rows, context in itertools.product(BATCHES, CONTEXTS):
        q, keys, values, batch, size = decode_attention(rows, context)
        copies = [(keys, values)] + [(keys.clone(), values.clone()) for _ in range(sets_for(size) - 1)]
        timing = measure([partial(ops.attention, q, *each, batch, 0.06) for each in copies])
        report(f"attention {rows} of {context}", size, timing, reading)


def time_all(ops: DeviceOps) -> float:
    """Prints a line for each; the bandwidth of reading, bytes a second."""
    reading = read_bandwidth()
    print(f"{'reading 4 GiB':44} {reading / 1e9:.0f} GB/s, the 100 % below")
    for part in (time_linears, time_pointwise, time_recurrences, time_attention):
        part(ops, reading)
    return reading
