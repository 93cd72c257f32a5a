"""What opencode, pi and Qwen Code show of themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsers.conversation import Conversation, Text, Tool, Turn
from sessions.harness import Kind, RequestMeta, identify, recognise

TOOL = Tool("bash", "", {"type": "object", "properties": {}})


def asked(system: str, *tools: Tool) -> Conversation:
    return Conversation((Turn("system", (Text(system),)), Turn("user", (Text("Hello"),))), tools)


@pytest.mark.parametrize(
    ("agent", "system", "tools", "name", "kind"),
    [
        ("opencode/1.18.33 ai-sdk", "You are a title generator. You output", (), "opencode", "side"),
        ("opencode/1.18.33 ai-sdk", "You are opencode", (TOOL,), "opencode", "main"),
        ("opencode/1.18.33 ai-sdk", "You are a title generator. A project's own", (TOOL,), "opencode", "main"),
        ("opencode/1.18.33", "You are a context summarization agent. You", (), "opencode", "compaction"),
        ("", "You are an expert coding assistant operating inside pi, a", (TOOL,), "pi", "main"),
        ("", "You are a context summarization assistant. Your", (), "pi", "compaction"),
        ("QwenCode/0.24.4 (linux; x64)", "You are Qwen Code", (TOOL,), "qwen-code", "main"),
        ("", "You are a title generator. You output", (), "opencode", "side"),
    ],
)
def test_who_asks_and_for_what(agent: str, system: str, tools: tuple[Tool, ...], name: str, kind: Kind) -> None:
    meta = RequestMeta("chat", headers={"user-agent": agent})
    conversation = asked(system, *tools)
    harness = recognise(meta, conversation)
    assert (harness.name, identify(harness, meta, conversation).kind) == (name, kind)


def test_qwen_code_asks_for_a_summary_with_its_tools() -> None:
    """After the whole conversation, in the last message."""
    start = asked("You are Qwen Code", TOOL)
    ask = "First, reason in your <analysis> block. Then, produce the <state_snapshot> XML."
    conversation = replace(start, turns=(*start.turns, Turn("user", (Text(ask),))))
    meta = RequestMeta("chat", headers={"user-agent": "QwenCode/0.24.4"})
    assert identify(recognise(meta, conversation), meta, conversation).kind == "compaction"
    assert identify(recognise(meta, start), meta, start).kind == "main"


def test_opencode_names_its_sessions_and_subagents() -> None:
    headers = {"user-agent": "opencode/1", "x-session-id": "ses_1", "x-parent-session-id": "ses_0"}
    meta = RequestMeta("chat", headers=headers)
    identity = identify(recognise(meta, asked("x", TOOL)), meta, asked("x", TOOL))
    assert (identity.session, identity.kind) == ("ses_1", "subagent")
