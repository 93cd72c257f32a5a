"""The edit catalogue of the two big harnesses, and the ordinary life between the edits: every request's cause, and how
much of the previous prompt it kept."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from parsers.conversation import Text, Thinking, Tool, ToolCall, ToolOutput, Turn

LONG = "word " * 400
"""Beside this much history, a kept prefix is visible in percent."""


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall("", name, arguments)


def claude_echo(turn: Turn) -> Turn:
    """Schema order, defaults in front, other numbers, blank text gone; thinking as it was."""
    blocks: list[Any] = []
    for block in turn.blocks:
        if isinstance(block, ToolCall):
            arguments = json.loads(block.arguments)
            if block.name == "Edit":
                arguments = {"replace_all": False, **dict(sorted(arguments.items())), "count": 7}
            whole = {k: int(v) if isinstance(v, float) and v == int(v) else v for k, v in arguments.items()}
            blocks.append(replace(block, arguments=json.dumps(whole, separators=(",", ":"))))
        elif not isinstance(block, Text) or block.text.strip():
            blocks.append(block)
    return Turn("assistant", tuple(blocks))


def chat_echo(turn: Turn) -> Turn:
    """Merged and trimmed thinking, one text, compact arguments, no tickets, ids without punctuation."""
    thinking = "".join(block.text for block in turn.blocks if isinstance(block, Thinking)).strip()
    text = "".join(block.text for block in turn.blocks if isinstance(block, Text))
    calls = [
        ToolCall(b.id.replace("_", ""), b.name, json.dumps(json.loads(b.arguments), separators=(",", ":")))
        for b in turn.blocks
        if isinstance(b, ToolCall)
    ]
    return Turn("assistant", (Thinking(thinking), Text(text), *calls))


def without_thinking(turn: Turn) -> Turn:
    return replace(turn, blocks=tuple(block for block in turn.blocks if not isinstance(block, Thinking)))


def tool_loop(agent: Any, echo: Any) -> list[Any]:
    agent.user(f"Fix the tests. {LONG}")
    odd = '{"description":  "\\u00fcn\\u00ef", "command": "ls", "timeout": 5000.0}'
    edit = '{"old_string": "a", "new_string": "b", "file_path": "f.py"}'
    return [
        agent.say(Thinking("\nlook first "), Text("Looking."), Text("\n\n"), call("Bash", odd), echo=echo),
        agent.outputs(LONG).say(Thinking("A1"), Text("B1"), Thinking("C1"), call("Edit", edit), echo=echo),
        agent.outputs("ok").say(call("Bash", '{"command": "a"}'), call("Bash", '{"command": "b"}'), echo=echo),
        agent.outputs("1", "2").say(Thinking("done"), Text("\n\nAll done. \n"), echo=echo),
    ]


@pytest.mark.parametrize("echo", [claude_echo, chat_echo, without_thinking, lambda turn: turn])
@pytest.mark.parametrize("harness", ["claude", "codex", "chat"])
def test_a_tool_loop_is_append_only_whatever_the_echo(world: Any, harness: str, echo: Any) -> None:
    outcomes = tool_loop(getattr(world, harness)(), echo)
    assert [outcome.report.cause for outcome in outcomes] == ["first_request", "none", "none", "none"]
    assert [outcome.kept for outcome in outcomes[1:]] == [1.0, 1.0, 1.0]
    assert [outcome.report.replayed for outcome in outcomes] == [0, 0, 0, 0]
    assert len({outcome.visit.session_id for outcome in outcomes}) == 1
    assert world.sessions.stats()["misses_without_cause"] == 0
    assert world.sessions.stats()["echo_edited"] == 0


@pytest.mark.parametrize("harness", ["claude", "codex", "chat"])
def test_a_new_user_message_strips_the_loop_where_the_template_does(world: Any, harness: str) -> None:
    agent = getattr(world, harness)()
    tool_loop(agent, lambda turn: turn)
    outcome = agent.user("And now document it.").say(Text("Yes."))
    assert outcome.report.cause == "thinking_stripped"
    header = next(span for span in outcome.prompt.spans if span.kind == "assistant_header")
    assert outcome.report.resumed == header.end
    loop_start = [anchor for anchor in outcome.visit.anchors(outcome.prompt) if anchor.position == header.start]
    assert loop_start[0].pinned


@pytest.mark.parametrize("harness", ["claude", "codex", "chat"])
def test_a_family_that_keeps_thinking_keeps_everything(keeping_world: Any, harness: str) -> None:
    agent = getattr(keeping_world, harness)()
    tool_loop(agent, without_thinking)
    outcome = agent.user("And now document it.").say(Text("Yes."))
    assert (outcome.report.cause, outcome.kept) == ("none", 1.0)


def test_resume_in_a_new_client_process_continues_the_session(keeping_world: Any) -> None:
    agent = keeping_world.claude()
    first = tool_loop(agent, claude_echo)[0]
    other_process = agent.fork(meta=replace(agent.meta, headers={**agent.meta.headers, "x-app": "cli"}))
    outcome = other_process.user("Go on.").say(Text("Yes."))
    assert outcome.visit.session_id == first.visit.session_id
    assert outcome.report.cause == "none"


def test_e1_deferred_tools_that_appear_in_the_head_are_named(world: Any) -> None:
    agent = world.claude()
    tool_loop(agent, claude_echo)
    agent.tools = (agent.tools[0], Tool("Cron", "Plan"), *agent.tools[1:])
    outcome = agent.user("Again.").ask(Text("Yes."))
    assert outcome.report.cause == "tools_changed"
    assert 0 < outcome.kept < 0.1


def test_e1_deferred_tools_that_are_left_out_cost_nothing(keeping_world: Any) -> None:
    agent = keeping_world.claude().user(LONG)
    agent.say(call("Bash", '{"command": "find tools"}'))
    outcome = agent.outputs("<tool_reference> Cron: Plan").ask(Text("Yes."))
    assert (outcome.report.cause, outcome.kept) == ("none", 1.0)


def claude_summary(agent: Any) -> Any:
    return agent.user("Your task is to create a detailed summary of the conversation so far, ...").say(
        Thinking("sum"), Text("<summary>All is well.</summary>")
    )


def test_e2_claude_compaction_extends_and_then_starts_anew(keeping_world: Any) -> None:
    agent = keeping_world.claude()
    tool_loop(agent, claude_echo)
    system, last = agent.turns[0], agent.turns[-2:]
    request = claude_summary(agent)
    assert (request.visit.kind, request.report.cause, request.kept) == ("compaction", "none", 1.0)
    agent.turns = [system, Turn("user", (Text("This session continues: all is well."),)), *last]
    outcome = agent.user("Go on.").say(Text("Yes."))
    assert outcome.report.cause == "compacted"
    head = next(span for span in outcome.prompt.spans if span.kind == "user")
    assert outcome.report.resumed >= head.start
    assert agent.outputs().user("And?").ask(Text("So.")).report.cause == "none"


def test_e2_claude_may_ask_for_the_summary_in_place_of_the_last_answer(keeping_world: Any) -> None:
    agent = keeping_world.claude()
    tool_loop(agent, claude_echo)
    del agent.turns[-1]
    asked = Text("CRITICAL: Respond with TEXT ONLY.\n\nYour task is to create a detailed summary of this conversation.")
    agent.turns[-1] = replace(agent.turns[-1], blocks=(*agent.turns[-1].blocks, asked))
    outcome = agent.say(Text("<summary>All is well.</summary>"))
    assert (outcome.visit.kind, outcome.report.cause) == ("compaction", "history_edited")
    assert outcome.kept > 0.9
    agent.turns[1:] = [Turn("user", (Text("This session continues: all is well."),))]
    assert agent.ask(Text("Yes.")).report.cause == "compacted"


def test_a_compaction_that_is_not_followed_up_leaves_the_branch_as_it_was(keeping_world: Any) -> None:
    agent = keeping_world.claude()
    tool_loop(agent, claude_echo)
    claude_summary(agent)
    del agent.turns[-2:]
    assert agent.user("Rather go on.").ask(Text("Yes.")).report.cause == "none"


def test_e3_a_reminder_in_front_of_a_system_turn_is_an_edit(world: Any) -> None:
    agent = world.claude().user(f"Hello. {LONG}")
    agent.turns.append(Turn("system", (Text("Agents: none."),)))
    agent.say(Thinking("only thoughts"))
    del agent.turns[-1]
    agent.turns.insert(2, Turn("user", (Text("Answer with text."),)))
    outcome = agent.ask(Text("Yes."))
    assert outcome.report.cause == "history_edited"
    assert outcome.kept > 0.8


def test_e4_a_shortened_history_with_a_summary_request_is_an_edit(keeping_world: Any) -> None:
    agent = keeping_world.claude()
    tool_loop(agent, claude_echo)
    del agent.turns[-3:]
    outcome = claude_summary(agent)
    assert outcome.report.cause == "history_edited"
    assert outcome.kept > 0.8


def test_e5_a_system_turn_folded_into_the_user_turn_is_an_edit(world: Any) -> None:
    agent = world.claude().user(f"Hello. {LONG}")
    agent.turns.append(Turn("system", (Text("Agents: none."),)))
    agent.say(Text("Hi."))
    agent.turns[1:3] = [Turn("user", (*agent.turns[1].blocks, Text("<system-reminder>Agents: none.")))]
    outcome = agent.user("Go on.").ask(Text("Yes."))
    assert outcome.report.cause == "history_edited"
    assert outcome.kept > 0.7


def test_e6_a_new_git_status_in_the_system_text(world: Any) -> None:
    agent = world.claude()
    tool_loop(agent, claude_echo)
    agent.turns[0] = Turn("system", (Text("You are an agent."), Text("git: clean")))
    outcome = agent.user("Go on.").ask(Text("Yes."))
    assert outcome.report.cause == "system_changed"
    head = next(span for span in outcome.prompt.spans if span.kind == "user")
    assert 0 < outcome.report.resumed < head.start


@pytest.mark.parametrize("as_block", [True, False])
def test_e7_the_billing_line_never_reaches_the_prompt(keeping_world: Any, as_block: bool) -> None:
    agent = keeping_world.claude().user(f"Hello. {LONG}")

    def billed(value: str) -> Turn:
        line = f"x-anthropic-billing-header: cc_version=2.1.332.{value}; cch={value};"
        texts = (Text(line), Text("You are an agent.")) if as_block else (Text(f"{line}\nYou are an agent."),)
        return Turn("system", texts)

    agent.turns[0] = billed("a1b")
    first = agent.say(Text("Hi."))
    agent.turns[0] = billed("fff")
    outcome = agent.user("Go on.").ask(Text("Yes."))
    assert (outcome.report.cause, outcome.kept) == ("none", 1.0)
    assert first.visit.conversation.turns[0] == Turn("system", (Text("You are an agent."),))


def test_a_quoted_billing_line_is_only_text(world: Any) -> None:
    quoted = "x-anthropic-billing-header: what is it?"
    visit = world.claude().user(quoted).ask(Text("A line.")).visit
    assert visit.conversation.turns[1] == Turn("user", (Text(quoted),))


def codex_compaction(agent: Any) -> Any:
    headers = {**agent.meta.headers, "x-codex-turn-metadata": '{"request_kind":"compaction","thread_source":"user"}'}
    agent.user("You are performing a CONTEXT CHECKPOINT COMPACTION.")
    return agent.ask(Thinking("sum"), Text("Summary."), meta=replace(agent.meta, headers=headers), tools=())


def test_e8_codex_compaction_gets_its_tools_back(keeping_world: Any) -> None:
    agent = keeping_world.codex()
    tool_loop(agent, lambda turn: turn)
    outcome = codex_compaction(agent)
    assert outcome.visit.kind == "compaction"
    assert outcome.visit.conversation.tools == agent.tools
    assert (outcome.report.cause, outcome.kept) == ("none", 1.0)


def test_e9_codex_keeps_the_user_messages_after_compaction(keeping_world: Any) -> None:
    agent = keeping_world.codex()
    tool_loop(agent, lambda turn: turn)
    codex_compaction(agent)
    users = [turn for turn in agent.turns[:-1] if turn.role in ("user", "system")]
    agent.turns = [*users, Turn("user", (Text("Another model wrote: Summary."),))]
    outcome = agent.say(Text("Yes."))
    assert outcome.report.cause == "compacted"
    assert 0.2 < outcome.kept < 0.6
    assert agent.user("Go on.").ask(Text("Yes.")).report.cause == "none"


def test_e9_codex_moves_its_second_system_message_behind_the_first_user_message(world: Any) -> None:
    agent = world.agent(world.codex().meta)
    agent.turns.append(Turn("system", (Text("Permissions: all."),)))
    tool_loop(agent, lambda turn: turn)
    codex_compaction(agent)
    first, second, user = agent.turns[:3]
    agent.turns = [first, user, second, Turn("user", (Text("Another model wrote: Summary."),))]
    outcome = agent.ask(Text("Yes."))
    assert outcome.report.cause == "compacted"
    end = next(span for span in outcome.prompt.spans if span.kind == "system").end
    assert 0 <= outcome.report.resumed - end < 20
    assert any(anchor.position == end and anchor.pinned for anchor in outcome.visit.anchors(outcome.prompt))


def test_e10_codex_drops_the_unfinished_text_and_keeps_the_thinking(keeping_world: Any) -> None:
    agent = keeping_world.codex().user(f"Hello. {LONG}")
    agent.say(
        Thinking("think a while"), Text("It is so because"), cut=3, echo=lambda t: replace(t, blocks=t.blocks[:1])
    )
    outcome = agent.user("<turn_aborted>").ask(Text("Yes."))
    assert outcome.report.cause == "text_changed"
    thinking = next(span for span in outcome.prompt.spans if span.kind == "thinking")
    assert outcome.report.resumed >= thinking.end


def test_e11_claude_keeps_the_partial_text(keeping_world: Any) -> None:
    agent = keeping_world.claude().user(f"Hello. {LONG}")
    agent.say(Thinking("think a while"), Text("It is so because"), cut=1)
    outcome = agent.user("[Request interrupted by user]").ask(Text("Yes."))
    assert (outcome.report.cause, outcome.kept) == ("none", 1.0)


def test_e12_a_cleared_tool_output_is_an_edit_at_that_output(keeping_world: Any) -> None:
    agent = keeping_world.claude()
    tool_loop(agent, claude_echo)
    old = agent.turns[3].blocks[0]
    agent.turns[3] = Turn("tool", (ToolOutput(old.call_id, "[Old tool result content cleared]"),))
    outcome = agent.user("Go on.").ask(Text("Yes."))
    assert outcome.report.cause == "history_edited"
    span = next(span for span in outcome.prompt.spans if span.kind == "tool_output")
    assert span.start < outcome.report.resumed < span.end


def test_e17_sub_agents_and_titles_live_beside_the_main_thread(keeping_world: Any) -> None:
    agent = keeping_world.claude()
    tool_loop(agent, claude_echo)
    helper = keeping_world.agent(
        replace(agent.meta, headers={**agent.meta.headers, "x-claude-code-agent-id": "a7"}), system=["You help."]
    )
    first = helper.user("Search.").say(Thinking("hm"), call("Bash", '{"command": "grep"}'))
    title = replace(agent.meta, json_schema=True, max_tokens=32000)
    side = keeping_world.agent(title, system=["Write a title."]).user("Fix the tests.").ask(Text("T"), tools=())
    second = helper.outputs("found").ask(Text("There."))
    after = agent.user("Go on.").ask(Text("Yes."))
    assert (first.visit.kind, first.report.cause, second.report.cause) == ("subagent", "subagent", "none")
    assert (side.visit.kind, side.visit.side, side.report.cause) == ("side", True, "side_request")
    assert (after.report.cause, after.kept) == ("none", 1.0)
    assert {first.visit.session_id, side.visit.session_id} == {after.visit.session_id}
    detail = keeping_world.sessions.get(after.visit.session_id)
    assert detail.branches == ("a7", "main")
    assert [record.cause for record in detail.requests][-4:] == ["subagent", "side_request", "none", "none"]


def test_codex_sub_agents_have_their_own_thread_of_the_same_session(world: Any) -> None:
    agent = world.codex()
    tool_loop(agent, lambda turn: turn)
    headers = {**agent.meta.headers, "thread-id": "k2", "x-codex-parent-thread-id": "k1"}
    headers["x-openai-subagent"] = "collab_spawn"
    helper = world.agent(replace(agent.meta, headers=headers), system=["You help."]).user("Search.")
    outcome = helper.say(Text("Found."))
    assert (outcome.visit.kind, outcome.report.cause) == ("subagent", "subagent")
    assert len(world.sessions.list()) == 1
    assert world.sessions.list()[0].branches == 2


def test_arguments_changed_by_the_user_are_named(keeping_world: Any) -> None:
    agent = keeping_world.claude()
    tool_loop(agent, claude_echo)
    old = agent.turns[2].blocks[-1]
    agent.turns[2] = replace(
        agent.turns[2], blocks=(*agent.turns[2].blocks[:-1], replace(old, arguments='{"command":"rm"}'))
    )
    outcome = agent.user("Go on.").ask(Text("Yes."))
    assert outcome.report.cause == "tool_args_changed"
    span = next(span for span in outcome.prompt.spans if span.kind == "tool_call")
    assert span.start <= outcome.report.resumed < span.end


def test_changed_thinking_is_an_edit(keeping_world: Any) -> None:
    agent = keeping_world.claude().user(LONG)
    agent.say(Thinking("one way"), Text("Yes."), echo=lambda t: Turn("assistant", (Thinking("other"), t.blocks[1])))
    assert agent.user("Go on.").ask(Text("Yes.")).report.cause == "history_edited"


def test_a_retry_and_a_regeneration_are_no_edits(keeping_world: Any) -> None:
    agent = keeping_world.chat().user(LONG)
    first, retry = agent.ask(Text("One.")), agent.ask(Text("Two."))
    assert (retry.report.cause, retry.report.new) == ("none", 1)
    agent.turns.append(first.answer)
    assert agent.user("Go on.").ask(Text("Yes.")).report.cause == "none"


def test_a_rewind_to_an_older_message_is_an_edit(keeping_world: Any) -> None:
    agent = keeping_world.claude()
    tool_loop(agent, claude_echo)
    del agent.turns[2:]
    assert agent.ask(Text("Once more.")).report.cause == "none"
    agent.turns[1] = Turn("user", (Text("Something else."),))
    assert agent.ask(Text("Yes.")).report.cause in ("text_changed", "compacted")


def test_a_restarted_worker_is_named_once(keeping_world: Any) -> None:
    agent = keeping_world.claude()
    tool_loop(agent, claude_echo)
    keeping_world.engine.restart()
    outcome = agent.user("Go on.").say(Text("Yes."))
    assert outcome.report.cause == "worker_restart"
    assert outcome.report.replayed > 0.9 * outcome.report.prompt
    assert agent.user("And on.").ask(Text("Yes.")).report.cause == "none"


def test_a_system_message_in_the_middle_stays_there(keeping_world: Any) -> None:
    agent = keeping_world.claude().user(f"Hello. {LONG}")
    agent.turns.append(Turn("system", (Text("Agents: none."),)))
    agent.say(Thinking("hm"), call("Bash", '{"command": "ls"}'), echo=claude_echo)
    agent.outputs("ok").turns.append(Turn("system", (Text("f.py changed on disk"),)))
    outcome = agent.ask(Text("Yes."))
    assert [turn.role for turn in outcome.visit.conversation.turns] == [
        "system", "user", "system", "assistant", "tool", "system",
    ]  # fmt: skip
    assert (outcome.report.cause, outcome.kept) == ("none", 1.0)
