"""The soak of ``engine.device.check`` on a device that is none: all tiers, memory that is divided anew."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from device_double import LateLanes
from device_support import TwinOps, machine, round_experts, use_twins

from engine.api import StoreSettings
from engine.checkpoint import write_tiny
from engine.device import agree, check_soak, findings
from engine.device.virtual import HostMemory

LAYERS = 4


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_twins(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no bandwidth profile
    for name, value in (("hosted.RING", 1 << 20), ("hosted.GATHERED", 1 << 20), ("plan.GATHERED", 1 << 20)):
        monkeypatch.setattr(f"engine.device.{name}", value)
    for name, value in (("LEAST_PAGES", 6), ("ANSWER", 70), ("CHUNK", 32), ("WARM", 5.0)):
        monkeypatch.setattr(check_soak, name, value)
    monkeypatch.setattr("engine.experts.prefill.Prefill.possible", False)  # its kernels take seconds to interpret
    model = write_tiny("qwen3_5_moe", tmp_path / "model", layers=LAYERS)
    round_experts(model, "int8")
    texts = check_soak.texts(4, 200, 256)
    there = agree.known(model, {name: (tokens[:1], tokens[1:]) for name, tokens in texts.items()}, LAYERS)
    here = replace(machine(), virtual=lambda: HostMemory(1 << 30, 4096), lanes=partial(LateLanes, 1, 0.3))
    settings = StoreSettings(str(tmp_path / "store"), host_bytes=4 << 20)
    monkeypatch.setattr(findings, "wrong", [])
    check_soak.run(
        model, here, there, 30.0, TwinOps, device="cuda", experts="hybrid", expert_format="int8", gpu_bytes=4 << 20,
        kv_bytes=8 * 32768, checkpoint_bytes=1 << 18, store=settings, open_store=check_soak.disk(settings),
    )  # fmt: skip
    assert not findings.wrong
