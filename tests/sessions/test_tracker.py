"""Which session a request belongs to, and how much is remembered of it."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

from parsers.conversation import Conversation, Text, Thinking, ToolCall, Turn
from sessions.session import Limits
from sessions.tracker import RequestMeta, Reuse


def call() -> ToolCall:
    return ToolCall("", "Bash", '{"command": "ls"}')


def test_without_ids_the_longest_common_prefix_finds_the_session(world: Any) -> None:
    one, two = world.chat().user("Fix it."), world.chat().user("Write it.")
    first, second = one.say(call()), two.say(call())
    again = one.outputs("ok").ask(Text("Done."))
    assert again.visit.session_id == first.visit.session_id != second.visit.session_id
    assert again.report.cause == "none"


def test_the_same_first_words_to_another_system_are_another_session(world: Any) -> None:
    one = world.chat().user("Hello").say(Text("Hi."))
    other = world.agent(RequestMeta("chat"), system=["You are another."]).user("Hello").say(Text("Hi."))
    assert one.visit.session_id != other.visit.session_id
    assert other.report.cause == "first_request"


def test_after_an_answer_the_system_text_may_change(world: Any) -> None:
    agent = world.chat().user("Hello")
    first = agent.say(call())
    agent.turns[0] = Turn("system", (Text("You are an agent. Today is Friday."),))
    outcome = agent.outputs("ok").ask(Text("Done."))
    assert outcome.visit.session_id == first.visit.session_id
    assert outcome.report.cause == "system_changed"


def test_two_answers_to_the_same_question_are_branches_of_one_history(world: Any) -> None:
    one = world.chat().user("Hello")
    two = one.fork()
    one.say(call())
    two.say(call())
    for _ in range(2):
        assert one.outputs("ok").say(call()).report.cause == "none"
        assert two.outputs("ok").say(call()).report.cause == "none"


def test_namespaces_never_share(keeping_world: Any) -> None:
    for meta in (RequestMeta("chat"), RequestMeta("chat", {"x-session-id": "s"}), keeping_world.claude().meta):
        one = keeping_world.agent(replace(meta, namespace="one")).user("Hello")
        first = one.say(Thinking("secret"), call())
        two = one.fork(meta=replace(meta, namespace="two"))
        outcome = two.outputs("ok").ask(Text("Done."))
        assert outcome.visit.session_id != first.visit.session_id
        assert outcome.report.cause == "first_request"
        assert all(turn.sampled is None for turn in outcome.visit.conversation.turns)


def test_sessions_do_not_share_exact_tokens(world: Any) -> None:
    one = world.claude().user("Hello")
    one.say(call())
    headers = {**one.meta.headers, "x-claude-code-session-id": "c2"}
    two = one.fork(meta=replace(one.meta, headers=headers))
    outcome = two.outputs("ok").ask(Text("Done."))
    assert all(turn.sampled is None for turn in outcome.visit.conversation.turns)


def test_one_client_id_with_two_conversations_has_two_branches(world: Any) -> None:
    meta = RequestMeta("chat", {"x-session-id": "o1"})
    title = world.agent(meta, system=["Write a title."]).user("Fix it.")
    title.tools = ()
    assert title.say(Text("Fixing")).report.cause == "first_request"
    agent = world.agent(meta).user("Fix it.")
    assert agent.say(call()).report.cause == "first_request"
    assert agent.outputs("ok").say(Text("Done.")).report.cause == "none"
    summary = world.sessions.list()[0]
    assert (summary.client_id, summary.branches, summary.requests) == ("o1", 2, 3)


def test_a_client_with_an_id_that_rewrites_all_messages_stays_on_its_branch(world: Any) -> None:
    agent = world.agent(RequestMeta("chat", {"x-session-id": "o1"})).user("Fix it.")
    agent.say(call())
    agent.outputs("ok " * 50).say(Text("Done."))
    agent.turns[1:] = [Turn("user", (Text("What we did so far."),))]
    assert agent.ask(Text("Yes.")).report.cause == "compacted"


def test_side_requests_leave_nothing_behind(world: Any) -> None:
    meta = RequestMeta("anthropic", {"x-claude-code-session-id": "t1"}, json_schema=True)
    outcome = world.agent(meta).user("Title?").ask(Text("T"), tools=())
    assert outcome.visit.side
    assert world.sessions.list() == []
    assert world.sessions.stats()["session_tokens"] == 0
    assert world.sessions.stats()["cause_side_request"] == 1


def test_normalise_counts_as_begin_would_render_and_leaves_no_trace(keeping_world: Any) -> None:
    agent = keeping_world.claude().user("Hello")
    agent.say(Thinking("hm"), call(), echo=lambda turn: replace(turn, blocks=turn.blocks[1:]))
    agent.outputs("ok")
    before = keeping_world.sessions.stats()
    conversation = Conversation(tuple(agent.turns), agent.tools)
    normalised = keeping_world.sessions.normalise(agent.meta, conversation)
    assert keeping_world.sessions.normalise(RequestMeta("chat"), conversation) == conversation
    assert keeping_world.sessions.stats() == before
    assert normalised == agent.ask(Text("Done.")).visit.conversation


def test_ids_and_tickets_are_long_and_survive_lost_punctuation(world: Any) -> None:
    visits = [world.claude().user("x").ask(Text("y")).visit, world.codex().user("x").ask(Text("y")).visit]
    assert [visit.new_call_id().split("_")[0] for visit in visits] == ["toolu", "call"]
    ids = {make() for visit in visits for make in (visit.new_call_id, visit.new_ticket) for _ in range(100)}
    assert len(ids) == 400
    assert all(id.replace("_", "").isalnum() and len(id) > 30 for id in ids)


def test_list_get_and_forget(world: Any) -> None:
    agent = world.claude().user("Hello")
    world.clock[0] = 5.0
    agent.say(Text("Hi."))
    world.chat().user("Other").say(Text("Hi."))
    newest, summary = world.sessions.list()
    assert (summary.harness, summary.client_id, summary.requests, summary.created) == ("claude-code", "c1", 1, 5.0)
    assert newest.harness == "generic"
    detail = world.sessions.get(summary.id)
    assert [(r.number, r.branch, r.cause, r.complete) for r in detail.requests] == [(1, "main", "first_request", True)]
    assert world.sessions.forget(summary.id)
    assert not world.sessions.forget(summary.id)
    assert world.sessions.get(summary.id) is None
    assert world.sessions.forget(newest.id)
    assert world.sessions.stats()["session_tokens"] == world.sessions.stats()["session_prefix_keys"] == 0
    assert agent.user("Go on.").ask(Text("Yes.")).report.cause == "first_request"


def test_a_request_that_ends_after_its_session_was_forgotten_leaves_nothing(world: Any) -> None:
    agent = world.chat().user("Hello")
    visit = world.sessions.begin(agent.meta, Conversation(tuple(agent.turns)), "one")
    prompt = world.family.render(visit.conversation)
    report = visit.report(prompt, Reuse(0, 0, len(prompt)), "none")
    assert world.sessions.forget(visit.session_id)
    visit.finish(prompt, (1, 2), (Text("Hi."),), (), report, True)
    assert world.sessions.stats()["session_tokens"] == world.sessions.stats()["session_prefix_keys"] == 0


def test_finish_counts_once_and_an_empty_answer_is_not_remembered(world: Any) -> None:
    agent = world.claude().user("Hello")
    visit = world.sessions.begin(agent.meta, Conversation(tuple(agent.turns)), "one")
    prompt = world.family.render(visit.conversation)
    report = visit.report(prompt, Reuse(0, 0, len(prompt)), "none")
    for _ in range(2):
        visit.finish(prompt, (), (), (), report, False)
    assert world.sessions.list()[0].requests == 1
    assert agent.ask(Text("Hi.")).report.cause == "first_request"
    assert report.header() == (
        f"resumed=0, device=0, host=0, disk=0, replayed=0, new={report.prompt}, cause=first_request"
    )


def test_an_answer_without_exact_tokens_still_leaves_its_prompt(keeping_world: Any) -> None:
    """A stop string ended it in the middle of a token."""
    agent = keeping_world.claude().user("Hello")
    visit = keeping_world.sessions.begin(agent.meta, Conversation(tuple(agent.turns), agent.tools), "one")
    prompt = keeping_world.family.render(visit.conversation)
    report = visit.report(prompt, Reuse(0, 0, len(prompt)), "none")
    visit.finish(prompt, (), (Text("Hi."),), (), report, True)
    keeping_world.engine.known.append(prompt.ids)
    agent.turns.append(Turn("assistant", (Text("Hi."),)))
    outcome = agent.user("Go on.").ask(Text("Yes."))
    assert outcome.report.cause == "none"
    assert outcome.report.resumed == len(prompt.ids)
    assert keeping_world.sessions.stats()["echo_unknown"] == 1


def test_memory_is_bounded_under_ten_thousand_sessions(worlds: Any) -> None:
    world = worlds(Limits(max_sessions=50, max_tokens=20_000))
    meta = world.claude().meta

    def serve(first: int, last: int) -> None:
        for number in range(first, last):
            ids = {**meta.headers, "x-claude-code-session-id": str(number)}
            agent = world.agent(replace(meta, headers=ids) if number % 2 else RequestMeta("chat"))
            agent.tools = ()
            agent.user(f"Task {number % 7}. Do {number % 911}.").say(call())
            world.engine.known.clear()

    serve(0, 1000)
    gc.collect()
    before = sys.getallocatedblocks()
    serve(1000, 10_000)
    gc.collect()
    grown = sys.getallocatedblocks() - before
    stats = world.sessions.stats()
    assert stats["sessions"] <= 50
    assert stats["session_tokens"] <= 20_000
    assert stats["session_prefix_keys"] <= 50 * 3
    assert stats["sessions_dropped"] > 5000
    assert grown < 9000, "less than one object per session"


def test_a_session_is_bounded_by_itself(worlds: Any) -> None:
    world = worlds(Limits(session_tokens=500, branches=3, turns=10, history=5))
    agent = world.chat().user("Start.")
    for _ in range(60):
        agent.say(call())
        agent.outputs("ok")
    assert agent.ask(Text("Done.")).visit.session_id == world.sessions.list()[0].id
    assert world.sessions.stats()["session_prefix_keys"] <= 10
    assert len(world.sessions.get(world.sessions.list()[0].id).requests) == 5
    claude = world.claude()
    for number in range(10):
        headers = {**claude.meta.headers, "x-claude-code-agent-id": str(number)}
        world.agent(replace(claude.meta, headers=headers)).user("Help.").say(call())
    assert world.sessions.get(world.sessions.list()[0].id).branches == ("7", "8", "9")


def test_a_request_that_was_not_accepted_leaves_nothing(worlds: Any) -> None:
    world = worlds(Limits(max_sessions=1))
    agent = world.chat().user("Hello")
    agent.say(call())
    agent.outputs("ok")
    before = world.sessions.stats(), world.sessions.list()
    for meta in (RequestMeta("chat"), RequestMeta("chat", {"x-session-id": "s"}), world.claude().meta):
        world.sessions.begin(meta, Conversation((Turn("user", (Text("Other"),)),)), "one")
        world.sessions.begin(agent.meta, Conversation((*agent.turns, Turn("user", (Text("More"),)))), "one")
    after = world.sessions.stats()
    assert {name: after[name] for name in after if not name.startswith("echo")} == {
        name: before[0][name] for name in before[0] if not name.startswith("echo")
    }
    assert world.sessions.list() == before[1]
    assert agent.ask(Text("Done.")).report.cause == "none"


def test_two_first_requests_at_once_are_one_session(world: Any) -> None:
    conversation = Conversation((Turn("user", (Text("Hello"),)),))
    visits = [world.sessions.begin(RequestMeta("chat"), conversation, "one") for _ in range(2)]
    prompt = world.family.render(conversation)
    for visit in visits:
        report = visit.report(prompt, Reuse(0, 0, len(prompt)), "none")
        visit.finish(prompt, (1, 2), (Text("Hi."),), (), report, True)
    (summary,) = world.sessions.list()
    assert {visit.session_id for visit in visits} == {summary.id}
    assert (summary.requests, summary.branches) == (2, 1)


def test_a_flood_in_one_namespace_drops_its_own_sessions(worlds: Any) -> None:
    world = worlds(Limits(max_sessions=6))
    for number in range(3):
        world.agent(RequestMeta("chat", {"x-session-id": str(number)}, namespace="small")).user("Hello").say(call())
    kept = world.sessions.list("small")
    for number in range(20):
        world.agent(RequestMeta("chat", {"x-session-id": str(number)}, namespace="flood")).user("Hello").say(call())
    assert world.sessions.list("small") == kept
    assert [summary.client_id for summary in world.sessions.list("flood")] == ["19", "18", "17"]
    assert world.sessions.list() == []
    assert world.sessions.get(kept[0].id) is None
    assert not world.sessions.forget(kept[0].id, "flood")
    assert world.sessions.get(kept[0].id, "small") is not None
    assert world.sessions.forget(kept[0].id, "small")
