"""The executor against the decoded weights, and its bits against themselves."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.device.frozen import executor_threads
from engine.experts.executor import COARSE, Executor, ExecutorError, MailboxLayout
from engine.experts.layout import FORMATS
from engine.experts.pool import Pool
from engine.native.library import (
    EXPERT_SETS,
    NativeLibraryError,
    find_library,
    load_library,
    supported_instruction_sets,
)

MakePool = Callable[..., Pool]
ROWS, RANKS = 16, 3
INSTRUCTION_SETS = supported_instruction_sets(load_library(find_library()), EXPERT_SETS)


def request(pool: Pool, rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, plan and weights; some ranks not asked for, some in part, many rows with the same expert."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, pool.layout.hidden, generator=generator)
    ids = torch.rand(rows, pool.experts, generator=generator).argsort(dim=1)[:, :RANKS]
    ids[torch.rand(rows, RANKS, generator=generator) < 0.2] = -1
    first = (torch.arange(pool.experts) % (pool.layout.parts + 1))[ids]
    weights = torch.rand(rows, RANKS, generator=generator)
    return x, torch.stack((ids, first), dim=2).int(), weights


def expected(pool: Pool, layer: int, x: Tensor, plan: Tensor, weights: Tensor) -> Tensor:
    """In float64, from the weights that the kernels compute with."""
    layout, y = pool.layout, torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for rank, (expert, first) in enumerate(plan[row].tolist()):
            if expert < 0 or first >= layout.parts:
                continue
            gate_up, down = (w.double() for w in layout.decode(pool.blob(layer * pool.experts + expert)))
            gate, up = (gate_up @ x[row].double()).view(2, -1)
            inner = torch.nn.functional.silu(gate) * up
            columns = slice(layout.bounds[first], None)
            y[row] += weights[row, rank].double() * (down[:, columns] @ inner[columns])
    return y


def relative_error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("exact", [True, False])
def test_results(make_pool: MakePool, name: str, instruction_set: str, exact: bool) -> None:
    pool = make_pool(name)
    executor = Executor(pool, ROWS, RANKS, threads=2, exact=exact, instruction_set=instruction_set)
    for rows in (0, 1, 5, ROWS):
        x, plan, weights = request(pool, rows, rows)
        y = executor.run(1, x, plan, weights)
        if rows:
            assert relative_error(y, expected(pool, 1, x, plan, weights)) < (
                1e-6 if exact or name == "bf16" else COARSE
            )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("hidden", "inner"), [(96, 160), (64, 32), (128, 320)])
def test_same_bits(make_pool: MakePool, name: str, exact: bool, hidden: int, inner: int) -> None:
    """Whatever the instruction set, the threads, the company of a row and its place in the batch."""
    pool = make_pool(name, hidden, inner)
    x, plan, weights = request(pool, ROWS)
    plan[:, 0] = plan[0, 0].clone()  # all rows in one tile, or more than one
    plan[:, 0, 1] = 0
    wholes = []
    for threads, instruction_set in enumerate(INSTRUCTION_SETS, 1):
        executor = Executor(pool, ROWS, RANKS, threads, exact, instruction_set)
        whole = executor.run(0, x, plan, weights)
        wholes.append(whole)
        for rows in (1, 2, 3, 4, 6, 7, 11, 12, 13):
            for first in (0, ROWS - rows):
                part = slice(first, first + rows)
                assert torch.equal(executor.run(0, x[part], plan[part], weights[part]), whole[part])
    assert all(torch.equal(whole, wholes[0]) for whole in wholes)


@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_more_threads_than_processors(make_pool: MakePool, name: str) -> None:
    """Tasks wait for one another in every order in which threads can be stopped."""
    pool = make_pool(name, 128, 96)
    alone, many = (Executor(pool, ROWS, RANKS, threads) for threads in (1, 6))
    for seed in range(60):
        x, plan, weights = request(pool, 1 + seed % ROWS, seed)
        assert torch.equal(many.run(seed % 2, x, plan, weights), alone.run(seed % 2, x, plan, weights))
    assert many.read() == pool.nbytes >> 20 << 20


def test_threads_that_sleep_are_woken(make_pool: MakePool) -> None:
    """Of those that wait for work, and the one that waits for a device."""
    executor = Executor(make_pool("mxfp4", 128, 96), ROWS, RANKS, threads=6)
    device = Device(executor)
    x, plan, weights = request(executor.pool, 4)
    y = executor.run(0, x, plan, weights)
    for seconds in (0.0, 0.03, 0.1, 0.03):
        time.sleep(seconds)
        assert torch.equal(device.ask(0, x, plan, weights), y)
        time.sleep(seconds)
        assert torch.equal(executor.run(0, x, plan, weights), y)


def test_threads_are_roused_before_a_device_asks(make_pool: MakePool) -> None:
    """Nothing else wakes the workers: the one that waits for a device naps, and does so often."""

    def naps(thread: int) -> int:
        lines = Path(f"/proc/self/task/{thread}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    def until_all(condition: Callable[[int], bool]) -> None:
        deadline = time.monotonic() + 60
        while not all(condition(thread) for thread in threads):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    pool = make_pool("mxfp4", 128, 96)
    with executor_threads() as threads:
        executor = Executor(pool, ROWS, RANKS, threads=3)
    until_all(lambda thread: naps(thread) > 0)
    before = {thread: naps(thread) for thread in threads}
    executor.rouse()
    until_all(lambda thread: naps(thread) > before[thread])  # awake, and asleep again
    device, (x, plan, weights) = Device(executor), request(pool, 4)
    for _ in range(3):
        executor.rouse()
        assert torch.equal(device.ask(0, x, plan, weights), executor.run(0, x, plan, weights))


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_not_finite_stays_so(make_pool: MakePool, exact: bool) -> None:
    pool = make_pool("int8")
    for instruction_set in INSTRUCTION_SETS:
        executor = Executor(pool, ROWS, RANKS, 1, exact, instruction_set)
        x, plan, weights = request(pool, 3)
        plan[:, :, 1] = 0
        plan[:, :, 0] = torch.arange(RANKS)
        x[1, 7] = float("nan")
        y = executor.run(0, x, plan, weights)
        assert y[1].isnan().all()
        assert y[0].isfinite().all() and y[2].isfinite().all()


@pytest.mark.parametrize("exact", [True, False])
def test_scales_of_every_size(make_pool: MakePool, exact: bool) -> None:
    """Denormal float16 scales, the largest and the smallest e8m0 ones, and 0."""
    for name in ("int8", "mxfp4"):
        pool = Pool(make_pool(name, 64, 64).layout, 1, RANKS)
        pool.tensor.copy_(make_pool(name, 64, 64).tensor[: pool.nbytes])
        blocks = pool.blob(0).view(-1, pool.layout.format.block_bytes)
        if name == "int8":
            blocks[:, :64].view(torch.int16)[:] = torch.tensor([0, 1, 0x3FF, 0x400, 0x1234, 0x3C00], dtype=torch.int16)[
                torch.arange(32) % 6
            ]
        else:
            blocks[:, :32] = torch.tensor([0, 1, 2, 100, 127, 130], dtype=torch.uint8)[torch.arange(32) % 6]
        x, _, weights = request(pool, 2)
        plan = torch.tensor([[[0, 0], [-1, 0], [-1, 0]]] * 2, dtype=torch.int32)
        results = [Executor(pool, 2, RANKS, 1, exact, name).run(0, x, plan, weights) for name in INSTRUCTION_SETS]
        assert all(torch.equal(result, results[0]) for result in results)
        assert relative_error(results[0], expected(pool, 0, x, plan, weights)) < (1e-6 if exact else COARSE)


class Device:
    """Asks through the mailbox as a device does."""

    def __init__(self, executor: Executor) -> None:
        self.executor, box = executor, executor.layout
        memory = executor.mailbox.numpy()
        self.lines = {
            name: memory[at : at + 8].view(np.uint64)
            for name in ("ready", "done", "error", "served", "arrived")
            for at in [getattr(box, name)]
        }

        def view(at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            count = int(np.prod(shape))
            return executor.mailbox[at : at + 4 * count].view(dtype).view(shape)

        self.x = view(box.x, (box.rows, box.hidden), torch.float32)
        self.plan = view(box.plan, (box.rows, box.ranks, 2), torch.int32)
        self.weights = view(box.weights, (box.rows, box.ranks), torch.float32)
        self.y = view(box.y, (box.rows, box.hidden), torch.float32)

    def ask(self, layer: int, x: Tensor, plan: Tensor, weights: Tensor) -> Tensor:
        rows = x.shape[0]
        self.lines["done"][0] = 0
        self.x[:rows], self.plan[:rows], self.weights[:rows] = x, plan, weights
        self.lines["ready"][0] = rows << 32 | (layer + 1)
        self.wait("done", 1)
        return self.y[:rows].clone()

    def wait(self, line: str, value: int) -> None:
        deadline = time.monotonic() + 60
        while self.lines[line][0] != value:
            assert time.monotonic() < deadline
            time.sleep(0)


@pytest.mark.parametrize("name", FORMATS)
def test_mailbox(make_pool: MakePool, name: str) -> None:
    pool = make_pool(name)
    executor = Executor(pool, ROWS, RANKS, threads=2)
    device = Device(executor)
    for count, rows in enumerate((1, 16, 4), 1):
        x, plan, weights = request(pool, rows, rows)
        layer = count % 2
        assert torch.equal(device.ask(layer, x, plan, weights), executor.run(layer, x, plan, weights))
        assert device.lines["served"][0] == count
        assert device.lines["ready"][0] == 0
        device.lines["arrived"][0] = 1
        asked = plan[plan[:, :, 0] >= 0][:, [1]].sum(dim=1)
        deadline = time.monotonic() + 60
        while executor.times[layer, 1] == 0:
            assert time.monotonic() < deadline
        cpu, arrived, parts = executor.times[layer]
        assert arrived >= cpu > 0
        groups = {(expert, first) for expert, first in plan.view(-1, 2).tolist() if expert >= 0}
        assert len(asked) and parts == sum(pool.layout.parts - first for _, first in groups)
    executor.check()
    assert not executor.stalled(60)


@pytest.mark.parametrize(
    ("layer", "expert", "first", "message"),
    [
        (0, 5, 0, "the plan names expert 5 from part 0; there are 5 experts of 4 parts"),
        (0, 1, 5, "the plan names expert 1 from part 5"),
        (0, 1, -1, "the plan names expert 1 from part -1"),
        (2, 1, 0, "layer 2 with 1 rows is beyond the 2 layers and 16 rows"),
    ],
)
def test_errors(make_pool: MakePool, layer: int, expert: int, first: int, message: str) -> None:
    pool = make_pool("int8")
    executor = Executor(pool, ROWS, RANKS, threads=1)
    x, plan, weights = request(pool, 1)
    good = plan.clone()
    plan[0, 1] = torch.tensor([expert, first])
    with pytest.raises(ValueError, match=message):
        executor.run(layer, x, plan, weights)
    device = Device(executor)
    assert device.ask(layer, x, plan, weights).isnan().all()
    assert device.lines["error"][0] == 1
    with pytest.raises(ExecutorError, match=message):
        executor.check()
    assert device.lines["error"][0] == 0
    executor.check()
    assert torch.equal(device.ask(0, x, good, weights), executor.run(0, x, good, weights))


def test_wrong_arguments(make_pool: MakePool) -> None:
    pool = make_pool("int8")
    with pytest.raises(ValueError, match="an executor needs rows, ranks and threads, not 0, 3 and 0"):
        Executor(pool, 0, 3)
    with pytest.raises(NativeLibraryError, match="'sse9' cannot run here"):
        Executor(pool, 1, 3, instruction_set="sse9")
    executor = Executor(pool, 2, 3, threads=1)
    x, plan, weights = request(pool, 3)
    with pytest.raises(ValueError, match="layer 0 with 3 rows is beyond"):
        executor.run(0, x, plan, weights)
    with pytest.raises(ValueError, match=r"plan must be torch.int32 \[1, 3, 2\]"):
        executor.run(0, x[:1], plan[:1, :2], weights[:1])
    with pytest.raises(ValueError, match=r"x must be torch.float32 \[1, 96\]"):
        executor.run(0, x[:1].double(), plan[:1], weights[:1])


def test_mailbox_layout() -> None:
    box = MailboxLayout(rows=3, ranks=5, hidden=32)
    assert (box.ready, box.done, box.error, box.served, box.arrived, box.x) == (0, 64, 128, 192, 256, 320)
    assert (box.plan, box.weights, box.y, box.nbytes) == (704, 832, 896, 4096)


def test_threads_end_with_the_executor(make_pool: MakePool) -> None:
    pool = make_pool("int8")  # made before: torch begins threads of its own for it

    def running(threads: set[int]) -> bool:
        return any(Path("/proc/self/task", str(thread)).exists() for thread in threads)

    with executor_threads() as threads:
        executor = Executor(pool, 1, 1, threads=3)
    assert len(threads) == 3
    executor.close()
    assert not running(threads)
    with executor_threads() as threads:
        another = Executor(pool, 1, 1)
    assert len(threads) == another.threads >= 1
    del another
    gc.collect()
    assert not running(threads)


def test_a_request_that_takes_too_long_shows(make_pool: MakePool) -> None:
    pool = make_pool("int8", 1024, 1024, 1, 4)
    executor = Executor(pool, ROWS, 4, threads=1, instruction_set="scalar")
    device = Device(executor)
    plan = torch.stack((torch.arange(4), torch.zeros(4, dtype=torch.int64)), dim=1).int().expand(ROWS, 4, 2)
    device.lines["done"][0] = 0
    device.x[:], device.plan[:], device.weights[:] = 1.0, plan, 1.0
    assert not executor.stalled(60)
    device.lines["ready"][0] = ROWS << 32 | 1
    while not executor.stalled(0.05):
        assert device.lines["done"][0] == 0
    device.wait("done", 1)
    while executor.stalled(0.05):
        time.sleep(0)
