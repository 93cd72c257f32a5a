"""Errors are told apart from routers that choose otherwise between scores that lie close."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_support import TwinOps, machine, round_experts, use_twins
from torch import Tensor

from engine.api import Sampling
from engine.checkpoint import write_tiny
from engine.device import agree, check_serve, check_soak, findings, served
from engine.kernels import products
from engine.kernels.linear import DeviceWeight
from engine.kernels.ops import DeviceOps
from engine.runner import Rows, Runner, make_batch

LAYERS = 4
SIZES = (("a", 40), ("b", 3))
ROOM: dict[str, Any] = {"kv_bytes": 1 << 20, "checkpoint_bytes": 1 << 19, "chunk_tokens": 24}
DEVICE: dict[str, Any] = {"device": "cuda", "experts": "hybrid", "split": 0.5, "expert_format": "int8"}


@pytest.fixture(autouse=True)
def wrong(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was found to be wrong."""
    monkeypatch.setattr(findings, "wrong", [])
    return findings.wrong


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_twins(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no bandwidth profile
    made = write_tiny("qwen3_5_moe", tmp_path / "model", layers=LAYERS)
    round_experts(made, "int8")
    return made


def compared(
    model: Path, first: Callable[[Runner], None] = lambda _: None, ops: type[DeviceOps] = TwinOps
) -> tuple[dict[str, agree.Errors], dict[str, agree.Known]]:
    said = {name: (served.prompt(at, size, 90), served.prompt(9, 5, 90)) for at, (name, size) in enumerate(SIZES)}
    there = agree.known(model, said, LAYERS)
    led = agree.Led(there, torch.device("cpu"))
    with led.routers(ops), served.served(model, machine(), **DEVICE, **ROOM) as made:
        first(made.scheduler.runner)
        led.listen(made.scheduler.runner)
        for name, (prompt, answer) in said.items():
            made.submit(name, prompt, Sampling(max_tokens=5, temperature=0.0, forced=tuple(answer)))
        made.run()
    return led.errors, there


def rehearsed(runner: Runner) -> None:
    """A model of some layers has been run, as where kernels are compiled before the first step."""
    some: Any = copy(runner.model)
    some.layers = some.layers[:1]
    some.forward(make_batch([Rows([0], 0, [0], 1)]), runner.cache)


def blur(monkeypatch: pytest.MonkeyPatch, of: Callable[[Tensor], bool], relative: float) -> None:
    """Linear layers of the device whose input is so are as far off."""
    linear, generator = TwinOps.linear, torch.Generator().manual_seed(1)

    def off(ops: TwinOps, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        out = linear(ops, x, weight, bias)
        noise = torch.randn(out.shape, generator=generator) * out.std() * relative
        return out + noise if of(x) else out

    monkeypatch.setattr(TwinOps, "linear", off)


def test_the_same_arithmetic(model: Path, wrong: list[str]) -> None:
    errors, there = compared(model, rehearsed)
    for kind, one in errors.items():
        one.tell(kind)
    assert not wrong and findings.verdict(0.0) == 0
    for one in errors.values():
        assert one.turned == 0 and max(one.logits) < 1e-4 and max(float(scores.max()) for scores in one.scores) < 1e-4
    rows = sum(scores.shape[1] for one in errors.values() for scores in one.scores)
    assert rows == sum(len(one.tokens) - 1 for one in there.values())
    assert sum(len(one.logits) for one in errors.values()) == 10


def test_small_errors_turn_choices_and_are_no_fault(
    model: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[str]
) -> None:
    blur(monkeypatch, lambda _: True, 1e-3)
    errors, _ = compared(model)
    assert sum(one.turned for one in errors.values()) > 0
    for kind, one in errors.items():
        one.tell(kind)
    assert not wrong


@pytest.mark.deep
def test_prompts_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels themselves, and what lies between them in float16 as on a GPU: experts of the CPU and all."""

    def half(weight: DeviceWeight, device: torch.device) -> torch.dtype:
        return torch.float16

    def multiplied(x: Tensor, weight: DeviceWeight, bias: Tensor | None = None, **options: Any) -> Tensor:
        short = options.pop("short", False)
        out = multiply(x.float(), weight, bias, **options)
        return out.half() if short else out

    multiply = products.multiply
    monkeypatch.setattr(products, "_half", half)
    monkeypatch.setattr(products, "multiply", multiplied)
    monkeypatch.setattr("engine.experts.cost.Ways.choose", lambda *_: False)  # the CPU has its share
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = write_tiny("qwen3_5_moe", tmp_path / "model", layers=LAYERS)
    round_experts(made, "int8")
    errors, _ = compared(made, ops=DeviceOps)
    for one in errors.values():
        assert (
            max(one.logits) < agree.TYPICAL and max(float(np.median(scores)) for scores in one.scores) < agree.TYPICAL
        )


def test_a_fault_of_one_kind_of_step_fails_the_check(
    model: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[str]
) -> None:
    blur(monkeypatch, lambda x: x.shape[0] > agree.FEW, 0.1)
    errors, _ = compared(model)
    findings.aim("is fast", "no", False)
    assert findings.verdict(0.0) == 0  # that is no fault
    errors["prefill"].tell("prefill")
    assert "prefill: routers' scores of layer 0" in wrong and findings.verdict(0.0) == 1


@pytest.mark.deep
def test_the_part_of_the_check(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    """With threads that are stopped by another process."""
    monkeypatch.setattr(check_serve, "PROMPTS", {"first": 20, "second": 4, "third": 3, "long": 2})
    monkeypatch.setattr(check_serve, "ANSWERS", {"first": 50, "second": 25, "third": 3, "long": 4})
    monkeypatch.setattr(check_serve, "CROWD", 100)
    monkeypatch.setattr(check_serve, "EACH", 5)
    conversation = {
        name: (check_serve._prompt(name, 90), served.prompt(90, count, 90))
        for name, count in check_serve.ANSWERS.items()
    }
    said = check_soak.texts(4, 300, 90)
    conversation |= {name: (tokens[:1], tokens[1:]) for name, tokens in said.items()}
    there = agree.known(model, conversation, LAYERS)
    with check_serve.following(
        model, machine(), there, TwinOps, **{**DEVICE, **ROOM, "kv_bytes": 8 << 20, "split": 0.0}
    ) as made:
        check_serve.crowd(check_soak.Sessions(made[0], said))
        check_serve.compare(*made, there, 90, {}, 0.0)
    assert not wrong and "its threads stop: an error" in capsys.readouterr().out
