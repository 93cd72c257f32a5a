"""How the habits of a harness shape what its anchors are worth."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsers.conversation import Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from sessions.anchors import PRIORITIES
from sessions.prior import KINDS, REMEMBERED, Divergence, counted, priorities


def call(command: str = "ls") -> ToolCall:
    return ToolCall("", "Bash", json.dumps({"command": command}))


def test_nothing_known_gives_the_defaults() -> None:
    assert priorities({}) == pytest.approx(PRIORITIES)
    assert priorities({"append": 5000}) == pytest.approx(PRIORITIES)


def test_what_happens_often_is_worth_more_and_the_rest_less() -> None:
    learned = priorities({"output_cleared": 200, "append": 5000})
    assert learned["tool_call_end"] == pytest.approx(2 * PRIORITIES["tool_call_end"])
    assert learned["turn_start"] == pytest.approx(PRIORITIES["turn_start"] / 2)
    assert learned["lattice"] == PRIORITIES["lattice"]


@given(st.dictionaries(st.sampled_from(KINDS), st.integers(0, 10**6)))
def test_priorities_stay_in_reach_of_the_defaults(counts: dict[Divergence, int]) -> None:
    learned = priorities(counts)
    assert learned.keys() == PRIORITIES.keys()
    assert all(PRIORITIES[kind] / 2 <= value <= PRIORITIES[kind] * 2 for kind, value in learned.items())


def test_habits_may_change() -> None:
    counts: dict[Divergence, int] = {}
    for kind in ["step_retry"] * 3000 + ["output_cleared"] * 3000:
        counts = counted(counts, kind)  # type: ignore[arg-type]
        assert sum(counts.values()) <= REMEMBERED
    assert counts["output_cleared"] > 10 * counts["step_retry"]


def rollback(agent: Any) -> None:
    del agent.turns[-3:]
    agent.user("Something else.")


def retry(agent: Any) -> None:
    del agent.turns[-2:]


def clear(agent: Any) -> None:
    at = max(index for index, turn in enumerate(agent.turns) if turn.role == "tool")
    outputs = tuple(ToolOutput(block.call_id, "cleared") for block in agent.turns[at].blocks)
    agent.turns[at] = Turn("tool", outputs)
    agent.user("Go on.")


def change_call(agent: Any) -> None:
    at = max(index for index, turn in enumerate(agent.turns) if any(isinstance(b, ToolCall) for b in turn.blocks))
    blocks = tuple(
        replace(b, arguments='{"command": "rm"}') if isinstance(b, ToolCall) else b for b in agent.turns[at].blocks
    )
    agent.turns[at] = replace(agent.turns[at], blocks=blocks)
    agent.user("Go on.")


def change_tools(agent: Any) -> None:
    agent.tools = (Tool("Other"),)
    agent.user("Go on.")


def compact(agent: Any) -> None:
    del agent.turns[1:]
    agent.user("In short: all is well.")


@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        (lambda agent: agent.user("Go on."), "append"),
        (rollback, "user_rollback"),
        (retry, "step_retry"),
        (clear, "output_cleared"),
        (change_call, "call_changed"),
        (change_tools, "head_changed"),
    ],
)
def test_divergences_are_told_apart(keeping_world: Any, edit: Any, kind: str) -> None:
    agent = keeping_world.claude().user("Hello.")
    agent.say(Text("Hi."))
    agent.user("Fix it.").say(Thinking("hm"), call())
    agent.outputs("a lot").say(Text("Done."))
    agent.user("And this?").say(Text("Done too."))
    edit(agent)
    assert agent.ask(Text("Yes.")).report.divergence == kind
    assert kind in get_args(Divergence)


def test_stripped_thinking_is_one_of_them(world: Any) -> None:
    agent = world.claude().user("Fix it.")
    agent.say(Thinking("hm"), call())
    agent.outputs("ok").say(Text("Done."))
    assert agent.user("Go on.").ask(Text("Yes.")).report.divergence == "think_strip"
    compact(agent)
    assert agent.ask(Text("Yes.")).report.divergence in ("head_changed", "user_rollback")
