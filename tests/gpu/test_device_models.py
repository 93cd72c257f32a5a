"""Whole tiny models: the device's operations give the logits of their twins, through prefill, decode and snapshots."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.checkpoint import write_tiny
from engine.kernels.ops import DeviceOps
from engine.layers.loader import Loader
from engine.layers.ops import CPU, Ops
from engine.layers.reference import ReferenceOps
from engine.models.fields import read_config
from engine.models.registry import find_architecture
from engine.runner import Rows, Runner
from engine.weights.source import Source

ROOT = Path(__file__).parents[2]


class TwinExperts:
    def __init__(self) -> None:
        twin = ReferenceOps()
        self.pack, self.run = twin.pack_experts, twin.experts


def load(directory: Path, ops: Ops) -> Runner:
    loader = Loader(Source(directory, "float32"), ops, CPU)
    model = find_architecture(read_config(directory)).build(loader, 512, lambda *_: None)
    runner = Runner(model, ops, torch.float32, pages=8, slots=6, device=CPU)
    for tensor in (*runner.cache.keys, *runner.cache.values, *runner.cache.states):
        tensor.zero_()
    return runner


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Runner, Runner]]:
    def make(arch: str) -> tuple[Runner, Runner]:
        layers = 4 if arch == "qwen3_5_moe" else 2
        directory = write_tiny(arch, tmp_path_factory.mktemp(arch), layers=layers)
        return load(directory, DeviceOps(TwinExperts(), CPU)), load(directory, ReferenceOps())

    return make


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    "arch", ["qwen3_5_moe", *(pytest.param(name, marks=pytest.mark.deep) for name in ("qwen3_moe", "qwen2_moe"))]
)
def test_logits_equal_the_twins(runners: Callable[[str], tuple[Runner, Runner]], arch: str) -> None:
    device, twin = runners(arch)

    def both(*parts: Rows) -> Tensor:
        got, want = device.forward(parts), twin.forward(parts)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item() if want.numel() else 0)
        return got

    # Positions start late, on keys of zeros, so that a few rows cross into another page.
    both(Rows(tokens(17, 0), 40, [3], 1), Rows([3], 0, [6], 4, logits=True))  # more rows than decode has
    both(Rows(tokens(7, 1), 57, [3], 1, snapshots=[(3, 3), (7, 4)]), Rows([7], 0, [5], 2, logits=True))
    both(Rows([1], 64, [3, 0], 1, logits=True), Rows([9], 1, [5], 2, logits=True))
    # From the snapshot, the same tokens again give the state that going through gave.
    for runner in (device, twin):
        runner.mover.copy_state(3, 5)
        runner.mover.copy_page(3, 1)
    assert both(Rows(tokens(7, 1)[3:], 60, [1], 5, logits=True)).shape[0] == 1
    for states in device.cache.states:
        torch.testing.assert_close(states[5], states[4], rtol=1e-4, atol=1e-5)


def test_a_sequence_decodes_to_the_same_bits_in_any_company(runners: Callable[[str], tuple[Runner, Runner]]) -> None:
    """Within 2 to 16 rows, where linear layers are the device's own; alone, their sums are in another order."""

    def logits(company: int) -> list[Tensor]:
        runner, _ = runners("qwen3_5_moe")
        out = []
        for step, token in enumerate(tokens(2, 2)):
            parts = [Rows([token], step, [2], 1, logits=True)]
            if company > 0:
                parts = [*parts, Rows([5], step, [0], 3)]
            if company > 1:
                parts = [Rows(tokens(2, step), 2 * step, [4], 2), *parts]
            out.append(runner.forward(parts)[0])
        return out

    for alone, beside, among in zip(logits(0), logits(1), logits(2), strict=True):
        assert torch.equal(beside, among)
        torch.testing.assert_close(alone, among)


def test_pages_and_states_on_a_device_are_not_read_in_place(tmp_path: Path) -> None:
    directory = write_tiny("qwen3_5_moe", tmp_path / "tiny")
    ops = ReferenceOps()
    model = find_architecture(read_config(directory)).build(
        Loader(Source(directory, "float32"), ops), 512, lambda *_: None
    )
    runner = Runner(model, ops, torch.float32, pages=2, slots=2, device=torch.device("meta"))
    for read in (lambda: runner.mover.stage_pages([(0, 1)]), lambda: runner.mover.stage_state(0)):
        with pytest.raises(RuntimeError, match="on meta cannot be read in place"):
            read()


def test_the_engine_loads_where_there_is_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import engine.worker"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
