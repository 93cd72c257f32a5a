"""How long prefill kernels take at the sizes of Qwen3.6-35B-A3B; run by ``engine.kernels.check_prefill``.

Times are of graph replays. Shares are of torch's own product of two bfloat16 matrices, or of its reading of memory, in
the same run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.api import PAGE
from engine.experts.layout import FORMATS, ExpertFormat, Layout
from engine.kernels import chunked_delta, grouped, pairs, prefill_attention, prefill_conv
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
    make_batch,
    measure,
    random,
    read_bandwidth,
)

INNER = 512
ROWS = 8192
Call = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """``amount``: floating-point operations of products, or bytes that have to be moved."""

    name: str
    call: Call
    amount: float
    unit: str = "FLOP"


def best(call: Call) -> float:
    """Microseconds of one call in a captured graph of many."""
    return measure([call], samples=3).microseconds


def rates() -> dict[str, float]:
    """A second's floating-point operations of torch's product of 8,192 x 8,192 matrices, and bytes that it reads."""
    a, b = random(8192, 8192, dtype=torch.bfloat16), random(8192, 8192, dtype=torch.bfloat16)
    return {"FLOP": 2 * 8192**3 / best(partial(torch.mm, a, b)) * 1e6, "B": read_bandwidth()}


def tell(timed: Timed, microseconds: float, bounds: dict[str, float]) -> None:
    rate, bound = timed.amount / microseconds * 1e6, bounds[timed.unit]
    share = f"{rate / 1e12:7.2f} T{timed.unit}/s {100 * rate / bound:4.0f} %"
    print(f"{timed.name:44} {microseconds:10.1f} µs {share}", flush=True)


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
        q, k, v = (
            random(rows, heads, LINEAR_DIM, dtype=torch.float16) for heads in (KEY_HEADS, KEY_HEADS, VALUE_HEADS)
        )
        decay, beta = -random(rows, VALUE_HEADS).abs(), torch.sigmoid(random(rows, VALUE_HEADS))
        self.given = q, k, v, decay, beta
        self.state = random(1, VALUE_HEADS, LINEAR_DIM, LINEAR_DIM)
        self.nbytes = sum(tensor.nbytes for tensor in self.given) + self.given[2].nbytes + 2 * self.state.nbytes

    def __call__(self) -> Tensor:
        return chunked_delta.gated_delta(*self.given, self.state, self.batch)


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
        given, result = grouped.precision(self.layout, GPU)
        self.x, self.weights = random(rows, HIDDEN, dtype=given), random(rows, TOP_K)
        self.ids = random(rows, EXPERTS).topk(TOP_K).indices.to(torch.int32)
        self.groups = Groups(*pairs.sort_pairs(self.ids, EXPERTS)[:2], self.every)
        count = rows * TOP_K
        self.h = random(count, INNER, dtype=given)
        self.out, self.y = random(count, HIDDEN, dtype=result), random(rows, HIDDEN)
        self.operations = 2 * count * 3 * INNER * HIDDEN
        self.nbytes = int((self.groups.start.diff() > 0).sum()) * self.layout.nbytes

    def gate_up(self) -> None:
        grouped.gate_up(self.x, self.slots, self.layout, self.groups, self.h)

    def down(self) -> None:
        grouped.down(self.h, self.slots, self.layout, self.groups, self.out)

    def both(self) -> None:
        self.gate_up()
        self.down()

    def combine(self) -> None:
        pairs.combine_pairs(self.out, self.ids, self.every, self.weights, self.y)

    def sort(self) -> None:
        pairs.sort_pairs(self.ids, EXPERTS)


def attentions() -> Iterator[Timed]:
    for rows, history in ((ROWS, 0), (ROWS, 60_000), (2048, 60_000), (200, 60_000), (17, 60_000)):
        work = Attention(rows, history)
        yield Timed(f"attention of {rows} behind {history}", work, work.operations)


def deltas() -> Iterator[Timed]:
    for rows in (ROWS, 200):
        work = Delta(rows)
        yield Timed(f"gated delta of {rows}", work, work.nbytes, "B")


def convolutions() -> Iterator[Timed]:
    for rows in (ROWS, 200):
        x, weight, window = random(rows, CHANNELS).half(), random(CHANNELS, WIDTH), random(1, CHANNELS, WIDTH - 1)
        batch = make_batch([(rows, 0, 0)], GPU)
        yield Timed(f"conv of {rows}", partial(prefill_conv.conv, x, weight, window, batch), 2 * x.nbytes, "B")


def products(name: str) -> Iterator[Timed]:
    """Few rows read blobs, most of all; many multiply."""
    work = Experts(FORMATS[name])
    for rows in (17, 200, 1000):
        work.route(rows)
        yield Timed(f"{name} experts of {rows}", work.both, work.nbytes, "B")
    work.route(ROWS)
    yield Timed(f"{name} gate_up of {ROWS}", work.gate_up, work.operations * 2 / 3)
    yield Timed(f"{name} down of {ROWS}", work.down, work.operations / 3)
    yield Timed(f"{name} experts of {ROWS}", work.both, work.operations)
    yield Timed(f"{name}, pairs of {ROWS} in order", work.sort, 3 * work.ids.nbytes, "B")
    yield Timed(f"{name}, sums of {ROWS}", work.combine, work.out.nbytes + work.y.nbytes, "B")


PARTS: dict[str, Callable[[], Iterator[Timed]]] = {
    "attention": attentions,
    "delta": deltas,
    "conv": convolutions,
    **{name: partial(products, name) for name in FORMATS},
}


def time_all(bounds: dict[str, float]) -> None:
    """Prints a line for each."""
    print(f"torch: {bounds['FLOP'] / 1e12:.0f} TFLOP/s, reading {bounds['B'] / 1e9:.0f} GB/s: the 100 % below")
    for part in PARTS.values():
        for timed in part():
            tell(timed, best(timed.call), bounds)


def compile_all(part: str) -> None:
    """What is timed of it."""
    for timed in PARTS[part]():
        timed.call()
    torch.cuda.synchronize()


def tune(bounds: dict[str, float]) -> None:
    """Other tilings, the best first."""
    found: list[tuple[float, Timed]] = []
    work = Attention(ROWS, 20_000)
    for plan in itertools.starmap(prefill_attention.Tiling, ((128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3))):
        found.append((best(partial(work, plan)), Timed(f"attention {plan}", work, work.operations)))
    for name, format in FORMATS.items():
        experts, chosen = Experts(format), grouped.TILES[name]
        experts.route(ROWS)
        for tile in itertools.starmap(
            Tile, ((128, 64, 256, 64, 8, 3), (128, 64, 256, 64, 8, 4), (128, 32, 128, 64, 4, 3),
                   (128, 32, 128, 64, 4, 4), (256, 64, 128, 64, 8, 3))
        ):  # fmt: skip
            grouped.TILES[name] = (tile, tile, tile)
            found.append((best(experts.both), Timed(f"{name} {tile}", experts.both, experts.operations)))
        grouped.TILES[name] = chosen
    for took, timed in sorted(found, key=lambda each: (each[1].name.split()[0], each[0])):
        tell(timed, took, bounds)
