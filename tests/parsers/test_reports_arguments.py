"""Public bug reports on arguments, written anew from their abstract shapes: types, missing arguments, damaged
parameters, brackets that were counted. Tests are named after the number of a report in the project's list."""

from __future__ import annotations

import json

import pytest

from parsers.conversation import ToolCall
from tests.parsers.report_support import arguments, heard, tool
from tests.parsers.wire_support import NAMES, machine

STRING, MAYBE = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}
TEXTUAL = {
    "qwen3_xml": "<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter={key}>{value}</parameter>\n</function>\n</seed:tool_call>",
    "glm45": "<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    "glm47": "<tool_call>f<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>",
    "ling3": "<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="{key}">{value}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<{key}>{value}]<]minimax[>['
    "</{key}>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "muse_glimmer": ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="{key}">'
    "{value}</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="{key}">{value}'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
}
"""One call with one parameter whose wire has no type, as text decides it."""
textual = pytest.mark.parametrize("name", TEXTUAL)


def one(name: str, schema: object, value: str, key: str = "p") -> object:
    text = TEXTUAL[name].replace("{key}", key).replace("{value}", value)
    return arguments(heard(name, text, tool(**{key: schema})))[0][key]


@pytest.mark.parametrize("name", NAMES)
def test_report_15_17_no_arguments_are_an_empty_object(name: str) -> None:
    family = machine(name)
    parsed = family.parse(family.output([ToolCall("functions.g:0", "g", "{}")]))
    assert (parsed.calls, parsed.tolerated) == ([("call", "g", "{}", "complete")], [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>'),
        ("hermes", '<tool_call>{"name": "g"}</tool_call>'),
        ("kimi_k2", "<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|><|tool_call_end|>"),
        ("kimi_k2", "<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>null<|tool_call_end|>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>g<｜tool▁sep｜><｜tool▁call▁end｜>"),
        ("mistral_v13", "[TOOL_CALLS]g[ARGS]"),
        ("llama3", '{"name": "g", "parameters": null}'),
    ],
)
def test_report_16_missing_and_null_arguments_are_an_empty_object(name: str, text: str) -> None:
    assert arguments(heard(name, text + machine(name).format.ends[0])) == [{}]


def test_report_18_nothing_counts_the_braces_in_strings() -> None:
    text = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "}}{"}<|tool_call_end|>'
    empty = "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    wrapped = f"<|tool_calls_section_begin|>{text}{empty}<|tool_calls_section_end|>"
    assert arguments(heard("kimi_k2", wrapped)) == [{"s": "}}{"}, {}]


@textual
def test_report_19_an_optional_string_keeps_its_quotes_and_brackets(name: str) -> None:
    for value in ('say "hi"', '"', "[x]", "]", "a]]"):
        assert one(name, MAYBE, value) == value


@textual
def test_report_20_only_the_text_null_is_null(name: str) -> None:
    assert [one(name, MAYBE, value) for value in ("null", "None", "nul", "0", "n")] == [None, None, "nul", "0", "n"]
    assert one(name, STRING, "null") == "null"


@textual
def test_report_21_numbers_and_lists_are_no_strings(name: str) -> None:
    assert one(name, {"type": "integer"}, "42") == 42
    assert one(name, {"type": "number"}, "-1.5") == -1.5
    assert one(name, {"type": "boolean"}, "true") is True
    assert one(name, {"type": "array"}, "[1, 2]") == [1, 2]
    assert one(name, {"type": "object"}, '{"a": {"b": []}}') == {"a": {"b": []}}


@textual
def test_report_22_a_string_that_holds_json_stays_a_string(name: str) -> None:
    for value in ('{"a": 1}', "[1, 2]", "true", "12", '"quoted"'):
        assert one(name, STRING, value) == value


@textual
def test_report_23_a_string_wins_over_a_number(name: str) -> None:
    assert one(name, {"type": ["integer", "string"]}, "007") == "007"


@pytest.mark.parametrize("broken", ["<parameter=</parameter>", "<parameter=\n</parameter>", "<parameter\n</parameter>"])
def test_report_37_a_malformed_parameter_is_dropped(broken: str) -> None:
    text = f"<tool_call>\n<function=f>\n{broken}\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
    parsed = heard("qwen3_xml", text)
    assert arguments(parsed) == [{"n": 1}]
    assert parsed.tolerated != []


@pytest.mark.parametrize("closer", ["</parameter/>", "</parameter1>", "</parameter >"])
def test_report_38_misspelled_closers_are_counted(closer: str) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=n>\n1\n{closer}\n<parameter=s>\nx\n</parameter>\n</function>\n"
    parsed = heard("qwen3_xml", f"{text}</tool_call>")
    assert (arguments(parsed), parsed.tolerated) == ([{"n": 1, "s": "x"}], ["misspelled_close"])


MISSING = {
    "qwen3_xml": (
        "<tool_call>\n<function=f>\n<parameter=s>\none\n<parameter=t>\ntwo\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm47": (
        "<tool_call>f<arg_key>s</arg_key><arg_value>one<arg_key>t</arg_key><arg_value>two</arg_value></tool_call>"
    ),
    "ling3": (
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>one<arg_key>t</arg_key>\n<arg_value>two</arg_value>\n"
        "</tool_call>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">one\n<parameter name="t">two</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">one\n'
        '<｜DSML｜parameter name="t" string="true">two</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="s" type="string"<|sep|>one'
        '<|open|>argument key="t" type="string"<|sep|>two<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>"
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_report_39_the_next_parameter_closes_one_without_closer(name: str) -> None:
    parsed = heard(name, MISSING[name])
    assert (arguments(parsed), parsed.tolerated) == ([{"s": "one", "t": "two"}], ["missing_parameter_close"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {oops}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{broken"}</tool_call>'),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{n: 1<|tool_call_end|>"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>do it<|tool_call_end|>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
        ("mistral_v13", "[TOOL_CALLS]f[ARGS]words</s>"),
        ("gemma4", "<|tool_call>call:f{n<tool_call|>"),
        ("llama4", "<|python_start|>[f(1, 2)]<|python_end|>"),
        ("lfm2", "<|tool_call_start|>[f(n=open('x'))]<|tool_call_end|>"),
        ("hermes", '<tool_call>{"name": "f", "args": {"s": "x"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f",}"arguments": {"s": "x"}}</tool_call>'),
        ("mistral_v3", '[TOOL_CALLS][{"name": "f", "s": "x", "id": "call00001"}]'),
        ("llama3", '{"name": "f", "param": {"s": "x"}}'),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```js\n{}\n```<｜tool▁call▁end｜>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'),
        ("qwen3_xml", "<tool_call>\n<function=f>\n"),
    ],
)
def test_report_40_an_unreadable_body_is_no_empty_object(name: str, text: str) -> None:
    for call in heard(name, text + machine(name).format.ends[0]).calls:
        assert call[3] == "incomplete"
        assert call[2] != "{}"


BRACES = {"o": {"a": {"b": {"c": "}"}}}, "s": "{ ] }", "a": ["}", {"x": "["}]}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "minimax_m3"])
def test_report_41_42_43_brackets_are_scanned_not_counted(name: str) -> None:
    family = machine(name)
    parsed = family.parse(family.output([ToolCall("functions.f:0", "f", json.dumps(BRACES))]))
    assert arguments(parsed) == [BRACES]


def test_report_60_gemma_with_quotes_of_all_kinds() -> None:
    parsed = heard("gemma4", '<|tool_call>call:f{s:"it\'s",a:["x",\'y\',<|"|>z<|"|>],n:2}<tool_call|>')
    assert (arguments(parsed), parsed.tolerated) == ([{"s": "it's", "a": ["x", "y", "z"], "n": 2}], ["plain_quotes"])
    parsed = heard("gemma4", '<|tool_call>call:f{s:"say "hi" twice",n:2}<tool_call|>')
    assert arguments(parsed) == [{"s": 'say "hi" twice', "n": 2}]
    parsed = heard("gemma4", '<|tool_call>call:f{s:<|"|>say "hi", then \'bye\'}<|"|>}<tool_call|>')
    assert (arguments(parsed), parsed.tolerated) == ([{"s": "say \"hi\", then 'bye'}"}], [])


ROWS = [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]
ROW_SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}},
}


@pytest.mark.parametrize("name", NAMES)
def test_report_63_a_list_of_objects_is_one_value(name: str) -> None:
    family = machine(name)
    ids = family.output([ToolCall("functions.f:0", "f", json.dumps({"rows": ROWS}))])
    assert arguments(family.parse(ids, tool(rows=ROW_SCHEMA))) == [{"rows": ROWS}]


PHANTOMS = {
    "minimax_m3": ']<]minimax[>[<invoke name="g">]<]minimax[>[</invoke>',
    "minimax_m2": '<invoke name="g">\n</invoke>',
    "qwen3_xml": "<function=g>\n</function>",
    "hermes": '<tool_call>{"name": "g"}</tool_call>',
    "gemma4": "<|tool_call>call:g{}<tool_call|>",
    "kimi_k3": '<|open|>call tool="g" index="1"<|sep|><|close|>call<|sep|>',
    "deepseek_v4": '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>',
}


@pytest.mark.parametrize("name", PHANTOMS)
def test_report_f6_a_call_inside_a_value_is_a_value(name: str) -> None:
    family = machine(name)
    value = f"Write {PHANTOMS[name]} so."
    parsed = family.parse(family.output([ToolCall("", "f", json.dumps({"s": value, "n": 1}))]))
    assert (arguments(parsed), parsed.tolerated) == ([{"s": value, "n": 1}], [])
