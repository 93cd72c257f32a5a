"""The expert kernels and the device's decisions on a GPU: right first, then how fast.

    python -P -m engine.kernels.check_experts [--seed N] [--quick] [--tune]

Decisions are compared with the reference bit for bit. Experts are compared with float64 products of the weights that
their blobs decode to; the relative error is that of the whole result, and what must not be read is NaN. Times are of
graph replays over layers in turn, so that the GPU's cache does not hold the experts. ``--tune`` times other tiles. Ends
with status 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from engine.experts import residency
from engine.experts.executor import MailboxLayout
from engine.experts.layout import FORMATS, Layout
from engine.experts.residency import ONE, Decision, Policy, Residency
from engine.kernels import experts, experts_twin
from engine.kernels.mailbox import Request, add_answer
from engine.kernels.resolve import resolve
from engine.kernels.time_experts import SHAPES, stride_of, time_all, tune
from engine.kernels.timing import GPU
from engine.layers.ops import CPU

TOLERANCE = 1e-5
LAYERS = 3
CALLS = ((1, 8, 256, 100), (1, 1, 8, 1), (16, 8, 256, 300), (4, 10, 512, 1500), (3, 4, 128, 40))
"""Rows, ranks, experts, slots."""


def check_decisions(policy: Policy, steps: int, rng: random.Random) -> bool:
    """Whether state and decision are the reference's after each of so many random calls of every size, and the CPU is
    asked for its part of each."""
    layout, same = Layout(FORMATS["mxfp4"], 32, 160), True
    for rows, ranks, count, slots in CALLS:
        states = [Residency.create(layout, LAYERS, count, slots, device) for device in (CPU, GPU)]
        decisions = [Decision.create(rows, ranks, device) for device in (CPU, GPU)]
        box, x, weights = MailboxLayout(rows, ranks, 64), torch.rand(rows, 64), torch.rand(rows, ranks)
        memory = torch.zeros(box.nbytes, dtype=torch.uint8).pin_memory()
        request = Request(x.to(GPU), weights.to(GPU), memory.data_ptr(), box)
        for state in states:
            state.follow(policy)
            state.clock.fill_(2**31 // policy.per_step - steps // 6)  # times wrap on the way
        for step in range(steps):
            if step % 8 == 0:
                share = torch.tensor([rng.choice((0, ONE, rng.randrange(ONE))) for _ in range(LAYERS)])
                for state in states:
                    state.share.copy_(share)
            ids = torch.tensor([_routed(rng, ranks, count) for _ in range(rows)], dtype=torch.int32)
            residency.resolve(states[0], ids, step % LAYERS, decisions[0])
            memory.zero_()
            memory[box.done] = 1
            resolve(states[1], ids.to(GPU), step % LAYERS, decisions[1], request)
            same &= _same(states[1], states[0]) and _same(*(_used(decision) for decision in reversed(decisions)))
            asked = bool(decisions[0].counts[1])
            words = _read(memory, box.ready, torch.zeros(9, dtype=torch.int64))
            same &= int(words[0]) == asked * request.number(step % LAYERS) and bool(words[8]) != asked
            sent = ((box.x, x), (box.plan, decisions[0].plan), (box.weights, weights))
            same &= all(torch.equal(_read(memory, offset, each), each) for offset, each in sent if asked)
    return same


def _routed(rng: random.Random, ranks: int, count: int) -> list[int]:
    """A row's experts, low ones more often; some rows are padding."""
    if rng.random() < 0.1:
        return [-1] * ranks
    chosen: dict[int, None] = {}
    while len(chosen) < ranks:
        chosen[int(count * rng.random() ** 3)] = None
    return list(chosen)


def _used(decision: Decision) -> Decision:
    return replace(decision, fetch=decision.fetch[: int(decision.counts[0])])


def _same(got: Residency | Decision, want: Residency | Decision) -> bool:
    names = [field.name for field in fields(want) if isinstance(getattr(want, field.name), Tensor)]
    return all(torch.equal(getattr(got, name).cpu(), getattr(want, name)) for name in names)


def check_experts(layout: Layout, generator: torch.Generator) -> tuple[float, bool]:
    """Relative error of a call with whole, partial and absent experts, and whether rows of it give the same bits
    in other company."""
    slots = torch.full((4, stride_of(layout)), 0xFF, dtype=torch.uint8)
    for slot in slots:
        gate_up = torch.randn(2 * layout.inner, layout.hidden, generator=generator) * layout.hidden**-0.5
        down = torch.randn(layout.hidden, layout.inner, generator=generator) * layout.inner**-0.5
        layout.encode(gate_up, down, slot[: layout.nbytes])
    made = Decision.create(3, 2, CPU)
    made.slot.copy_(torch.tensor([[2, 0], [-1, 3], [1, 2]]))
    made.gpu_parts.copy_(torch.tensor([[4, 2], [0, 4], [1, 3]]))
    made.counts.zero_()
    x, weights = torch.randn(3, layout.hidden, generator=generator), torch.rand(3, 2, generator=generator)
    h, out = (torch.full((3, 2, size), torch.nan, dtype=torch.float64) for size in (layout.inner, layout.hidden))
    want = torch.empty(3, layout.hidden, dtype=torch.float64)
    experts_twin.gate_up(x.double(), slots, made, layout, h)
    experts_twin.down(h, slots, made, layout, out)
    experts_twin.combine(out, weights, made, want)
    got = _computed(x, weights, slots, made, layout)
    some = replace(made, slot=made.slot[1:], gpu_parts=made.gpu_parts[1:], plan=made.plan[1:])
    others = _computed(x[1:], weights[1:], slots, some, layout)
    return float((got - want).norm() / want.norm()), torch.equal(others, got[1:])


def _computed(x: Tensor, weights: Tensor, slots: Tensor, made: Decision, layout: Layout) -> Tensor:
    made = _on_gpu(made)
    h, out = (torch.full((*made.slot.shape, size), torch.nan, device=GPU) for size in (layout.inner, layout.hidden))
    y, slots = torch.full_like(x, torch.nan, device=GPU), slots.to(GPU)
    experts.gate_up(x.to(GPU), slots, made, layout, h)
    experts.down(h, slots, made, layout, out)
    experts.combine(out, weights.to(GPU), made, y)
    return y.cpu()


def _on_gpu(decision: Decision) -> Decision:
    return Decision(*(getattr(decision, field.name).to(GPU) for field in fields(decision)))


def check_fetch(layout: Layout) -> bool:
    """Whether whole and partial experts arrive from pinned host memory, and nothing else changes."""
    part_bytes, stride = torch.tensor(layout.offsets, dtype=torch.int32), stride_of(layout)
    pool = torch.randint(0, 256, (9, stride), dtype=torch.uint8).pin_memory()
    made = Decision.create(1, 4, CPU)
    made.fetch.copy_(torch.tensor([[4, 7, 4], [0, 8, 4], [5, 3, 1], [1, 1, 4]]))
    made.counts.copy_(torch.tensor([3, 0]))
    want = torch.full((6, stride), 0xA5, dtype=torch.uint8)
    got = want.to(GPU)
    experts_twin.fetch(pool, want, made, part_bytes)
    experts.fetch(pool.data_ptr(), stride, got, _on_gpu(made), part_bytes.to(GPU))
    return torch.equal(got.cpu(), want)


def _read(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    return memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def check_mailbox(rows: int, hidden: int, generator: torch.Generator) -> bool:
    """Whether the CPU finds its part in pinned memory, hears only of work that there is, and its result is added."""
    box = MailboxLayout(rows, 8, hidden)
    memory = torch.full((box.nbytes,), 0xEE, dtype=torch.uint8).pin_memory()
    x, weights = torch.randn(rows, hidden, generator=generator), torch.rand(rows, 8, generator=generator)
    made, arrivals = Decision.create(rows, 8, CPU), torch.zeros(1, dtype=torch.int32, device=GPU)
    for field in fields(made):
        getattr(made, field.name).zero_()
    made.plan.copy_(torch.arange(made.plan.numel()).view(made.plan.shape))

    one, right = torch.ones(1, dtype=torch.int64), True
    for work in (0, 1):
        made.counts[1] = work
        memory.fill_(0xEE)
        experts.publish(x.to(GPU), weights.to(GPU), _on_gpu(made), 41, arrivals, memory.data_ptr(), box)
        experts.arrive(memory.data_ptr(), box)
        torch.cuda.synchronize()
        right &= torch.equal(_read(memory, box.arrived, one), one)
        if work:
            right &= int(_read(memory, box.ready, one)) == rows << 32 | 42 and int(_read(memory, box.done, one)) == 0
            right &= all(
                torch.equal(_read(memory, offset, sent), sent)
                for offset, sent in ((box.x, x), (box.plan, made.plan), (box.weights, weights))
            )
        else:
            untouched = (_read(memory, box.x, x).view(torch.uint8) == 0xEE).all()
            right &= int(_read(memory, box.done, one)) == 1 and bool(untouched)
        y = torch.zeros(rows, hidden, device=GPU)
        _read(memory, box.y, x).copy_(x)
        add_answer(y, made.counts.to(GPU), memory.data_ptr(), box)
        right &= torch.equal(y.cpu(), x * work)
    return right and not int(arrivals)


def check_all(seed: int, quick: bool) -> bool:
    """Prints one line for each check; whether all were right."""
    rng, generator, results = random.Random(seed), torch.Generator().manual_seed(seed), []  # noqa: S311

    def tell(name: str, good: bool, note: str = "") -> None:
        results.append(good)
        print(f"{'ok   ' if good else 'WRONG'} {name} {note}", flush=True)

    steps = 60 if quick else 600
    for policy in residency.policies(LAYERS).values():
        tell(f"decisions, {policy.name}, {steps * len(CALLS)} calls", check_decisions(policy, steps, rng))
    for name, format in FORMATS.items():
        for hidden, inner in ((128, 160), *SHAPES.values()):
            error, same = check_experts(Layout(format, hidden, inner), generator)
            tell(f"experts {name} {hidden} x {inner}", error <= TOLERANCE and same, f"{error:.2e}, same {same}")
        tell(f"fetch {name}", check_fetch(Layout(format, 2048, 512)))
    for rows, hidden in ((1, 2048), (3, 96), (16, 4096)):
        tell(f"mailbox {rows} x {hidden}", check_mailbox(rows, hidden, generator))
    return all(results)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 31))
    parser.add_argument("--quick", action="store_true", help="fewer decisions and sizes")
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args(arguments)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {options.seed}")
    with torch.inference_mode():
        right = check_all(options.seed, options.quick)
        time_all(options.quick)
        if options.tune:
            tune()
    print("all right" if right else "WRONG results above")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
