"""The arena on a GPU: what moving the border takes; that graphs go on, what is kept is kept, others get memory."""

from __future__ import annotations

import sys
import time

import torch

from engine.device.arena import Arena, Shapes
from engine.device.findings import aim, report, verdict
from engine.device.memory import Sizes
from engine.device.virtual import CudaMemory
from engine.models.model import Manifest

GPU = torch.device("cuda")
GIB = 1 << 30
STRIDE = 1769472
MANIFEST = Manifest(attention_layers=10, kv_heads=2, head_dim=256, recurrent=((32, 128, 128), (8192, 3)) * 30)
"""Sizes of a common model, experts of four bits."""
GOAL_SECONDS = 0.05
SAMPLES = 5


def timed(arena: Arena, sizes: Sizes) -> float:
    start = time.perf_counter()
    arena.resize(sizes)
    return time.perf_counter() - start


def main() -> int:
    begin = time.perf_counter()
    torch.zeros(1, device=GPU)
    virtual = CudaMemory(torch.device("cuda", torch.cuda.current_device()))
    report("granules", f"{virtual.granule >> 20} MiB")
    shapes = Shapes(MANIFEST, torch.bfloat16, STRIDE)
    few, many = Sizes(1600, 256, 20), Sizes(1600 - GIB // STRIDE, 256 + GIB // shapes.page_bytes, 20)
    before = virtual.free_bytes()
    start = time.perf_counter()
    most = Sizes(10240, 65536, 400)
    arena = Arena(virtual, shapes, sizes=few, most=most, budget=6 * GIB, device=GPU)
    made = time.perf_counter() - start
    report("made", f"{arena.held / GIB:.2f} GiB in {1e3 * made:.0f} ms")
    taken = before - virtual.free_bytes()
    report(
        "what it holds is what the device lacks", f"{arena.held} of {taken} bytes", 0 <= taken - arena.held < GIB // 8
    )
    memory = arena.memory

    kept = many.slots
    marks = torch.arange(kept, device=GPU, dtype=torch.int64)
    slots = memory.slots[:, :8].view(torch.int64)  # the first word of each
    slots[:kept, 0] = marks
    slots[most.slots, 0] = -5
    pages = (*memory.keys, *memory.values)
    for number, tensor in enumerate(pages):
        tensor[: few.pages] = number
    for number, state in enumerate(memory.states):
        state[: few.states] = number
    total, out = torch.zeros(1, dtype=torch.int64, device=GPU), torch.zeros(1, device=GPU)
    graph = torch.cuda.CUDAGraph()
    total.copy_(slots[:kept, 0].sum(0, keepdim=True))
    out.copy_(pages[7][: few.pages].float().mean().view(1))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total.copy_(slots[:kept, 0].sum(0, keepdim=True))
        out.copy_(pages[7][: few.pages].float().mean().view(1))
        memory.states[1][1].add_(1)

    def replays(times: int) -> bool:
        total.zero_()
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        state = float(memory.states[1][1].mean())
        return int(total) == kept * (kept - 1) // 2 and float(out) == 7.0 and state == 1.0 + times

    report("a graph over it replays", "as captured", replays(1))
    there, back = [], []
    for sample in range(SAMPLES):
        there.append(timed(arena, many))
        right = replays(2 + 2 * sample)
        for tensor in pages:
            tensor[few.pages : many.pages] = 3  # all that is new can be written
        back.append(timed(arena, few))
        right &= replays(3 + 2 * sample)
        if not right:
            break
    report("and right after the border moved", f"{2 * SAMPLES} times", right)
    for name, times in (("1 GiB from slots to pages", there), ("1 GiB from pages to slots", back)):
        times.sort()
        middle = times[len(times) // 2]
        aim(name, f"{1e3 * middle:.1f} ms (at most {1e3 * times[-1]:.1f})", middle < GOAL_SECONDS)
    same = bool((slots[:kept, 0] == marks).all()) and int(slots[most.slots, 0]) == -5
    same &= all(bool((tensor[: few.pages] == number).all()) for number, tensor in enumerate(pages))
    same &= all(bool((state[2 : few.states] == number).all()) for number, state in enumerate(memory.states))
    report("slots, pages and states that were kept", "unchanged", same)

    free = virtual.free_bytes()
    took = timed(arena, Sizes(few.slots - GIB // STRIDE, few.pages, few.states))
    seen = virtual.free_bytes() - free
    enough = seen >= GIB - 2 * STRIDE - virtual.granule
    report("1 GiB given back is there for others", f"{seen >> 20} MiB", enough)
    aim("within", f"{1e3 * took:.1f} ms", took < 1)
    took = timed(arena, few)
    report("and taken again", f"in {1e3 * took:.1f} ms", replays(2 + 2 * SAMPLES))
    arena.close()
    torch.cuda.empty_cache()
    left = before - virtual.free_bytes()
    report("closed, nothing is held", f"{left >> 20} MiB beside it", arena.held == 0 and left < GIB // 8)
    return verdict(time.perf_counter() - begin)


if __name__ == "__main__":
    sys.exit(main())
