"""Which mode serves a model: arithmetic on what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.bandwidth_profile import Profile
from engine.device.auto import Load, Rates, choose, seconds

H200 = Rates(device=3200e9, link=55e9, cpu=92e9, both=132e9)
QWEN = Load(layers=40, dense=2e9, routed=2.01e9, pool=64.4e9, room=24e9)


def test_all_on_the_device_where_all_fit() -> None:
    choice = choose(replace(QWEN, room=65e9), None)
    assert choice.mode == "device" and "64.4 of 65.0 GB" in choice.why


def test_both_at_once_where_that_is_faster() -> None:
    choice = choose(QWEN, H200)
    assert choice.mode == "hybrid"
    assert choice.why.startswith("37% of the experts fit; bounds in tok/s: offload 42, cpu 44, hybrid 94 (link 55.0,")


@pytest.mark.parametrize("rates, room, mode", [
    (Rates(1000e9, 50e9, 10e9, 45e9), 24e9, "offload"),  # they starve each other, and the link is the faster one
    (Rates(1000e9, 2e9, 80e9, 79e9), 1e9, "cpu"),  # hardly any link, hardly any room
    (Rates(1000e9, 2e9, 80e9, 79e9), 40e9, "hybrid"),  # what is there need not come again
    (Rates(1000e9, 25e9, 65e9, 72e9), 8e9, "hybrid"),
])  # fmt: skip
def test_the_fastest_mode_and_the_simpler_one_of_equals(rates: Rates, room: float, mode: str) -> None:
    load = replace(QWEN, room=room)
    assert choose(load, rates).mode == mode
    times = seconds(load, rates)
    assert times[choose(load, rates).mode] * 0.98 <= min(times.values())


def test_bounds_are_those_of_the_design() -> None:
    """Per token: what is on the device at its rate, the rest at that of link and CPU together."""
    load, rates = Load(layers=40, dense=1e9, routed=2e9, pool=64e9, room=32e9), H200
    times = seconds(load, rates)
    assert times["hybrid"] == pytest.approx((1e9 + 1e9) / 3200e9 + 1e9 / 132e9 + 40 * 5e-6)
    assert times["offload"] == pytest.approx((1e9 + 1e9) / 3200e9 + 1e9 / 55e9)
    assert "device" not in times


def test_an_unknown_machine_learns_while_it_serves(tmp_path: Path) -> None:
    assert choose(QWEN, None).mode == "hybrid" and "not known" in choose(QWEN, None).why
    profile = Profile(tmp_path / "bandwidth.json")
    measured = {"device.copy": [3e12], "link.int8": [5e10], "cpu.int8": [9e10, 8e10], "both.link.int8": [4e10]}
    profile.add("here", measured)
    assert Rates.of(profile.rates("here"), "int8") is None
    profile.add("here", {"both.cpu.int8": [7e10]})
    assert Rates.of(profile.rates("here"), "int8") == Rates(3e12, 5e10, 8.5e10, 11e10)
    assert Rates.of(profile.rates("here"), "mxfp4") is None
