"""An offloaded layer computes all routed experts, wherever they are: the real executor, kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.device.driver import DriverError
from engine.device.fake import FakeDriver
from engine.experts.executor import Executor, ExecutorError
from engine.experts.layout import FORMATS, Layout
from engine.experts.offload import OffloadedExperts
from engine.experts.pool import Pool
from engine.experts.replay import Chooser
from engine.experts.residency import BYTES, CPU, FETCHED, HITS, ONE, Residency, lru
from engine.experts.split import Split
from engine.kernels.ops import DeviceOps
from engine.layers.ops import Routing
from engine.layers.reference import ReferenceExperts, ReferenceOps

HIDDEN, INNER, EXPERTS, LAYERS, RANKS, ROWS = 64, 128, 6, 2, 2, 4
DEVICE = torch.device("cpu")


def room(pool: Pool, slots: int) -> Tensor:
    return torch.empty(slots + 1, pool.stride, dtype=torch.uint8)


class Case:
    """Offloaded experts, and the same ones as plain tensors."""

    def __init__(self, name: str, slots: int, inner: int = INNER) -> None:
        layout = Layout(FORMATS[name], HIDDEN, inner)
        self.pool = Pool(layout, LAYERS, EXPERTS)
        self.executor = Executor(self.pool, ROWS, RANKS, threads=1)
        self.offloaded = OffloadedExperts(
            self.pool, self.executor, FakeDriver(), Split(LAYERS, 1.0, 1.0), room(self.pool, slots)
        )
        generator = torch.Generator().manual_seed(3)
        self.layers = []
        for _ in range(LAYERS):
            gate_up = torch.randn(EXPERTS, 2 * inner, HIDDEN, generator=generator) * 0.2
            down = torch.randn(EXPERTS, HIDDEN, inner, generator=generator) * 0.2
            self.layers.append(self.offloaded.pack(gate_up, down))
        self.offloaded.fix(1.0)
        self.offloaded.start()
        self.twins = [self._twin(layer) for layer in range(LAYERS)]

    def _twin(self, layer: int) -> ReferenceExperts:
        decoded = [self.pool.layout.decode(self.pool.blob(layer * EXPERTS + one)) for one in range(EXPERTS)]
        gate_up, down = zip(*decoded, strict=True)
        return ReferenceExperts(torch.stack(gate_up), torch.stack(down))

    def share(self, share: float) -> None:
        self.offloaded.fix(share)

    def counted(self) -> list[int]:
        return self.offloaded.residency.counters.tolist()

    def check(self, rows: int, seed: int, layer: int = 0) -> Tensor:
        """One layer of one step with random routing; what it gave."""
        x, ids, weights = routed(rows, seed)
        y = self.offloaded.run(x, ids, weights, self.layers[layer])
        self.offloaded.report()
        self.offloaded.after_step()
        self.offloaded.learn()
        expected = ReferenceOps().experts(x, ids, weights, self.twins[layer])
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        return y

    def close(self) -> None:
        self.offloaded.close()
        self.executor.close()


def routed(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, EXPERTS, generator=generator).topk(RANKS, dim=1).indices.int()
    return torch.randn(rows, HIDDEN, generator=generator), ids, torch.rand(rows, RANKS, generator=generator)


@pytest.fixture
def made() -> Iterator[Any]:
    cases = []

    def make(name: str = "mxfp4", slots: int = LAYERS * EXPERTS, inner: int = INNER) -> Case:
        cases.append(Case(name, slots, inner))
        return cases[-1]

    yield make
    for case in cases:
        case.close()


@pytest.mark.parametrize("name", ["int8", "mxfp4"])
def test_everything_resident(made: Any, name: str) -> None:
    case = made(name)
    for expert in range(0, EXPERTS, RANKS):
        ids = torch.arange(expert, expert + RANKS, dtype=torch.int32)[None]
        for layer in range(LAYERS):
            case.offloaded.run(torch.ones(1, HIDDEN), ids, torch.ones(1, RANKS), layer)
    before = case.counted()
    case.check(2, 1), case.check(3, 2, layer=1)
    after = case.counted()
    assert after[FETCHED:] == before[FETCHED:] and after[HITS] > before[HITS]


@pytest.mark.parametrize("name", ["int8", "mxfp4"])
def test_everything_fetched_into_few_slots(made: Any, name: str) -> None:
    case = made(name, slots=ROWS * RANKS)
    for seed in range(4):
        case.check(2, seed, layer=seed % LAYERS)
    _, fetched, cpu, moved = case.counted()
    assert cpu == 0 and fetched > 0
    assert moved * case.pool.layout.parts == fetched * case.pool.layout.nbytes


@pytest.mark.parametrize("name", ["bf16", "int8", "mxfp4"])
def test_everything_on_the_cpu(made: Any, name: str) -> None:
    case = made(name)
    case.share(0)
    for seed in range(4):
        case.check(3, seed, layer=seed % LAYERS)
    hits, fetched, cpu, moved = case.counted()
    assert (hits, fetched, moved) == (0, 0, 0) and cpu > 0


@pytest.mark.parametrize("share", [0.1, 0.4, 0.75])
@pytest.mark.parametrize("slots", [1, 12])
def test_splits_and_partial_experts(made: Any, share: float, slots: int) -> None:
    case = made(slots=slots)
    case.share(share)
    for seed in range(4):
        case.check(1 + seed % 2, seed, layer=seed % LAYERS)
    assert case.counted()[CPU] > 0 and case.counted()[BYTES] > 0


@pytest.mark.parametrize("inner", [32, 96, 160])
def test_parts_of_different_widths(made: Any, inner: int) -> None:
    case = made(slots=2, inner=inner)
    case.share(0.4)
    for seed in range(3):
        case.check(2, seed)


@pytest.mark.parametrize("name", ["int8", "mxfp4"])
def test_a_step_that_asks_nobody_gives_the_same_bits(made: Any, name: str) -> None:
    """As one whose share is all, whatever the shares are; residency and what is told of the step, too."""
    asks, brings = made(name, slots=5), made(name, slots=5)
    brings.share(0.4)
    before = brings.executor.times.copy()
    for seed in range(4):
        x, ids, weights = routed(1, seed)
        wanted = asks.offloaded.run(x, ids, weights, seed % LAYERS)
        with brings.offloaded.bringing(True):
            got = brings.offloaded.run(x, ids, weights, seed % LAYERS)
        assert torch.equal(got, wanted)
        for case, brought in ((asks, False), (brings, True)):
            case.offloaded.report()
            case.offloaded.after_step(graph=True, brought=brought)
            case.offloaded.learn()
        for one, other in zip(asks.offloaded._told, brings.offloaded._told, strict=True):
            assert one is asks.executor.times or (one == other).all()
    one, other = (case.offloaded.residency for case in (asks, brings))
    assert asks.counted() == brings.counted() and asks.counted()[FETCHED] > 0
    assert torch.equal(one.slot_of, other.slot_of) and torch.equal(one.value, other.value)
    assert (brings.executor.times == before).all()  # nobody was asked


def test_who_may_do_without_the_cpu(made: Any) -> None:
    case = made(slots=RANKS)
    assert case.offloaded.may_bring(1) and case.offloaded.brings(1) and not case.offloaded.may_bring(2)
    for share in (0.0, 0.4):
        case.share(share)
        assert case.offloaded.may_bring(1) and not case.offloaded.brings(1)
    case.share(1.0)
    case.offloaded.resize(RANKS - 1)  # one of a layer's experts would have no place; there may be one again
    assert case.offloaded.may_bring(1) and not case.offloaded.brings(1)
    case.offloaded.resize(RANKS)
    assert case.offloaded.brings(1)
    case.offloaded._pinned = None
    case.share(1.0)
    assert not case.offloaded.brings(1)


def test_experts_that_nobody_computed_are_an_error(made: Any) -> None:
    case = made(slots=RANKS)
    case.offloaded._limit, case.offloaded._all.limit[0] = 1, 1
    x, ids, weights = routed(ROWS, 1)
    with case.offloaded.bringing(True):
        case.offloaded.run(x, ids, weights, 0)
    case.offloaded.report()
    with pytest.raises(ExecutorError, match="left some"):
        case.offloaded.after_step(graph=True, brought=True)


def test_rows_join_and_leave_without_changing_others(made: Any) -> None:
    """Where an expert is computed stays the same here, so that the bits must."""
    x, ids, weights = routed(ROWS, 5)
    for share in (0.0, 1.0):
        case = made()
        case.share(share)
        together = case.offloaded.run(x, ids, weights, 0)
        for row in range(ROWS):
            alone = slice(row, row + 1)
            assert torch.equal(together[alone], case.offloaded.run(x[alone], ids[alone], weights[alone], 0))


def test_the_split_learns_from_steps(made: Any) -> None:
    """Every step on both sides has times for the loop, and what it decides is what the next step does."""
    case = made(slots=3)
    case.offloaded.fix(None)
    shares = set()
    for seed in range(6):
        case.check(2, seed)
        shares.add(int(case.offloaded.residency.share[0]))
    assert len(shares) > 1 and case.executor.times[0, 0] > 0
    assert case.counted()[CPU] > 0 and case.counted()[FETCHED] > 0


def test_a_better_policy_is_followed(made: Any) -> None:
    """What the device says was routed reaches the chooser, and its choice the table of the next decision."""
    case, seen = made(slots=3), []

    class Chooses:
        policy = lru(LAYERS)

        def step(self, routed: Any) -> bool:
            seen.append(routed.tolist())
            return len(seen) == 2

    case.offloaded._chooser = cast(Chooser, Chooses())
    before = case.offloaded.residency.bump.clone()
    for seed in range(3):
        assert torch.equal(case.offloaded.residency.bump, before) == (seed < 2)
        case.check(2, seed)
        ids = routed(2, seed)[1].flatten().tolist()
        assert seen[-1][0] == ids + [-1] * (len(seen[-1][0]) - len(ids))
    assert not case.offloaded.residency.bump.any()
    case.offloaded.residency.check()


def test_fewer_and_more_slots_between_steps(made: Any) -> None:
    case = made(slots=10)
    for seed, limit in enumerate((10, 2, 7, 1, 10)):
        case.offloaded.resize(limit)
        case.check(2, seed, layer=seed % LAYERS)
        case.offloaded.residency.check()


def test_more_rows_than_the_executor_takes(made: Any) -> None:
    case = made(slots=3)
    case.share(0.5)
    case.check(2 * ROWS + 1, 7)


def test_absent_rows_give_zero(made: Any) -> None:
    case = made()
    for share in (0.0, 1.0):
        case.share(share)
        x, ids, weights = routed(3, 8)
        expected = case.offloaded.run(x, ids, weights, 0)[[0, 2]]
        ids[1] = -1
        y = case.offloaded.run(x, ids, weights, 0)
        assert torch.equal(y[1], torch.zeros(HIDDEN))
        torch.testing.assert_close(y[[0, 2]], expected, rtol=1e-4, atol=1e-5)


def test_a_request_that_cannot_be_computed_is_an_error(made: Any) -> None:
    case = made()
    x, ids, weights = routed(1, 9)
    right = case.offloaded.residency
    case.offloaded.residency = Residency.create(case.pool.layout, LAYERS, EXPERTS + 2, 4, DEVICE)
    case.share(0)
    y = case.offloaded.run(x, ids.fill_(EXPERTS + 1), weights, 0)
    with pytest.raises(ExecutorError, match="expert"):
        case.offloaded.after_step()
    assert y.isnan().all()
    case.offloaded.residency = right
    case.check(1, 9)  # and the next one is


class DeadExecutor:
    """A mailbox that nobody looks at, which may go unnoticed."""

    def __init__(self, executor: Executor, noticed: bool = True) -> None:
        self._noticed = noticed
        self.layout, self.times = executor.layout, executor.times
        self.mailbox = torch.zeros(self.layout.nbytes + 4096, dtype=torch.uint8)
        self.mailbox = self.mailbox[-self.mailbox.data_ptr() % 4096 :][: self.layout.nbytes]

    def stalled(self, seconds: float) -> bool:
        return self._noticed

    def check(self) -> None:
        """It has no errors to tell of."""


def test_a_dead_executor_is_an_error(made: Any) -> None:
    pool, executor = made().pool, DeadExecutor(made().executor)
    offloaded = OffloadedExperts(
        pool, cast(Executor, executor), FakeDriver(), Split(LAYERS, 1.0, 1.0), room(pool, 2), patience=0.0
    )
    offloaded.fix(0.0)
    offloaded.start(fetches=False)
    for _ in range(2):
        y = offloaded.run(*routed(2, 1), 0)
        assert y.isnan().all()
        with pytest.raises(ExecutorError, match="have not answered"):
            offloaded.after_step()
    offloaded.close()


def test_only_the_answer_waits_for_the_cpu(made: Any) -> None:
    """All else of a layer is launched before it, the shared expert by whoever asked for the sums."""
    pool, executor = made().pool, DeadExecutor(made().executor, noticed=False)
    driver = FakeDriver(patience=0.05)
    offloaded = OffloadedExperts(pool, cast(Executor, executor), driver, Split(LAYERS, 1.0, 1.0), room(pool, 2))
    offloaded.fix(0.0)
    offloaded.start(fetches=False)
    x, _, _ = routed(2, 1)
    sums = offloaded.sums(x, Routing(torch.randn(2, EXPERTS), RANKS, True), 0)
    assert sums is not None and sums.answer is not None
    with pytest.raises(DriverError, match="waits for 1"):
        sums.answer(torch.zeros_like(x))
    offloaded.close()


@pytest.mark.parametrize("name", ["int8", "mxfp4"])
@pytest.mark.parametrize(("rows", "share"), [(1, 0.0), (2, 0.4)])
def test_a_layer_from_routers_to_the_residual(made: Any, name: str, rows: int, share: float) -> None:
    case, twins = made(name, slots=9), ReferenceOps()
    case.share(share)
    ops = DeviceOps(case.offloaded, DEVICE)
    for seed in range(2):
        draw = torch.Generator().manual_seed(seed)
        base, x, gate_up, gate, logits, down = (
            torch.randn(*shape, generator=draw)
            for shape in ((rows, HIDDEN), (rows, HIDDEN), (rows, 64), (rows, 1), (rows, EXPERTS + 1), (HIDDEN, 32))
        )
        routing, layer = Routing(logits[:, :EXPERTS], RANKS, True), seed % LAYERS
        y = ops.add_shared_experts(base, x, routing, case.layers[layer], gate_up, gate, ops.pack(down))
        case.offloaded.after_step()
        expected = twins.add_shared_experts(base, x, routing, case.twins[layer], gate_up, gate, twins.pack(down))
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    box, mailbox = case.executor.layout, case.executor.mailbox
    assert int(mailbox[box.done]) == int(mailbox[box.arrived]) == 1


def test_what_is_not_known_of_a_machine_is_measured(made: Any) -> None:
    """Else one side would seem to take nothing, and get everything for good."""
    pool, executor, split = made().pool, made().executor, Split(LAYERS, 1.0, 1.0)
    offloaded = OffloadedExperts(pool, executor, FakeDriver(), split, room(pool, 2))
    offloaded.start(measures=True)
    assert split.link_alone > 1.0 and offloaded.prefill.costs.link == split.link_alone * pool.layout.parts
    assert all(0 < share < ONE for share in split.share)
    offloaded.close()
