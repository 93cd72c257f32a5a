"""A device in host memory: what is computed happens at once; what leaves and what comes happens late, and out of order
between lanes, as a seed has it. Until then, what is to be written holds no numbers."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import engine_support
import pytest
import torch
from torch import Tensor

from engine.device.room import Event, Room, Rows
from engine.device.staging import Lane, Staging, shapes
from engine.experts.pool import aligned
from engine.kernels.gather_twin import move
from engine.memory.host import HostTier
from engine.memory.store import StateStore
from engine.models.model import Cache

POISON = 0xFF


@dataclass
class LateEvent:
    lanes: LateLanes
    lane: Lane
    number: int

    def query(self) -> bool:
        self.lanes.stir()
        return self.lanes.done[self.lane] >= self.number

    def synchronize(self) -> None:
        while self.lanes.done[self.lane] < self.number:
            self.lanes.advance(self.lane)


@dataclass
class LateLanes:
    """``eager`` share of what is asked about goes on then."""

    seed: int = 0
    eager: float = 0.3
    work: dict[Lane, deque[Callable[[], None]]] = field(default_factory=lambda: {"out": deque(), "in": deque()})
    submitted: dict[Lane, int] = field(default_factory=lambda: {"main": 0, "out": 0, "in": 0})
    done: dict[Lane, int] = field(default_factory=lambda: {"main": 0, "out": 0, "in": 0})

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def move(self, lane: Lane, rows: Rows, flags: int, *, copy: bool = True) -> None:
        rows = rows.copy()
        assert (rows[:, :3] % 16 == 0).all()
        if lane == "main":
            move(rows, flags, copy=copy)
            return
        for _, target, size, _ in rows.tolist():
            ctypes.memset(target, POISON, size)
        self._submit(lane, lambda: move(rows, flags, copy=copy))

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        target.fill_(POISON)
        self._submit("out", lambda: target.copy_(source))

    def record(self, lane: Lane) -> LateEvent:
        return LateEvent(self, lane, self.submitted[lane])

    def wait(self, lane: Lane, event: Event) -> None:
        if lane == "main":
            event.synchronize()
        else:
            self._submit(lane, event.synchronize)

    def stir(self) -> None:
        while self._rng.random() < self.eager:
            lanes = [lane for lane, work in self.work.items() if work]
            if not lanes:
                return
            self.advance(self._rng.choice(lanes))

    def advance(self, lane: Lane) -> None:
        self.work[lane].popleft()()
        self.done[lane] += 1

    def _submit(self, lane: Lane, work: Callable[[], Any]) -> None:
        self.work[lane].append(work)
        self.submitted[lane] += 1


@dataclass
class Device:
    """What a runner with this mover has. ``page_blocks`` and ``state_blocks`` bound the host tier."""

    seed: int = 0
    eager: float = 0.3
    page_blocks: int = 400
    state_blocks: int = 40
    gathered: int = 1 << 20
    ring: int = 1 << 20
    tiers: list[HostTier] = field(default_factory=list)
    rooms: list[Room] = field(default_factory=list)
    stagings: list[Staging] = field(default_factory=list)

    def mover(self, cache: Cache) -> Staging:
        shaped, blocks = shapes(cache), (self.page_blocks, self.state_blocks if cache.states else 0)
        memory = aligned(Room.bytes(shaped, self.ring, blocks), 4096)
        room = Room(memory, memory.data_ptr(), shaped, self.ring, blocks)
        staging = Staging(cache, LateLanes(self.seed, self.eager), room, torch.empty(self.gathered, dtype=torch.uint8))
        self.rooms.append(room)
        self.stagings.append(staging)
        return staging

    def tier(self, store: StateStore | None) -> HostTier:
        tier = HostTier(store)
        self.rooms[-1].reclaim = tier.reclaim
        self.tiers.append(tier)
        return tier

    def check(self) -> None:
        """Every block, every word and every byte of the rings is accounted for; what is in host memory is right."""
        for room, tier, staging in zip(self.rooms, self.tiers, self.stagings, strict=True):
            for slot in list(staging._looked):
                staging._forget(slot)
            held = tier._all()
            assert all(one.data.wait() and not one.holds and not one.gone for one in held)
            free, states = room.free, sum(one.state for one in held)
            assert free[0] + len(held) - states == self.page_blocks
            assert free[1] + states in (0, self.state_blocks)
            assert len(room.ring) == len(staging._ring) == 0 and len(room._spare) == 64
            assert tier._bytes == sum(one.size for one in held)


@pytest.fixture(autouse=True, name="device")
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Every engine that a test loads has its pages there."""
    made, load = Device(seed=len(request.node.name)), engine_support.load_engine
    monkeypatch.setattr("engine.runner.InPlace", lambda cache, ops: made.mover(cache))
    monkeypatch.setattr(
        engine_support, "load_engine",
        lambda config, progress, store, *more: load(config, progress, lambda *it: made.tier(store(*it)), *more),
    )  # fmt: skip
    yield made
    made.check()
