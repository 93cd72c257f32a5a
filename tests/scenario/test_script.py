"""Scripted sampling: which rule speaks, and what a broken script file is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from parsers.conversation import Conversation, Text, Thinking, ToolCall, ToolOutput, Turn
from server.script import Raw, Script, ScriptError, position


def load(directory: Path, *lines: str) -> Script:
    path = directory / "script.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return Script.load(path)


def user(text: str) -> Turn:
    return Turn("user", (Text(text),))


CALL = Turn("assistant", (ToolCall("c1", "Bash", "{}"),))
OUTPUT = Turn("tool", (ToolOutput("c1", "done"),))


def test_every_form_of_say(tmp_path: Path) -> None:
    script = load(
        tmp_path,
        '{"say": [{"thinking": "hm"}, {"text": ""}, {"tool_call": {"name": "Bash", "args": {"b": 1, "a": "é"}}},'
        ' {"tool_call": {"name": "apply_patch", "args": "*** Begin Patch"}}, {"raw": "<tool_call>"}]}',
    )
    assert script.say("main", Conversation((user("hi"),))) == [
        Thinking("hm"),
        Text(""),
        ToolCall("", "Bash", '{"b": 1, "a": "é"}'),
        ToolCall("", "apply_patch", "*** Begin Patch", freeform=True),
        Raw("<tool_call>"),
    ]


def test_first_match_wins_and_no_match_is_none(tmp_path: Path) -> None:
    script = load(
        tmp_path,
        '{"when": {"kind": "side"}, "say": [{"text": "title"}]}',
        "",
        '{"when": {"after_user": "(?i)^FIX", "step": 1}, "say": [{"text": "second"}]}',
        '{"when": {"after_user": "fix"}, "say": [{"text": "any step"}]}',
    )
    fix = user("fix it")
    assert script.say("side", Conversation((fix,))) == [Text("title")]
    assert script.say("main", Conversation((fix,))) == [Text("any step")]
    assert script.say("main", Conversation((fix, CALL, OUTPUT))) == [Text("second")]
    assert script.say("main", Conversation((user("other"),))) is None
    assert script.say("main", Conversation(())) is None


def test_position_counts_from_the_last_real_user_text() -> None:
    reminder = "<system-reminder>\nfix\n</system-reminder>"
    turns = (
        user("old"),
        CALL,
        OUTPUT,
        Turn("user", (Text(reminder), Text("new"))),
        Turn("system", (Text("not a user"),)),
        CALL,
        Turn("user", (ToolOutput("c1", "done"), Text("text beside an output"))),
        CALL,
        user(f" {reminder} {reminder}\n"),
    )
    assert position(Conversation(turns)) == ("new", 2)
    assert position(Conversation(turns[:3])) == ("old", 1)
    assert position(Conversation(turns[4:])) == ("", 2)


def test_what_is_said_does_not_depend_on_earlier_requests(tmp_path: Path) -> None:
    script = load(tmp_path, '{"when": {"step": 0}, "say": [{"text": "a"}]}', '{"say": [{"text": "b"}]}')
    first, second = Conversation((user("x"),)), Conversation((user("x"), CALL, OUTPUT))
    assert [script.say("main", c) for c in (second, first, first, second)] == [
        [Text("b")],
        [Text("a")],
        [Text("a")],
        [Text("b")],
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Invalid JSON"),
        ("[]", "line 2: Input should be an object"),
        ('{"when": {}}', "line 2: say: Field required"),
        ('{"say": []}', "line 2: say: List should have at least 1 item"),
        ('{"say": [{"text": "a"}], "then": 1}', "line 2: then: Extra inputs"),
        ('{"when": {"kind": "title"}, "say": [{"text": "a"}]}', "line 2: when.kind: Input should be 'main'"),
        ('{"when": {"step": -1}, "say": [{"text": "a"}]}', "line 2: when.step: Input should be greater"),
        ('{"when": {"step": "1"}, "say": [{"text": "a"}]}', "line 2: when.step: Input should be a valid integer"),
        ('{"when": {"after_user": "("}, "say": [{"text": "a"}]}', "line 2: when.after_user: missing )"),
        ('{"say": [{"text": "a", "raw": "b"}]}', "line 2: say: each item holds exactly one of"),
        ('{"say": [{}]}', "line 2: say: each item holds exactly one of"),
        ('{"say": [{"text": null}]}', "line 2: say: an item is null or empty"),
        ('{"say": [{"tool_call": {"name": "", "args": {}}}]}', "line 2: say.0.tool_call.name: String should have"),
        ('{"say": [{"tool_call": {"name": "x", "args": []}}]}', "line 2: say.0.tool_call.args"),
        ('{"say": [{"raw": "a"}, {"text": "b"}]}', "line 2: say: `raw` must be the last item"),
    ],
)
def test_a_broken_rule_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ScriptError) as caught:
        load(tmp_path, '{"say": [{"text": "fine"}]}', line)
    assert message in str(caught.value)


def test_an_unreadable_or_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="cannot read the script"):
        Script.load(tmp_path / "absent.jsonl")
    with pytest.raises(ScriptError, match="holds no rules"):
        load(tmp_path, "", "  ")
