"""What was found out about earlier turns is what would be found out again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parsers.conversation import Block, Conversation, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from sessions.tracker import RequestMeta, Reuse, Sessions, Visit
from sessions.walks import _TURNS, Walk, Walks

TOOLS = (Tool("look", "Looks.", {"type": "object", "properties": {"n": {"type": "integer"}}}), Tool("wait"))
TEXTS = st.sampled_from(["a", "b", "", " a\n", "Done."])


@st.composite
def answers(draw: st.DrawFn) -> tuple[Block, ...]:
    said: tuple[Block, ...] = (Text(draw(TEXTS)),)
    if draw(st.booleans()):
        said = (Thinking(draw(TEXTS), draw(st.sampled_from(["", "t1", "t2"]))), *said)
    if draw(st.booleans()):
        said += (
            ToolCall(
                draw(st.sampled_from(["c1", "c2", "c3"])), "look", draw(st.sampled_from(['{"n":1}', '{"n": 1.0}']))
            ),
        )
    return said


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[Conversation, RequestMeta, tuple[Block, ...], bool]]:
    """What is asked, how it is answered, and whether that is remembered."""
    turns: tuple[Turn, ...] = (Turn("system", (Text("S"),)), Turn("user", (Text("Q"),)))
    made = []
    for _ in range(8):
        if draw(st.integers(0, 5)) == 0:
            at = draw(st.integers(1, len(turns)))
            turns = (*turns[:at], Turn("user", (Text(draw(TEXTS)),)), *turns[at + 1 :])
        answer = draw(answers())
        tools = draw(st.sampled_from([TOOLS, TOOLS, TOOLS[:1], ()]))
        meta = RequestMeta(
            "chat", session_hint=draw(st.sampled_from(["", "", "s"])), namespace=draw(st.sampled_from(["", "k"]))
        )
        made.append((Conversation(turns, tools), meta, answer, draw(st.integers(0, 4)) > 0))
        calls = [ToolOutput(block.id, "o") for block in answer if isinstance(block, ToolCall)]
        news = Turn("tool", tuple(calls)) if calls else Turn("user", (Text(draw(TEXTS)),))
        turns = (*turns, Turn("assistant", answer), news)
    return made


def ask(sessions: Sessions, family: Any, asked: Conversation, meta: RequestMeta) -> Visit:
    return sessions.begin(meta, asked, "w", "f")


@pytest.fixture(scope="module")
def family(families: dict[str, Callable[[], Any]]) -> Any:
    return families["keeps"]()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=requests())
def test_it_is_the_same_as_from_the_start(
    family: Any, made: list[tuple[Conversation, RequestMeta, tuple[Block, ...], bool]]
) -> None:
    warm, cold = Sessions(family), Sessions(family)
    for asked, meta, answer, remembered in made:
        cold._walks = Walks()
        copied = replace(asked, turns=tuple(replace(turn) for turn in asked.turns))
        one, other = ask(warm, family, asked, meta), ask(cold, family, copied, meta)
        assert one.conversation == other.conversation and one.kind == other.kind
        ours, theirs = one._place, other._place
        assert (ours.turns, ours.link, ours.keys, ours.head) == (theirs.turns, theirs.link, theirs.keys, theirs.head)
        assert (ours.session.id, ours.branch.name) == (theirs.session.id, theirs.branch.name)
        if remembered:
            for visit in (one, other):
                prompt = family.render(Conversation((Turn("user", (Text("Q"),)),)))
                report = visit.report(prompt, Reuse(0, 0, len(prompt)), "none")
                visit.finish(prompt, (1, 2, 3), answer, (), report, complete=True)
    ours, theirs = warm.stats(), cold.stats()
    assert {name: ours[name] for name in ours if name.startswith("echo")} == {
        n: theirs[n] for n in ours if n.startswith("echo")
    }


def test_a_session_that_is_forgotten_is_not_walked_again(family: Any) -> None:
    sessions = Sessions(family)
    asked = Conversation((Turn("user", (Text("Q"),)), Turn("assistant", (Text("A"),)), Turn("user", (Text("Q"),))))
    visit = ask(sessions, family, asked, RequestMeta("chat", session_hint="s"))
    prompt = family.render(asked)
    visit.report(prompt, Reuse(0, 0, len(prompt)), "none")
    assert sessions._walks.find(asked)[1] == 3
    assert sessions.forget(visit.session_id) and sessions._walks.find(asked)[1] == 0


def test_what_is_refused_is_not_remembered(family: Any) -> None:
    """Nor what was forgotten while it was asked for."""
    sessions = Sessions(family)
    asked = Conversation((Turn("user", (Text("Q"),)), Turn("assistant", (Text("A"),)), Turn("user", (Text("Q"),))))
    visit = ask(sessions, family, asked, RequestMeta("chat", session_hint="s"))
    assert not sessions._walks._known
    prompt = family.render(asked)
    visit.report(prompt, Reuse(0, 0, len(prompt)), "none")
    assert len(sessions._walks._known) == 1
    late = ask(sessions, family, asked, RequestMeta("chat", session_hint="s"))
    assert sessions.forget(visit.session_id)
    late.report(prompt, Reuse(0, 0, len(prompt)), "none")
    assert not sessions._walks._known


def test_they_are_no_more_turns_than_is_allowed() -> None:
    walks = Walks()
    for number in range(9):
        walks.keep(Walk((Turn("user", (Text(str(number)),)),) * (_TURNS // 4)), Walk())
        assert len(walks._known) == min(number + 1, 4)
    walks.keep(Walk((Turn("user", (Text("Q"),)),) * (_TURNS + 1)), Walk())
    assert not walks._known
