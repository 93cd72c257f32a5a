"""Each codec by itself: what it reads, what it forgives and counts, and what it gives back as unreadable."""

from __future__ import annotations

import json
import re

import pytest

from parsers import source
from parsers.conversation import Block, Tool, ToolCall
from parsers.schema import NESTING, Shape, is_json, json_of, property_types, too_deep
from tests.parsers.parsed import Parsed
from tests.parsers.report_support import arguments, heard, tool
from tests.parsers.wire_support import NAMES, machine

Tolerated = list[str]


def kimi(body: str) -> Parsed:
    return heard("kimi_k2", f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{body}<|tool_call_end|>")


def hermes(body: str) -> Parsed:
    return heard("hermes", f"<tool_call>\n{body}\n</tool_call><|im_end|>")


def dsml(*parameters: str) -> Parsed:
    body = "".join(f"<｜DSML｜parameter {one}</｜DSML｜parameter>\n" for one in parameters)
    call = f'<｜DSML｜invoke name="f">\n{body}</｜DSML｜invoke>\n'
    return heard("deepseek_v4", f"<｜DSML｜tool_calls>\n{call}</｜DSML｜tool_calls>")


def k3(body: str) -> Parsed:
    call = f'<|open|>call tool="f" index="1"<|sep|>{body}<|close|>call<|sep|>'
    return heard("kimi_k3", f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>")


def gemma(body: str) -> Parsed:
    return heard("gemma4", f"<|tool_call>call:f{body}<tool_call|><turn|>")


def python(body: str) -> Parsed:
    return heard("lfm2", f"<|tool_call_start|>[{body}]<|tool_call_end|><|im_end|>")


M3 = "]<]minimax[>["


def minimax(body: str, **properties: object) -> Parsed:
    call = f'{M3}<tool_call>\n{M3}<invoke name="f">{body.replace("@", M3)}{M3}</invoke>\n{M3}</tool_call>'
    return heard("minimax_m3", call, tool(**properties)) if properties else heard("minimax_m3", call)


def read(parsed: Parsed) -> tuple[object, list[str]]:
    """The one call's arguments, and what was forgiven."""
    (decoded,) = arguments(parsed)
    return decoded, [rule for rule in parsed.tolerated if rule != "bare_head"]


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "body", ['{"n":  1.50, "s" : "\\u00e9"}', "{}", '{"b": 1, "a": {"c": [ ]}}', '{"n": -0, "n": 2}']
)
def test_json_is_verbatim(body: str) -> None:
    assert kimi(body).calls == [("call", "f", body, "complete")]


@pytest.mark.parametrize(
    ("body", "value", "rules"),
    [
        ("", {}, []),
        ("null", {}, []),
        ('"{\\"n\\": 1}"', {"n": 1}, ["encoded_arguments"]),
        ('{"n": 1,}', {"n": 1}, ["trailing_comma"]),
        ('{"a": [1, 2, ], "n": 1 , }', {"a": [1, 2], "n": 1}, ["trailing_comma"]),
        ('{"b": True, "u": None, "s": "True"}', {"b": True, "u": None, "s": "True"}, ["python_literal"]),
        ("{'s': 'it\\'s \"x\"\\x41', 'n': 1}", {"s": 'it\'s "x"A', "n": 1}, ["python_literal"]),
        ('{"s": "a\nb\tc"}', {"s": "a\nb\tc"}, ["raw_control_character"]),
    ],
)
def test_json_with_what_is_forgiven(body: str, value: object, rules: Tolerated) -> None:
    assert read(kimi(body)) == (value, rules)


@pytest.mark.parametrize("number", ["1e999", "-1E+5000", "9" * 5000, "1." + "0" * 5000])
def test_numbers_of_any_size_are_passed_on_as_they_are(number: str) -> None:
    """No client may read it, but it is what the tool's schema and every grammar of JSON allow."""
    body = f'{{"x": {number}, "a": [{number}]}}'
    spelled = {"x": number, "a": [number]}
    texts = [kimi(body).calls[0][2]]
    for name, value in (("gemma4", f"x:{number},a:[{number}]"), ("llama4", f"x={number}, a=[{number}]")):
        found = machine(name)
        call = f"<|tool_call>call:f{{{value}}}<tool_call|>" if name == "gemma4" else f"[f({value})]"
        texts.append(found.say(call).calls[0][2])
    qwen = machine("qwen3_xml").say(
        f"<tool_call>\n<function=f>\n<parameter=x>\n{number}\n</parameter>\n<parameter=a>\n[{number}]\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    for text in (*texts, qwen.calls[0][2]):
        assert json.loads(text, parse_float=str, parse_int=str) == spelled


@pytest.mark.parametrize("body", ["[1]", "12", '"text"', "nul", "{oops}", '{"n": NaN}', '{"n" 1}'])
def test_what_is_no_json_object_never_becomes_one(body: str) -> None:
    for call in kimi(body).calls:
        assert call[3] == "incomplete"
        assert call[2] != "{}"


@pytest.mark.parametrize(
    ("body", "rules"),
    [
        ('{"arguments": {"n": 1}, "name": "f"}', []),
        ('{"id": "x", "type": "function", "name": "f", "parameters": {"n": 1}}', []),
        ('{"name": "f", "arguments": "{\\"n\\": 1}"}', ["encoded_arguments"]),
        ('{"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}', ["nested_call"]),
        ('{"function": {"arguments": {"n": 1}, "name": "f"}}', ["nested_call"]),
        ('{"name": "f", "arguments": {"n": 1}', ["missing_brace"]),
    ],
)
def test_json_calls_in_any_order(body: str, rules: Tolerated) -> None:
    assert read(hermes(body)) == ({"n": 1}, rules)


def test_a_list_of_json_calls() -> None:
    one, two = '{"name": "f", "arguments": {"n": 1}, "id": "a"}', '{"name": "g", "arguments": {}, "id": "b"}'
    for text in (f"[{one}, {two}]", f" [\n{one},\n{two}\n]", f"{one},{two}"):
        assert arguments(heard("mistral_v3", f"[TOOL_CALLS]{text}</s>")) == [{"n": 1}, {}]


def test_llama_joins_calls_with_semicolons() -> None:
    text = '{"name": "f", "parameters": {"n": 1}}; {"name": "g", "parameters": {}}<|eot_id|>'
    assert arguments(heard("llama3", text)) == [{"n": 1}, {}]
    assert arguments(heard("llama3", f"<|python_tag|>{text}")) == [{"n": 1}, {}]


# ── tagged ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_type_on_the_wire_wins() -> None:
    assert read(dsml('name="n" string="true">12', 'name="s" string="false">12')) == ({"n": "12", "s": 12}, [])
    assert read(dsml('name="s" string="true">a ">b"</x>')) == ({"s": 'a ">b"</x>'}, [])
    assert read(dsml('name="o" string="false">{"a": [1]}', 'name="x" string="false">words')) == (
        {"o": {"a": [1]}, "x": "words"},
        [],
    )
    assert read(dsml('name="o" string="false">{\'a\': None}')) == ({"o": {"a": None}}, ["python_literal"])


def test_a_missing_type_leaves_it_to_the_schema() -> None:
    assert read(dsml('name="n">12', 'name="s">12', 'name="new">[1]')) == (
        {"n": 12, "s": "12", "new": [1]},
        ["missing_type"],
    )


def test_arguments_wrapped_once_more_are_unwrapped() -> None:
    assert read(dsml('name="arguments" string="false">{"n":  1}')) == ({"n": 1}, ["wrapped_arguments"])
    several = dsml('name="arguments" string="false">{"n": 1}', 'name="s" string="true">x')
    assert read(several) == ({"arguments": {"n": 1}, "s": "x"}, [])


def test_kimi_k3_types_escapes_and_whole_objects() -> None:
    key = "a&amp;b&quot;&amp;lt;"
    values = {"string": ("12", "12"), "number": ("1.50", 1.5), "boolean": ("true", True), "null": ("null", None)}
    values |= {"object": ('{"x": [1]}', {"x": [1]}), "array": ("[]", [])}
    for kind, (text, value) in values.items():
        body = f'<|open|>argument key="{key}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'
        assert read(k3(body)) == ({'a&b"&lt;': value}, [])
    whole = '<|open|>json type="object"<|sep|>{"n":  1}<|close|>json<|sep|>'
    assert k3(whole).calls == [("call", "f", '{"n":  1}', "complete")]
    assert read(k3("")) == ({}, [])


@pytest.mark.parametrize("quote", ['"', "'", ""])
def test_minimax_m2_quotes_names_as_it_likes(quote: str) -> None:
    call = f"<invoke name={quote}f{quote}>\n<parameter name={quote}s{quote}>a>b</parameter>\n</invoke>\n"
    parsed = heard("minimax_m2", f"<minimax:tool_call>\n{call}</minimax:tool_call>")
    assert arguments(parsed) == [{"s": "a>b"}]
    assert ("quoted_key" in parsed.tolerated) == (quote != '"')


@pytest.mark.parametrize("gap", ["", "\n", " ", "\n\n"])
@pytest.mark.parametrize("name", ["glm45", "glm47", "ling3", "hy3"])
def test_white_space_between_key_and_value_is_layout(name: str, gap: str) -> None:
    family = machine(name)
    text = family.tokenizer.decode(family.output([ToolCall("", "f", '{"s": "x"}')]))
    suffix = ":opensource" if name == "hy3" else ""
    spread = re.sub(f"</arg_key{suffix}>\\s*<", f"</arg_key{suffix}>{gap}<", text)
    assert read(heard(name, spread)) == ({"s": "x"}, [])


def test_a_value_may_hold_pieces_of_the_format() -> None:
    family = machine("qwen3_xml")
    head = "<tool_call>\n<function=g>\n<parameter=other>\n1"
    for value in (head, f"Say:\n{head}\nthen", "</parameter>", "a </parameter>\nb", "</function>", "\n</tool_call>\n"):
        parsed = family.parse(family.output([ToolCall("", "f", json.dumps({"s": value, "n": 2}))]))
        assert read(parsed) == ({"s": value, "n": 2}, [])


def test_text_in_place_of_parameters_makes_no_empty_call() -> None:
    parsed = heard("qwen3_xml", "<tool_call>\n<function=f>\nn is 1\n</function>\n</tool_call>")
    assert [call[2:] for call in parsed.calls] == [("", "incomplete")]


# ── literals ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "value", "rules"),
    [
        ("{}", {}, []),
        ("{n:1,b:true,u:null,x:-1.5e3}", {"n": 1, "b": True, "u": None, "x": -1500.0}, []),
        ("{u:None,b:False}", {"u": None, "b": False}, []),
        ('{o:{k:[1,{z:<|"|>y<|"|>}],e:{}},a:[]}', {"o": {"k": [1, {"z": "y"}], "e": {}}, "a": []}, []),
        ('{ n : 1 ,\n s: <|"|> x <|"|> }', {"n": 1, "s": " x "}, []),
        ('{a:b:<|"|>x<|"|>,c}d:1}', {"a:b": "x", "c}d": 1}, []),
        ('{<|"|>odd key, "x"<|"|>:1}', {'odd key, "x"': 1}, []),
        ('{s:<|"|>a "quoted" \\n {x:1}, }<|"|>}', {"s": 'a "quoted" \\n {x:1}, }'}, []),
        ("{s:words and more,n:2}", {"s": "words and more", "n": 2}, ["bare_string"]),
        ('{s:"plain",n:2,}', {"s": "plain", "n": 2}, ["plain_quotes"]),
        ('(n=1,s=<|"|>x<|"|>)', {"n": 1, "s": "x"}, ["parentheses"]),
        ("{n:1,n:2}", {"n": 1}, ["duplicate_parameter"]),
        ('{n:1,n:{a:[2]},s:"x"}', {"n": 1, "s": "x"}, ["duplicate_parameter", "plain_quotes"]),
        ("", {}, []),
    ],
)
def test_gemma_literals(body: str, value: object, rules: Tolerated) -> None:
    assert read(gemma(body)) == (value, rules)


@pytest.mark.parametrize("body", ["{n", "{n:}", "{n:1", "{:", "[1]", "{n:1]"])
def test_gemma_literals_that_end_nowhere_are_incomplete(body: str) -> None:
    for call in gemma(body).calls:
        assert call[3] == "incomplete"


@pytest.mark.parametrize(
    ("body", "value", "rules"),
    [
        ("f()", {}, []),
        ("f(n=1, b=True, u=None, x=1_000.5)", {"n": 1, "b": True, "u": None, "x": 1000.5}, []),
        ("f(b=true, u=null)", {"b": True, "u": None}, []),
        ('f(s=\'it\\\'s\', t="a\\n\\"b\\"")', {"s": "it's", "t": 'a\n"b"'}, []),
        ("f(s='''a 'b'\n\"c\"''')", {"s": "a 'b'\n\"c\""}, []),
        ("f(s='it's', t='x')", {"s": "it's", "t": "x"}, []),
        ("f(s='\\x41\\u00e9\\U0001F600\\d')", {"s": "Aé😀\\d"}, []),
        ("f(o={'k': [1, (2, 3)], 'e': {}}, a=[])", {"o": {"k": [1, [2, 3]], "e": {}}, "a": []}, []),
        ('f(o={"k": true})', {"o": {"k": True}}, []),
        ("f(n=0x1f, x=.5)", {"n": 31, "x": 0.5}, []),
        ('f(n="2", s="2")', {"n": 2, "s": "2"}, ["quoted_value"]),
        ("f( n = 1 , )", {"n": 1}, []),
        ("f(n=1, n=2)", {"n": 1}, ["duplicate_parameter"]),
        ('{"name": "f", "arguments": {"n": 1}}', {"n": 1}, ["json_call"]),
    ],
)
def test_python_calls(body: str, value: object, rules: Tolerated) -> None:
    assert read(python(body)) == (value, rules)


@pytest.mark.parametrize(
    "body",
    ["f(1)", "f(n=g())", "f(n=open('x'))", "f(n=1+1)", "f(**{'n': 1})", "f(n=f'{x}')", "f(n=x)", "f(n=[1", "f(n=1j)"],
)
def test_python_code_is_never_run_or_completed(body: str) -> None:
    for call in python(body).calls:
        assert call[3] == "incomplete"


def test_several_python_calls() -> None:
    assert arguments(python('f(n=1), g(), f(s="x, f(n=2)")')) == [{"n": 1}, {}, {"s": "x, f(n=2)"}]
    lines = heard("olmo3", "<function_calls>f(n=1)\ng()\nf(s='x')</function_calls><|im_end|>")
    assert arguments(lines) == [{"n": 1}, {}, {"s": "x"}]


# ── elements ──────────────────────────────────────────────────────────────────────────────────────────────────────

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "tags": {"type": "array"}, "zip": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("body", "schema", "value", "rules"),
    [
        ("@<p>12@</p>", {"type": "integer"}, 12, []),
        ("@<p>12@</p>", {"type": "string"}, "12", []),
        ("@<p>@</p>", {"type": "string"}, "", []),
        ("@<p>@</p>", {"type": "array"}, [], []),
        ("@<p>@</p>", PERSON, {}, []),
        ("@<p>@<item>1@</item>@<item>2@</item>@</p>", {"type": "array", "items": {"type": "integer"}}, [1, 2], []),
        ("@<p>@<item>1@</item>@</p>", {"type": "array", "items": {"type": "string"}}, ["1"], []),
        ("@<p>@<item>@<age>3@</age>@</item>@</p>", {"type": "array", "items": PERSON}, [{"age": 3}], []),
        ("@<p>\n@<age>3@</age>\n@<zip>007@</zip>\n@</p>", PERSON, {"age": 3, "zip": "007"}, []),
        ("@<p>@<tags>a@</tags>@<tags>b@</tags>@</p>", PERSON, {"tags": ["a", "b"]}, []),
        ("@<p>1@</p>@<p>2@</p>", {"type": "array", "items": {"type": "integer"}}, [1, 2], []),
        ('@<p>{"age": 3}@</p>', PERSON, {"age": 3}, []),
        ("@<p>text @<age>3@</age>@</p>", PERSON, {"age": 3}, ["text_in_call"]),
        ("@<p>a @<b>c@</b> d@</p>", {"type": "string"}, f"a {M3}<b>c{M3}</b> d", []),
        ("@<p>@<age>3@</p>", PERSON, {"age": 3}, ["missing_parameter_close"]),
        ("@<p>@<age>3@</age>", PERSON, {"age": 3}, ["missing_parameter_close"]),
        ("@<p>one", {"type": "string"}, "one", ["missing_parameter_close"]),
        ("@<p>3@</p>@</q>", {"type": "integer"}, 3, ["stray_close"]),
    ],
)
def test_elements(body: str, schema: object, value: object, rules: Tolerated) -> None:
    assert read(minimax(body, p=schema)) == ({"p": value}, rules)


def test_elements_of_an_undeclared_argument() -> None:
    assert read(minimax("@<new>@<a>1@</a>@<b>@<item>x@</item>@</b>@</new>")) == ({"new": {"a": 1, "b": ["x"]}}, [])


def test_of_elements_that_come_again_the_first_counts() -> None:
    assert read(minimax("@<n>1@</n>@<s>x@</s>@<n>2@</n>")) == ({"n": 1, "s": "x"}, ["duplicate_parameter"])


# ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────────

VALUES = {
    "s": 'a "b" \\ \n\n c\u2028\x00😀',
    "t": "",
    "u": "007",
    "n": 2**63,
    "x": -0.5,
    "b": False,
    "o": {"": 1, "k.1": {"z": []}},
    "a": [{}, [], "x"],
}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read(name: str) -> None:
    family = machine(name)
    values = VALUES if name != "minimax_m3" else {**VALUES, "o": {"k": [1, 2]}, "a": ["x", 1]}
    values |= {"n": 2**53 + 1} if name == "minimax_m3" else {}
    for key, value in values.items():
        call = ToolCall("functions.f:0", "f", json.dumps({key: value}, ensure_ascii=False))
        assert read(family.parse(family.output([call]))) == ({key: value}, [])


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_levels_are_read_and_endless_ones_refused(name: str) -> None:
    family = machine(name)
    deep: object = 1
    for _ in range(100):
        deep = [deep]
    ids = family.output([ToolCall("functions.f:0", "f", json.dumps({"a": deep}))])
    assert read(family.parse(ids)) == ({"a": deep}, [])
    level = f"{M3}<item>" if name == "minimax_m3" else "["
    endless = family.tokenizer.decode(ids).replace(level * 100, level * 20_000)
    for call in family.parse(family.tokenizer.encode_trusted(endless)).calls:
        assert call[3] == "incomplete" or isinstance(json.loads(call[2])["a"], str)


@pytest.mark.parametrize("name", ["kimi_k2", "qwen3_xml", "kimi_k3", "gemma4", "minimax_m3", "lfm2", "mistral_v3"])
def test_the_work_grows_with_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    held = source.Stops.held

    def counted(self: source.Stops, text: str) -> int:
        nonlocal seen
        seen += len(text)
        return held(self, text)

    monkeypatch.setattr(source.Stops, "held", counted)
    family, spent = machine(name), []
    for size in (100, 400):
        seen = 0
        value = {"s": 'it\'s "x" <p \n' * size, "a": [{"k": ["v", 1]}] * size}
        assert read(family.parse(family.output([ToolCall("functions.f:0", "f", json.dumps(value))])))[0] == value
        spent.append(seen)
    assert spent[1] < 4.5 * spent[0]


# ── schemas ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "int"}, {"integer"}),
        ({"type": ["str", "null"]}, {"string", "null"}),
        ({"type": "dict"}, {"object"}),
        ({"type": "list"}, {"array"}),
        ({"type": "float", "nullable": True}, {"number", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}, {"string", "integer"}),
        ({"allOf": [{"$ref": "#/definitions/d~1e"}]}, {"array"}),
        ({"$ref": "#/$defs/u%20v/anyOf/1"}, {"null"}),
        ({"$ref": "#/$defs/u v/anyOf/" + "9" * 5000}, set()),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({}, set()),
    ],
)
def test_types_are_found_wherever_a_schema_says_them(schema: object, types: set[str]) -> None:
    root = {
        "properties": {"p": schema},
        "$defs": {"n": {"type": "integer"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}
        | {"u v": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "definitions": {"d/e": {"type": "array"}},
    }
    assert property_types(root, "p") == types


def test_shapes_know_what_is_inside() -> None:
    many = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}
    root = {"properties": {"p": many}, "$defs": {"n": {"type": "integer"}}}
    shape = Shape(root, root).member("p")
    assert shape is not None
    item = shape.item()
    assert item is not None
    assert item.types == {"integer"}
    assert property_types({"additionalProperties": {"type": "string"}}, "any") == {"string"}
    assert property_types({"additionalProperties": False}, "any") is None


def test_a_schema_of_any_depth_is_walked() -> None:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(3000):
        schema = {"anyOf": [schema]}
    assert property_types({"properties": {"p": schema}}, "p") == {"string"}


def test_python_text_in_a_value_needs_no_valid_escapes() -> None:
    assert json_of(r"{'a': '\d+\\n'}", frozenset({"object"})) == (json.dumps({"a": "\\d+\\n"}), True)


@pytest.mark.parametrize(("leaf", "deeper"), [("1", 0), ('"["', 0), ("[]", 1), ('[["}"], {}]', 2)])
def test_depth_is_that_of_containers_however_it_is_counted(leaf: str, deeper: int) -> None:
    for depth in range(NESTING - 3, NESTING + 3):
        text = "[" * depth + leaf + "]" * depth
        assert is_json(text) == (not too_deep(json.loads(text))) == (depth + deeper <= NESTING)


@pytest.mark.parametrize("name", ["llama4", "lfm2", "olmo3"])
def test_python_calls_know_declared_names_that_are_none_in_python(name: str) -> None:
    family = machine(name)
    for odd in ("3d-view", "-x", "ns:f", "naïve", "$ref", "a/b"):
        declared = tuple(
            Tool(one, "", {"type": "object", "properties": {odd: {"type": "string"}}}) for one in (odd, "f")
        )
        calls: list[Block] = [ToolCall("call00001", one.name, json.dumps({odd: "v"})) for one in declared]
        parsed = family.parse(family.output(calls), declared)
        assert [(call[1], json.loads(call[2]), call[3]) for call in parsed.calls] == [
            (one.name, {odd: "v"}, "complete") for one in declared
        ]
        assert family.parse(family.output(calls[:1]), (Tool("g", ""),)).calls == []


VALUE = "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>"
END = "\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("behind", "parts", "rules"),
    [
        ("\n\nSo.", [("call", "f", "x"), ("text", "\n\nSo.")], ["missing_call_close"]),
        ("\n</parameter> So", [("call", "f", "x"), ("text", "\n</parameter> So")], ["missing_call_close"]),
        (f"\n\nSo.\n{VALUE}\n</tool_call>", [("call", "f", "x"), ("text", "\n\nSo."), ("call", "f", "x")], None),
        ("\n<function=g>\n</function>\n</tool_call>", [("call", "f", "x"), ("call", "g", "")], None),
        ("\n\nSo." + END, [("call", "f", "x\n</parameter>\n</function>\n\nSo.")], []),
        ("\n<function=h>" + END, [("call", "f", "x\n</parameter>\n</function>\n<function=h>")], []),
        (" " * 5000 + END, [("call", "f", "x\n</parameter>\n</function>" + " " * 5000)], []),
        (" x" * 5000 + END, [("call", "f", "x\n</parameter>\n</function>" + " x" * 5000)], []),
    ],
)
def test_text_behind_a_call_without_its_closer_is_no_value(
    behind: str, parts: list[tuple[str, ...]], rules: list[str] | None
) -> None:
    """Unless a better end of the value comes later."""
    parsed = heard("qwen3_xml", f"{VALUE}{behind}<|im_end|>")
    found = [(*part[:2], json.loads(part[2]).get("s", "")) if part[0] == "call" else part for part in parsed.parts]
    assert found == parts
    assert rules in (None, parsed.tolerated)
    assert all(call[3] == "complete" for call in parsed.calls)
    assert not heard("qwen3_xml", f"{VALUE}{behind}"[: len(VALUE) + 4], reason="length").text
