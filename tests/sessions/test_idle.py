"""What is computed ahead is the beginning of the prompt that really comes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsers.conversation import Text, Thinking, ToolCall, Turn
from sessions.idle import WORTHWHILE, predict

LONG = "words and words " * 20


def call(command: str) -> ToolCall:
    return ToolCall("", "Bash", json.dumps({"command": command}))


def idle(world: Any, outcome: Any, computed: int | None = None) -> Any:
    """The server has a quiet moment after ``outcome``."""
    prediction = world.sessions.predict(outcome.visit.followup)()
    if prediction is not None:
        world.engine.known.append(prediction.tokens)
        world.sessions.predicted(prediction, prediction.new if computed is None else computed)
    return prediction


def turn(agent: Any, text: str = LONG) -> Any:
    agent.user("Fix it.").say(Thinking("look first"), call("ls"))
    return agent.outputs(LONG).say(Thinking("so it is"), Text(text))


@pytest.mark.parametrize("harness", ["claude", "codex", "chat"])
def test_the_next_message_pays_only_for_its_own_words(world: Any, harness: str) -> None:
    agent = getattr(world, harness)()
    prediction = idle(world, turn(agent))
    outcome = agent.user("And now document it.").say(Text("Yes."))
    start = max(span.start for span in outcome.prompt.spans if span.kind == "user")
    assert outcome.prompt.ids[:start] == prediction.tokens
    assert (outcome.report.cause, outcome.report.replayed) == ("none", 0)
    assert outcome.report.resumed >= start
    stats = world.sessions.stats()
    assert [stats[f"idle_{name}"] for name in ("prefills", "tokens", "hits", "waste")] == [1, prediction.new, 1, 0]
    assert stats["misses_without_cause"] == 0


def test_a_checkpoint_is_asked_for_where_the_message_will_begin(world: Any) -> None:
    agent = world.claude()
    prediction = idle(world, turn(agent))
    outcome = agent.user("Go on.").ask(Text("Yes."))
    wanted = {point.position: point for point in outcome.visit.anchors(outcome.prompt)}
    last = prediction.anchors[-1]
    assert (last.position, last.pinned, last.kind) == (len(prediction.tokens), True, "user_start")
    assert wanted[last.position].pinned
    positions = [point.position for point in prediction.anchors]
    assert positions == sorted(set(positions))


def test_a_family_that_keeps_everything_has_nothing_to_predict(keeping_world: Any) -> None:
    assert idle(keeping_world, turn(keeping_world.claude())) is None


def test_nothing_is_predicted_while_a_tool_runs_or_for_side_requests(world: Any) -> None:
    agent = world.claude().user("Fix it.")
    outcome = agent.say(Thinking("look first"), call("ls"))
    assert not outcome.visit.followup.waits_for_user
    assert idle(world, outcome) is None
    interrupted = agent.outputs("ok").ask(Text(LONG), cut=1)
    assert interrupted.visit.followup is None
    title = world.claude().user("Title?").ask(Text("T"), meta=replace(agent.meta, json_schema=True), tools=())
    assert title.visit.followup is None


def test_a_few_tokens_are_not_worth_it(world: Any) -> None:
    agent = world.claude().user("Hello")
    outcome = agent.say(Text("Hi"))
    assert len("Hi") < WORTHWHILE
    assert idle(world, outcome) is None


def test_what_does_not_come_is_waste(world: Any) -> None:
    agent = world.claude()
    before = list(agent.turns)
    prediction = idle(world, turn(agent))
    agent.turns = before
    assert agent.user("Something else.").ask(Text("Yes.")).report.cause != "none"
    stats = world.sessions.stats()
    assert (stats["idle_hits"], stats["idle_waste"]) == (0, prediction.new)


def test_a_forgotten_session_wastes_what_was_computed_for_it(world: Any) -> None:
    outcome = turn(world.claude())
    prediction = idle(world, outcome)
    world.sessions.forget(outcome.visit.session_id)
    assert world.sessions.stats()["idle_waste"] == prediction.new
    idle(world, outcome)
    assert world.sessions.stats()["idle_waste"] == 2 * prediction.new


def test_an_evicted_prediction_is_replayed_and_named(world: Any) -> None:
    agent = world.claude()
    world.engine.known.append(())
    idle(world, turn(agent, LONG * 3))
    del world.engine.known[-1]
    report = agent.user("Go on.").ask(Text("Yes.")).report
    assert report.cause == "evicted"
    assert report.replayed > 0
    assert world.sessions.stats()["idle_hits"] == 0


WORDS = st.text("ab é<>|\n{}", max_size=30)
STEPS = st.lists(st.tuples(WORDS, WORDS, st.booleans(), WORDS), max_size=3)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_prediction_is_a_prefix_of_the_real_next_prompt(worlds: Any, families: Any, data: Any) -> None:
    world = worlds(family=families[data.draw(st.sampled_from(["qwen3_xml", "hermes", "strips"]))]())
    agent = data.draw(st.sampled_from([world.claude, world.codex, world.chat]))()
    for _ in range(data.draw(st.integers(1, 3))):
        agent.user("Do: " + data.draw(WORDS))
        for thought, text, two, output in data.draw(STEPS):
            calls = [call(text), call(output)][: 1 + two]
            agent.say(*([Thinking(thought)] if thought.strip() else []), *calls)
            agent.outputs(*[output] * len(calls))
        outcome = agent.say(Thinking("t " + data.draw(WORDS)), Text("A: " + data.draw(WORDS)), echo=trimmed)
    prediction = predict(world.family, outcome.visit.followup)
    agent.user("Next: " + data.draw(WORDS))
    prompt = agent.ask(Text("Yes.")).prompt
    start = max(span.start for span in prompt.spans if span.kind == "user")
    if prediction is not None:
        assert prompt.ids[:start] == prediction.tokens
        assert 0 <= prediction.known <= len(prediction.tokens) - WORTHWHILE


def trimmed(turn: Turn) -> Turn:
    """As some clients do: without thinking, text trimmed."""
    return Turn("assistant", tuple(Text(b.text.strip()) for b in turn.blocks if isinstance(b, Text)))
