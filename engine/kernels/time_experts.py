"""How long the expert kernels take; run by ``engine.kernels.check_experts``."""

from __future__ import annotations

import itertools
from functools import partial
from operator import itemgetter

import torch

from engine.experts.executor import MailboxLayout
from engine.experts.layout import FORMATS, Layout
from engine.experts.pool import ALIGNMENT, STRIDE, aligned
from engine.experts.residency import Decision, Residency
from engine.kernels import experts
from engine.kernels.experts import TILES, Tile, Tiles
from engine.kernels.mailbox import add_answer
from engine.kernels.resolve import resolve
from engine.kernels.timing import GPU, Timing, measure, random, read_bandwidth, report, sets_for

SHAPES = {"Qwen3.6": (2048, 512), "DeepSeek-V4-like": (4096, 2048)}
RANKS, EXPERTS = 8, 256
POOL_BYTES = 1 << 30


def stride_of(layout: Layout) -> int:
    return -(-layout.nbytes // STRIDE) * STRIDE


class Resident:
    """``rows`` rows with RANKS experts each, of ``distinct`` experts, in slots of several layers."""

    def __init__(self, layout: Layout, rows: int, distinct: int) -> None:
        self.layout, self.rows, self.nbytes = layout, rows, distinct * layout.nbytes
        blob = torch.empty(layout.nbytes, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(0)
        gate_up = torch.randn(2 * layout.inner, layout.hidden, generator=generator) * layout.hidden**-0.5
        layout.encode(gate_up, torch.randn(layout.hidden, layout.inner, generator=generator) * layout.inner**-0.5, blob)
        layers = sets_for(self.nbytes)
        self.slots = torch.zeros(layers * distinct + 1, stride_of(layout), dtype=torch.uint8, device=GPU)
        self.slots[:, : layout.nbytes] = blob.to(GPU)
        self.x, self.weights = random(rows, layout.hidden), random(rows, RANKS)
        self.h, self.out = random(rows, RANKS, layout.inner), random(rows, RANKS, layout.hidden)
        self.y = random(rows, layout.hidden)
        self.decisions = [self._decide(layer * distinct, distinct) for layer in range(layers)]

    def _decide(self, first: int, distinct: int) -> Decision:
        made = Decision.create(self.rows, RANKS, GPU)
        each = torch.arange(self.rows * RANKS, device=GPU).view(self.rows, RANKS)
        made.slot.copy_(each % distinct + first)
        made.gpu_parts.fill_(self.layout.parts)
        made.counts.zero_()
        return made

    def gate_up(self) -> Timing:
        return measure([
            partial(experts.gate_up, self.x, self.slots, made, self.layout, self.h) for made in self.decisions
        ])  # fmt: skip

    def down(self) -> Timing:
        return measure([
            partial(experts.down, self.h, self.slots, made, self.layout, self.out) for made in self.decisions
        ])  # fmt: skip

    def combine(self) -> Timing:
        return measure([partial(experts.combine, self.out, self.weights, self.decisions[0], self.y)])


def time_resident(reading: float, quick: bool) -> None:
    for (shape, (hidden, inner)), format in itertools.product(SHAPES.items(), FORMATS.values()):
        layout = Layout(format, hidden, inner)
        for rows, distinct in ((1, 8),) if quick else ((1, 8), (4, 24), (16, 80)):
            resident = Resident(layout, rows, distinct)
            name = f"{shape} {format.name} {rows} rows {distinct} experts"
            report(f"gate_up {name}", resident.nbytes // 3 * 2, resident.gate_up(), reading)
            report(f"down    {name}", resident.nbytes // 3, resident.down(), reading)
            combined = resident.combine()
            print(f"combine {rows} x {hidden}: {combined.microseconds:.2f} µs")
            del resident


def time_fetch() -> None:
    """From registered host memory, whole experts, one after another through a pool."""
    memory = aligned(POOL_BYTES, ALIGNMENT)
    memory.fill_(1)
    address = memory.data_ptr()
    status = torch.cuda.cudart().cudaHostRegister(address, POOL_BYTES, 2)  # mapped, at the same address
    if int(status):
        print(f"host memory cannot be registered: {status}")
        return
    try:
        for (shape, (hidden, inner)), format in itertools.product(SHAPES.items(), FORMATS.values()):
            layout = Layout(format, hidden, inner)
            stride = stride_of(layout)
            slots = torch.empty(9, stride, dtype=torch.uint8, device=GPU)
            part_bytes = torch.tensor(layout.offsets, dtype=torch.int32, device=GPU)
            for count in (1, 2, 4, 8):
                sets = []
                for first in range(0, min(256, POOL_BYTES // stride) - count + 1, count):
                    made = Decision.create(1, 8, GPU)
                    made.counts.copy_(torch.tensor([count, 0]))
                    entries = torch.tensor([[number, first + number, layout.parts] for number in range(count)])
                    made.fetch[:count] = entries.to(torch.int32).to(GPU)
                    sets.append(partial(experts.fetch, address, stride, slots, made, part_bytes))
                timing = measure(sets[:16])
                rate = count * layout.nbytes / timing.microseconds / 1e3
                print(f"fetch {shape} {format.name} {count}: {timing.microseconds:9.2f} µs {rate:6.1f} GB/s")
    finally:
        torch.cuda.cudart().cudaHostUnregister(address)


def time_decisions() -> None:
    layout = Layout(FORMATS["mxfp4"], 2048, 512)
    for rows, (kind, slots) in itertools.product((1, 4, 16), (("resident", 40 * EXPERTS), ("missing", 200))):
        state = Residency.create(layout, 40, EXPERTS, slots, GPU)
        made, sets = Decision.create(rows, RANKS, GPU), []
        for layer in range(40):
            ids = torch.stack([torch.randperm(EXPERTS)[:RANKS] for _ in range(rows)]).to(torch.int32).to(GPU)
            sets.append(partial(resolve, state, ids, layer, made))
        timing = measure(sets)
        print(f"resolve {rows} x {RANKS}, all {kind}: {timing.microseconds:.2f} µs")


def time_mailbox() -> None:
    for rows in (1, 16):
        box = MailboxLayout(rows, RANKS, 2048)
        memory = torch.zeros(box.nbytes, dtype=torch.uint8).pin_memory()
        x, weights = random(rows, 2048), random(rows, RANKS)
        made, arrivals = Decision.create(rows, RANKS, GPU), torch.zeros(1, dtype=torch.int32, device=GPU)
        made.gpu_parts.fill_(4)
        for work in (0, 1):
            made.counts.copy_(torch.tensor([0, work]))
            at = memory.data_ptr()
            times = [
                measure([call]).microseconds
                for call in (
                    partial(experts.publish, x, weights, made, 3, arrivals, at, box),
                    partial(experts.arrive, at, box),
                    partial(add_answer, torch.zeros_like(x), made.counts, at, box),
                )
            ]
            kind = "with" if work else "without"
            print(f"{rows} rows {kind} CPU work: publish, arrive, add {', '.join(f'{t:.2f}' for t in times)} µs")


def time_all(quick: bool) -> None:
    reading = read_bandwidth()
    print(f"reading 4 GiB: {reading / 1e9:.0f} GB/s, the 100 % below")
    time_decisions()
    time_mailbox()
    time_resident(reading, quick)
    time_fetch()


def tune() -> None:
    """The best tiles for one row of each shape and format that has tiles of ``experts``."""
    for (shape, (hidden, inner)), (name, chosen) in itertools.product(SHAPES.items(), tuple(TILES.items())):
        format, found = FORMATS[name], []
        resident = Resident(Layout(format, hidden, inner), 1, 8)
        for blocks, warps, unroll, stages in itertools.product((4, 8, 16, 32), (1, 2, 4, 8), (1, 2, 4), (1, 3)):
            read = blocks * unroll * stages * format.block_bytes
            if read > 100 << 10 or read // warps > 256 * 32 or unroll > 1 < stages:
                continue
            tile = Tile(blocks, warps, unroll, stages)
            TILES[format.name] = Tiles(tile, tile)
            found.append((resident.gate_up().microseconds, resident.down().microseconds, tile))
        TILES[format.name] = chosen
        for which, name in enumerate(("gate_up", "down")):
            for entry in sorted(found, key=itemgetter(which))[:4]:
                print(f"{name} {shape} {format.name}: {entry[which]:.2f} µs, {entry[2]}", flush=True)
