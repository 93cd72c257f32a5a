"""Bandwidths are merged into the profile, never overwritten."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from engine.bandwidth_profile import KEPT, Profile, ProfileError, machine_name


def test_runs_and_machines_are_merged(tmp_path: Path) -> None:
    profile = Profile(tmp_path / "deep" / "profile.json")
    assert profile.rates("a") == {}
    profile.add("a", {"dram": [4.0, 2.0], "link": [1.0]})
    profile.add("b", {"dram": [9.0]})
    profile.add("a", {"dram": [3.0]})
    assert profile.rates("a")["dram"].samples == (4.0, 2.0, 3.0)
    assert profile.rates("a")["dram"].middle == 3.0
    assert profile.rates("a")["dram"].spread == pytest.approx(2 / 3)
    assert profile.rates("a")["link"].samples == (1.0,)
    assert profile.rates("b")["dram"].samples == (9.0,)


def test_the_newest_samples_are_kept(tmp_path: Path) -> None:
    profile = Profile(tmp_path / "profile.json")
    for start in range(1, 2 * KEPT, 8):
        profile.add("a", {"dram": [float(start + i) for i in range(8)]})
    assert profile.rates("a")["dram"].samples == tuple(float(i) for i in range(KEPT + 1, 2 * KEPT + 1))


def test_runs_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    threads = [
        threading.Thread(target=lambda name: Profile(path).add("a", {name: [1.0]}), args=(str(number),))
        for number in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(Profile(path).rates("a")) == {str(number) for number in range(16)}


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"dram": []}}', '{"a": {"dram": [0]}}'])
def test_another_file_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match="delete it"):
        Profile(path).add("a", {"dram": [1.0]})
    assert path.read_text() == text


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    Profile(tmp_path / "profile.json").add(machine_name(None), {"dram": [1.0]})
    assert json.loads((tmp_path / "profile.json").read_text()) == {machine_name(None): {"dram": [1.0]}}
    assert machine_name("A").startswith("A; ")
