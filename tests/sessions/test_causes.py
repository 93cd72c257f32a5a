"""Rules that depend on the worker's numbers, and the completeness of the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsers.conversation import Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from sessions.causes import GRAIN, Asked, Cause, Facts, Reuse, counted, explain, facts
from sessions.digest import pack, turn_digest

TURNS = tuple(turn_digest(Turn("user", (Text(text),))) for text in "abcd")


def asked(length: int, *, incarnation: str = "one", first: int = 0) -> Asked:
    return Asked(pack(range(first, first + length)), b"t", b"s", 0, TURNS, (False,) * 4, "main", incarnation)


def seen(now: Asked, past: Asked, reuse: Reuse, worker_cause: str = "none") -> Facts:
    return facts(now, (), (past,), reuse, worker_cause)


PAST = asked(1000)
NOW = asked(1100)


@pytest.mark.parametrize(
    ("reuse", "worker", "cause", "replayed"),
    [
        (Reuse(999, 0, 101), "none", "none", 0),
        (Reuse(1000, 0, 100), "none", "none", 0),
        (Reuse(960, 39, 101), "no_anchor", "no_anchor", 39),
        (Reuse(64, 935, 101), "evicted", "evicted", 935),
        (Reuse(960, 0, 140), "none", "no_anchor", 39),
        (Reuse(999 - GRAIN, 0, 101 + GRAIN), "none", "evicted", GRAIN),
        (Reuse(0, 0, 1100), "none", "evicted", 999),
    ],
)
def test_what_an_append_costs_is_blamed_on_the_engine(reuse: Reuse, worker: str, cause: str, replayed: int) -> None:
    known = seen(NOW, PAST, reuse, worker)
    assert explain(known) == cause
    assert counted(known) == Reuse(reuse.resumed, replayed, 1100 - reuse.resumed - replayed)


def test_the_same_prompt_again_recomputes_its_last_token_for_free() -> None:
    assert explain(seen(PAST, PAST, Reuse(999, 0, 1))) == "none"
    assert explain(seen(asked(500), PAST, Reuse(499, 0, 1))) == "none"


def test_a_new_worker_is_blamed_only_for_what_it_does_not_know() -> None:
    again = asked(1100, incarnation="two")
    assert explain(seen(again, PAST, Reuse(0, 0, 1100))) == "worker_restart"
    assert explain(seen(again, PAST, Reuse(999, 0, 101))) == "none"
    assert explain(seen(again, PAST, Reuse(64, 935, 101), "no_anchor")) == "no_anchor"


def test_the_rest_of_a_page_hides_no_edit_after_a_restart() -> None:
    edited = replace(
        asked(1100, incarnation="two", first=1), tokens=asked(500).tokens + pack(range(2000, 2600)), tools=b"x"
    )
    assert explain(seen(edited, PAST, Reuse(448, 0, 652))) == "tools_changed"
    assert explain(seen(edited, PAST, Reuse(0, 0, 1100))) == "worker_restart"
    assert explain(seen(edited, PAST, Reuse(0, 500, 600), "evicted")) == "tools_changed"


@pytest.mark.parametrize(
    ("then", "now", "cause"),
    [("a", "b", "fingerprint"), ("a", "a", "worker_restart"), ("", "b", "worker_restart"), ("a", "", "fingerprint")],
)
def test_another_fingerprint_comes_before_the_restart_that_it_needs(then: str, now: str, cause: str) -> None:
    past, again = replace(PAST, fingerprint=then), replace(asked(1100, incarnation="two"), fingerprint=now)
    assert explain(seen(again, past, Reuse(0, 0, 1100))) == cause
    assert explain(seen(again, past, Reuse(999, 0, 101))) == "none"
    edited = replace(again, tokens=asked(500).tokens + pack(range(2000, 2600)), tools=b"x")
    assert explain(seen(edited, past, Reuse(448, 0, 652))) == "tools_changed"
    assert explain(seen(edited, past, Reuse(0, 0, 1100))) == cause


def test_pages_without_a_checkpoint_are_what_a_dead_worker_leaves() -> None:
    again = asked(1100, incarnation="two")
    assert explain(seen(again, PAST, Reuse(960, 39, 101), "worker_restart")) == "worker_restart"
    assert explain(seen(again, PAST, Reuse(960, 20, 120), "worker_restart")) == "worker_restart"
    assert explain(seen(NOW, PAST, Reuse(960, 39, 101), "worker_restart")) == "no_anchor"
    edited = replace(again, tokens=asked(500).tokens + pack(range(2000, 2600)), tools=b"x")
    assert explain(seen(edited, PAST, Reuse(448, 52, 600), "worker_restart")) == "tools_changed"
    assert explain(seen(edited, PAST, Reuse(128, 372, 600), "worker_restart")) == "worker_restart"


def test_the_readme_names_every_cause() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert [cause for cause in get_args(Cause) if f"`{cause}`" not in text] == []


@pytest.mark.parametrize("past", [True, False])
def test_what_only_the_worker_can_know_is_passed_on(past: bool) -> None:
    pasts = (PAST,) if past else ()
    for reuse in (Reuse(0, 0, 1100), Reuse(0, 999, 101)):
        assert explain(facts(NOW, (), pasts, reuse, "corrupt")) == "corrupt"


def test_head_changes_are_named_in_the_order_of_the_prompt() -> None:
    other = asked(1100, first=1)
    assert explain(seen(replace(other, tools=b"x", system=b"x"), PAST, Reuse(0, 0, 1100))) == "tools_changed"
    assert explain(seen(replace(other, system=b"x"), PAST, Reuse(0, 0, 1100))) == "system_changed"


def test_another_effort_is_named_where_it_is_written(keeping_world: Any) -> None:
    agent = keeping_world.chat().user("Hello there.")
    agent.effort = "low"
    agent.say(Text("Hi."))
    agent.effort = "high"
    assert agent.user("Go on.").say(Text("Yes.")).report.cause == "effort_changed"
    assert agent.user("And on.").say(Text("Yes.")).report.cause == "none"
    agent.effort = None
    assert agent.user("On.").ask(Text("Yes.")).report.cause == "effort_changed"


def test_another_effort_hides_no_edit(keeping_world: Any) -> None:
    """Where the level is not written at all, or in front of the edit as it was before."""
    agent = keeping_world.chat().user("Hello there.")
    agent.say(Text("Hi."))
    agent.user("Go on.").say(Text("Yes."))
    plain = keeping_world.family.render
    keeping_world.family.render = lambda conversation, *, effort, **rest: replace(plain(conversation), effort=effort)
    agent.effort = "max"
    assert agent.user("And on.").say(Text("Yes.")).report.cause == "none"
    agent.effort = "low"
    agent.turns[3] = Turn("user", (Text("Stop."),))
    assert agent.ask(Text("No.")).report.cause == "text_changed"


def test_switching_thinking_off_is_an_effort_too() -> None:
    """Templates may write answers in another way then."""
    thought, silent = replace(PAST, effort="high"), replace(asked(1100, first=1), effort="none")
    assert explain(seen(silent, thought, Reuse(0, 0, 1100))) == "effort_changed"
    assert explain(seen(replace(silent, system=b"x"), thought, Reuse(0, 0, 1100))) == "system_changed"


def test_an_unnamed_difference_is_counted(keeping_world: Any) -> None:
    """The template wrote a user turn in another way: nothing that a client or a family is known to do."""
    agent = keeping_world.chat().user("Hello there.")
    agent.say(Text("Hi."))
    agent.user("Go on.")
    keeping_world.family.encode = lambda text, plain=keeping_world.family.encode: plain(
        text.replace("<user>", "<us_er>")
    )
    report = agent.ask(Text("Yes.")).report
    assert (report.explained, report.cause) == (False, "history_edited")
    assert keeping_world.sessions.stats()["misses_without_cause"] == 1


WORDS = st.text("abc ", min_size=1, max_size=8)
NAMES = st.from_regex(r"[abc][abc ]{0,7}", fullmatch=True)


def random_turn(data: Any, agent: Any) -> None:
    """One request; then perhaps some harm to the history."""
    agent.user(data.draw(WORDS)) if data.draw(st.booleans()) or agent.turns[-1].role == "assistant" else None
    blocks: list[Any] = [Thinking(data.draw(WORDS))] if data.draw(st.booleans()) else []
    if data.draw(st.booleans()):
        blocks.append(Text(data.draw(WORDS)))
    calls = data.draw(st.integers(0 if blocks else 1, 2))
    blocks += [ToolCall("", "Bash", f'{{"command": "{data.draw(WORDS)}"}}') for _ in range(calls)]
    agent.say(*blocks, cut=data.draw(st.sampled_from([0, 0, 0, 1, 2])))
    if calls and data.draw(st.booleans()):
        agent.outputs(*[data.draw(WORDS) for _ in range(calls)])


def harm(data: Any, agent: Any) -> None:
    index = data.draw(st.integers(0, len(agent.turns) - 1))
    turn = agent.turns[index]
    match data.draw(st.sampled_from(["none", "drop", "cut", "insert", "text", "blocks", "system", "tools", "restart"])):
        case "drop" if index:
            del agent.turns[index]
        case "cut" if index:
            del agent.turns[index:]
        case "insert":
            agent.turns.insert(index, Turn("user", (Text(data.draw(WORDS)),)))
        case "text":
            change = {Text: "text", Thinking: "text", ToolOutput: "text", ToolCall: "arguments"}
            blocks = tuple(replace(block, **{change[type(block)]: data.draw(WORDS)}) for block in turn.blocks)
            agent.turns[index] = replace(turn, blocks=blocks)
        case "blocks":
            agent.turns[index] = replace(turn, blocks=turn.blocks[: data.draw(st.integers(0, len(turn.blocks)))])
        case "system":
            agent.turns[0] = Turn("system", (Text(data.draw(WORDS)),))
        case "tools":
            agent.tools = (Tool(data.draw(NAMES)),)
        case "restart":
            agent.engine.restart()
    agent.turns[:] = without_orphans(agent.turns)


def without_orphans(turns: list[Turn]) -> list[Turn]:
    """Outputs whose calls are gone are refused before there is anything to explain."""
    called: set[str] = set()
    kept: list[Turn] = []
    for turn in turns:
        called |= {block.id for block in turn.blocks if isinstance(block, ToolCall)}
        blocks = tuple(one for one in turn.blocks if not isinstance(one, ToolOutput) or one.call_id in called)
        if blocks or not turn.blocks:
            kept.append(replace(turn, blocks=blocks))
    return kept


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_every_miss_has_a_cause_whatever_happens_to_the_history(worlds: Any, families: Any, data: Any) -> None:
    world = worlds(family=families[data.draw(st.sampled_from(sorted(families)))]())
    agent = data.draw(st.sampled_from([world.claude, world.codex, world.chat]))().user("start")
    for _ in range(data.draw(st.integers(1, 6))):
        if agent.turns[-1].role == "assistant" or all(turn.role != "user" for turn in agent.turns):
            agent.user(data.draw(WORDS))
        random_turn(data, agent)
        harm(data, agent)
    stats = world.sessions.stats()
    assert stats["misses_without_cause"] == 0
    detail = world.sessions.get(world.sessions.list()[0].id)
    assert all(record.replayed == 0 or record.cause != "none" for record in detail.requests)
