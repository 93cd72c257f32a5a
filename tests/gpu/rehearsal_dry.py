"""A program for test_rehearsal.py: Triton as for an H200, on a machine without a GPU, and outside its interpreter.

``compile``: a kernel for two numbers, side by side. ``serve MODE SEQUENCES RANKS STEPS [SLOTS]``: what a rehearsal
asks for, and what serving a small model then asks for besides, with so many steps of anything that the scheduler might
come to; with SLOTS, there are only so many until kernels were rehearsed. Prints JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget

from engine.api import PAGE, EngineConfig, Request, Sampling
from engine.bench_shapes import tiny
from engine.device import load, rehearse, runner
from engine.device.fake import FakeDriver
from engine.device.machine import Machine
from engine.device.masks import Masks
from engine.device.reduce import KEPT
from engine.device.runner import DeviceRunner
from engine.device.served import write_model
from engine.experts.offload import OffloadedExperts
from engine.kernels import best, launch
from engine.loading import load_engine
from engine.runner import Rows
from engine.scheduler import Scheduler

CPU = torch.device("cpu")
PROMPTS = ([3], [844], [500, 300], [7, 9, 200, 33], [4100], [128, 2, 2], [60] * 8, [1] * 5, [48, 16, 32], [32, 32])
"""Tokens of what is asked at a time."""
MODEL = replace(
    tiny(), vocab=4160, context=1 << 13, heads=16, key_heads=16, value_heads=32, experts=16, top_k=8
)  # fmt: skip
"""Few numbers, but matrices with more blocks than a GPU has processors."""
CHUNK = 1024


class Counting(FakeDriver):
    copied = 0

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        super().copy(stream, target, source, nbytes)
        self.copied = max(self.copied, nbytes)


class NoDriver:
    """Of a GPU that is not there: nothing can be launched. ``loaded``: kernels."""

    def __init__(self) -> None:
        self.loaded, self.utils = list[str](), self

    def launcher_cls(self, *_: Any) -> Any:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}

    def load_binary(self, name: str, *_: Any) -> tuple[int, ...]:
        self.loaded.append(name)
        return 1, 1, 0, 0, 1024

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@triton.jit
def _add(x, out, number, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + number)


def compiled() -> dict[str, Any]:
    done, seen, launched, known = list[tuple[int, int]](), list[float](), list[Any](), dict[Any, Any]()

    def work() -> None:
        for number in (1, 16, 32, 1):
            out = torch.empty(64)
            launch.launch(_add, (1,), torch.ones(64), out, number, SIZE=64)
            seen.append(out.abs().max().item())
        known.update(launch._compiled)

    found = rehearse.compile_all(work, lambda *now: done.append(now), CPU)
    kept = len(list(Path(triton.knobs.cache.dir).glob("*/_add.cubin")))
    for key, kernel in known.items():  # as if they had been started since
        launch._compiled[key] = kernel._replace(run=lambda *given: launched.append(given))
    rehearse.compile_all(work, lambda *_: None, CPU)
    loaded = triton.runtime.driver.active.loaded
    return {"loaded": loaded, "found": found, "kept": kept, "done": done[-1], "seen": seen, "launched": len(launched)}


def reduce(logits: Tensor, temperatures: Tensor, masks: Masks) -> Tensor:
    return best.reduce(logits, temperatures, masks.which, masks.words, KEPT)


def steps(pages: int, live: int, count: int) -> Iterator[list[Rows]]:
    """Of one sequence first, then of anything."""

    def rows(tokens: int, width: int, snapshots: int = 0, logits: bool = True) -> Rows:
        return Rows([0] * tokens, width * PAGE - tokens, [0] * width, 1, [(tokens, 1)] * snapshots, logits)

    for tokens in range(1, 34):
        yield [rows(tokens, 1)]
    rng = random.Random(0)
    for _ in range(count):
        sequences, most, parts = rng.randint(1, live), rng.choice((4, 16, 40, 130, CHUNK)), []
        tokens_of = [
            1 if rng.random() < 0.5 else rng.randint(1, max(1, most // sequences)) for _ in range(sequences)
        ]  # fmt: skip
        for tokens in tokens_of:
            least = -(-tokens // PAGE)
            width = rng.choice((least, rng.randint(least, pages), pages))
            left = (64 if sum(tokens_of) > 16 else 16) - sum(len(part.snapshots) for part in parts)
            snapshots = min(left, rng.choice((0, 0, 1, 2, 20, 40)))
            parts.append(rows(tokens, width, snapshots, rng.random() < 0.8))
        yield parts


def disturb(experts: OffloadedExperts, rng: random.Random) -> None:
    """What serving may have learnt, and how many slots there may be."""
    prefill, slots = experts.prefill, experts.residency.slots
    prefill.ahead = rng.choice((None, False, True))
    link = prefill.costs.link
    prefill.costs = replace(prefill.costs, between=rng.choice((0.0, 100 * link)), spread=rng.choice((0.3, 1.0)))
    experts.resize(rng.choice((slots, rng.randint(1, slots))))


def served(mode: str, live: int, ranks: int, count: int, few: int = 0) -> tuple[list[str], list[str], bool]:
    asked, driver, untouched = set[tuple[str, str]](), Counting(), []

    def ask(*, key: str, fn: Any, **_: Any) -> bool:
        asked.add((fn.name, key))
        return True  # no need to compile it

    triton.knobs.runtime.jit_cache_hook = ask
    rehearse.reduce = runner.reduce = reduce

    class Runner(DeviceRunner):
        def __init__(self, *given: Any, pages: int, most: int, **more: Any) -> None:
            super().__init__(*given, pages=pages, most=most, **more)
            self.room: Any = {"pages": pages, "most": most, "live": live, "chunk": CHUNK}

        def prepare(self, progress: Any) -> None:
            experts, costs = self._experts, self._experts and self._experts.prefill.costs
            slots = experts.residency.slots if experts is not None else 0
            if experts is not None and few:
                experts.resize(few)
            rehearse.rehearse(self.model, self.cache, experts, **self.room, device=CPU, progress=progress)
            untouched.append(experts is None or (
                driver.copied <= experts.pool.stride and experts.prefill.costs == costs
                and experts.prefill.ahead is None and bool((experts.residency.slot_of == -1).all())
                and experts.prefill.limit == int(experts.residency.limit)
            ))  # fmt: skip
            if experts is not None and few:
                experts.resize(slots)

    load.DeviceRunner = Runner  # type: ignore[misc]
    with TemporaryDirectory() as folder:
        write_model(replace(MODEL, top_k=ranks), Path(folder), CPU)
        config = EngineConfig(
            folder, device="cuda", experts=mode, kv_bytes=1 << 26, checkpoint_bytes=1 << 20, max_sequences=live,  # type: ignore[arg-type]
            chunk_tokens=CHUNK,
        )  # fmt: skip
        machine = Machine(CPU, "none", "no GPU", 2 << 30, lambda: driver)
        scheduler = Scheduler(load_engine(config, lambda *_: None, None, machine), config)
    known, rng, served = set(asked), random.Random(0), scheduler.runner
    assert isinstance(served, Runner)
    with rehearse._unlaunched(), rehearse._Zeros():
        for turn, sizes in enumerate(PROMPTS):
            for number, size in enumerate(sizes):
                prompt = tuple(rng.randrange(MODEL.vocab) for _ in range(size))
                scheduler.submit(Request(f"{turn}.{number}", prompt, Sampling(max_tokens=6, temperature=0.0)))
            while not scheduler.idle:
                scheduler.step()
        for parts in steps(served.room["pages"], live, count):
            if served._experts is not None and rng.random() < 0.3:
                disturb(served._experts, rng)
            served.score(parts)
    scheduler.close(1.0)
    return sorted({name for name, _ in known}), sorted(f"{name} {key}" for name, key in asked - known), all(untouched)


if __name__ == "__main__":
    triton.runtime.driver.set_active(NoDriver())
    torch.cuda.current_device = lambda: 0
    print(json.dumps(compiled() if sys.argv[1] == "compile" else served(sys.argv[2], *map(int, sys.argv[3:]))))
