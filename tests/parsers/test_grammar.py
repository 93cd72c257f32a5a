"""Grammars of every format: what they allow parses as exactly what was demanded, without a single tolerance."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from engine.grammar import GrammarError as EngineGrammarError
from parsers.conversation import Tool
from parsers.families.registry import FORMATS
from parsers.grammar import Demand, GrammarError
from tests.parsers.grammar_support import HERMES, accepts, grammar, guide, walk, xml
from tests.parsers.wire_support import NAMES, machine

PROPERTIES: dict[str, Any] = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "b": {"type": "boolean"},
    "e": {"enum": ["red", "light green"]},
    "u": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
    "l": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    "o": {"$ref": "#/$defs/place"},
}
PLACE = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}, "required": ["x"]}
PROBE = Tool(
    "probe",
    parameters={"type": "object", "properties": PROPERTIES, "required": ["s", "n"], "$defs": {"place": PLACE}},
    strict=True,
)
EMPTY = Tool("no_args", parameters={"type": "object", "properties": {}}, strict=True)
SING = Tool("sing", freeform=True, grammar=("lark", 'start: line+\nline: /[a-c"]+/ LF\n%import common.LF'))
TOOLS = (PROBE, EMPTY, SING)
KEYS = (*PROPERTIES, "x", "y", "input")
ANSWER = {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}
SEEDS = range(3)


def check(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    match name:
        case "no_args":
            assert value == {}
        case "sing":
            assert value.keys() == {"input"} and re.fullmatch(r'(?:[a-c"]+\n)+', value["input"])
        case "probe":
            assert value.keys() <= PROPERTIES.keys() and value.keys() >= {"s", "n"}
            assert isinstance(value["s"], str) and type(value["n"]) is int
            assert type(value.get("b", True)) is bool and value.get("e", "red") in PROPERTIES["e"]["enum"]
            assert value.get("u") is None or (isinstance(value["u"], str) and len(value["u"]) <= 4)
            numbers = value.get("l", [])
            assert len(numbers) <= 3 and all(type(number) is int for number in numbers)
            place = value.get("o", {"x": 1})
            assert place.keys() <= {"x", "y"} and type(place["x"]) is int and isinstance(place.get("y", ""), str)
        case _:
            raise AssertionError(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_demanded_call_parses_as_one(name: str) -> None:
    text = grammar(name, TOOLS, Demand("required"))
    for seed in SEEDS:
        ids = walk(name, text, seed, KEYS)
        parsed = machine(name).parse(ids, TOOLS)
        assert parsed.calls and not parsed.text.strip() and not parsed.tolerated, machine(name).tokenizer.decode(ids)
        for _, called, arguments, state in parsed.calls:
            assert state == "complete"
            check(called, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_tool_is_called_once(name: str) -> None:
    text = grammar(name, TOOLS, Demand("required", only=("probe",), parallel=False))
    for seed in SEEDS:
        parsed = machine(name).parse(walk(name, text, seed, KEYS), TOOLS)
        ((_, called, arguments, state),) = parsed.calls
        assert (called, state, parsed.tolerated) == ("probe", "complete", [])
        check(called, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_strict_tools_among_free_text(name: str) -> None:
    text = grammar(name, TOOLS, Demand("auto"))
    for seed in SEEDS:
        parsed = machine(name).parse(walk(name, text, seed, KEYS), TOOLS)
        for _, called, arguments, state in parsed.calls:
            assert state == "complete"
            check(called, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_text_by_a_schema_or_calls(name: str) -> None:
    alone = grammar(name, (), Demand(answer=ANSWER))
    either = grammar(name, TOOLS, Demand(answer=ANSWER))
    for seed in SEEDS:
        parsed = machine(name).parse(walk(name, alone, seed, KEYS), ())
        assert type(json.loads(parsed.text)["k"]) is int and not parsed.calls and not parsed.tolerated
        parsed = machine(name).parse(walk(name, either, seed, KEYS), TOOLS)
        assert bool(parsed.calls) != bool(parsed.text.strip()) and not parsed.tolerated


@pytest.mark.parametrize("name", [one.name for one in FORMATS if one.think])
def test_thinking_comes_first_and_is_free(name: str) -> None:
    """Field reports 28, 67 and 69: the grammar neither forbids thinking nor reaches into it."""
    think = next(one.with_suffix(":opensource") for one in FORMATS if one.name == name).think
    assert think is not None
    unopened, opened, closed = (
        grammar(name, (EMPTY,), Demand("required"), opener, thinking)
        for opener, thinking in (("", True), (think.open, True), (f"{think.open}{think.close}", False))
    )
    call = _written(name, EMPTY)
    thought = 'Hm, {"a": 1} or <b>?'
    assert accepts(name, unopened, f"{think.open}{thought}{think.close}{think.after}{call}")
    assert accepts(name, unopened, call) and accepts(name, closed, call)
    assert accepts(name, opened, f"{thought}{think.close}{call}")
    assert not accepts(name, opened, call) and not accepts(name, closed, f"{think.open}{thought}{think.close}{call}")
    assert not accepts(name, unopened, f"{think.open}{thought}{think.close}Hello")


def _written(name: str, tool: Tool) -> str:
    """A call as the format writes it, found by walking."""
    ids = walk(name, grammar(name, (tool,), Demand("required", parallel=False), thinking=False), 0, KEYS)
    return machine(name).tokenizer.decode(ids)


def test_channels_need_no_thinking() -> None:
    """Field report 64: the grammar is there whether the model thinks first or not, and in any channel."""
    muse = grammar("muse_glimmer", (EMPTY,), Demand("required"))
    call = (
        " to=no_args<|message|><atem:function_calls>\n"
        '<atem:invoke name="no_args">\n</atem:invoke>\n</atem:function_calls><|eom|>'
    )
    assert accepts("muse_glimmer", muse, call)
    assert accepts("muse_glimmer", muse, f" to=self<|message|>Well.<|eom|><|start|>assistant{call}")
    assert not accepts("muse_glimmer", muse, " to=user<|message|>Hello")


def test_a_prefilled_channel_can_be_closed() -> None:
    """Field report 66: with thinking switched off, the prompt has opened the channel of the answer already."""
    opened = grammar("kimi_k3", (EMPTY,), Demand("required"), "<|open|>response<|sep|>", thinking=False)
    call = '<|open|>tools<|sep|><|open|>call tool="no_args" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    assert accepts("kimi_k3", opened, f"<|close|>response<|sep|>{call}")
    assert not accepts("kimi_k3", opened, call) and not accepts("kimi_k3", opened, f"Yes<|close|>response<|sep|>{call}")


def test_calls_keep_their_section_and_their_ids() -> None:
    """Field reports 35 and 68: the wrapper that the parser wants is part of the grammar, noise between calls is not."""
    text = grammar("kimi_k2", (EMPTY,), Demand("required"))
    one = "<|tool_call_begin|>functions.no_args:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    assert accepts("kimi_k2", text, one.join(section)) and accepts("kimi_k2", text, (one + one).join(section))
    assert not accepts("kimi_k2", text, one) and not accepts("kimi_k2", text, f"{one} and {one}".join(section))
    assert not accepts("kimi_k2", text, one.replace("no_args:", "no_args\n:").join(section))


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ('{"s": "x", "n": 1}', True),
        ('{"s": "x", "n": 1, "o": {"x": 2}}', True),
        ('{"s": "x"}', False),
        ('{"s": "x", "n": 1, "z": 1}', False),
        ('{"s": "x", "n": "1"}', False),
        ('{"s": "x", "n": 1, "e": "blue"}', False),
        ('{"s": "x", "n": 1, "o": {"y": "1"}}', False),
        ('{"s": "x", "n": 1, "o": {"x": 1, "z": 2}}', False),
        ('{"s": "x", "n": 1, "l": [1, 2, 3, 4]}', False),
        ('{"s": "x", "n": 1, "u": "12345"}', False),
    ],
)
def test_keys_and_types(arguments: str, right: bool) -> None:
    assert accepts("hermes", grammar("hermes", TOOLS, Demand("required")), HERMES.format(arguments)) is right


@pytest.mark.parametrize(
    ("call", "right"),
    [
        (xml(s="any </div> text\n\n<x>", n="1"), True),
        (xml(s="x", n="1", u="null", o='{"x": 2}'), True),
        (xml(s="x", n="1", u="1234"), True),
        (xml(s="x", n="one"), False),
        (xml(n="1"), False),
        (xml(s="x", n="1", b="yes"), False),
        (xml(s="x", n="1", e="blue"), False),
        (xml(s="x", n="1", o='{"y": "z"}'), False),
        (xml(s="x", n="1", z="1"), False),
        (xml(s="x", n="1", u="12345"), False),
        (xml(s="x\n<parameter=n>\n2", n="1"), False),
    ],
)
def test_parameters_in_text(call: str, right: bool) -> None:
    assert accepts("qwen3_xml", grammar("qwen3_xml", TOOLS, Demand("required")), call) is right


def test_a_mixed_type_is_what_the_reader_makes_of_it() -> None:
    """A string that reads as an object would be one; a number where a string may be is a string, and no number."""
    mixed = {
        "a": {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"k": {"type": "integer"}}}]},
        "b": {"enum": ["x", 1, None]},
    }
    tool = Tool("probe", parameters={"type": "object", "properties": mixed, "required": ["a", "b"]}, strict=True)
    text = grammar("qwen3_xml", (tool,), Demand("required"))
    for a, b, right in (
        ("text", "x", True),
        ('{"k": 1}', "null", True),
        ('{"k": "v"}', "x", False),
        ("{broken", "x", False),
        ("text", "1", False),
    ):
        assert accepts("qwen3_xml", text, xml(a=a, b=b)) is right, (a, b)
        if right:
            ((_, _, arguments, _),) = machine("qwen3_xml").say(xml(a=a, b=b), (tool,)).calls
            assert json.loads(arguments) == {"a": json.loads(a) if a[0] == "{" else a, "b": None if b == "null" else b}


def test_schemas_that_refer_to_themselves() -> None:
    inner = {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/t"}}
    tree = {"type": "object", "properties": inner, "required": ["v"]}
    schema = {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}, "required": ["t"], "$defs": {"t": tree}}
    tool = Tool("probe", parameters=schema, strict=True)
    for name in ("hermes", "gemma4", "minimax_m3", "qwen3_xml", "llama4"):
        ids = walk(name, grammar(name, (tool,), Demand("required")), 1, ("t", "next", "v"))
        parsed = machine(name).parse(ids, (tool,))
        for _, _, arguments, _ in parsed.calls:
            assert type(json.loads(arguments)["t"]["v"]) is int
    hermes = grammar("hermes", (tool,), Demand("required"))
    assert accepts("hermes", hermes, HERMES.format('{"t": {"v": 1, "next": {"v": 2}}}'))
    assert not accepts("hermes", hermes, HERMES.format('{"t": {"v": 1, "next": {"w": 2}}}'))


ITSELF: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"allOf": [{"$ref": "#/$defs/t"}]}}},
    {
        "type": "object",
        "properties": {
            "a": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]}
        },
        "required": ["a"],
        "$defs": {"t": {"type": "object", "properties": {"u": {"$ref": "#/$defs/t"}}, "required": ["u"]}},
    },
]


@pytest.mark.parametrize("name", ["hermes", "gemma4", "minimax_m3", "qwen3_xml", "llama4", "kimi_k3"])
@pytest.mark.parametrize("schema", ITSELF)
def test_what_demands_itself_for_ever_is_refused_or_open(name: str, schema: dict[str, Any]) -> None:
    """No answer would ever end."""
    with pytest.raises(GrammarError, match=r"probe.*\$ref '#.*' demands itself for ever"):
        grammar(name, (Tool("probe", parameters=schema, strict=True),), Demand("required"))
    tool = Tool("probe", parameters=schema)
    parsed = machine(name).parse(walk(name, grammar(name, (tool,), Demand("required")), 1, ("a",)), (tool,))
    assert parsed.calls and all(state == "complete" for *_, state in parsed.calls)


def test_tools_that_are_not_strict_are_followed_as_far_as_possible() -> None:
    loose = Tool("probe", parameters={"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    text = grammar("hermes", (loose,), Demand("required"))
    assert accepts("hermes", text, HERMES.format('{"a": [1, 1]}'))
    assert not accepts("hermes", text, HERMES.format('{"a": {}}'))


def test_strings_may_be_written_in_the_quotes_of_the_format() -> None:
    """Which are those that the model was trained on; where they need escapes, they are others."""
    kinds: Any = {
        "s": {"type": "string"},
        "e": {"enum": ["up", "it's", 3]},
        "p": {"type": "string", "pattern": "^[a-z]+$"},
        "l": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "n": {"type": ["boolean", "null"]},
    }
    schema = {"type": "object", "properties": kinds, "additionalProperties": False}
    for strict in (True, False):
        text = grammar("lfm2", (Tool("probe", parameters=schema, strict=strict),), Demand("required"), thinking=False)
        for right in (
            "s='a b'", 's="a b"', "s=''", """s="it's\\n\"""", "e='up'", 'e="it\'s"', "e=3", "p='abc'", "l=['a', 'b']",
            'l=["a", "b"]', "n=True", "n=None", "n=null", "s='x', p='y'",
        ):  # fmt: skip
            assert accepts("lfm2", text, f"<|tool_call_start|>[probe({right})]<|tool_call_end|>"), right
        for wrong in ("s=a", "s='a", "s='it's'", "s='a\nb'", r"s='a\'", "e='down'", "p='A'", "l=[]", "n='True'"):
            assert not accepts("lfm2", text, f"<|tool_call_start|>[probe({wrong})]<|tool_call_end|>"), wrong


@pytest.mark.parametrize("name", ["gemma4", "minimax_m3", "qwen3_xml", "lfm2"])
def test_what_a_spelling_cannot_express_is_refused_by_name(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "patternProperties": {"^x": {}}}
    with pytest.raises(GrammarError, match=r"probe.*patternProperties"):
        grammar(name, (Tool("probe", parameters=schema, strict=True),), Demand("required"))
    grammar(name, (Tool("probe", parameters=schema),), Demand("required"))


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (Demand("required", only=("other",)), "'other', which is not among the tools"),
        (Demand(only=("other",)), "'other', which is not among the tools"),
    ],
)
def test_demands_that_cannot_be_met(demand: Demand, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        grammar("hermes", TOOLS, demand)


def test_nothing_is_demanded_by_default() -> None:
    assert not Demand().binds((Tool("f"),)) and not Demand("none").binds(TOOLS) and Demand().binds(TOOLS)
    assert Demand("none", answer=ANSWER).binds(())


DEEP: Any = {"type": "object", "properties": {}}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}


CHAIN = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(3000)}


@pytest.mark.parametrize("name", ["hermes", "gemma4", "minimax_m3", "qwen3_xml", "llama4"])
@pytest.mark.parametrize(
    "schema",
    [
        DEEP,
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#/required/" + "9" * 5000}}, "required": ["a"]},
        {"type": "objekt"},
        {"type": "object", "properties": {"a": {"type": "objekt"}}},
        {"type": "object", "properties": 3},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "required": ["a"], "$defs": CHAIN},
        {"type": "object", "properties": {"a": {"type": "string", "enum": "b"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "array", "minItems": "b"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}},
    ],
)
def test_impossible_schemas_are_refused(name: str, schema: dict[str, Any]) -> None:
    """Here, or by the engine before it admits the request; either way by the tool's name."""
    with pytest.raises((GrammarError, EngineGrammarError), match="probe"):
        guide(name, grammar(name, (Tool("probe", parameters=schema, strict=True),), Demand("required"))).allowed()


def one_member(schema: Any, key: str = "a") -> dict[str, Any]:
    return {"type": "object", "properties": {key: schema}, "required": [key], "additionalProperties": False}


DOUBLING = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
WITHOUT_TYPE: list[dict[str, Any]] = [{"not": {"type": "string"}}, {"minimum": 3}, {"pattern": "^a$"}]


@pytest.mark.parametrize("name", ["qwen3_xml", "gemma4", "minimax_m3", "kimi_k3", "lfm2", "hermes"])
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({**one_member({"$ref": "#/$defs/d0"}), "$defs": {**DOUBLING, "d30": {"not": {}}}}, "alternatives|not"),
        (one_member({"type": "integer", "multipleOf": 1000003}), "multipleOf"),
        (one_member({"type": "object", "properties": {f"p{n}": {} for n in range(600)}}), "more than 512 properties"),
        (one_member({"type": "integer", "enum": ["a", "b"]}), "no value|Unsatisfiable"),
        ({**one_member(True), "required": ["z"]}, "'z'"),
        (one_member({"not": {"type": "string"}}), "not"),
    ],
)
def test_what_takes_too_much_or_allows_nothing_is_refused_at_once(name: str, schema: Any, keyword: str) -> None:
    with pytest.raises((GrammarError, EngineGrammarError), match=f"probe.*(?:{keyword})"):
        guide(name, grammar(name, (Tool("probe", parameters=schema, strict=True),), Demand("required"))).allowed()


@pytest.mark.parametrize("name", ["qwen3_xml", "gemma4", "minimax_m3"])
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "maxLength": 10**6}, "maxLength beyond"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength 5 and maxLength 2"),
        ({"type": "string", "pattern": "a)|(b"}, "unbalanced"),
        *((one, next(iter(one))) for one in WITHOUT_TYPE),
    ],
)
def test_text_that_cannot_be_followed_is_refused_by_its_keyword(name: str, schema: Any, keyword: str) -> None:
    with pytest.raises(GrammarError, match=keyword):
        grammar(name, (Tool("probe", parameters=one_member(schema), strict=True),), Demand("required"))


@pytest.mark.parametrize("name", ["qwen3_xml", "gemma4", "minimax_m3", "deepseek_v4", "lfm2"])
def test_a_courtesy_passes_over_what_is_too_much(name: str) -> None:
    large = {"l": {"type": "string", "maxLength": 10**6}, "m": {"type": "integer", "multipleOf": 1000003}}
    odd = {"<a>\n": {"type": "string"}, "x" * 300: {"type": "string"}, "never": False}
    tool = Tool("probe", parameters={"type": "object", "properties": {**large, **odd}})
    assert guide(name, grammar(name, (tool,), Demand("required"))).allowed().any()


@pytest.mark.parametrize("name", NAMES)
def test_names_and_keys_come_back_as_they_are_or_are_refused(name: str) -> None:
    keys = ('a"b', "c\nd", "</parameter>", "ключ", "a b", " a", "a>", "a&b", "a:b", "", "x" * 300, "[0]", "a/b")
    names = ('we"ather', "a</tool_call>", "a b", "é", "x" * 300, "a\nb", "a.b", "a(b", "a{b", "a&b", "mcp__x__y", "a,b")
    written = 0
    for called, key in (*(("probe", key) for key in keys), *((called, "q") for called in names)):
        tool = Tool(called, parameters=one_member({"const": 1}, key), strict=True)
        try:
            text = grammar(name, (tool,), Demand("required", parallel=False), thinking=False)
        except GrammarError:
            continue
        parsed = machine(name).parse(walk(name, text, 1, (key,)), (tool,))
        ((_, found, arguments, state),) = parsed.calls
        assert (found, json.loads(arguments), state) == (called, {key: 1}, "complete") and not parsed.tolerated
        written += 1
    assert written >= 5


def test_required_members_may_be_undeclared() -> None:
    loose = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["z"]}
    for name in ("hermes", "qwen3_xml", "gemma4", "minimax_m3", "lfm2"):
        tool = Tool("probe", parameters=loose)
        parsed = machine(name).parse(walk(name, grammar(name, (tool,), Demand("required")), 0, ("a", "z")), (tool,))
        assert all("z" in json.loads(arguments) for _, _, arguments, _ in parsed.calls)


def test_references_into_lists_and_with_escapes() -> None:
    inner = {"a": {"anyOf": [{"type": "integer"}]}, "b": {"$ref": "#/properties/a/anyOf/0"}}
    inner["c"] = {"$ref": "#/$defs/x%20y"}
    schema = {"type": "object", "properties": inner, "required": ["b", "c"], "$defs": {"x y": {"type": "boolean"}}}
    text = grammar("qwen3_xml", (Tool("probe", parameters=schema, strict=True),), Demand("required"))
    assert accepts("qwen3_xml", text, xml(b="1", c="true"))
    assert not accepts("qwen3_xml", text, xml(b="x", c="true")) and not accepts("qwen3_xml", text, xml(b="1", c="1"))


def test_many_values_are_one_choice() -> None:
    """A choice of thousands is more than the engine follows side by side."""
    tool = Tool("probe", parameters=one_member({"enum": [*range(3000)]}), strict=True)
    for name in ("qwen3_xml", "gemma4", "minimax_m3", "kimi_k3"):
        text = grammar(name, (tool,), Demand("required", parallel=False))
        ((_, _, arguments, _),) = machine(name).parse(walk(name, text, 0, ("a",)), (tool,)).calls
        assert json.loads(arguments)["a"] in range(3000)
