"""Shapes that broke other parsers, from public bug reports: several tokens at once, zero arguments, wrong types, calls
in thinking, missing wrappers, malformed parameters, braces in strings, quoted markup."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from parsers.conversation import Tool
from parsers.events import Boundary
from parsers.load import Family
from parsers.schema import property_types
from tests.parsers.parser_support import TOOLS, Parsed, parse, say


@pytest.fixture
def qwen(families: Callable[[str], Family]) -> Family:
    return families("qwen-qwen3_xml")


@pytest.fixture
def hermes(families: Callable[[str], Family]) -> Family:
    return families("qwen-hermes")


def xml(*parameters: tuple[str, str], name: str = "f") -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def arguments(parsed: Parsed) -> object:
    assert [call[3] for call in parsed.calls] == ["complete"]
    return json.loads(parsed.calls[0][2])


DEEP = "[" * 200 + "]" * 200
TYPED = [
    ("u", "null", None),
    ("u", "None", None),
    ("u", "007", "007"),
    ("s", "true", "true"),
    ("s", '{"a": 1}', '{"a": 1}'),
    ("n", "9007199254740993", 9007199254740993),
    ("n", "-007", -7),
    ("n", "many", "many"),
    ("x", "1.5", 1.5),
    ("x", ".5", 0.5),
    ("x", "1e400", float("inf")),
    ("x", "NaN", "NaN"),
    ("b", "True", True),
    ("b", "FALSE", False),
    ("o", '{"k": [1, {}]}', {"k": [1, {}]}),
    ("o", "{'k': True, 'n': None}", {"k": True, "n": None}),
    ("o", "{broken", "{broken"),
    ("o", r'{"k": "\ud800", "\uDc00": "\ud83d\ude00"}', {"k": "\ufffd", "\ufffd": "😀"}),
    ("o", r'{"k": "\ud800\ud83d\ude00\\ud800"}', {"k": "\ufffd😀\\ud800"}),
    ("o", r"{'k': '\ud800', 'e': '\ud83d\ude00'}", {"k": "\ufffd", "e": "😀"}),
    ("o", '{"k": 1e999}', {"k": float("inf")}),
    ("o", f'{{"k": {DEEP}}}', f'{{"k": {DEEP}}}'),
    ("a", f"['x', {DEEP}]", f"['x', {DEEP}]"),
    ("n", "\u0661", "\u0661"),
    ("new", r'["\udfff"]', ["\ufffd"]),
    ("a", "[1, 'two']", [1, "two"]),
    ("new", "5", 5),
    ("new", '"5"', '"5"'),
    ("new", "five", "five"),
    ("r", "12", 12),
    ("e", "3", 3),
    ("m", "[1]", [1]),
    ("m", "[x", "[x"),
]
SCHEMA = {
    "properties": {
        **TOOLS[0].parameters["properties"],
        "r": {"$ref": "#/$defs/count"},
        "e": {"enum": [1, 2, 3]},
        "m": {"oneOf": [{"type": "array"}, {"type": "string"}]},
    },
    "$defs": {"count": {"type": ["int", "null"]}},
}


@pytest.mark.parametrize(("key", "text", "value"), TYPED)
def test_the_schema_types_tagged_values(qwen: Family, key: str, text: str, value: object) -> None:
    parsed = say(qwen, xml((key, text)), (Tool("f", "", SCHEMA),))
    assert arguments(parsed) == {key: value}
    assert parsed.tolerated == (["python_literal"] if "'" in text and value != text else [])
    json.dumps(arguments(parsed), ensure_ascii=False).encode()


def test_a_schema_that_refers_to_itself_many_times_is_read_in_no_time(qwen: Family) -> None:
    reference = {"$ref": "#/properties/s"}
    schema = {"properties": {"s": {"anyOf": [*([reference] * 8), {"anyOf": [dict(reference) for _ in range(8)]}]}}}
    assert arguments(say(qwen, xml(("s", "5")), (Tool("f", "", schema),))) == {"s": 5}
    assert property_types(schema, "s") == frozenset()
    typed = {"properties": {"s": {"anyOf": [reference, {"$ref": "#/$defs/t"}]}}, "$defs": {"t": {"type": "string"}}}
    assert property_types(typed, "s") == {"string"}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r'"\\ud800"', "\\ud800"),
        (r'"\ud800"', "\ufffd"),
        (r'"\ud800x\uDFFF"', "\ufffdx\ufffd"),
        (r'"\ud83d\ude00\ud83d"', "😀\ufffd"),
        (r'"\ud800\ud83d\ude00"', "\ufffd😀"),
        (r'"\ud800\u0041\ud800\n"', "\ufffdA\ufffd\n"),
        (r'["\uD800\\", {"\udc00": "\u00e9"}]', ["\ufffd\\", {"\ufffd": "é"}]),
    ],
)
def test_half_surrogate_pairs_never_leave_json_arguments(hermes: Family, written: str, read: object) -> None:
    (opener,), (closer,) = hermes.encode_raw("<tool_call>"), hermes.encode_raw("</tool_call>")
    for call in (
        '{"name": "g", "arguments": {"k": ' + written + "}}",
        '{"arguments": {"k": ' + written + '}, "name": "g"}',
        '{"name": "g", "arguments": ' + json.dumps('{"k": ' + written + "}") + "}",
    ):
        letters = [token for letter in call for token in hermes.tokenizer.encode(letter)]
        for ids in (hermes.tokenizer.encode(call), letters):
            assert arguments(parse(hermes, [opener, *ids, closer])) == {"k": read}
    named = say(hermes, '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>')
    assert named.calls[0][1] == "\ufffd"


def test_numbers_and_objects_keep_their_spelling(qwen: Family) -> None:
    parsed = say(qwen, xml(("x", "5000.0"), ("o", '{"b":  1, "a": 2.50}')))
    assert parsed.calls[0][2] == '{"x": 5000.0, "o": {"b":  1, "a": 2.50}}'


def test_no_arguments_are_an_empty_object(qwen: Family, hermes: Family) -> None:
    assert arguments(say(qwen, xml(name="g"))) == {}
    for body in ('{"name": "g"}', '{"name": "g", "arguments": null}', '{"name": "g", "arguments": {}}'):
        parsed = say(hermes, f"<tool_call>\n{body}\n</tool_call>")
        assert (arguments(parsed), parsed.tolerated) == ({}, [])


def test_a_call_written_while_thinking_ends_the_thinking(qwen: Family, hermes: Family) -> None:
    body = {qwen: "<function=g>\n</function>", hermes: '{"name": "g", "arguments": {}}'}
    for family in (qwen, hermes):
        parsed = say(family, f"Let me\n<tool_call>\n{body[family]}\n</tool_call><|im_end|>", thinking_open=True)
        assert parsed.parts == [("thinking", "Let me"), ("call", "g", "{}", "complete")]
        assert parsed.tolerated == ["call_in_thinking"]
        kinds = [boundary.kind for boundary in parsed.boundaries]
        assert kinds == ["thinking_start", "thinking_end", "tool_call_start", "tool_call_end", "turn_end"]
        assert parsed.boundaries[1].token == parsed.boundaries[2].token


def test_an_opener_mentioned_while_thinking_is_thinking(qwen: Family) -> None:
    parsed = say(qwen, "I write <tool_call> later.\n</think>\n\nHi.", thinking_open=True)
    assert parsed.parts == [("thinking", "I write <tool_call> later."), ("text", "Hi.")]


def test_a_thinking_closer_in_text_has_no_effect(qwen: Family) -> None:
    spelled = qwen.tokenizer.encode("a </think> b")
    assert parse(qwen, spelled).parts == [("text", "a </think> b")]
    control = say(qwen, "a </think> b")
    assert (control.text, control.tolerated) == ("a  b", ["stray_delimiter"])


def test_thinking_that_never_ends_is_thinking(qwen: Family) -> None:
    parsed = say(qwen, "on and on<|im_end|>", thinking_open=True)
    assert parsed.parts == [("thinking", "on and on")]
    assert parsed.tolerated == ["unclosed_thinking"]
    assert [boundary.kind for boundary in parsed.boundaries] == ["thinking_start", "thinking_end", "turn_end"]


def test_a_missing_wrapper_is_forgiven_for_declared_tools(qwen: Family) -> None:
    bare = "Now:\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>"
    for text in (bare, f"{bare}\n</tool_call>"):
        parsed = say(qwen, text)
        assert (arguments(parsed), parsed.text) == ({"n": 1}, "Now:")
        assert parsed.tolerated[0] == "bare_head"
    assert say(qwen, "Write <function=name> first.").parts == [("text", "Write <function=name> first.")]


def test_spelled_openers_count_outside_quoted_code_only(qwen: Family, hermes: Family) -> None:
    call, line = xml(("n", "1")), xml(("n", "1")).replace("\n", "")
    spelled = parse(qwen, qwen.tokenizer.encode(call))
    assert (arguments(spelled), spelled.tolerated) == ({"n": 1}, ["spelled_opener"])
    for text in (f"```xml\n{call}\n```\ndone", f"Use `{line}` so.", f"~~~\n{call}\n~~~"):
        quoted = parse(qwen, qwen.tokenizer.encode(text))
        assert quoted.parts == [("text", text)]
    after = parse(qwen, qwen.tokenizer.encode(f"```\ncode\n```\n{call}"))
    assert len(after.calls) == 1
    prose = 'Write <tool_call>\n{"name": "the_name"}\n</tool_call> for that.'
    assert parse(hermes, hermes.tokenizer.encode(prose)).parts == [("text", prose)]
    assert parse(qwen, qwen.tokenizer.encode(call), ()).parts == [("text", call)]


def test_missing_closers_are_forgiven_at_a_natural_end(qwen: Family, hermes: Family) -> None:
    head = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n"
    for text in (f"{head}</function>\n</tool_call>", f"{head}</function>", head, f"{head}</tool_call>"):
        for end in ("<|im_end|>", ""):
            assert arguments(say(qwen, text + end)) == {"n": 1}
    for text in ('{"name": "f", "arguments": {"n": 1}}', '{"name": "f", "arguments": {"n": 1}</tool_call>'):
        assert arguments(say(hermes, f"<tool_call>\n{text}<|im_end|>")) == {"n": 1}


def test_a_value_cut_off_by_the_end_of_the_turn_is_incomplete(qwen: Family, hermes: Family) -> None:
    parsed = say(qwen, "<tool_call>\n<function=f>\n<parameter=s>\nhalf<|im_end|>")
    assert parsed.calls == [("call", "f", '{"s": "half', "incomplete")]
    parsed = say(hermes, '<tool_call>\n{"name": "f", "arguments": {"s": "half<|im_end|>')
    assert parsed.calls == [("call", "f", '{"s": "half', "incomplete")]


def test_the_next_parameter_closes_one_without_closer(qwen: Family) -> None:
    text = "<tool_call>\n<function=f>\n<parameter=s>\none\n<parameter=t>\ntwo\n</parameter>\n</function>\n</tool_call>"
    parsed = say(qwen, text)
    assert (arguments(parsed), parsed.tolerated) == ({"s": "one", "t": "two"}, ["missing_parameter_close"])


def test_a_malformed_parameter_is_dropped_and_the_rest_stays_json(qwen: Family) -> None:
    parsed = say(qwen, xml(("n", "1")).replace("<function=f>", "<function=f>\n<parameter=\n</parameter>"))
    assert (arguments(parsed), parsed.tolerated) == ({"n": 1}, ["malformed_parameter"])


def test_of_two_parameters_with_one_key_the_first_wins(qwen: Family) -> None:
    parsed = say(qwen, xml(("n", "1"), ("n", "2")))
    assert (parsed.calls[0][2], parsed.tolerated) == ('{"n": 1}', ["duplicate_parameter"])


def test_values_may_contain_the_format_itself(qwen: Family) -> None:
    value = 'if x < y: # </parameter> and </function> and <parameter=n> inline\n"</parameter>" + more\n  <function=g>'
    parsed = say(qwen, xml(("s", value)))
    assert (arguments(parsed), parsed.tolerated) == ({"s": value}, [])


def test_whitespace_of_values_is_kept_but_for_one_newline(qwen: Family) -> None:
    for value in ("\n", "\n\nx\n\n", "  x  ", "", "\tx"):
        assert arguments(say(qwen, xml(("s", value)))) == {"s": value}


def test_braces_and_closers_in_json_strings_are_content(hermes: Family) -> None:
    value = 'a } b { ] "quoted" \\ </tool_call> end'
    body = json.dumps({"name": "f", "arguments": {"s": value}})
    parsed = say(hermes, f"<tool_call>\n{body}\n</tool_call>")
    assert (arguments(parsed), parsed.tolerated) == ({"s": value}, [])
    deep = '{"o": {"a": {"b": [{"c": "}"}]}}}'
    assert say(hermes, f'<tool_call>\n{{"name": "f", "arguments": {deep}}}\n</tool_call>').calls[0][2] == deep


def test_arguments_before_the_name_and_other_members(hermes: Family) -> None:
    parsed = say(hermes, '<tool_call>{"id": [1, "x"], "arguments": {"n":1}, "name": "f"}</tool_call>')
    assert parsed.calls == [("call", "f", '{"n":1}', "complete")]


def test_an_encoded_argument_object_is_decoded_once(hermes: Family) -> None:
    parsed = say(hermes, r'<tool_call>{"name": "f", "arguments": "{\"s\": \"a\\nb\"}"}</tool_call>')
    assert (arguments(parsed), parsed.tolerated) == ({"s": "a\nb"}, ["encoded_arguments"])


def test_raw_newlines_in_json_strings_are_escaped(hermes: Family) -> None:
    parsed = say(hermes, '<tool_call>{"name": "f", "arguments": {"s": "a\nb"}}</tool_call>')
    assert (arguments(parsed), parsed.tolerated) == ({"s": "a\nb"}, ["raw_control_character"])


@pytest.mark.parametrize(
    "body", ["not json", '{"arguments": {}}', '["f"]', '{"name": 5}', '{"name": "f", "arguments": [1]}', "{,,x"]
)
def test_an_unreadable_call_is_text_and_the_next_one_is_found(hermes: Family, body: str) -> None:
    broken = f"<tool_call>\n{body}\n</tool_call>"
    parsed = say(hermes, f'{broken}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call><|im_end|>')
    assert parsed.parts == [("text", broken), ("call", "g", "{}", "complete")]
    assert parsed.tolerated == ["malformed_call"]


def test_an_unreadable_body_never_becomes_an_empty_object(hermes: Family) -> None:
    parsed = say(hermes, '<tool_call>\n{"name": "f", "arguments": {"n": oops}}\n</tool_call>')
    assert parsed.calls == [("call", "f", '{"n": oops}', "incomplete")]


def test_two_calls_in_one_wrapper(qwen: Family) -> None:
    inner = "<function=g>\n</function>\n"
    parsed = say(qwen, f"<tool_call>\n{inner}{inner}</tool_call><|im_end|>")
    assert parsed.calls == [("call", "g", "{}", "complete")] * 2


def test_a_call_without_closer_before_the_next(qwen: Family) -> None:
    parsed = say(qwen, f"<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n{xml(name='g')}")
    assert [(call[1], call[3]) for call in parsed.calls] == [("f", "complete"), ("g", "complete")]


def test_quoted_names_and_unknown_control_tokens(qwen: Family) -> None:
    parsed = say(qwen, 'a<|fim_prefix|>b<|im_start|>c<tool_call>\n<function="g">\n</function>\n</tool_call>')
    assert parsed.calls == [("call", "g", "{}", "complete")]
    assert parsed.text == "a<|fim_prefix|>bc"
    assert parsed.tolerated == ["stray_control_token", "header_spelling"]


def test_text_around_calls_keeps_its_order(hermes: Family) -> None:
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    parsed = say(hermes, f"One. \n{call}\n\nTwo.\n{call}\n")
    assert [part[:2] for part in parsed.parts] == [("text", "One."), ("call", "g"), ("text", "\n\nTwo."), ("call", "g")]


def test_thinking_may_come_back_after_text(qwen: Family) -> None:
    parsed = say(qwen, "First.\n<think>\nHm.\n</think>\n\nSecond.<|im_end|>")
    assert parsed.parts == [("text", "First."), ("thinking", "Hm."), ("text", "Second.")]


def test_a_freeform_tool_gets_one_string(qwen: Family) -> None:
    parsed = say(qwen, xml(("input", '*** Begin\n{"x": 1}\n'), name="patch"))
    assert arguments(parsed) == {"input": '*** Begin\n{"x": 1}\n'}


def test_escapes_split_anywhere_stay_escapes(hermes: Family) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"s": "\\ud83d\\ude00 \\u00e9 \\\\"}}</tool_call>'
    control = {token: name for name, token in hermes.tokenizer.control.items()}
    ids = [
        piece
        for token in hermes.encode_raw(text)
        for piece in ([token] if token in control else _singles(hermes, hermes.tokenizer.decode([token])))
    ]
    assert arguments(parse(hermes, ids)) == {"s": "😀 é \\"}


def _singles(family: Family, text: str) -> list[int]:
    return [token for letter in text for token in family.tokenizer.encode(letter)]


def test_an_empty_answer_has_only_its_end(qwen: Family) -> None:
    parsed = say(qwen, "<|im_end|>")
    assert (parsed.parts, parsed.boundaries) == ([], [Boundary("turn_end", 1)])
