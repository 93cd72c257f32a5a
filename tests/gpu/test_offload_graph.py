"""A decode step over static buffers is the forward that the runner makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from engine.bench_shapes import RandomSource, tiny
from engine.device.graph import DecodeSteps
from engine.layers.loader import Loader
from engine.layers.reference import ReferenceExperts, ReferenceOps
from engine.models.qwen3_5_moe import Qwen35Moe
from engine.runner import Rows, Runner

CPU = torch.device("cpu")


class RandomExperts(ReferenceOps):
    def pack_experts(self, gate_up: Tensor, down: Tensor) -> ReferenceExperts:
        generator = torch.Generator().manual_seed(2)
        return ReferenceExperts(
            torch.randn(gate_up.shape, generator=generator) * 0.1, torch.randn(down.shape, generator=generator) * 0.1
        )


def make() -> Runner:
    ops = RandomExperts()
    model = Qwen35Moe(tiny(), Loader(RandomSource(torch.float32, CPU), ops), 512, lambda *_: None)
    runner = Runner(model, ops, torch.float32, pages=8, slots=4)
    for tensor in (*runner.cache.keys, *runner.cache.values, *runner.cache.states):
        tensor.zero_()
    return runner


def test_steps_are_forwards() -> None:
    one, other = make(), make()
    steps = DecodeSteps(other.model, other.cache, lambda logits, _: logits, pages=4, scratch=(7, 3), device=CPU)
    tables: list[list[int]] = [[0, 1], [2]]
    with torch.inference_mode():
        for runner in (one, other):
            prompts = [Rows([3, 5, 7] * 21, 0, tables[0], 1), Rows([9, 2], 0, tables[1], 2)]
            runner.forward(prompts)
        for step in range(4):
            parts = [Rows([step], 63 + step, tables[0], 1, logits=True), Rows([8], 2 + step, tables[1], 2, logits=True)]
            assert torch.equal(one.forward(parts), steps.run(parts))
        alone = [Rows([1], 67, tables[0], 1, logits=True)]
        assert torch.equal(one.forward(alone), steps.run(alone))
        tables[0] = [0, 4]  # another page in the same place
        for runner in (one, other):
            runner.mover.copy_page(1, 4)
        moved = [Rows([1], 68, tables[0], 1, logits=True)]
        assert torch.equal(one.forward(moved), steps.run(moved))


@pytest.mark.parametrize(
    "part", [Rows([1, 2], 0, [0], 1), Rows([1], 0, [0] * 5, 1), Rows([1], 0, [0], 1, snapshots=[(1, 2)])]
)
def test_what_is_no_decode_step_is_refused(part: Rows) -> None:
    runner = make()
    steps = DecodeSteps(runner.model, runner.cache, lambda logits, _: logits, pages=4, scratch=(7, 3), device=CPU)
    with pytest.raises(ValueError, match="one token, no snapshots and at most 4 pages"):
        steps.run([part])


def test_the_other_way_of_a_step_is_made_within_it() -> None:
    runner, went = make(), list[bool]()

    @contextmanager
    def way(other: bool) -> Iterator[None]:
        went.append(other)
        yield
        went.append(other)

    steps = DecodeSteps(
        runner.model, runner.cache, lambda logits, _: logits.clone(), pages=4, scratch=(7, 3), device=CPU, way=way
    )
    for other in (False, True):
        for tensor in runner.cache.states:
            tensor.zero_()
        launched = steps.launch([Rows([1], 0, [0], 1, logits=True)], other=other)
        assert went == [other, other] and launched is steps.prepare(1, other=other)
        assert torch.equal(steps.wait(launched), launched.logits)
        went.clear()
    assert torch.equal(steps.prepare(1).out, steps.prepare(1, other=True).out)
