"""Grammar masks on a GPU: what is kept of each row is right, and what they cost a decode step.

    python -P -m engine.device.check_masks [--layers N]

A model of Qwen3.6-35B-A3B's shape with random weights and all experts on the device; masks allow a random half of the
tokens, or a few. Ends with status 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from engine.device.check_decode import Counted, Step
from engine.device.masks import Masks
from engine.device.reduce import KEPT, reduce, twin
from engine.grammar import Mask, packed
from engine.kernels.timing import GPU, VOCAB, measure, random

BATCHES = (1, 4, 16)


def draw(share: float, vocab: int = VOCAB) -> Mask:
    return packed(np.flatnonzero(np.random.default_rng(int(1e4 * share)).random(vocab) < share).tolist(), vocab)


def check(rows: int, given: Sequence[Mask | None], logits: Tensor) -> bool:
    masks = Masks(VOCAB, rows, GPU)
    masks.copy(given)
    temperatures = torch.full((rows,), 0.7, device=GPU)
    got, want = (one(logits, temperatures) for one in (partial(reduce, masks=masks), partial(_twin, masks)))
    scores, wanted = got[:, :KEPT].view(torch.float32), want[:, :KEPT].view(torch.float32)
    there = wanted > -torch.inf
    sums, wanted_sums = got[:, -2:].view(torch.float32), want[:, -2:].view(torch.float32)
    return (
        bool((scores == wanted).all())
        and bool((got[:, KEPT:-2][there] == want[:, KEPT:-2][there]).all())
        and torch.allclose(sums, wanted_sums, rtol=1e-4)
    )


def _twin(masks: Masks, logits: Tensor, temperatures: Tensor) -> Tensor:
    return twin(logits, temperatures, masks.which, masks.words, KEPT)


def microseconds(call: Callable[[], object]) -> float:
    """Of the host, until the result is there."""
    times = []
    for _ in range(40):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * median(times)


def time_steps(options: argparse.Namespace, rows: int) -> None:
    options.rows = rows
    made, masks = Step(options, Counted), Masks(VOCAB, rows, GPU)
    steps, parts = made.steps(partial(reduce, masks=masks)), made.parts(0)
    given = [draw(0.5)] * rows

    def step(wanted: Sequence[Mask | None]) -> None:
        if not any(mask is not None for mask in wanted):
            masks.copy(wanted)
        launched = steps.launch(parts)
        if any(mask is not None for mask in wanted):
            masks.copy(wanted)
            steps.finish_again(launched)
        steps.wait(rows)

    free, one, every = (
        microseconds(partial(step, wanted)) for wanted in ([None] * rows, [given[0], *[None] * (rows - 1)], given)
    )
    print(
        f"a step of {rows}, {options.layers} layers: {free:.0f} µs without masks; one mask +{one - free:.0f}, "
        f"{rows} masks +{every - free:.0f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    options.context = 1024
    right = True
    with torch.inference_mode():
        for rows in BATCHES:
            logits = random(rows, VOCAB) * 4
            logits[0] = logits[0].round(decimals=1)
            for name, given in (
                ("no mask", [None] * rows), ("half of all", [draw(0.5)] * rows), ("few", [draw(1e-4)] * rows),
                ("mixed", [(None, draw(0.9), draw(2e-3))[row % 3] for row in range(rows)]),
            ):  # fmt: skip
                good = check(rows, given, logits)
                right &= good
                print(f"{'ok   ' if good else 'WRONG'} best of {rows} rows, {name}", flush=True)
            masks, temperatures = Masks(VOCAB, rows, GPU), torch.ones(rows, device=GPU)
            free = measure([partial(reduce, logits, temperatures, masks)]).microseconds
            masks.copy([draw(0.5)] * rows)
            masked = measure([partial(reduce, logits, temperatures, masks)]).microseconds
            topk = measure([partial(logits.topk, KEPT, dim=1)]).microseconds
            print(f"best of {rows} rows: {free:.1f} µs, masked {masked:.1f}; torch's topk alone {topk:.1f}", flush=True)
    for rows in BATCHES[:2]:
        time_steps(options, rows)
    print("all right" if right else "WRONG results above")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
