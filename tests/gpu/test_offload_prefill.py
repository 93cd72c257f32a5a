"""Prefill over offloaded experts: whatever is resident, brought or left to the CPU, the results are those of experts
that are all there, and where experts are said to be they are. On twins, but for one test in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_support import add_answer, arrive, resolve
from torch import Tensor

from engine.device.fake import FakeDriver
from engine.experts import copies, offload, pinning, prefill, waves
from engine.experts.cost import Costs
from engine.experts.executor import Executor, ExecutorError
from engine.experts.layout import FORMATS, Layout
from engine.experts.offload import OffloadedExperts
from engine.experts.pool import Pool
from engine.experts.residency import BYTES, CPU, FETCHED
from engine.experts.split import Split
from engine.experts.waves import FOUND, LEFT, LINK, ROWS
from engine.kernels import experts_twin, grouped_twin, waves_twin
from engine.kernels.grouped import Groups, precision
from engine.layers.reference import ReferenceExperts, ReferenceOps

LAYERS, EXPERTS, RANKS, HIDDEN, INNER = 3, 12, 2, 32, 64
MOST = 400
"""Rows that the CPU takes part in."""


def twins(pool: Pool) -> dict[str, SimpleNamespace]:
    """Stand-ins for the modules of kernels that prefill uses."""

    def fetch(_address: int, _stride: int, slots: Tensor, fetches: waves.Fetches, nbytes: int, _stream: object) -> None:
        waves_twin.fetch(pool.tensor[: pool.nbytes].view(len(pool), -1), slots, fetches, nbytes)

    decisions = SimpleNamespace(
        divide=waves.divide, take=waves.take, keep=waves.keep, fetch=fetch, move=waves_twin.move, left=waves_twin.left,
    )  # fmt: skip
    return {
        "waves": decisions,
        "grouped": SimpleNamespace(
            Groups=Groups,
            precision=precision,
            arrange=grouped_twin.arrange,
            gate_up=grouped_twin.gate_up,
            down=grouped_twin.down,
        ),
        "pairs": SimpleNamespace(sort_pairs=grouped_twin.sort_pairs, combine_pairs=grouped_twin.combine_pairs),
    }


def decode_twins(pool: Pool) -> SimpleNamespace:
    def fetch(_address: int, _stride: int, slots: Tensor, decision: Any, part_bytes: Tensor) -> None:
        experts_twin.fetch(pool.tensor[: pool.nbytes].view(len(pool), -1), slots, decision, part_bytes)

    return SimpleNamespace(
        fetch=fetch, gate_up=experts_twin.gate_up, down=experts_twin.down, combine=experts_twin.combine,
        arrive=arrive,
    )  # fmt: skip


class Case:
    """Offloaded experts, and the same ones as plain tensors."""

    def __init__(self, slots: int, patch: pytest.MonkeyPatch | None) -> None:
        self.pool = Pool(Layout(FORMATS["mxfp4"], HIDDEN, INNER), LAYERS, EXPERTS)
        self.executor = Executor(self.pool, MOST, RANKS, threads=1)
        room = torch.full((slots + 1, self.pool.stride), 0xFF, dtype=torch.uint8)
        self.room = room
        self.offloaded = OffloadedExperts(self.pool, self.executor, FakeDriver(), Split(LAYERS, 1.0, 1.0), room)
        generator = torch.Generator().manual_seed(3)
        for _ in range(LAYERS):
            gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) * 0.3
            self.offloaded.pack(gate_up, torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) * 0.3)
        self.offloaded.start()
        self.costs()
        if patch is not None:
            for name, module in twins(self.pool).items():
                patch.setattr(prefill, name, module)
            patch.setattr(copies, "kernels", waves)
            patch.setattr(offload, "kernels", decode_twins(self.pool))
            patch.setattr(offload, "resolve", resolve)
            patch.setattr(offload, "add_answer", add_answer)
            patch.setattr(prefill, "add_answer", add_answer)
            patch.setattr(prefill, "CHUNK", 300)
        self.plain = [self._plain(layer) for layer in range(LAYERS)]

    def _plain(self, layer: int) -> ReferenceExperts:
        decoded = [self.pool.layout.decode(self.pool.blob(layer * EXPERTS + one)) for one in range(EXPERTS)]
        gate_up, down = zip(*decoded, strict=True)
        return ReferenceExperts(torch.stack(gate_up), torch.stack(down))

    def costs(self, **changed: float) -> None:
        """With these, the CPU takes the lighter half and whole layers never come ahead."""
        part = self.offloaded.prefill
        part.follow(replace(
            part.costs, link=100.0, ahead=100.0, cpu=90.0, row=1.0, exchange=1.0, handed=0.0, read=0.0, pair=0.0
        ))  # fmt: skip
        part.follow(replace(part.costs, **changed))

    def call(self, rows: int, seed: int, skew: float = 0.0) -> None:
        """A forward of all layers, and that everything about it is right."""
        generator = torch.Generator().manual_seed(seed)
        for layer in range(LAYERS):
            liked = torch.rand(rows, EXPERTS, generator=generator) + skew * torch.arange(EXPERTS) / EXPERTS
            ids = liked.topk(RANKS, dim=1).indices.int()
            ids[torch.rand(rows, generator=generator) < 0.05] = -1
            x, base = torch.randn(2, rows, HIDDEN, generator=generator)
            x = x.half()  # as products of many rows give it
            weights = torch.rand(rows, RANKS, generator=generator)
            y = self.offloaded.add(base.clone(), x, ids, weights, layer)
            weights[ids < 0] = 0.0  # the reference knows no padding
            expected = base + ReferenceOps().experts(x.float(), ids.clamp(min=0), weights, self.plain[layer])
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
            self.check()
        self.offloaded.report()
        self.offloaded.after_step()
        self.offloaded.learn()

    def check(self) -> None:
        """Experts are where they are said to be, in part or whole."""
        state, layout = self.offloaded.residency, self.pool.layout
        state.check()
        for slot, flat in enumerate(state.owner.tolist()):
            nbytes = layout.offsets[layout.parts - int(state.lacks[flat])]
            assert flat < 0 or torch.equal(self.room[slot, :nbytes], self.pool.blob(flat)[:nbytes])

    @property
    def told(self) -> list[list[int]]:
        return self.offloaded.prefill.waves.told.tolist()  # type: ignore[no-any-return]

    def close(self) -> None:
        self.offloaded.close()
        self.executor.close()


MakeCase = Callable[..., Case]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCase]:
    cases = []

    def make(slots: int = LAYERS * EXPERTS, patch: pytest.MonkeyPatch | None = monkeypatch) -> Case:
        cases.append(Case(slots, patch))
        return cases[-1]

    yield make
    for case in cases:
        case.close()


@pytest.mark.parametrize(
    "slots", [2, *(pytest.param(slots, marks=pytest.mark.deep) for slots in (3, 5, 12, 24)), 30, LAYERS * EXPERTS + 4]
)
def test_results_and_residency_for_every_size_of_the_cache(made: MakeCase, slots: int) -> None:
    """Short and long calls, ahead or not, with decode steps and fewer and more slots between."""
    case = made(slots)
    for seed, (rows, costs) in enumerate(
        [(17, {}), (64, {"cpu": 0.0, "row": 0.0}), (200, {"row": 1e3}), (1000, {}), (64, {"row": 1e6, "read": 1.0})]
    ):
        case.costs(**costs)
        case.call(rows, seed)
        case.call(1 + seed % 2, seed + 50, skew=2.0)
        case.offloaded.resize(slots // 2 + 1 if seed == 1 else slots)
        case.check()


def test_a_single_slot_is_enough(made: MakeCase) -> None:
    case = made(1)
    case.call(17, 1)


def test_the_kernels_do_the_same(made: MakeCase) -> None:
    case = made(26, None)
    case.call(17, 1)
    assert case.told[0][LEFT] > 0 and case.told[0][LINK] > 0
    case.costs(cpu=300.0, ahead=50.0)
    case.call(17, 2)
    assert case.offloaded.prefill.streamed and all(layer[FOUND] and not layer[LINK] for layer in case.told)


def test_light_experts_go_to_the_cpu_and_heavy_ones_over_the_link(made: MakeCase) -> None:
    case = made(24)
    case.costs(cpu=190.0)
    case.call(40, 1, skew=1.5)
    for found, on_link, left, pairs in case.told:
        assert found == 0 and on_link >= left > 0
        assert pairs * (on_link + left) < 40 * RANKS * left  # lighter than on average
    assert case.offloaded.residency.counters[CPU] == sum(layer[LEFT] for layer in case.told) * case.pool.layout.parts


def test_calls_with_more_rows_than_the_cpu_takes_leave_it_alone(made: MakeCase) -> None:
    case = made(24)
    case.costs(cpu=0.0, row=0.0)
    case.call(MOST + 1, 1)
    assert all(layer[LEFT] == layer[ROWS] == 0 for layer in case.told)
    case.call(MOST, 2)
    assert case.told[0][LEFT] > 0 and all(layer[LINK] == 0 for layer in case.told)


def test_calls_of_many_rows_do_not_count_as_decode_steps(made: MakeCase) -> None:
    """The CPU's times are those of the whole call then, and the work is still that of the step before."""
    case = made(24)
    case.call(1, 1)
    before = case.offloaded._learnt_from[0].tolist()
    case.costs(cpu=0.0, row=0.0)
    case.call(40, 2)
    assert case.told[0][LEFT] > 0 and case.executor.times.tolist() != before
    assert case.offloaded._learnt_from[0].tolist() == before
    case.call(1, 3)
    assert case.offloaded._learnt_from[0].tolist() != before


def test_a_fixed_split_holds_for_prefill_too(made: MakeCase) -> None:
    """Whatever things take. Without the CPU all that a layer misses comes ahead."""
    case = made(24)
    for share, bounds in ((0.0, (0, 0)), (1.0, (0, 0)), (0.5, (1, 6))):
        case.offloaded.fix(share)
        case.call(40, 3)
        assert all(bounds[0] <= layer[LINK] <= bounds[1] for layer in case.told)
        assert all((layer[LEFT] > 0) == (share < 1) for layer in case.told)
        assert share < 1 or all(layer[FOUND] == EXPERTS for layer in case.told)
        case.offloaded.resize(2), case.offloaded.resize(24)


def test_long_calls_bring_whole_layers_ahead_and_only_what_is_missing(made: MakeCase) -> None:
    case = made(33)
    case.costs(row=1e6, read=1.0)
    case.call(300, 1)
    assert case.offloaded.prefill.streamed and [layer[:3] for layer in case.told] == [[EXPERTS, 0, 0]] * LAYERS
    before = case.offloaded.residency.counters.tolist()
    case.call(300, 2)  # 21 of the 36 experts found room beyond the ring
    after = case.offloaded.residency.counters.tolist()
    assert 3 <= (after[FETCHED] - before[FETCHED]) / case.pool.layout.parts <= 15
    assert (after[BYTES] - before[BYTES]) * case.pool.layout.parts == (after[FETCHED] - before[FETCHED]) * (
        case.pool.layout.nbytes
    )


def test_what_has_room_for_all_comes_ahead_and_stays(made: MakeCase) -> None:
    """The first prompt, with nothing there, and the next ones, with everything: nothing is given up for it."""
    case = made(LAYERS * EXPERTS)
    case.costs(read=1.0, pair=1.0, between=1.0)
    state, whole = case.offloaded.residency, LAYERS * EXPERTS * case.pool.layout.parts
    for seed in range(3):
        case.call(MOST + 1, seed)
        assert case.offloaded.prefill.streamed and [layer[:3] for layer in case.told] == [[EXPERTS, 0, 0]] * LAYERS
        assert int(state.counters[FETCHED]) == whole and bool((state.slot_of >= 0).all())


@pytest.mark.parametrize("slots", [EXPERTS, EXPERTS + 1, 2 * EXPERTS - 5, 3 * EXPERTS])
def test_whole_layers_come_wherever_the_others_are(made: MakeCase, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """From pieces of a pool that end within experts; into a ring that holds experts of all layers, and whose room
    another layer takes half of or nearly all; also after a call that was not ended."""
    monkeypatch.setattr(offload, "pin", partial(pinning.pin, piece=1))
    case = made(slots)
    for seed in range(3):
        case.call(1, seed + 50)
        case.offloaded.prefill.ahead = False
        case.call(40, seed + 60, skew=1.0)
        case.offloaded.prefill.ahead = True
        case.call(300, seed)
        assert all(layer[FOUND] == EXPERTS for layer in case.told)
        x, ids = torch.ones(300, HIDDEN), torch.zeros(300, RANKS, dtype=torch.int32)
        ids[:, 1] = seed
        case.offloaded.run(x, ids, torch.ones(300, RANKS), 0)
        case.offloaded.after_step()


@pytest.mark.parametrize(("ring", "limit", "held"), [(8, 8, 0), (8, 30, 0), (9, 20, 20), (13, 20, 14), (16, 48, 30)])
def test_a_plan_brings_every_layer_in_time(ring: int, limit: int, held: int) -> None:
    """Nothing goes that is to be computed and has been brought; no slot has two; what needs no slot of a layer before
    comes before that."""
    experts, layers, rng = 8, 5, np.random.default_rng(ring)
    found = np.full(layers * experts, -1, np.int32)
    found[rng.choice(layers * experts, held, replace=False)] = rng.choice(limit, held, replace=False)
    holds = {int(slot): int(flat) for flat, slot in enumerate(found) if slot >= 0}
    kept = [np.count_nonzero(found[one * experts : (one + 1) * experts] >= ring) for one in range(layers)]
    moved = ahead = 0
    for layer, batches in enumerate(copies.plan(found.copy(), experts, ring, limit)):
        for batch in batches:
            assert batch.layer >= layer
            for expert, slot in zip(batch.experts.tolist(), batch.slots.tolist(), strict=True):
                goes = holds.get(slot, -1) // experts
                assert slot not in holds or (slot < ring and (goes < layer or goes > batch.layer))
                holds[slot] = batch.layer * experts + expert
            moved, ahead = moved + len(batch.experts), max(ahead, batch.layer - layer)
        there = list(holds.values())
        assert all(there.count(layer * experts + expert) == 1 for expert in range(experts))
    assert moved >= layers * experts - held and ahead >= (limit > 8)
    now = [sum(flat // experts == one for slot, flat in holds.items() if slot >= ring) for one in range(layers)]
    most = [max(before, waves.share_of(layers, experts, ring, limit)) for before in kept]
    assert all(one <= other for one, other in zip(now, most, strict=True)) and (held or now == most)


def test_neighbours_are_copied_at_once() -> None:
    assert list(copies.runs(np.array([0, 1, 2, 5, 6, 9]), np.array([3, 4, 6, 7, 8, 9]))) == [
        (0, 3, 2), (2, 6, 1), (5, 7, 2), (9, 9, 1)
    ]  # fmt: skip


def test_some_come_ahead_while_the_cpu_helps(made: MakeCase) -> None:
    """As many as the link brings between two layers, of a call that uses nearly all experts; not of a short one."""
    case = made(24)
    case.costs(between=1.0)
    case.call(300, 1)
    assert case.told[0][FOUND] == 0 and all(layer[FOUND] == 3 and layer[LEFT] > 0 for layer in case.told[1:])
    case.call(17, 2)
    assert case.offloaded.prefill._ahead_of(17) == 0


def test_what_the_last_tokens_use_is_there_for_decoding(made: MakeCase) -> None:
    """Even of the first layer, whose part of the ring other layers have taken since."""
    case = made(30)
    case.costs(row=1e6)
    case.call(200, 1, skew=3.0)  # the last experts of a layer, mostly
    before = case.offloaded.residency.counters[FETCHED:].tolist()
    case.call(1, 2, skew=9.0)
    assert case.offloaded.residency.counters[FETCHED:].tolist() == before


def test_an_error_of_the_cpu_is_an_error_of_the_call(made: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    case = made(24)
    case.costs(cpu=0.0, row=0.0)
    publish = prefill.kernels.publish

    def wrong(x: Tensor, weights: Tensor, decision: Any, layer: int, *rest: Any) -> None:
        publish(x, weights, decision, layer + LAYERS, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(prefill.kernels, "publish", wrong)
        x, ids = torch.ones(17, HIDDEN), torch.zeros(17, RANKS, dtype=torch.int32)
        ids[:, 1] = 1
        y = case.offloaded.run(x, ids, torch.ones(17, RANKS), 0)
    assert y.isnan().all()
    with pytest.raises(ExecutorError, match="beyond the 3 layers"):
        case.offloaded.after_step()
    case.call(17, 1)


def test_costs_follow_what_calls_take(made: MakeCase) -> None:
    case = made(24)
    case.costs(cpu=1e9, link=1e9, ahead=1e12)
    before = case.offloaded.prefill.costs
    for seed in range(8):
        case.call(40, seed)
        case.offloaded.resize(2), case.offloaded.resize(24)
    after = case.offloaded.prefill.costs
    assert after.cpu < before.cpu and after.row < before.row
    assert case.offloaded.prefill.waves.costs.tolist()[:2] == after.table()[:2]


def test_part_of_a_prompt_is_learnt_from_when_it_is_over(made: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what it gives: it is over when the next call begins, or the next graph has run."""
    case, learnt = made(LAYERS * EXPERTS), []
    part = case.offloaded.prefill
    over, learn = [False], Costs.learnt
    monkeypatch.setattr(part._probe, "over", lambda name: over[0])
    monkeypatch.setattr(Costs, "learnt", lambda self, *args: learnt.append(args) or learn(self, *args))
    case.call(40, 1)
    assert not learnt
    over[0] = True
    case.call(30, 2)
    assert [args[-1] for args in learnt] == [40 * RANKS, 30 * RANKS]
    over[0] = False
    case.call(20, 3)
    over[0] = True
    case.offloaded._told[1][:, CPU] = 5
    case.offloaded.after_step(graph=True)
    assert learnt[-1][-1] == 20 * RANKS and (case.offloaded._learnt_from[1][:, CPU] == 5).all()
