"""The arena over host memory: what it holds is exact, what is kept stays where it is, failures change nothing."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.device.arena import Arena, FixedArena, Shapes
from engine.device.driver import DriverError
from engine.device.memory import DeviceMemory, Sizes, allocate
from engine.device.virtual import HostMemory, OutOfMemory
from engine.memory.resize import DoesNotFit
from engine.models.model import Manifest

GRANULE = 4096
MANIFEST = Manifest(attention_layers=2, kv_heads=1, head_dim=8, recurrent=((3, 5), (7,)))
SHAPES = Shapes(MANIFEST, torch.float32, stride=3008)
MOST = Sizes(slots=40, pages=50, states=60)


class Unreliable(HostMemory):
    """``trouble``: calls of map or create until one fails."""

    trouble = 0

    def create(self) -> int:
        self._step()
        return super().create()

    def map(self, address: int, handles: Sequence[int]) -> None:
        self._step()
        super().map(address, handles)

    def _step(self) -> None:
        self.trouble -= 1
        if self.trouble == 0:
            raise OutOfMemory("as it happens")


def make(memory: HostMemory) -> Arena:
    return Arena(memory, SHAPES, sizes=Sizes(10, 10, 10), most=MOST, budget=100 * GRANULE, device=torch.device("cpu"))


def tensors(memory: DeviceMemory) -> dict[str, tuple[torch.Tensor, ...]]:
    return {"slots": (memory.slots,), "pages": (*memory.keys, *memory.values), "states": memory.states}


def write(memory: DeviceMemory, kind: str, item: int) -> None:
    for number, tensor in enumerate(tensors(memory)[kind]):
        tensor[item] = item % 100 + number


def right(memory: DeviceMemory, kind: str, item: int) -> bool:
    return all(bool((one[item] == item % 100 + at).all()) for at, one in enumerate(tensors(memory)[kind]))


def check(arena: Arena, memory: HostMemory, before: Sizes) -> None:
    """Accounts are exact; what was there before and still is was not touched; all that is new can be written."""
    assert arena.held == arena.needed(arena.sizes) == len(memory.mapped) * GRANULE <= arena.budget
    assert not memory.unmapped and len(set(memory.mapped.values())) == len(memory.mapped)
    assert right(arena.memory, "slots", MOST.slots)
    for kind in tensors(arena.memory):
        now, old = getattr(arena.sizes, kind), getattr(before, kind)
        assert all(right(arena.memory, kind, item) for item in range(min(now, old)))
        for item in range(now):
            write(arena.memory, kind, item)


def smaller(one: Sizes, other: Sizes) -> Sizes:
    """Whoever asks for less has given up the rest, even if it does not come to that."""
    return Sizes(min(one.slots, other.slots), min(one.pages, other.pages), min(one.states, other.states))


def test_the_border_moves_and_nothing_is_lost() -> None:
    rng = random.Random(1)
    memory = Unreliable(1 << 30, GRANULE)
    arena = make(memory)
    places = [tensor.data_ptr() for kind in tensors(arena.memory).values() for tensor in kind]
    for kind, size in (("slots", 10), ("pages", 10), ("states", 10), ("slots", 0)):
        for item in range(size) if size else (MOST.slots,):
            write(arena.memory, kind, item)
    refused = failed = 0
    for _ in range(300):
        before = arena.sizes
        wanted = Sizes(rng.randint(1, 40), rng.randint(1, 50), rng.randint(1, 60))
        memory.trouble = rng.randint(1, 12) if rng.random() < 0.5 else 0
        try:
            arena.resize(wanted)
            assert arena.sizes == wanted
        except DoesNotFit as error:
            refused += 1
            assert f"need {arena.needed(wanted)} bytes, and there are {arena.budget}" in str(error)
        except OutOfMemory:
            failed += 1
        assert arena.sizes in (before, wanted)
        check(arena, memory, before if arena.sizes == wanted else smaller(before, wanted))
    assert refused > 10 and failed > 10
    assert [tensor.data_ptr() for kind in tensors(arena.memory).values() for tensor in kind] == places
    arena.close()
    assert not memory.mapped and not memory.unmapped and arena.held == 0


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (Sizes(0, 5, 5), "0 slots: there may be 1 to 40"),
        (Sizes(5, 51, 5), "51 pages: there may be 1 to 50"),
        (Sizes(5, 5, -1), "-1 states: there may be 1 to 60"),
    ],
)
def test_what_can_never_be_is_refused(sizes: Sizes, says: str) -> None:
    arena = make(HostMemory(1 << 30, GRANULE))
    for division in (arena, FixedArena(arena.memory, SHAPES, MOST)):
        with pytest.raises(DoesNotFit, match=says):
            division.resize(sizes)


def test_others_may_have_the_memory() -> None:
    memory = HostMemory(60 * GRANULE, GRANULE)
    arena = make(memory)
    memory.outside = memory.free_bytes()
    before = dict(memory.mapped)
    with pytest.raises(OutOfMemory):
        arena.resize(replace(arena.sizes, pages=40))
    assert memory.mapped == before and not memory.unmapped
    arena.resize(Sizes(slots=1, pages=12, states=10))  # what is given up pays for it
    assert arena.held <= len(before) * GRANULE
    with pytest.raises(DriverError):
        make(memory)
    assert len(memory.mapped) * GRANULE == arena.held and not memory.unmapped


def test_what_is_not_backed_faults() -> None:
    """As on a GPU, where a kernel that uses it ends the process."""
    arena = make(HostMemory(1 << 30, GRANULE))
    arena.resize(Sizes(4, 4, 4))
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        arena.memory.keys[1][20].fill_(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_memory_that_is_given_up_goes_back_to_the_system() -> None:
    """And the tensors keep their addresses, whoever else is gone."""
    memory = HostMemory(1 << 30)
    shapes = Shapes(Manifest(attention_layers=1, kv_heads=4, head_dim=128), torch.float32, stride=0)
    arena = Arena(
        memory, shapes, sizes=Sizes(0, 500, 1), most=Sizes(0, 800, 1), budget=1 << 30, device=torch.device("cpu")
    )
    keys = arena.memory.keys[0]
    keys[:500] = 1

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    arena.resize(Sizes(0, 100, 1))
    assert before - resident() > 0.9 * 400 * 64 * 4 * 128 * 4
    ranges = weakref.WeakSet(memory.ranges)
    del arena, memory
    gc.collect()
    assert bool((keys[:100] == 1).all()) and len(ranges) == 1
    del keys
    gc.collect()
    assert not ranges


def test_a_fixed_arena_counts_only() -> None:
    memory = allocate(MANIFEST, torch.float32, SHAPES.stride, MOST, torch.device("cpu"))
    arena = FixedArena(memory, SHAPES, MOST)
    arena.resize(Sizes(3, 4, 5))
    assert arena.sizes == Sizes(3, 4, 5) and arena.held == arena.budget == arena.needed(MOST)
    arena.resize(MOST)
