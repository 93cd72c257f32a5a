"""Parts of ``engine.device.check``: what joins the GPU, the CPU's experts and the driver."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from engine.device.driver import CudaDriver
from engine.device.findings import report, verdict
from engine.experts import waves as reference
from engine.experts.executor import Executor
from engine.experts.layout import FORMATS, Layout
from engine.experts.offload import OffloadedExperts
from engine.experts.pool import Pool
from engine.experts.residency import Residency
from engine.experts.split import Split
from engine.experts.waves import TAIL, Fetches, Waves
from engine.kernels import waves as kernels
from engine.kernels.resident import ResidentExperts
from engine.native.library import load_library, supported_instruction_sets

GPU = torch.device("cuda")
TOLERANCE = {"layer": 1e-4, "prefill": 1e-2}
"""Relative error of the whole result against experts that are all on the device."""
_ROUND_TRIPS = 200


def error(got: Tensor, want: Tensor) -> float:
    """NaN is an error without bound."""
    relative = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return relative if relative == relative else float("inf")


def small_pool(name: str, layers: int, experts: int) -> Pool:
    """Experts of Qwen3.6's size, each its own."""
    layout = Layout(FORMATS[name], 2048, 512)
    pool = Pool(layout, layers, experts)
    generator = torch.Generator().manual_seed(4)
    samples = torch.randn(2, 3 * 512, 2048, generator=generator) * 0.03
    pool.fill(lambda layer, expert: _rolled(samples, layer * experts + expert))
    return pool


def _rolled(samples: Tensor, number: int) -> tuple[Tensor, Tensor]:
    weights = samples[number % 2].roll((number * 7, number * 13), dims=(0, 1))
    return weights[:1024], weights[1024:].t().contiguous()


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def handshake(library: Path, quick: bool) -> None:
    pool = Pool(Layout(FORMATS["mxfp4"], 64, 64), 1, 2)
    executor = Executor(pool, 1, 1, library=library)
    box = executor.layout
    executor.mailbox[box.plan : box.plan + 8].view(torch.int32).fill_(-1)  # a request without work
    x = torch.zeros(1, device=GPU)
    loaded = load_library(library)
    for memory_operations in (True, False):
        driver = CudaDriver(loaded, memory_operations)
        what = "memory operations" if driver.memory_operations else "host functions"
        if memory_operations and not driver.memory_operations:
            report("memory operations", "not on this driver")
            continue
        start = driver.register(executor.mailbox.data_ptr(), box.nbytes)

        def ask(kernel: bool, driver: CudaDriver = driver, start: int = start) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            driver.write64(stream, start + box.done, 0)
            driver.write64(stream, start + box.ready, 1 << 32 | 1)
            if kernel:
                x.add_(1)
            driver.wait64(stream, start + box.done, 1)

        for kernel in (False, True):
            times = graph_times(lambda kernel=kernel: ask(kernel), _ROUND_TRIPS, 30)  # type: ignore[misc]
            with_kernel = ", a small kernel between" if kernel else ""
            report(f"round trip by {what}{with_kernel}", f"{1e6 * min(times):.2f} us, median {1e6 * median(times):.2f}")
        driver.unregister(executor.mailbox.data_ptr())
    report("small kernel", f"{1e6 * median(graph_times(lambda: x.add_(1), _ROUND_TRIPS, 30)):.2f} us")
    executor.check()
    executor.close()


def graph_times(work: Callable[[], object], count: int, repeats: int) -> list[float]:
    """Seconds of one of ``count`` calls captured into a graph, for each replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            work()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / count)
    return times


def executor(library: Path, quick: bool) -> None:
    """Right for every instruction set."""
    for name in FORMATS:
        pool = small_pool(name, 1, 16)
        x, ids, weights, plan = routed(4, 8, 16)
        want = expected(decoded(pool), x, ids, weights)
        for instruction_set in supported_instruction_sets(load_library(library)):
            for exact in (True, False) if name != "bf16" else (True,):
                one = Executor(pool, 4, 8, exact=exact, instruction_set=instruction_set, library=library)
                off = error(one.run(0, x, plan, weights), want)
                report(
                    f"{name}, {instruction_set}{'' if exact else ', rounded'}", f"off by {off:.1e}",
                    off < (1e-5 if exact else 2e-2),
                )  # fmt: skip
                one.close()


def routed(rows: int, ranks: int, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, ids, weights, and a plan that leaves everything to the CPU."""
    x = torch.randn(rows, 2048)
    ids = torch.rand(rows, experts).topk(ranks, dim=1).indices.int()
    plan = torch.stack((ids, torch.zeros_like(ids)), dim=2)
    return x, ids, torch.rand(rows, ranks), plan


def decoded(pool: Pool) -> list[tuple[Tensor, Tensor]]:
    return [pool.layout.decode(pool.blob(flat)) for flat in range(len(pool))]


def expected(experts: Sequence[tuple[Tensor, Tensor]], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """In float64, from what the blobs of a layer decode to."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for expert, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
            gate_up, down = (each.double() for each in experts[expert])
            gate, up = (gate_up @ x[row].double()).chunk(2)
            y[row] += weight * (down @ (torch.nn.functional.silu(gate) * up))
    return y


def fixed(layers: int, share: float) -> Split:
    split = Split(layers, 1.0, 1.0)
    split.fix(share)
    return split


def room(pool: Pool, slots: int) -> Tensor:
    return torch.empty(slots + 1, pool.stride, dtype=torch.uint8, device=GPU)


def layer(library: Path, quick: bool) -> None:
    """One offloaded layer, eager, wherever its experts are."""
    loaded = load_library(library)
    for name in ("mxfp4",) if quick else FORMATS:
        pool = small_pool(name, 2, 32)
        weights_of = decoded(pool)
        executor = Executor(pool, 16, 8, library=library)
        for memory_operations in (True, False):
            for slots, share in ((63, 1.0), (9, 1.0), (9, 0.0), (9, 0.4), (1, 0.15)):
                driver = CudaDriver(loaded, memory_operations)
                experts = OffloadedExperts(pool, executor, driver, fixed(2, share), room(pool, slots))
                experts.start()
                worst = 0.0
                for rows in (1, 3, 16, 1):
                    x, ids, weights, _ = routed(rows, 8, 32)
                    y = experts.run(x.to(GPU), ids.to(GPU), weights.to(GPU), rows % 2)
                    torch.cuda.synchronize()
                    experts.after_step()
                    layer_experts = weights_of[rows % 2 * 32 :][:32]
                    worst = max(worst, error(y.cpu(), expected(layer_experts, x, ids, weights)))
                by = "" if memory_operations else ", host functions"
                report(f"{name}, {slots} slots, {share:.0%} over the link{by}", f"off by {worst:.1e}", worst < 1e-4)
                experts.close()
        executor.close()


def prefill(library: Path, quick: bool) -> None:
    """Whole calls of many rows: decisions as in the reference bit for bit, results as with all experts there."""
    worst = _same_waves(torch.Generator().manual_seed(int(time.time())))
    report("decisions of prefill, whole calls", "as the reference" if worst is None else worst, worst is None)
    driver = CudaDriver(load_library(library))
    for name in ("mxfp4",) if quick else FORMATS:
        pool = small_pool(name, 3, 32)
        weights_of = decoded(pool)
        executor = Executor(pool, 256, 8, library=library)
        resident = ResidentExperts.of_pool(pool, GPU)
        for slots, share, ahead in (
            (96, None, None), (96, 0.5, None), (40, 1.0, None), (40, 0.0, None), (12, 0.5, None), (2, 0.5, None),
            (80, None, True), (33, None, True),
        ):  # fmt: skip
            where = room(pool, slots)
            experts = OffloadedExperts(pool, executor, driver, Split(3, 1e4, 2e4), where)
            experts.start()
            experts.fix(share)
            experts.prefill.ahead = ahead
            off = [_prefilled(experts, resident, rows, weights_of) for rows in (17, 200, 1, 3, 1000)]
            experts.residency.check()
            owner = experts.residency.owner.tolist()
            there = all(flat < 0 or torch.equal(where[at].cpu(), pool.slots[flat]) for at, flat in enumerate(owner))
            split = "layers ahead" if ahead else "by cost" if share is None else f"{share:.0%} over the link"
            right = there and max(off) < TOLERANCE["prefill"]
            report(f"{name}, {slots} slots, {split}", f"off by {max(off):.1e}", right)
            experts.close()
        executor.close()


def _prefilled(
    experts: OffloadedExperts, resident: ResidentExperts, rows: int, weights_of: Sequence[tuple[Tensor, Tensor]]
) -> float:
    """Relative error of a call of all layers; against float64 if that is not too much to compute."""
    worst = 0.0
    for layer in range(3):
        x, ids, weights, _ = routed(rows, 8, 32)
        given = x.to(GPU), ids.to(GPU), weights.to(GPU), layer
        y = experts.run(*given)
        few = rows <= 32
        want = expected(weights_of[32 * layer :][:32], x, ids, weights) if few else resident.run(*given).cpu()
        worst = max(worst, error(y.cpu(), want))
    experts.report()
    torch.cuda.synchronize()
    experts.after_step()
    return worst


def _same_waves(generator: torch.Generator) -> str | None:
    """What differs between the device and the reference, after calls of random rows and sizes of the ring."""
    layout, experts, layers, ranks = Layout(FORMATS["mxfp4"], 32, 160), 256, 3, 8
    devices = (torch.device("cpu"), GPU)
    states = [Residency.create(layout, layers, experts, 700, device) for device in devices]
    made = [Waves.create(layers, experts, device) for device in devices]
    fetches = [Fetches.create(experts, device) for device in devices]
    where = [torch.zeros(experts, dtype=torch.int32, device=device) for device in devices]
    for call in range(24):
        rows, half = (17, 64, 500, 3000)[call % 4], (256, 87, 40)[call % 3]
        for waves_of in made:
            waves_of.costs.copy_(torch.tensor([32000, 18000, 6000, 20000, -1 if call % 5 else 20000]))
        for layer in range(layers):
            ids = torch.rand(rows, experts, generator=generator).pow(2).topk(ranks, dim=1).indices.int()
            counts = torch.bincount(ids.flatten().long(), minlength=experts).int()
            come = torch.randperm(700, generator=generator)[:experts].int()
            come[torch.rand(experts, generator=generator) < 0.5] = -1
            for side, how in enumerate((reference, kernels)):
                state, of, mine, device = states[side], made[side], fetches[side], devices[side]
                each, at = counts.to(device), where[side]
                how.divide(state, of, each, layer, at, cpu=rows < 1000)
                for wave in range(-(-experts // half)):
                    base = wave % 2 * half
                    how.take(state, of, mine, each, layer, at, base, half, first=not wave, ahead=False)
                if layer + 1 < layers and call % 2:
                    how.place(state, of, come.to(device), layer + 1)
                how.keep(state, of, ids[-TAIL:].to(device), rows, layer, 2 * half, (0, 60, 200)[call % 3])
            for got, want in ((states[1], states[0]), (made[1], made[0])):
                for name, tensor in vars(want).items():
                    if name not in ("experts", "moves") and not torch.equal(getattr(got, name).cpu(), tensor):
                        return f"{name} of call {call}, layer {layer}"
            taken, moved = int(fetches[0].counts[0]), int(made[0].moved)
            if not torch.equal(fetches[1].fetch[:taken].cpu(), fetches[0].fetch[:taken]):
                return f"fetches of call {call}, layer {layer}"
            if not torch.equal(made[1].moves[:moved].cpu(), made[0].moves[:moved]):
                return f"moves of call {call}, layer {layer}"
    return None


PARTS = {"handshake": handshake, "executor": executor, "layer": layer, "prefill": prefill}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("library", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(time.time_ns())
    torch.zeros(1, device=GPU)
    start = time.monotonic()
    PARTS[options.part](options.library, options.quick)
    return verdict(time.monotonic() - start)


if __name__ == "__main__":
    sys.exit(main())
