"""How long prefill kernels take at the sizes of Qwen3.6-35B-A3B; run by ``engine.kernels.check_prefill``.

Times are of graph replays. Shares are of torch's own product of two bfloat16 matrices, or of its reading of memory, in
the same run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.api import PAGE
from engine.experts.layout import FORMATS, ExpertFormat, Layout
from engine.kernels import chunked_delta, grouped, prefill_attention, prefill_conv, recurrent
from engine.kernels.grouped import Groups, Tile
from engine.kernels.timing import (
    CHANNELS,
    EXPERTS,
    GPU,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KEY_HEADS,
    KV_HEADS,
    LINEAR_DIM,
    TOP_K,
    VALUE_HEADS,
    WIDTH,
    elapsed,
    make_batch,
    measure,
    random,
    read_bandwidth,
)

INNER = 512
ROWS = 8192
Call = Callable[[], object]


def best(call: Call) -> float:
    """Microseconds of one call in a captured graph of many."""
    return measure([call], samples=3).microseconds


def once(call: Call) -> float:
    """Microseconds of one slow call, once it is compiled."""
    call()
    return elapsed(call)


def matmul_rate() -> float:
    """Floating-point operations a second of torch's product of 8,192 x 8,192 matrices."""
    a, b = random(8192, 8192, dtype=torch.bfloat16), random(8192, 8192, dtype=torch.bfloat16)
    return 2 * 8192**3 / best(partial(torch.mm, a, b)) * 1e6


def tell(name: str, microseconds: float, amount: float, bound: float, unit: str, note: str = "") -> None:
    """``amount``: operations or bytes; ``bound``: of them a second."""
    rate = amount / microseconds * 1e6
    share = f"{rate / 1e12:7.2f} T{unit}/s {100 * rate / bound:4.0f} %"
    print(f"{name:44} {microseconds:10.1f} µs {share} {note}", flush=True)


class Attention:
    def __init__(self, rows: int, history: int) -> None:
        self.batch = make_batch([(rows, history, 0)], GPU)
        shape = (self.batch.page_table.numel(), PAGE, KV_HEADS, HEAD_DIM)
        self.pages = random(*shape, dtype=torch.bfloat16), random(*shape, dtype=torch.bfloat16)
        self.q = random(rows, HEADS, HEAD_DIM)
        self.operations = 4 * HEADS * HEAD_DIM * rows * (history + (rows + 1) / 2)

    def __call__(self, tiling: prefill_attention.Tiling | None = None) -> Tensor:
        return prefill_attention.attention(self.q, *self.pages, self.batch, 0.06, tiling)


class Delta:
    def __init__(self, rows: int) -> None:
        self.batch = make_batch([(rows, 0, 0)], GPU)
        q, k = random(rows, KEY_HEADS, LINEAR_DIM), random(rows, KEY_HEADS, LINEAR_DIM)
        decay, beta = -random(rows, VALUE_HEADS).abs(), torch.sigmoid(random(rows, VALUE_HEADS))
        self.given = q, k, random(rows, VALUE_HEADS, LINEAR_DIM), decay, beta
        self.state = random(1, VALUE_HEADS, LINEAR_DIM, LINEAR_DIM)
        self.nbytes = sum(tensor.nbytes for tensor in self.given) + self.given[2].nbytes + 2 * self.state.nbytes

    def __call__(self, tiling: chunked_delta.Tiling | None = None) -> Tensor:
        return chunked_delta.gated_delta(*self.given, self.state, self.batch, tiling=tiling)

    def serial(self) -> Tensor:
        return recurrent.gated_delta(*self.given, self.state, self.batch)


class Experts:
    """A layer's experts, all here, and rows that chose among them at random."""

    def __init__(self, format: ExpertFormat) -> None:
        self.layout = Layout(format, HIDDEN, INNER)
        blob = torch.empty(self.layout.nbytes, dtype=torch.uint8)
        gate_up, down = torch.randn(2 * INNER, HIDDEN), torch.randn(HIDDEN, INNER)
        self.layout.encode(gate_up * HIDDEN**-0.5, down * INNER**-0.5, blob)
        stride = -(-self.layout.nbytes // 256) * 256
        self.slots = torch.zeros(EXPERTS, stride, dtype=torch.uint8, device=GPU)
        self.slots[:, : self.layout.nbytes] = blob.to(GPU)
        self.every = torch.arange(EXPERTS, dtype=torch.int32, device=GPU)

    def route(self, rows: int) -> None:
        self.x, self.weights = random(rows, HIDDEN, dtype=torch.bfloat16), random(rows, TOP_K)
        self.ids = random(rows, EXPERTS).topk(TOP_K).indices.to(torch.int32)
        self.groups = Groups(*grouped.sort_pairs(self.ids, EXPERTS)[:2], self.every)
        pairs = rows * TOP_K
        self.h = random(pairs, INNER, dtype=torch.bfloat16)
        self.out, self.y = random(pairs, HIDDEN, dtype=torch.bfloat16), random(rows, HIDDEN)
        self.operations = 2 * pairs * 3 * INNER * HIDDEN
        self.nbytes = int((self.groups.start.diff() > 0).sum()) * self.layout.nbytes

    def gate_up(self) -> None:
        grouped.gate_up(self.x, self.slots, self.layout, self.groups, self.h)

    def down(self) -> None:
        grouped.down(self.h, self.slots, self.layout, self.groups, self.out)

    def combine(self) -> None:
        grouped.combine_pairs(self.out, self.ids, self.every, self.weights, self.y)


def time_attention(rate: float) -> None:
    for rows, history in ((ROWS, 0), (ROWS, 60_000), (2048, 60_000), (200, 60_000), (17, 60_000)):
        work = Attention(rows, history)
        tell(f"attention of {rows} behind {history}", best(work), work.operations, rate, "FLOP")


def time_recurrences(reading: float) -> None:
    for rows in (ROWS, 200):
        work = Delta(rows)
        took, serial = best(work), once(work.serial)
        tell(f"gated delta of {rows}", took, work.nbytes, reading, "B", f"token by token {serial / took:.1f} x")
        x, weight, window = random(rows, CHANNELS), random(CHANNELS, WIDTH), random(1, CHANNELS, WIDTH - 1)
        took = best(partial(prefill_conv.conv, x, weight, window, work.batch))
        serial = once(partial(recurrent.conv, x, weight, window, work.batch))
        tell(f"conv of {rows}", took, 2 * x.nbytes, reading, "B", f"token by token {serial / took:.1f} x")


def time_experts(rate: float, reading: float) -> None:
    for name, format in FORMATS.items():
        work = Experts(format)
        for rows in (17, 200, 1000, ROWS):
            work.route(rows)
            up, down, both = best(work.gate_up), best(work.down), work.operations
            tell(f"{name} gate_up of {rows}", up, both * 2 / 3, rate, "FLOP")
            tell(f"{name} down of {rows}", down, both / 3, rate, "FLOP")
            blobs = 100 * work.nbytes / (up + down) * 1e6 / reading
            tell(f"{name} both of {rows}", up + down, both, rate, "FLOP", f"blobs read at {blobs:.0f} %")
    for rows in (200, ROWS):
        work.route(rows)
        sort = best(partial(grouped.sort_pairs, work.ids, EXPERTS))
        tell(f"sort and sum pairs of {rows}", best(work.combine), work.out.nbytes, reading, "B", f"sort {sort:.1f} µs")


def time_all() -> float:
    """Prints a line for each; the rate of matrix products."""
    rate, reading = matmul_rate(), read_bandwidth()
    print(f"torch: {rate / 1e12:.0f} TFLOP/s, reading {reading / 1e9:.0f} GB/s: the 100 % below")
    time_attention(rate)
    time_recurrences(reading)
    time_experts(rate, reading)
    return rate


def tune(rate: float) -> None:
    """Other tilings, the best first."""
    work = Attention(ROWS, 20_000)
    plans = itertools.starmap(
        prefill_attention.Tiling, ((128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3))
    )
    for took, plan in sorted((best(partial(work, plan)), str(plan)) for plan in plans):
        tell(f"attention {plan}", took, work.operations, rate, "FLOP")
    delta = Delta(ROWS)
    deltas = itertools.starmap(chunked_delta.Tiling, ((32, 32, 2), (64, 32, 2), (32, 16, 2), (32, 32, 1)))
    for took, shape in sorted((best(partial(delta, each)), str(each)) for each in deltas):
        print(f"gated delta {shape}: {took:.1f} µs")
    for name, format in FORMATS.items():
        experts, chosen, found = Experts(format), grouped.TILES[name], []
        experts.route(ROWS)
        for tile in itertools.starmap(
            Tile, ((128, 64, 256, 64, 8, 3), (128, 64, 256, 64, 8, 4), (128, 32, 128, 64, 4, 3),
                   (128, 32, 128, 64, 4, 4), (256, 64, 128, 64, 8, 3))
        ):  # fmt: skip
            grouped.TILES[name] = (tile, tile, tile)
            found.append((best(experts.gate_up), best(experts.down), str(tile)))
        grouped.TILES[name] = chosen
        for up, down, shape in sorted(found, key=lambda each: each[0] + each[1]):
            tell(f"{name} {shape}", up + down, experts.operations, rate, "FLOP", f"{up:.0f} + {down:.0f}")
