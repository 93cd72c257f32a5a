"""Part ``serve`` of ``engine.device.check``: the whole scheduler on the GPU, against the CPU's arithmetic.

A model of Qwen3.6's layers with random weights, written to a temporary folder, is served with all experts on the device
and with most of them in host memory, while sequences join and leave. What was answered is then computed by the CPU, and
once more by the GPU with the same experts (``engine.device.agree``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from engine import native
from engine.api import Sampling
from engine.device.agree import CHUNK, Known, Led, known
from engine.device.machine import Machine, find_machine
from engine.device.served import LAYERS, Served, model_config, prompt, report, room_for, served, write_model
from engine.kernels.ops import DeviceOps

PROMPTS = {"first": 600, "second": 40, "third": 9, "long": 5}
ANSWERS = {"first": 200, "second": 60, "third": 200, "long": 2000}
"""Tokens."""
RESIDENT = 0.4
"""Of the experts."""
MODES: dict[str, dict[str, Any]] = {
    "all experts on the device": {"experts": "device"},
    "hybrid": {"experts": "hybrid"},
    "hybrid, half of the misses to the CPU": {"experts": "hybrid", "split": 0.5},
}
AGREED = 0.98
"""Of the tokens, where routers choose for themselves."""
HOST = 1e-4
"""Seconds of a step at most in which the device has nothing to do."""
_WARM = 8
"""Steps that are not timed."""


def converse(made: Served, vocab: int, said: dict[str, list[int]] | None = None) -> None:
    """Three sequences that join and leave, and a long one. ``said``: what each is to say."""

    def submit(name: str) -> None:
        forced = None if said is None else tuple(said[name])
        sampling = Sampling(max_tokens=ANSWERS[name], temperature=0.0, forced=forced)
        made.submit(name, _prompt(name, vocab), sampling)

    submit("first")
    made.run(lambda: len(made.answers["first"]) > 20)
    submit("second")
    made.run(lambda: len(made.answers["second"]) > 20)
    submit("third")
    made.run()
    submit("long")
    made.run()


def _prompt(name: str, vocab: int) -> list[int]:
    return prompt(list(PROMPTS).index(name), PROMPTS[name], vocab)


@contextmanager
def replays() -> Iterator[list[tuple[torch.Event, torch.Event]]]:
    """Events around every graph that is launched meanwhile."""
    events = list[tuple[torch.Event, torch.Event]]()
    replay = torch.cuda.CUDAGraph.replay

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        events.append((torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)))
        events[-1][0].record()
        replay(graph)
        events[-1][1].record()

    with patch.object(torch.cuda.CUDAGraph, "replay", timed):
        yield events


def converse_alone(vocab: int, folder: Path, machine: Machine, mode: dict[str, Any]) -> dict[str, list[int]]:
    """What was answered; told as it comes: tok/s of one sequence, and how long the device waits for the host."""
    with served(folder, machine, **mode) as made, replays() as events:
        converse(made, vocab)
        steps, graphs = made.steps[-ANSWERS["long"] + _WARM :], events[-ANSWERS["long"] + _WARM :]
        on_device = [begin.elapsed_time(end) / 1e3 for begin, end in graphs]
        host = median(step - busy for step, busy in zip(steps[-len(graphs) :], on_device[-len(steps) :], strict=True))
        stats = made.scheduler.stats().values
        parts = [stats.get(f"experts_{name}", 0.0) for name in ("hit", "fetched", "on_cpu")]
        shares = ", ".join(f"{part / max(sum(parts), 1):.0%}" for part in parts)
        report(f"one sequence{f'; hit, fetched, CPU {shares}' if sum(parts) else ''}", f"{1 / median(steps):.0f} tok/s")
        report(
            "a step; of it the device waits for the host",
            f"{1e3 * median(steps):.2f} ms; {1e6 * host:.0f} us", host < HOST,
        )  # fmt: skip
        report("whole rows fetched", f"{stats['fetched_rows']:.0f} of {stats['graph_steps']:.0f} steps")
        return made.answers


def compare(
    name: str, folder: Path, machine: Machine, there: dict[str, Known], vocab: int, mode: dict[str, Any]
) -> bool:
    """Say the same again, with the CPU's choice of experts."""
    print(f"{name}, with the experts that the CPU chooses:", flush=True)
    led = Led(there, machine.device)
    with led.routers(DeviceOps), served(folder, machine, chunk_tokens=CHUNK, **mode) as made:
        led.listen(made.scheduler.runner)
        converse(made, vocab, {name: list(one.tokens[one.prompt :]) for name, one in there.items()})
    return all([errors.told(kind) for kind, errors in led.errors.items()])


def check(folder: Path, machine: Machine, quick: bool) -> bool:
    config = model_config(quick)
    vocab, room = config.vocab, room_for(config, RESIDENT)
    modes = {
        name: {"device": "cuda", **({} if mode["experts"] == "device" else {"gpu_bytes": room}), **mode}
        for name, mode in MODES.items()
    }
    answers = {}
    for name, mode in modes.items():
        print(f"{name}:", flush=True)
        answers[name] = converse_alone(vocab, folder, machine, mode)
    first, *others = answers.values()
    for name, other in zip([*answers][1:], others, strict=True):
        same = [sum(a == b for a, b in zip(first[one], other[one], strict=True)) for one in first]
        report(f"{name}: tokens as with all on the device", f"{sum(same)} of {sum(ANSWERS.values())}")
    start = time.perf_counter()
    there = known(folder, {name: (_prompt(name, vocab), answer) for name, answer in first.items()}, LAYERS)
    report("the CPU has computed the same", f"{time.perf_counter() - start:.1f} s")
    agreed = sum(int((one.logits.argmax(1) == torch.tensor(first[name])).sum()) for name, one in there.items())
    total = sum(ANSWERS.values())
    right = report(
        "tokens that it would have chosen, routers left alone", f"{agreed} of {total}", agreed >= AGREED * total
    )
    return all([right, *(compare(name, folder, machine, there, vocab, mode) for name, mode in modes.items())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    native.__path__.append(str(options.library.parent))  # where the native library is looked for
    machine = find_machine()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        write_model(model_config(options.quick), Path(folder), machine.device)
        report("model written", f"{time.perf_counter() - start:.1f} s")
        return 0 if check(Path(folder), machine, options.quick) else 1


if __name__ == "__main__":
    sys.exit(main())
