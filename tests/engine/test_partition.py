"""The border between experts, pages and states while everything else goes on: what is kept is right, nothing leaks."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
from engine_support import audit, pending_slots, prompt

from engine.device.arena import Arena, FixedArena, Shapes
from engine.device.memory import Sizes, allocate
from engine.device.partition import CALM_SECONDS, KEEP_SECONDS, PLAN_SECONDS, Partition, Policy
from engine.device.virtual import HostMemory
from engine.experts.layout import FORMATS, Layout
from engine.experts.residency import Decision, Residency, resolve
from engine.memory.keys import encode
from engine.memory.memory import Lease, Memory
from engine.memory.mover import ALL
from engine.memory.resize import DoesNotFit
from engine.memory.states import Want
from engine.models.model import Manifest
from engine.sequence import TIP

CPU = torch.device("cpu")
GRANULE = 4096
LAYERS, EXPERTS, RANKS, LIVE = 2, 16, 3, 3
LAYOUT = Layout(FORMATS["bf16"], 32, 32)
MANIFEST = Manifest(attention_layers=1, kv_heads=1, head_dim=8, recurrent=((16,),))
SHAPES = Shapes(MANIFEST, torch.float32, LAYOUT.nbytes)
MOST = Sizes(slots=LAYERS * EXPERTS, pages=90, states=60)
FLOOR = 10 * GRANULE


class Machine:
    """A toy engine over an arena: its pages hold the tokens themselves, a state a hash of them, a slot its expert."""

    def __init__(self, slots: int = 12, pages: int = 30, checkpoints: int = 7, floor: int | None = FLOOR) -> None:
        self.host = HostMemory(200 * GRANULE, GRANULE)
        sizes = Sizes(slots, pages, 1 + LIVE + checkpoints)
        probe = Arena(self.host, SHAPES, sizes=sizes, most=MOST, budget=1 << 30, device=CPU)
        self.budget = probe.held
        probe.close()
        self.arena = Arena(self.host, SHAPES, sizes=sizes, most=MOST, budget=self.budget, device=CPU)
        self.arena.memory.states[0][0] = 0
        self.memory = Memory(self, "f", pages=pages, live=LIVE, checkpoints=checkpoints, recurrent=True)  # type: ignore[arg-type]
        self.residency = Residency.create(LAYOUT, LAYERS, EXPERTS, MOST.slots, CPU)
        self.residency.resize(slots)
        policy = Policy(least_slots=2, least_pages=4, experts=MOST.slots, part_seconds=1e-3, floor=floor, grows=True)
        self.partition = Partition(self.arena, self.memory, policy, self)
        self.now = 0.0
        self.running: list[tuple[Lease, list[int], int]] = []

    def resize(self, limit: int) -> None:
        self.residency.resize(limit)

    def copy_page(self, source: int, target: int) -> None:
        for pages in (*self.arena.memory.keys, *self.arena.memory.values):
            pages[target] = pages[source]

    def copy_state(self, source: int, target: int, parts: slice = ALL) -> None:
        self.arena.memory.states[0][target] = self.arena.memory.states[0][source]

    def page_finite(self, page: int, tokens: int) -> bool:
        return True

    def state_finite(self, slot: int, parts: slice = ALL) -> bool:
        return True

    def join(self, tokens: list[int], session: str, *, side: bool = False) -> bool:
        plan = self.memory.plan(encode(tokens), "")
        if not self.memory.fits(plan, len(tokens), modest=side):
            return False
        lease = self.memory.open(plan, session, side=side)
        assert self.state(lease) == digest(tokens[: plan.position])
        self.running.append((lease, tokens, plan.position))
        return True

    def feed(self, number: int, count: int) -> bool:
        lease, tokens, fed = self.running[number]
        end = min(len(tokens), fed + count)
        if end == fed or not self.memory.grow(lease, end):
            return False
        keys, values = self.arena.memory.keys[0], self.arena.memory.values[0]
        for at in range(fed, end):
            keys[lease.table[at // 64], at % 64] = tokens[at]
            values[lease.table[at // 64], at % 64] = -tokens[at]
        table = torch.tensor(lease.table)
        assert keys[table, :, 0, 7].flatten()[:end].tolist() == tokens[:end]
        assert values[table, :, 0, 0].flatten()[:end].tolist() == [-token for token in tokens[:end]]
        assert self.state(lease) == digest(tokens[:fed])
        self.arena.memory.states[0][lease.slot] = digest(tokens[:end])
        self.memory.advance(lease, tokens, end)
        self.running[number] = lease, tokens, end
        return True

    def checkpoint(self, number: int, want: Want) -> None:
        lease, tokens, fed = self.running[number]
        slot = self.memory.reserve_slot(lease, want) if fed else None
        if slot is not None:
            self.copy_state(lease.slot, slot)
            self.memory.capture(lease, tokens, fed, slot, want)

    def leave(self, number: int) -> None:
        lease, tokens, fed = self.running.pop(number)
        self.memory.close(lease, tokens, fed, TIP)

    def route(self, rng: random.Random, spread: int = EXPERTS) -> None:
        """One token through all layers: who is said to be in a slot is there."""
        decision = Decision.create(1, RANKS, CPU)
        slots = self.arena.memory.slots
        for layer in range(LAYERS):
            ids = torch.tensor([rng.sample(range(spread), RANKS)], dtype=torch.int32)
            resolve(self.residency, ids, layer, decision)
            for slot, flat, _ in decision.fetch[: int(decision.counts[0])].tolist():
                slots[slot] = flat
            for expert, slot in zip(ids.flatten().tolist(), decision.slot.flatten().tolist(), strict=True):
                assert slot == -1 or bool((slots[slot] == layer * EXPERTS + expert).all())

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.partition.tick(self.now, lambda: 1e-3)

    def state(self, lease: Lease) -> float:
        values = self.arena.memory.states[0][lease.slot]
        assert len(set(values.tolist())) == 1
        return float(values[0])

    def check(self) -> None:
        audit(self.memory)
        assert pending_slots(self.memory) == 0
        self.residency.check()
        arena, sizes = self.arena, self.arena.sizes
        assert arena.held == arena.needed(sizes) == len(self.host.mapped) * GRANULE <= arena.budget <= self.budget
        assert not self.host.unmapped
        assert self.partition.sizes == Sizes(int(self.residency.limit), sizes.pages, sizes.states - 1 - LIVE)
        assert sizes.slots >= 2 and sizes.pages >= 4 and self.memory.reserve == sizes.pages // 8


def digest(tokens: list[int]) -> float:
    value = 0
    for token in tokens:
        value = (value * 31 + token + 1) % 65521
    return float(value)


def soak(seed: int, steps: int, seconds: float = 0.0) -> Machine:
    """Joins, aborts, checkpoints, routing, what a person sets, and other programs: at random, in little memory."""
    rng, machine = random.Random(seed), Machine()
    stems = [prompt(seed * 10 + one, 700, 50) for one in range(4)]
    refused, until = 0, time.monotonic() + seconds
    for step in itertools.count():
        if step >= steps and time.monotonic() > until:
            break
        match rng.randrange(10):
            case 0 | 1 if len(machine.running) < LIVE:
                tokens = rng.choice(stems)[: rng.randint(1, 700)] + prompt(rng.randint(0, 10**9), 20, 50)
                machine.join(tokens, rng.choice("abc"), side=rng.random() < 0.2)
            case 2 | 3 | 4 | 5 if machine.running:
                number = rng.randrange(len(machine.running))
                if not machine.feed(number, rng.randint(1, 200)):
                    machine.leave(number)
                elif rng.random() < 0.5:
                    machine.checkpoint(number, Want("x", rng.random(), rng.random() < 0.1))
            case 6:
                machine.route(rng)
            case 7 if rng.random() < 0.4:
                wanted = {"slots": rng.randint(0, 36), "pages": rng.randint(0, 95), "states": rng.randint(0, 40)}
                before = machine.partition.sizes
                try:
                    machine.partition.set(**{name: wanted[name] for name in wanted if rng.random() < 0.4})
                except DoesNotFit:
                    refused += 1
                    assert machine.partition.sizes == before
                if rng.random() < 0.5:
                    machine.partition.release()
            case 8 if rng.random() < 0.3:
                machine.host.outside = rng.choice((0, 0, rng.randint(0, 190) * GRANULE))
            case _:
                machine.tick(rng.choice((0.1, 0.6, 3.0, 20.0)))
        machine.check()
    while machine.running:
        machine.leave(0)
    machine.check()
    assert refused and machine.memory.pool.held_pages == 0 and len(machine.memory.free_live) == LIVE
    report = machine.partition.report()
    assert min(report["moves"], report["given_back_bytes"], report["taken_bytes"]) > 0
    machine.arena.close()
    assert not machine.host.mapped and not machine.host.unmapped
    return machine


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_leaks_while_everything_goes_on(seed: int) -> None:
    soak(seed, 700)


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_nothing_leaks_in_five_minutes() -> None:
    soak(time.time_ns() % 1000, 1000, 300.0)


def test_pages_grow_with_a_session_and_experts_come_back() -> None:
    """It fits nowhere at first: not refused, and no other session's tip is lost for it; what it took goes back when
    nobody asks for it any more."""
    rng, machine = random.Random(1), Machine(slots=30, pages=12)
    assert machine.join(prompt(1, 300), "a")
    assert machine.feed(0, 300)
    machine.leave(0)
    assert machine.join(prompt(2, 900), "b")
    for _ in range(9):
        assert machine.feed(0, 100)
        machine.check()
    assert machine.memory.plan(encode(prompt(1, 320)), "").position == 300
    grown = machine.partition.sizes
    assert grown.pages > 12 and grown.slots < 30
    machine.leave(0)
    machine.memory.index.clock += 1000  # other, short requests came and went
    for _ in range(40):
        for _ in range(20):
            machine.route(rng)
        machine.tick(PLAN_SECONDS)
        machine.check()
    assert machine.now > KEEP_SECONDS
    assert machine.partition.sizes.slots > grown.slots


def test_others_have_what_they_need_within_a_second_and_it_comes_back() -> None:
    machine = Machine(slots=30)
    machine.tick(1.0)
    before = machine.partition.sizes
    machine.host.outside = machine.host.free_bytes() - 2 * GRANULE
    machine.tick(0.6)
    assert machine.host.free_bytes() >= FLOOR
    given = machine.partition.sizes
    assert given.slots < before.slots and (given.pages, given.states) == (before.pages, before.states)
    for _ in range(40):
        machine.tick(0.6)
    assert machine.partition.sizes == given  # it stays, for taking it would be to have too much again
    machine.host.outside = 0
    machine.tick(0.6)
    assert machine.partition.sizes == given
    machine.tick(CALM_SECONDS)
    machine.tick(CALM_SECONDS)
    assert machine.partition.sizes == before
    machine.check()


def test_what_a_person_has_set_stays() -> None:
    machine = Machine(slots=30, pages=12)
    machine.partition.set(pages=20)
    assert machine.partition.sizes.pages == 20 and machine.partition.sizes.slots < 30
    assert not machine.join(prompt(1, 64 * 21), "a")
    with pytest.raises(DoesNotFit, match=r"30 slots, 20 pages .* need \d+ bytes, and there are \d+"):
        machine.partition.set(slots=30)
    machine.partition.release()
    assert machine.join(prompt(1, 64 * 21), "a")
    machine.check()


def test_without_virtual_memory_there_is_what_was_allocated() -> None:
    sizes = Sizes(4, 30, 1 + LIVE + 5)
    machine = Machine()
    memory = Memory(machine, "f", pages=30, live=LIVE, checkpoints=5, recurrent=True)  # type: ignore[arg-type]
    fixed = FixedArena(allocate(MANIFEST, torch.float32, LAYOUT.nbytes, sizes, CPU), SHAPES, sizes)
    machine.residency = residency = Residency.create(LAYOUT, LAYERS, EXPERTS, 4, CPU)
    partition = Partition(fixed, memory, experts=machine)
    with pytest.raises(DoesNotFit, match="31 pages: there may be 1 to 30"):
        partition.set(pages=31)
    partition.set(pages=10, slots=3, states=2)
    assert (memory.pool.total, memory.checkpoints.total, int(residency.limit)) == (10, 2, 3)
    partition.set(pages=30)
    assert fixed.sizes == Sizes(3, 30, 1 + LIVE + 2)
