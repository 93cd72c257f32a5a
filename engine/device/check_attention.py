"""Backends of attention on a GPU: right first, then how fast beside each other.

    python -P -m engine.device.check_attention

Errors are those of the whole result, against the twin; sizes are those of Qwen3.6-35B-A3B. Shares are of torch's own
product of two bfloat16 matrices, or of its reading of memory, in the same run. Ends with status 1 where something is
wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from engine.api import PAGE
from engine.device.attention import BACKENDS, Attend, Phase
from engine.kernels.timing import GPU, HEAD_DIM, HEADS, KV_HEADS, make_batch, measure, random, read_bandwidth
from engine.layers.ops import Batch
from engine.layers.reference import ReferenceOps

SCALE = HEAD_DIM**-0.5
SIZES: dict[Phase, tuple[tuple[int, int], ...]] = {
    "prefill": ((8192, 0), (8192, 60_000), (2048, 60_000)),
    "decode": ((1, 1 << 10), (1, 1 << 17)),
}
"""Rows behind keys."""
MIXED: dict[Phase, list[tuple[int, int, int]]] = {
    "prefill": [(3000, 100, 0), (1, 4999, 1), (0, 3, 2), (1300, 2900, 3)],
    "decode": [(1, 0, 0), (1, 4999, 1), (1, 63, 2)],
}


class Work:
    def __init__(self, segments: list[tuple[int, int, int]]) -> None:
        self.batch: Batch = make_batch(segments, GPU)
        self.rows = self.batch.tokens.shape[0]
        shape = (self.batch.page_table.numel(), PAGE, KV_HEADS, HEAD_DIM)
        self.pages = random(*shape, dtype=torch.bfloat16), random(*shape, dtype=torch.bfloat16)
        self.q = random(self.rows, HEADS, HEAD_DIM)

    def run(self, attend: Attend) -> Tensor:
        return attend(self.q, *self.pages, self.batch, SCALE)


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def check(name: str, phase: Phase, attend: Attend) -> bool:
    work = Work(MIXED[phase])
    got, want = work.run(attend).double(), work.run(ReferenceOps().attention).double()
    error = float((got - want).norm() / want.norm())
    print(f"{'ok   ' if error < 1e-2 else 'WRONG'} {phase} {name:30} {error:.2e}", flush=True)
    return error < 1e-2


def tell(name: str, phase: Phase, attend: Attend, rows: int, keys: int, rate: float, reading: float) -> None:
    work = Work([(rows, keys, 0)])
    call = partial(work.run, attend)
    first = seconds(call)
    if phase == "decode":
        took = measure([call]).microseconds
        share = 2 * keys * KV_HEADS * HEAD_DIM * 2 / took * 1e6 / reading
    else:  # as it is served: it may wait for the device
        took = 1e6 * min(seconds(call) for _ in range(5))
        share = 4 * HEADS * HEAD_DIM * rows * (keys + (rows + 1) / 2) / took * 1e6 / rate
    print(
        f"{phase} {name:8} {rows:5} rows behind {keys:6} {took:10.1f} µs {100 * share:4.0f} %, "
        f"the first {1e3 * first:.0f} ms",
        flush=True,
    )


def main() -> int:
    right = True
    a = random(8192, 8192, dtype=torch.bfloat16)
    with torch.inference_mode():
        rate = 2 * 8192**3 / measure([partial(torch.mm, a, a)], samples=3).microseconds * 1e6
        reading = read_bandwidth()
        print(f"torch: {rate / 1e12:.0f} TFLOP/s, reading {reading / 1e9:.0f} GB/s")
        for name, phases in BACKENDS.items():
            for phase, module in phases.items():
                right &= check(name, phase, import_module(module).attention)
        for phase, sizes in SIZES.items():
            for rows, keys in sizes:
                for name, phases in BACKENDS.items():
                    if phase in phases:
                        tell(name, phase, import_module(phases[phase]).attention, rows, keys, rate, reading)
    print("all right" if right else "WRONG results above")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
