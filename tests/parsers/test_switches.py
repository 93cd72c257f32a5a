"""What every family's template is told for every effort."""

from __future__ import annotations

import pytest

from parsers.families.registry import FORMATS
from parsers.format import EFFORTS, Effort, Format, Switches

LADDER = Switches(
    always={"keep": True},
    on={"think": True},
    off={"think": False},
    efforts={"high": {"effort": 3}, "low": {"effort": 1}},
)


@pytest.mark.parametrize(
    ("effort", "expected"),
    [
        (None, {"keep": True, "think": True}),
        ("none", {"keep": True, "think": False}),
        ("minimal", {"keep": True, "think": True, "effort": 1}),
        ("low", {"keep": True, "think": True, "effort": 1}),
        ("medium", {"keep": True, "think": True, "effort": 1}),
        ("high", {"keep": True, "think": True, "effort": 3}),
        ("xhigh", {"keep": True, "think": True, "effort": 3}),
        ("max", {"keep": True, "think": True, "effort": 3}),
    ],
)
def test_an_effort_is_the_next_lower_level_of_the_family(effort: Effort | None, expected: dict[str, object]) -> None:
    assert LADDER.variables(True, effort) == expected
    assert LADDER.variables(False, effort) == {"keep": True, "think": False}


def test_levels_are_those_that_make_a_difference() -> None:
    assert LADDER.levels == ("none", "low", "high")
    assert Switches().levels == ("none", "medium")
    assert Switches(on={}, off={}).levels == ()
    # A family that cannot be switched off: no thinking is its least effort.
    assert Switches(on={}, off={"e": 1}, efforts={"low": {"e": 1}, "high": {"e": 2}}).levels == ("low", "high")


@pytest.mark.parametrize("wire_format", FORMATS, ids=lambda wire_format: wire_format.name)
def test_every_family_is_told_more_for_more_effort(wire_format: Format) -> None:
    switches = wire_format.switches
    ladder = switches.levels
    assert list(ladder) == sorted(ladder, key=EFFORTS.index)
    told = [switches.variables(True, level) for level in ladder]
    assert all(told.count(each) == 1 for each in told), "two levels are the same"
    for effort in EFFORTS[1:]:
        expected = [level for level in ladder if level != "none" and EFFORTS.index(level) <= EFFORTS.index(effort)]
        lowest = next((level for level in ladder if level != "none"), None)
        chosen = expected[-1] if expected else lowest
        assert switches.variables(True, effort) == switches.variables(True, chosen)
    off = switches.variables(False, "max")
    assert off == switches.variables(True, "none")
    assert {name: off.get(name) for name in switches.always} == dict(switches.always)


TOLD: dict[str, tuple[Effort, ...]] = {
    "hermes": ("none", "medium"),
    "qwen3_xml": ("none", "medium"),
    "glm53": ("low", "high", "max"),
    "deepseek_v32": ("none", "medium"),
    "deepseek_v4": ("none", "low", "high", "max"),
    "deepseek_v41": ("none", "low", "high", "max"),
    "kimi_k3": ("none", "low", "high", "max"),
    "harmony": ("low", "medium", "high"),
    "hy3": ("none", "low", "high"),
    "muse_glimmer": ("low", "medium", "high"),
}


@pytest.mark.parametrize(
    "wire_format", [known for known in FORMATS if known.name in TOLD], ids=lambda wire_format: wire_format.name
)
def test_levels_of_known_families(wire_format: Format) -> None:
    assert wire_format.switches.levels == TOLD[wire_format.name]


@pytest.mark.parametrize(
    ("name", "effort", "expected"),
    [
        ("deepseek_v4", "medium", {"drop_thinking": False, "thinking": True, "reasoning_effort": "low"}),
        ("deepseek_v4", "xhigh", {"drop_thinking": False, "thinking": True, "reasoning_effort": "high"}),
        ("deepseek_v41", "minimal", {"drop_thinking": False, "thinking": True, "reasoning_effort": 50}),
        ("deepseek_v41", "xhigh", {"drop_thinking": False, "thinking": True, "reasoning_effort": 75}),
        ("deepseek_v41", "max", {"drop_thinking": False, "thinking": True, "reasoning_effort": 100}),
        ("kimi_k3", "medium", {"thinking": True, "thinking_effort": "low"}),
        ("kimi_k3", None, {"thinking": True}),
        ("glm53", "none", {"clear_thinking": False, "reasoning_effort": "low"}),
    ],
)
def test_what_some_templates_are_told(name: str, effort: Effort | None, expected: dict[str, object]) -> None:
    wire_format = next(known for known in FORMATS if known.name == name)
    assert wire_format.switches.variables(True, effort) == expected
