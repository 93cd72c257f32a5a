"""Public bug reports on turns, written anew from their abstract shapes: calls in thinking, missing wrappers, damaged
headers, quoted markup, tools that are not there. Tests are named after the number of a report in the project's list."""

from __future__ import annotations

import json

import pytest

from parsers.conversation import Text, Thinking, Tool, ToolCall
from parsers.write import assistant_text
from tests.parsers.parsed import TOOLS, Parsed
from tests.parsers.report_support import arguments, heard
from tests.parsers.wire_support import NAMES, machine

TOKENS = ("hermes", "qwen3_xml", "glm45", "glm47", "kimi_k2", "minimax_m2", "minimax_m3", "deepseek_v31", "seed_oss")
"""Families that think and have tokens for what opens a call."""


def call_of(name: str, arguments: str = '{"n": 1}') -> str:
    """One call as the format writes it."""
    family = machine(name)
    text = family.tokenizer.decode(family.output([ToolCall("functions.f:0", "f", arguments)]))
    return text.removesuffix(family.format.ends[0])


@pytest.mark.parametrize("name", TOKENS)
def test_report_24_25_26_a_call_in_thinking_ends_the_thinking(name: str) -> None:
    end = machine(name).format.ends[0]
    parsed = heard(name, f"Let me look. {call_of(name)}{end}", thinking_open=True)
    assert (parsed.thinking.strip(), arguments(parsed)) == ("Let me look.", [{"n": 1}])
    assert parsed.tolerated == ["call_in_thinking"]


@pytest.mark.parametrize("name", NAMES)
def test_report_30_a_call_cut_off_by_the_limit_is_incomplete(name: str) -> None:
    family = machine(name)
    whole = json.dumps({"s": "a long text " * 3})
    ids = family.output([ToolCall("functions.f:0", "f", whole)])
    for cut in range(1, len(ids) - 30):
        for call in family.parse(ids[:cut], reason="length").calls:
            assert call[3] == "incomplete"
            assert whole.startswith(call[2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("broken", ['{"s": "half', "", "null", "[1]", '{"s": 1e999}', "[" * 5000])
def test_report_31_truncated_arguments_of_an_earlier_turn_can_be_written(name: str, broken: str) -> None:
    family = machine(name)
    text = assistant_text(family.format, family.guard, [ToolCall("functions.f:0", "f", broken)], "closed")
    assert "f" in text


def test_report_33_text_may_follow_a_call_without_its_wrapper() -> None:
    parsed = heard("qwen3_xml", "<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\nLet me wait.<|im_end|>")
    assert (arguments(parsed), parsed.text.strip()) == ([{"n": 1}], "Let me wait.")


M2_CALL = '<invoke name="f">\n<parameter name="n">1</parameter>\n</invoke>\n'


def test_report_33_a_call_without_its_opener_is_counted() -> None:
    for name, text in (
        ("qwen3_xml", "<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("minimax_m2", f"{M2_CALL}</minimax:tool_call>"),
        ("deepseek_v4", M2_CALL.replace("</", "</｜DSML｜").replace("<i", "<｜DSML｜i").replace("<p", "<｜DSML｜p")),
        ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"n": 1}<|tool_call_end|>'),
    ):
        parsed = heard(name, f"So.\n{text}")
        assert (parsed.text, arguments(parsed)) == ("So.", [{"n": 1}])
        assert "bare_head" in parsed.tolerated


def test_report_34_one_bad_sibling_or_a_missing_end_spoils_no_call() -> None:
    for text in (
        f"<minimax:tool_call>\n{M2_CALL}{M2_CALL}",
        f"<minimax:tool_call>\n{M2_CALL}<invoke>\n</invoke>\n{M2_CALL}</minimax:tool_call>",
        f'<minimax:tool_call>\n{M2_CALL}<invoke name="">\n</invoke>\n{M2_CALL}</minimax:tool_call>',
    ):
        assert arguments(heard("minimax_m2", text + "[e~[")) == [{"n": 1}, {"n": 1}]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("hermes", "<tool_call>\nnot json\n</tool_call>\n"),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {oops}}\n</tool_call>\n'),
        ("qwen3_xml", "<tool_call>\n<function=\n</tool_call>\n"),
        ("glm45", "<tool_call>\n</tool_call>\n"),
        ("gemma4", "<|tool_call>call:f{n<tool_call|>"),
        ("gemma4", "<|tool_call><tool_call|>"),
    ],
)
def test_report_36_a_malformed_call_does_not_spoil_the_rest_of_the_turn(name: str, bad: str) -> None:
    parsed = heard(name, f"{bad}{call_of(name)}{machine(name).format.ends[0]}")
    assert parsed.calls[-1] == ("call", "f", '{"n": 1}', "complete")
    assert [call[3] for call in parsed.calls[:-1]] == ["incomplete"] * (len(parsed.calls) - 1)


HEADERS = [
    "<|channel|>analysis to=functions.f<|channel|>commentary <|constrain|>json<|message|>{{}}<|call|>",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}<|call|>",
    "<|channel|>commentary to=functions.f<|message|>{{}}<|call|>",
    " to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>",
    "<|channel|>commentary<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}<|call|>",
]


@pytest.mark.parametrize("header", HEADERS)
def test_report_44_45_unexpected_tokens_in_a_header_are_tolerated(header: str) -> None:
    parsed = heard("harmony", header.replace("{{}}", '{"n": 1}'))
    assert arguments(parsed) == [{"n": 1}]


def test_report_45_of_two_channel_markers_the_turn_survives() -> None:
    parsed = heard("harmony", "<|channel|>final<|channel|>final<|message|>Hi.<|return|>")
    assert parsed.text == "Hi."


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>not json<|call|>",
        '<|channel|>commentary to=functions. json<|message|>{"n": 1}<|call|>',
        '<|channel|>commentary to=functions.f {"n": 1}<|call|>',
        "<|message|><|message|><|call|>",
        "<|channel|><|channel|><|end|>",
    ],
)
def test_report_46_a_bad_call_of_gpt_oss_is_no_failure(text: str) -> None:
    parsed = heard("harmony", text)
    assert "{}" not in [call[2] for call in parsed.calls]
    said = parsed.text + parsed.thinking + "".join(call[2] for call in parsed.calls)
    assert "not json" not in text or "not json" in said


QUOTING = ("hermes", "qwen3_xml", "glm47", "minimax_m2", "ling3", "nemotron_nano2", "deepseek_v4")
PROSE = [
    "Write\n```xml\n{call}\n```\nin the prompt.",
    "~~~\n{call}\n~~~",
    "Use `{line}` for that.",
]


@pytest.mark.parametrize("name", QUOTING)
@pytest.mark.parametrize("frame", PROSE)
def test_report_58_quoted_markup_is_not_called(name: str, frame: str) -> None:
    call = call_of(name)
    text = frame.replace("{call}", call).replace("{line}", call.replace("\n", ""))
    parsed = heard(name, text, plain=True)
    assert (parsed.calls, parsed.text) == ([], text)


def test_report_59_a_gemma_call_in_a_code_block_is_not_executed() -> None:
    text = f"So:\n```\n{call_of('gemma4')}\n```\n"
    parsed = heard("gemma4", text, plain=True)
    assert (parsed.calls, parsed.text.rstrip()) == ([], text.rstrip())


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"n": 1}}',
        '[{"name": "f", "arguments": {"n": 1}}]',
        '<|python_start|>{"name": "f", "parameters": {"n": 1}}<|python_end|>',
        "[f(n=1)]",
        '[f(n="1")]',
        "<|python_start|>[f(n=1)]<|python_end|>",
    ],
)
def test_report_62_llama_4_may_write_json_where_python_is_expected(text: str) -> None:
    assert arguments(heard("llama4", f"{text}<|eot|>")) == [{"n": 1}]


def test_report_62_bare_json_in_prose_is_text() -> None:
    for text in ('{"name": "f"} is a call.', "[1, 2]", '{"name": "unknown", "parameters": {}}', "[f(n=1)] or so"):
        parsed = heard("llama4", f"{text}<|eot|>")
        assert (parsed.calls, parsed.text) == ([], text)


def test_report_65_70_without_tools_the_channel_is_dropped_and_the_text_kept() -> None:
    parsed = heard("kimi_k3", f"<|open|>response<|sep|>Hi.<|close|>response<|sep|>{call_of('kimi_k3')}", ())
    assert parsed.calls == []
    assert "Hi." in parsed.text
    assert "<|" not in parsed.text


@pytest.mark.parametrize("name", NAMES)
def test_report_70_without_tools_nothing_is_called_or_said_twice(name: str) -> None:
    family = machine(name)
    ids = family.output([Text("Look here:"), ToolCall("functions.f:0", "f", '{"n": 4711}')])
    parsed = family.parse(ids, ())
    assert parsed.calls == []
    assert (parsed.text.count("Look here:"), parsed.text.count("4711")) == (1, 1)


def kimi(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|><|im_end|>"


def kimi_call(identity: str) -> str:
    return f'<|tool_call_begin|>{identity}<|tool_call_argument_begin|>{{"n": 1}}<|tool_call_end|>'


def test_report_68_noise_around_kimi_calls() -> None:
    def names(parsed: Parsed) -> list[str]:
        assert [call[3] for call in parsed.calls] == ["complete"] * len(parsed.calls)
        return [call[1] for call in parsed.calls]

    assert names(heard("kimi_k2", kimi(kimi_call("functions.f:0\n"), kimi_call("\nfunctions.g:1")))) == ["f", "g"]
    before = heard("kimi_k2", "I look. " + kimi(kimi_call("functions.f:0")))
    assert (before.text.strip(), names(before)) == ("I look.", ["f"])
    noisy = heard("kimi_k2", kimi(kimi_call("functions.f:0"), " and \n", kimi_call("functions.g:1")))
    assert (noisy.text, names(noisy), noisy.tolerated) == ("", ["f", "g"], ["text_between_calls"])


@pytest.mark.parametrize("name", NAMES)
def test_report_71_unknown_tools_are_forwarded_by_every_family(name: str) -> None:
    family = machine(name)
    parsed = family.parse(family.output([Thinking("Hm."), ToolCall("functions.nobody:0", "nobody", '{"k": 1}')]))
    bare = family.format.call.bare  # an answer without any opener is a call only if it names a tool
    assert [call[1] for call in parsed.calls] == ([] if bare else ["nobody"])
    assert not bare or "nobody" in parsed.text


def test_every_tool_of_these_tests_is_declared() -> None:
    assert [tool.name for tool in TOOLS if isinstance(tool, Tool)] == ["f", "g", "patch"]
