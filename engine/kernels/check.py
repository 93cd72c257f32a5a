"""Every device operation of a decode step, and every backend of attention, against torch twins at the sizes of
Qwen3.6-35B-A3B. Other operations of prefill are in ``engine.kernels.check_prefill``, times in
``engine.device.check_decode``.

    python -P -m engine.kernels.check [--seed N]

Inputs are drawn afresh each time (the seed is printed), what a kernel leaves unwritten is NaN, and the relative error
is that of the whole result, |got - want| / |want|.
Ends with status 1 where an operation is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import triton
from torch import Tensor

from engine.api import PAGE
from engine.device.attention import BACKENDS, choose
from engine.device.masks import Masks
from engine.device.reduce import KEPT, reduce
from engine.experts.layout import FORMATS, ExpertFormat, Layout
from engine.grammar import Mask, packed
from engine.kernels import linear
from engine.kernels.check_composed import CASES, Make
from engine.kernels.ops import DeviceOps
from engine.kernels.resident import ResidentExperts
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
    ROTARY,
    TOP_K,
    VALUE_HEADS,
    VOCAB,
    WIDTH,
    make_batch,
)
from engine.layers.ops import CPU, Ops
from engine.layers.reference import ReferenceOps

Run = Callable[[Ops, "Draws"], dict[str, Tensor]]


class Draws:
    """Random numbers, the same on every device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).to(dtype).to(self.device)


def linears(rows: int, out: int, inner: int, dtype: torch.dtype) -> Run:
    def run(ops: Ops, draw: Draws) -> dict[str, Tensor]:
        packed, x = ops.pack(draw(out, inner, scale=inner**-0.5, dtype=dtype)), draw(rows, inner)
        bias = draw(out)
        return {"plain": ops.linear(x, packed), "bias": ops.linear(x, packed, bias), "again": ops.linear(x, packed)}

    return run


def pointwise(rows: int) -> Run:
    def run(ops: Ops, draw: Draws) -> dict[str, Tensor]:
        x, gate, weight = draw(rows, HIDDEN, scale=4), draw(rows, HIDDEN, scale=4), draw(HIDDEN)
        heads, norm = draw(rows, VALUE_HEADS, LINEAR_DIM), draw(LINEAR_DIM)
        a, b, bias = draw(rows, VALUE_HEADS, scale=9), draw(rows, VALUE_HEADS, scale=9), draw(VALUE_HEADS)
        turned = draw(rows, HEADS, HEAD_DIM)
        positions = torch.arange(rows, dtype=torch.int32, device=draw.device) * 4000
        ops.rope(turned, positions, ops.rope_table(1 << 17, ROTARY, 1e7))
        ids, weights = ops.route(draw(rows, EXPERTS, scale=3), TOP_K, True)
        decay, beta = ops.gdn_gates(a, b, bias, bias)
        return {
            "rms_norm": ops.rms_norm(x, weight, 1e-6, 1.0),
            "gated_rms_norm": ops.gated_rms_norm(heads, heads.flip(0).contiguous(), norm, 1e-6),
            "silu_mul": ops.silu_mul(torch.cat((x, gate), 1)),
            "sigmoid_mul": ops.sigmoid_mul(x, gate),
            "sigmoid_mul row": ops.sigmoid_mul(x, gate[:, :1], gate),
            "gdn_gates decay": decay,
            "gdn_gates beta": beta,
            "rope": turned,
            "route ids": ids.float(),
            "route weights": weights,
        }

    return run


def recurrences(ops: Ops, draw: Draws) -> dict[str, Tensor]:
    batch = make_batch([(13, 0, 0), (1, 100, 1), (2, 63, 2)], draw.device, [(0, 8, 3), (0, 13, 4), (2, 1, 5)])
    window, state = draw(6, CHANNELS, WIDTH - 1), draw(6, VALUE_HEADS, LINEAR_DIM, LINEAR_DIM)
    mixed = ops.conv(draw(16, CHANNELS), draw(CHANNELS, WIDTH), window, batch)
    keys, values = (16, KEY_HEADS, LINEAR_DIM), (16, VALUE_HEADS, LINEAR_DIM)
    decay, beta = -draw(16, VALUE_HEADS).abs(), torch.sigmoid(draw(16, VALUE_HEADS))
    out = ops.gated_delta(draw(*keys), draw(*keys), draw(*values), decay, beta, state, batch)
    ops.copy_state(state, 4, 5)
    return {"conv": mixed, "conv state": window, "gated_delta": out, "gated_delta state": state}


def attentions(dtype: torch.dtype) -> Run:
    def run(ops: Ops, draw: Draws) -> dict[str, Tensor]:
        batch = make_batch([(11, 300, 0), (1, 4999, 1), (1, 0, 2), (3, 254, 3)], draw.device)
        shape = (batch.page_table.numel(), PAGE, KV_HEADS, HEAD_DIM)
        k_pages, v_pages = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
        rows = (16, KV_HEADS, HEAD_DIM)
        ops.write_pages(draw(*rows), draw(*rows), k_pages, v_pages, batch)
        out = ops.attention(draw(16, HEADS, HEAD_DIM, scale=2), k_pages, v_pages, batch, HEAD_DIM**-0.5)
        return {"attention": out, "write_pages k": k_pages.float(), "write_pages v": v_pages.float()}

    return run


def behind(backend: str) -> Run:
    """Attention of many rows, some behind a history."""

    def run(ops: Ops, draw: Draws) -> dict[str, Tensor]:
        if draw.device == GPU:
            ops = DeviceOps(ResidentExperts(FORMATS["bf16"], GPU), GPU, choose((backend, "auto")))
        batch = make_batch([(1100, 100, 0), (1, 4999, 1), (0, 3, 2), (130, 2900, 3)], draw.device)
        shape = (batch.page_table.numel(), PAGE, KV_HEADS, HEAD_DIM)
        k_pages, v_pages = draw(*shape, dtype=torch.bfloat16), draw(*shape, dtype=torch.bfloat16)
        return {"attention": ops.attention(draw(1231, HEADS, HEAD_DIM), k_pages, v_pages, batch, HEAD_DIM**-0.5)}

    return run


def best(rows: int, sums: bool) -> Run:
    """What is kept of rows of logits, of which grammars allow all, most, or few: some equal; or what it adds up to."""

    def run(_: Ops, draw: Draws) -> dict[str, Tensor]:
        logits, masks = draw(rows, VOCAB, scale=4), Masks(VOCAB, rows, draw.device)
        logits[0] = logits[0].round(decimals=1)
        masks.copy([(None, _allowed(0.9), _allowed(2e-4))[row % 3] for row in range(rows)])
        found = reduce(logits, torch.full((rows,), 0.7, device=draw.device), masks)
        if sums:
            return {"sums": found[:, 2 * KEPT :].view(torch.float32)}
        scores, ids = found[:, :KEPT].view(torch.float32), found[:, KEPT : 2 * KEPT]
        there = scores > -torch.inf
        return {"scores": scores.where(there, 0), "ids": ids.where(there, -1)}

    return run


def _allowed(share: float) -> Mask:
    return packed(np.flatnonzero(np.random.default_rng(0).random(VOCAB) < share).tolist(), VOCAB)


def routed(rows: int, format: ExpertFormat) -> Run:
    """Weights that the format holds exactly."""
    count, inner, k = 12, 512, 8
    layout = Layout(format, HIDDEN, inner)

    def run(ops: Ops, draw: Draws) -> dict[str, Tensor]:
        drawing, blob, held = Draws(0, CPU), torch.empty(layout.nbytes, dtype=torch.uint8), []
        for _ in range(count):
            layout.encode(drawing(2 * inner, HIDDEN, scale=0.02), drawing(HIDDEN, inner, scale=0.05), blob)
            held.append(layout.decode(blob))
        if draw.device == GPU:
            ops = DeviceOps(ResidentExperts(format, GPU), GPU)
        packed = ops.pack_experts(*(torch.stack(each) for each in zip(*held, strict=True)))
        x, weights = draw(rows, HIDDEN), draw(rows, k)
        ids = draw(rows, count).argsort(dim=1)[:, :k].to(torch.int32).contiguous()
        return {"experts": ops.experts(x, ids, weights, packed)}

    return run


def composed(make: Make, rows: int) -> Run:
    def run(ops: Ops, draw: Draws) -> dict[str, Tensor]:
        return {str(number): result for number, result in enumerate(make(ops, draw, rows).run())}

    return run


def compositions() -> Iterator[tuple[str, Run, float]]:
    for rows, (name, make) in itertools.product((1, 5, 16), CASES.items()):
        yield f"{name}, {rows}", composed(make, rows), 1e-4


def checks() -> Iterator[tuple[str, Run, float]]:
    """Name, what to compare, the largest relative error."""
    for dtype, few, many in ((torch.bfloat16, 1e-4, 1e-2), (torch.float32, 1e-5, 1e-5)):
        name = str(dtype).removeprefix("torch.")
        for out, inner in ((1, HIDDEN), (32, HIDDEN), (1024, 512), (513, 1000), (HIDDEN, 4096), (CHANNELS, HIDDEN)):
            for rows in (1, 5, linear.ROWS, 40):
                tolerance = few if rows <= linear.ROWS else many
                yield f"linear {name} {rows} x {out} x {inner}", linears(rows, out, inner, dtype), tolerance
        yield f"attention {name}", attentions(dtype), 1e-3 if dtype == torch.bfloat16 else 1e-5
    for rows in (1, 16):
        yield f"pointwise {rows}", pointwise(rows), 1e-5
    yield "recurrences", recurrences, 1e-5
    for backend in BACKENDS:
        yield f"attention {backend}", behind(backend), 1e-2
    for rows in (1, 4, 16):
        yield f"best of {rows} rows", best(rows, sums=False), 0.0
        yield f"best of {rows} rows", best(rows, sums=True), 1e-4
    yield from compositions()
    for name, format in FORMATS.items():
        for rows in (1, 5, 16):
            yield f"{rows} rows of {name}", routed(rows, format), 1e-5


def check(ops: DeviceOps, seed: int) -> bool:
    """Prints one line for each result; whether all were right."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is not written with NaN
    right = compare(ops, seed, checks())
    right &= in_company(ops, seed)
    torch.use_deterministic_algorithms(False)
    return right


def compare(ops: DeviceOps, seed: int, checks: Iterable[tuple[str, Run, float]]) -> bool:
    """Prints one line for each result; whether all were right."""
    right = True
    for number, (name, run, tolerance) in enumerate(checks):
        got = run(ops, Draws(seed + number, GPU))
        want = run(ReferenceOps(), Draws(seed + number, CPU))
        for part, result in got.items():
            error = relative_error(result.cpu(), want[part])
            good = error <= tolerance  # false for NaN
            right &= good
            print(f"{'ok   ' if good else 'WRONG'} {name:32} {part:20} {error:.2e}")
    return right


def relative_error(got: Tensor, want: Tensor) -> float:
    """All results are of the order of 1; a single number that happens to be small is not to be held against it."""
    got, want = got.double(), want.double()
    least = 0.1 * want.numel() ** 0.5
    return float(torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want).clamp(min=least))


def in_company(ops: DeviceOps, seed: int) -> bool:
    """Rows give the same bits among few as among many; attention's also alone."""
    draw, same = Draws(seed, GPU), True
    for out, inner in ((32, HIDDEN), (1281, HIDDEN), (HIDDEN, 4096), (CHANNELS, HIDDEN)):
        packed, x = ops.pack(draw(out, inner, dtype=torch.bfloat16)), draw(16, inner)
        parts = torch.cat([ops.linear(part, packed) for part in x.split([2, 5, 9])])
        same &= torch.equal(parts, ops.linear(x, packed))
    pages, q = draw(80, PAGE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16), draw(2, HEADS, HEAD_DIM)
    both = make_batch([(1, 2500, 0), (1, 700, 1)], GPU)
    alone = replace(make_batch([(1, 2500, 0)], GPU), page_table=both.page_table[:1].contiguous())
    same &= torch.equal(ops.attention(q[:1], pages, pages, alone, 0.1)[0], ops.attention(q, pages, pages, both, 0.1)[0])
    print(f"{'ok   ' if same else 'WRONG'} rows give the same bits in any company")
    return bool(same)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 31))
    options = parser.parse_args(arguments)
    ops = DeviceOps(ResidentExperts(FORMATS["bf16"], GPU), GPU)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, seed {options.seed}"
    )
    with torch.inference_mode():
        right = check(ops, options.seed)
    print("all right" if right else "WRONG results above")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
