"""What serves a model by default: arithmetic on what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.bandwidth_profile import Profile
from engine.device.auto import Load, Rates, choose, seconds

H200 = Rates(device=3200e9, link=55e9, cpu=92e9, both=132e9)
QWEN = Load(layers=40, dense=2e9, routed=2.01e9, pool=64.4e9, room=24e9)


def test_all_on_the_device_where_all_fit() -> None:
    mode, why = choose(replace(QWEN, room=65e9), None)
    assert mode == "device" and "64.4 of 65.0 GB" in why


@pytest.mark.parametrize("rates, room, bounds", [
    (H200, 24e9, "37% of the experts fit; bounds in tok/s: offload 42, hybrid 94, cpu 44 (link 55.0,"),
    (Rates(1000e9, 50e9, 10e9, 45e9), 24e9, "offload 36, hybrid 36, cpu 5"),  # they starve each other
    (Rates(1000e9, 2e9, 80e9, 79e9), 1e9, "offload 1, hybrid 37, cpu 37"),  # hardly any link, hardly any room
])  # fmt: skip
def test_else_both_sides_which_may_go_to_either_alone(rates: Rates, room: float, bounds: str) -> None:
    """Whatever was measured: it may have been on a bad day."""
    mode, why = choose(replace(QWEN, room=room), rates)
    assert mode == "hybrid" and bounds in why and why.endswith("each layer follows what it measures")


def test_bounds_are_those_of_the_design() -> None:
    """Per token: what is on the device at its rate, the rest at that of link and CPU together."""
    load, rates = Load(layers=40, dense=1e9, routed=2e9, pool=64e9, room=32e9), H200
    times = seconds(load, rates)
    assert times["hybrid"] == pytest.approx((1e9 + 1e9) / 3200e9 + 1e9 / 132e9 + 40 * 5e-6)
    assert times["offload"] == pytest.approx((1e9 + 1e9) / 3200e9 + 1e9 / 55e9)
    assert "device" not in times


def test_an_unknown_machine_learns_while_it_serves(tmp_path: Path) -> None:
    mode, why = choose(QWEN, None)
    assert mode == "hybrid" and "not known" in why
    profile = Profile(tmp_path / "bandwidth.json")
    measured = {"device.copy": [3e12], "link.int8": [5e10], "cpu.int8": [9e10, 8e10], "both.link.int8": [4e10]}
    profile.add("here", measured)
    assert Rates.of(profile.rates("here"), "int8") is None
    profile.add("here", {"both.cpu.int8": [7e10]})
    assert Rates.of(profile.rates("here"), "int8") == Rates(3e12, 5e10, 8.5e10, 11e10)
    assert Rates.of(profile.rates("here"), "mxfp4") is None
