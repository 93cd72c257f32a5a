"""The same words again and again: every answer gets its own tokens back, or none."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from parsers.conversation import Block, Conversation, Sampled, Text, Thinking, ToolCall, Turn
from sessions.session import Limits
from sessions.tracker import Reuse


def without_thinking(turn: Turn) -> Turn:
    return replace(turn, blocks=tuple(block for block in turn.blocks if not isinstance(block, Thinking)))


def without_tickets(turn: Turn) -> Turn:
    return replace(turn, blocks=tuple(replace(b, ticket="") if isinstance(b, Thinking) else b for b in turn.blocks))


def as_it_was(turn: Turn) -> Turn:
    return turn


def say(agent: Any, *blocks: Block, echo: Any = as_it_was) -> tuple[int, ...]:
    """Has the agent ask and keep the answer; returns the tokens it was sampled as."""
    outcome = agent.say(*blocks, echo=echo)
    ids: tuple[int, ...] = agent.before[len(outcome.prompt.ids) :]
    return ids


def restored(agent: Any) -> list[tuple[int, ...] | None]:
    """The exact tokens of each answer in the agent's history, as the next request would have them."""
    conversation = agent.sessions.normalise(agent.meta, Conversation(tuple(agent.turns), agent.tools))
    return [_ids(turn.sampled) for turn in conversation.turns if turn.role == "assistant"]


def _ids(sampled: Sampled | None) -> tuple[int, ...] | None:
    return None if sampled is None else sampled.ids


def call() -> ToolCall:
    return ToolCall("", "Bash", '{"command": "ls"}')


ECHOES = [without_thinking, without_tickets, as_it_was]


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("harness", ["claude", "codex", "chat"])
def test_equal_answers_to_equal_words_get_their_own_tokens(world: Any, harness: str, echo: Any) -> None:
    agent = getattr(world, harness)()
    sampled = [say(agent.user("continue"), Thinking(f"thought {n}"), Text("Done."), echo=echo) for n in range(4)]
    assert len(set(sampled)) == 4
    assert restored(agent.user("continue")) == sampled


@pytest.mark.parametrize("echo", ECHOES)
def test_a_family_that_keeps_thinking_is_shown_each_thought_once(keeping_world: Any, echo: Any) -> None:
    agent = keeping_world.chat()
    for n in range(3):
        say(agent.user("continue"), Thinking(f"thought {n}"), Text("Done."), echo=echo)
    outcome = agent.user("continue").ask(Text("End."))
    assert (outcome.report.cause, outcome.kept) == ("none", 1.0)
    shown = [b.text for turn in outcome.visit.conversation.turns for b in turn.blocks if isinstance(b, Thinking)]
    assert shown == ["thought 0", "thought 1", "thought 2"]


def test_an_answer_without_exact_tokens_does_not_get_those_of_another(keeping_world: Any) -> None:
    """A stop string ended the first one in the middle of a token."""
    agent = keeping_world.claude().user("continue")
    visit = keeping_world.sessions.begin(agent.meta, Conversation(tuple(agent.turns), agent.tools), "one")
    prompt = keeping_world.family.render(visit.conversation)
    report = visit.report(prompt, Reuse(0, 0, len(prompt)), "none")
    visit.finish(prompt, (), (Text("Done."),), (), report, True)
    agent.turns.append(Turn("assistant", (Text("Done."),)))
    second = say(agent.user("continue"), Thinking("hm"), Text("Done."), echo=without_thinking)
    assert restored(agent.user("continue")) == [None, second]
    del agent.turns[3:]
    assert restored(agent.user("continue")) == [None]


def test_a_forgotten_answer_does_not_get_the_tokens_of_another(worlds: Any) -> None:
    agent = worlds(Limits(session_tokens=20)).claude()
    sampled = [say(agent.user("continue"), Thinking(f"a{n}"), Text("Done."), echo=without_thinking) for n in range(8)]
    found = restored(agent.user("continue"))
    assert all(ids in (None, own) for ids, own in zip(found, sampled, strict=True))
    assert 0 < sum(ids is not None for ids in found) < 8


def test_sub_agents_with_the_same_task_have_their_own_answers(keeping_world: Any) -> None:
    main = keeping_world.claude()
    agents = [
        main.fork(meta=replace(main.meta, headers={**main.meta.headers, "x-claude-code-agent-id": name}))
        for name in ("one", "two", "three")
    ]
    sampled = [
        say(agent.user("Help."), Thinking(f"thought {n}"), Text("Done."), echo=without_thinking)
        for n, agent in enumerate(agents)
    ]
    assert [restored(agent) for agent in agents] == [[ids] for ids in sampled]


def test_a_thread_that_goes_on_with_the_history_of_another_keeps_its_tokens(keeping_world: Any) -> None:
    main = keeping_world.claude()
    sampled = [say(main.user("continue"), Thinking(f"t{n}"), Text("Done."), echo=without_thinking) for n in range(2)]
    child = main.fork(meta=replace(main.meta, headers={**main.meta.headers, "x-claude-code-agent-id": "a1"}))
    mine = say(main.user("continue"), Thinking("main"), Text("Done."), echo=without_thinking)
    its = say(child.user("continue"), Thinking("child"), Text("Done."), echo=without_thinking)
    assert restored(main) == [*sampled, mine]
    assert restored(child) == [*sampled, its]


def test_an_edit_costs_text_its_tokens_only_until_the_next_call_or_ticket(keeping_world: Any) -> None:
    agent = keeping_world.claude()
    sampled = [
        say(agent.user("Begin."), Text("Begun.")),
        say(agent.user("continue"), Thinking("hm"), Text("Done.")),
        say(agent.user("continue"), Text("Done.")),
        say(agent.user("continue"), call()),
        say(agent.outputs("ok"), Thinking("hm"), Text("Done."), echo=without_thinking),
        say(agent.user("continue"), Text("Done.")),
    ]
    agent.turns[1] = Turn("user", (Text("Begin anew."),))
    assert restored(agent) == [None, *sampled[1:]]


def test_system_turns_that_come_and_go_cost_nothing(keeping_world: Any) -> None:
    agent = keeping_world.claude()
    sampled = [say(agent.user("continue"), Thinking(f"t{n}"), Text("Done."), echo=without_thinking) for n in range(3)]
    agent.turns[0] = Turn("system", (Text("You are an agent. Today is Friday."),))
    agent.turns.insert(3, Turn("system", (Text("f.py changed on disk"),)))
    assert restored(agent) == sampled


@pytest.mark.parametrize("seed", range(25))
def test_no_answer_ever_gets_the_tokens_of_another(keeping_world: Any, seed: int) -> None:
    """Two words, two answers, every kind of echo, rewinds and edits: only answers to the very same history that say
    the same may stand in for each other, and not even those where a ticket came back."""
    chance = random.Random(seed)
    agent = keeping_world.agent(replace(keeping_world.chat().meta, session_hint="s"))
    own: list[tuple[int, ...]] = []
    equal: dict[object, set[tuple[int, ...]]] = {}
    for step in range(40):
        agent.user(chance.choice(["continue", "go on"]))
        before = (*map(without_thinking, agent.turns[1:]),)
        blocks = (Thinking(f"thought {step}"), Text(chance.choice(["Done.", "Yes."])))
        own.append(say(agent, *blocks, echo=chance.choice(ECHOES)))
        equal.setdefault((before, blocks[1]), set()).add(own[-1])
        if chance.random() < 0.3:
            kept = chance.randrange(len(own) + 1)
            del agent.turns[1 + 2 * kept :], own[kept:]
        elif chance.random() < 0.1:
            edited = chance.randrange(len(own))
            agent.turns[1 + 2 * edited] = Turn("user", (Text(f"edit {step}"),))
        for index, (ids, mine) in enumerate(zip(restored(agent), own, strict=True)):
            turn = agent.turns[2 + 2 * index]
            history = (*map(without_thinking, agent.turns[1 : 2 + 2 * index]),)
            may = {mine} if len(turn.blocks) > 1 else equal.get((history, turn.blocks[-1]), set())
            assert ids is None or ids == mine or ids in may
