from __future__ import annotations

import pytest

from parsers.conversation import Conversation, Text, Tool, Turn
from sessions.harness import CLAUDE_CODE, GENERIC, RequestMeta, identify, recognise, without_volatile

HELLO = Conversation((Turn("user", (Text("Hello"),)),), (Tool("Bash"),))
BILLING = "x-anthropic-billing-header:"
BARE = Conversation(HELLO.turns)
ANSWERED = Conversation((*HELLO.turns, Turn("assistant", (Text("Hi"),)), *HELLO.turns))
LONG = Conversation((Turn("system", (Text("word " * 500),)), *HELLO.turns))
BILLED = Conversation((Turn("system", (Text("x-anthropic-billing-header: cc_version=2;"),)), *HELLO.turns))


def named(conversation: Conversation, **headers: str) -> str:
    return recognise(
        RequestMeta("anthropic", {name.replace("_", "-"): value for name, value in headers.items()}), conversation
    ).name


def test_recognition_by_header_user_agent_and_body() -> None:
    assert named(HELLO, x_claude_code_session_id="1") == "claude-code"
    assert named(HELLO, user_agent="Claude-CLI/2.1.332 (external)") == "claude-code"
    assert named(BILLED) == "claude-code"
    assert named(HELLO, x_codex_turn_metadata="{}") == "codex"
    assert named(HELLO, user_agent="codex_exec/0.169.0") == "codex"
    assert named(HELLO, user_agent="OpenAI/Python") == "generic"
    assert named(HELLO) == "generic"


def told(conversation: Conversation, meta: RequestMeta) -> tuple[str, str, str]:
    identity = identify(recognise(meta, conversation), meta, conversation)
    return identity.session, identity.thread, identity.kind


def codex(**headers: str) -> RequestMeta:
    return RequestMeta("responses", {name.replace("_", "-"): value for name, value in headers.items()}, "k1")


@pytest.mark.parametrize(
    ("meta", "conversation", "expected"),
    [
        (RequestMeta("anthropic", {"x-claude-code-session-id": "c"}), HELLO, ("c", "", "main")),
        (RequestMeta("anthropic", {"user-agent": "claude-cli/2"}, "c"), HELLO, ("c", "", "main")),
        (
            RequestMeta("anthropic", {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}),
            HELLO,
            ("c", "a", "subagent"),
        ),
        (RequestMeta("anthropic", {"x-claude-code-session-id": "c"}, json_schema=True), BARE, ("c", "", "side")),
        (RequestMeta("anthropic", {"x-claude-code-session-id": "c"}, json_schema=True), HELLO, ("c", "", "main")),
        (RequestMeta("anthropic", {"x-claude-code-session-id": "c"}, max_tokens=1), BARE, ("c", "", "side")),
        (codex(x_codex_turn_metadata='{"request_kind":"turn"}', thread_id="k1"), HELLO, ("k1", "", "main")),
        (codex(x_codex_turn_metadata='{"request_kind":"compaction"}'), BARE, ("k1", "", "compaction")),
        (codex(x_codex_turn_metadata='{"thread_source":"thread_title"}'), BARE, ("k1", "", "side")),
        (codex(x_codex_turn_metadata='{"thread_source":"subagent"}', thread_id="t"), HELLO, ("k1", "t", "subagent")),
        (codex(x_codex_window_id="1", x_openai_subagent="spawn", thread_id="t"), HELLO, ("k1", "t", "subagent")),
        (codex(x_codex_turn_metadata="not json"), HELLO, ("k1", "", "main")),
        (codex(x_codex_turn_metadata="[" * 100_000), HELLO, ("k1", "", "main")),
        (codex(x_codex_turn_metadata="[1]"), HELLO, ("k1", "", "main")),
        (RequestMeta("chat", {"x-session-id": "o"}), HELLO, ("o", "", "main")),
        (RequestMeta("chat", {"x-session-affinity": "o", "x-parent-session-id": "p"}), HELLO, ("o", "", "subagent")),
        (RequestMeta("chat", json_schema=True), BARE, ("", "", "main")),
        (RequestMeta("chat", max_tokens=16), BARE, ("", "", "side")),
        (RequestMeta("chat", max_tokens=16), ANSWERED, ("", "", "main")),
        (RequestMeta("chat", max_tokens=16), LONG, ("", "", "main")),
        (RequestMeta("chat", max_tokens=16), HELLO, ("", "", "main")),
        (RequestMeta("anthropic", {"x-claude-code-session-id": "c"}, json_schema=True), ANSWERED, ("c", "", "main")),
        (RequestMeta("completions", max_tokens=16), BARE, ("completions", "", "raw")),
        (RequestMeta("completions", {"x-session-id": "o"}, max_tokens=16), BARE, ("completions o", "", "raw")),
    ],
)
def test_identity_and_kind(meta: RequestMeta, conversation: Conversation, expected: tuple[str, str, str]) -> None:
    assert told(conversation, meta) == expected


def test_only_clients_that_name_threads_have_them() -> None:
    meta = RequestMeta("chat", {"x-session-id": "o"})
    assert not identify(GENERIC, meta, HELLO).threads
    assert not identify(recognise(codex(), HELLO), RequestMeta("responses"), HELLO).threads


@pytest.mark.parametrize("marker", ["this conversation.", "the conversation so far,", "the RECENT portion of it"])
def test_claudes_request_for_a_summary(marker: str) -> None:
    asked = Turn("user", (Text(f"CRITICAL.\n\nYour task is to create a detailed summary of {marker}"),))
    meta = RequestMeta("anthropic", {"x-claude-code-session-id": "c"})
    assert told(Conversation((*HELLO.turns, asked), HELLO.tools), meta)[2] == "compaction"
    answered = (*HELLO.turns, asked, Turn("assistant", (Text("Sum."),)), *HELLO.turns)
    assert told(Conversation(answered, HELLO.tools), meta)[2] == "main"
    assert told(Conversation((asked,), HELLO.tools), RequestMeta("chat"))[2] == "main"


def cleaned(text: str) -> str:
    conversation = Conversation((Turn("system", (Text(text), Text("Be brief."))), *HELLO.turns))
    first = without_volatile(CLAUDE_CODE, conversation).turns[0].blocks[0]
    assert isinstance(first, Text)
    return "" if first == Text("Be brief.") else first.text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{BILLING} a=1;", ""),
        (f" \n\u2003{BILLING} a=1;\n  kept\n{BILLING}", f"  kept\n{BILLING}"),
        (f"{BILLING}\n\n{BILLING} b\r\n\tx", "\tx"),
        (f"kept\n{BILLING}", f"kept\n{BILLING}"),
        (" \n ", " \n "),
        (f"{BILLING} a;\n" * 200_000 + " x", " x"),  # in one pass: line by line it would take hours
        (" \n" * 500_000 + "x", " \n" * 500_000 + "x"),
    ],
    ids=range(7),
)
def test_volatile_lines_at_the_beginning_are_left_out(text: str, left: str) -> None:
    assert cleaned(text) == left
