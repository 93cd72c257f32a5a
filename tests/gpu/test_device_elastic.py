"""Serving from a device whose memory is divided anew between any two steps says what the CPU's engine says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from device_support import machine, round_experts, use_twins
from engine_support import GREEDY, Bench, Outcome, prompt

from engine.api import Reply
from engine.checkpoint import write_tiny
from engine.device.virtual import HostMemory
from engine.memory.resize import DoesNotFit

ROOM: dict[str, Any] = {"kv_bytes": 1 << 20, "checkpoint_bytes": 1 << 19, "chunk_tokens": 12, "max_sequences": 3}
GRANULE = 4096
PAGE_BYTES, GPU_BYTES = 131072, 2_660_000
"""Of the model below: room for its dense weights, seven pages, and not quite all of its experts."""
SIZES = ((3, 9, 4), (9, 5, 2), (20, 12, 3), (1, 16, 5), (32, 6, 1))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    use_twins(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no bandwidth profile

    def make(arch: str) -> Path:
        made = write_tiny(arch, tmp_path / arch, layers=4)
        round_experts(made, "int8")
        return made

    return make


class Restless(Bench):  # type: ignore[misc]
    """Divides its memory anew after every other step."""

    sizes = cycle(SIZES)
    refused = 0

    def step(self) -> list[Reply]:
        replies: list[Reply] = super().step()
        partition = self.scheduler.partition
        if self.scheduler.stats().values.get("steps", 0) % 2:
            slots, pages, states = next(self.sizes)
            try:
                partition.set(slots=slots, pages=pages, states=states if self.memory.recurrent else 0)
            except DoesNotFit:
                self.refused += 1
        self.check()
        return replies


def talk(made: Bench) -> list[Outcome]:
    """Two at once, one that joins, and one that goes on from what was said."""
    names = [made.submit(prompt(seed, 20 + 50 * seed), replace(GREEDY, max_tokens=12)) for seed in (1, 2)]
    for _ in range(9):
        made.step()
    names.append(made.submit(prompt(3, 7), GREEDY))
    made.run()
    again = [*prompt(2, 120), *made.outcomes[names[1]].tokens, 5, 6]
    names.append(made.submit(again, GREEDY))
    made.run()
    return [made.outcomes[name] for name in names]


@pytest.mark.parametrize("arch", ["qwen3_5_moe", pytest.param("qwen3_moe", marks=pytest.mark.deep)])
def test_divided_anew_between_steps(model: Callable[[str], Path], arch: str) -> None:
    directory, memory = model(arch), HostMemory(1 << 30, GRANULE)
    elastic = replace(machine(), virtual=lambda: memory)
    device = {"device": "cuda", "experts": "offload", "expert_format": "int8", "gpu_bytes": 8 << 20}
    made = Restless(directory, **{**ROOM, **device, "machine": elastic})
    got = talk(made)
    wanted = talk(Bench(directory, **ROOM))
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.failed is None and ours.tokens == theirs.tokens
    moves = made.scheduler.partition.report()["moves"]
    assert moves > 10 and made.refused < moves
    assert made.scheduler.partition.report()["held_bytes"] == len(memory.mapped) * GRANULE and not memory.unmapped
    made.scheduler.close(1.0)


def test_conversations_grow_at_the_cost_of_experts(model: Callable[[str], Path]) -> None:
    """Pages for them are there when they need them, whatever was set aside at the start."""
    directory, memory = model("qwen3_moe"), HostMemory(1 << 30, GRANULE)
    elastic = replace(machine(), virtual=lambda: memory)
    device = {"device": "cuda", "experts": "offload", "expert_format": "int8", "gpu_bytes": GPU_BYTES}
    made = Bench(directory, **{**ROOM, **device, "machine": elastic, "kv_bytes": 3 * PAGE_BYTES})
    before = made.scheduler.partition.sizes
    names = [made.submit(prompt(seed, size), GREEDY) for seed, size in ((1, 200), (2, 150))]
    made.run()
    assert [len(made.outcomes[name].tokens) for name in names] == [8, 8]
    after = made.scheduler.partition.sizes
    assert after.pages > before.pages == 3 and after.slots < before.slots
    made.check()
    made.scheduler.close(1.0)
