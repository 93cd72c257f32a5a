"""The prefill kernels on a GPU: right first, then how fast.

    python -P -m engine.kernels.check_prefill [--seed N] [--tune] [--only PART]

Parts are checked beside each other, by processes of their own, since most of it is compiling; then they are timed one
after another. Twins are computed on the GPU, in float64 where they can be; the relative error is that of the whole
result, and what a kernel leaves unwritten is NaN. Sizes are those of Qwen3.6-35B-A3B. ``--tune`` times other tilings;
``--only`` checks one part and times nothing. Ends with status 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import triton
from torch import Tensor

from engine.api import PAGE
from engine.experts.layout import FORMATS, Layout
from engine.kernels import chunked_delta, grouped, grouped_twin, pairs, prefill_attention, prefill_conv
from engine.kernels.grouped import Groups
from engine.kernels.time_prefill import compile_all, rates, time_all, tune
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
    VALUE_HEADS,
    WIDTH,
    make_batch,
)
from engine.layers.reference import ReferenceOps

TWIN = ReferenceOps()
Result = tuple[str, Tensor, Tensor, float]
"""What, got, wanted, the largest relative error."""


class Draws:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator(GPU).manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=GPU)


def attentions(draw: Draws) -> Iterator[Result]:
    """Prefill behind a history, with decode rows beside it, cut along the keys and not."""
    for name, segments in (
        ("one", [(300, 0, 0)]),
        ("behind 9,000", [(150, 9000, 0)]),
        ("mixed", [(130, 300, 0), (1, 4999, 1), (0, 3, 2), (1, 0, 3), (70, 63, 4)]),
        ("many", [(3000, 100, 0)]),
    ):
        batch = make_batch(segments, GPU)
        rows = batch.tokens.shape[0]
        shape = (batch.page_table.numel(), PAGE, KV_HEADS, HEAD_DIM)
        q, scale = draw(rows, HEADS, HEAD_DIM), HEAD_DIM**-0.5
        for dtype, most in ((torch.bfloat16, 1e-2), (torch.float32, 1e-5)):
            if dtype == torch.bfloat16 or name == "mixed":
                pages = draw(*shape).to(dtype), draw(*shape).to(dtype)
                got = prefill_attention.attention(q, *pages, batch, scale)
                yield f"attention {name} {dtype}", got, TWIN.attention(q, *pages, batch, scale), most


def deltas(draw: Draws) -> Iterator[Result]:
    """2,000 tokens, decays from none to e^-20 a token, keys that are alike; snapshots on the grid and off it."""
    for name, segments, snapshots in (
        ("one", [(2000, 0, 0)], []),
        ("mixed", [(300, 10, 0), (1, 77, 1), (0, 3, 2), (90, 50, 3)], [(0, 54, 4), (0, 300, 5), (3, 20, 6), (0, 9, 7)]),
    ):
        batch = make_batch(segments, GPU, snapshots)
        rows, slots = batch.tokens.shape[0], [*range(8)] if snapshots else [0]
        q, v = draw(rows, KEY_HEADS, LINEAR_DIM).half(), draw(rows, VALUE_HEADS, LINEAR_DIM).half()
        k, beta = (draw(rows, KEY_HEADS, LINEAR_DIM) + 0.7).half(), torch.sigmoid(draw(rows, VALUE_HEADS))
        slow, fast = -1e-3 * draw(rows, VALUE_HEADS).abs(), -20 - draw(rows, VALUE_HEADS).abs()
        for pace, decay in (
            ("none", 0 * slow), ("slow", slow), ("fast", fast), ("both", torch.where(slow > -2e-3, slow, fast)),
        ):  # fmt: skip
            state = draw(8, VALUE_HEADS, LINEAR_DIM, LINEAR_DIM)
            exact = state.double()
            want = TWIN.gated_delta(q.double(), k.double(), v.double(), decay.double(), beta.double(), exact, batch)
            got = chunked_delta.gated_delta(q, k, v, decay, beta, state, batch)
            yield f"delta {name}, decay {pace}", got, want, 1e-3
            yield f"delta {name}, decay {pace}, state", state[slots], exact[slots], 1e-3


def convolutions(draw: Draws) -> Iterator[Result]:
    batch = make_batch([(300, 10, 0), (1, 77, 1), (2, 5, 2)], GPU, [(0, 54, 3), (0, 1, 4), (2, 1, 5)])
    x, weight, state = draw(303, CHANNELS), draw(CHANNELS, WIDTH), draw(6, CHANNELS, WIDTH - 1)
    twin = state.clone()
    want = TWIN.conv(x, weight, twin, batch)
    yield "conv", prefill_conv.conv(x, weight, state, batch), want, 1e-5
    yield "conv, state", state, twin, 1e-6


def products(name: str, draw: Draws) -> Iterator[Result]:
    """Few, some and many pairs an expert on average, of which a few get all; experts that are not here, pairs of none.
    As many experts as are timed, for the same kernels."""
    inner, count, used = 512, EXPERTS, 12
    layout = Layout(FORMATS[name], HIDDEN, inner)
    blobs = torch.zeros(3, -(-layout.nbytes // 256) * 256, dtype=torch.uint8)
    for blob in blobs:
        gate_up, down = torch.randn(2 * inner, HIDDEN) * HIDDEN**-0.5, torch.randn(HIDDEN, inner) * inner**-0.5
        layout.encode(gate_up, down, blob[: layout.nbytes])
    slots, slot = blobs.to(GPU), (torch.arange(count, dtype=torch.int32) % 4 - 1).to(GPU)
    for rows in (17, 1000, 2100):
        ids = draw(rows, used).argsort(dim=1)[:, :8].to(torch.int32).contiguous()
        ids[3, 2] = -1
        groups = Groups(*pairs.sort_pairs(ids, count)[:2], slot)
        yield f"order of {rows}", groups.order, grouped_twin.sort_pairs(ids, count).order.to(GPU), 0
        x, weights = draw(rows, HIDDEN), draw(rows, 8)
        given, result = grouped.precision(layout, GPU)
        h, out = x.new_zeros(rows * 8, inner, dtype=given), x.new_zeros(rows * 8, HIDDEN, dtype=result)
        y, want_y = torch.empty_like(x), torch.empty_like(x)
        grouped.gate_up(grouped.arrange(x, layout, h.dtype), slots, layout, groups, h)
        grouped.down(h, slots, layout, groups, out)
        pairs.combine_pairs(out, ids, slot, weights, y)
        want_h, want = x.new_zeros(h.shape), x.new_zeros(out.shape)
        grouped_twin.gate_up(x, blobs, layout, groups, want_h)
        grouped_twin.down(want_h, blobs, layout, groups, want)
        grouped_twin.combine_pairs(want, ids, slot, weights, want_y)
        yield f"{name}, {rows} rows, gate_up", h, grouped.arrange(want_h, layout, h.dtype), 1e-2
        yield f"{name}, {rows} rows, down", out.float() * pairs.unit(triton.language.float16), want, 1e-2
        yield f"{name}, {rows} rows, sum", y, want_y, 1e-2


PARTS: dict[str, Callable[[Draws], Iterator[Result]]] = {
    "attention": attentions,
    "delta": deltas,
    "conv": convolutions,
    **{name: partial(products, name) for name in FORMATS},
}


def check(part: str, seed: int) -> bool:
    right = True
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is not written with NaN
    for name, got, want, most in PARTS[part](Draws(seed)):
        wide, exact = got.double().cpu(), want.double().cpu()
        error = float((wide - exact).norm() / exact.norm())
        good = error <= most  # false for NaN
        right &= good
        print(f"{'ok   ' if good else 'WRONG'} {name:44} {error:.2e}", flush=True)
    torch.use_deterministic_algorithms(False)
    return right


def check_all(seed: int) -> bool:
    """Each part in a process of its own, which leaves the kernels that are timed in Triton's cache."""
    command = [sys.executable, "-P", "-m", "engine.kernels.check_prefill", "--seed", str(seed), "--only"]
    running = [subprocess.Popen([*command, part], stdout=subprocess.PIPE, text=True) for part in PARTS]
    for process in running:
        print(process.communicate()[0], end="", flush=True)
    return not any(process.returncode for process in running)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 31))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        if options.only:
            torch.set_num_threads(1)  # others are beside it
            right = check(options.only, options.seed)
            compile_all(options.only)
            return 0 if right else 1
        versions = f"torch {torch.__version__}, triton {triton.__version__}"
        print(f"{torch.cuda.get_device_name()}, {versions}, seed {options.seed}", flush=True)
        right = check_all(options.seed)
        bounds = rates()
        time_all(bounds)
        if options.tune:
            tune(bounds)
    print("all right" if right else "WRONG results above")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
