"""Tools are known by their names in advance: whatever a client calls a tool, its calls come back."""

from __future__ import annotations

import json

import pytest

from parsers.conversation import Tool, ToolCall
from parsers.families.registry import FORMATS
from parsers.grammar import Demand, GrammarError
from parsers.plain_schema import plain_schema
from tests.parsers.grammar_support import grammar, walk
from tests.parsers.parsed import TOOL
from tests.parsers.wire_support import NAMES, machine

ODD = (
    *("my tool", 'say "hi"', "it's", "a>b", "a<b", "a(b)", "a{b}", "a[b]", "a,b", "a:1", "a&b", "a&amp;b", " a", "b "),
    *(
        "é",
        "a\nb",
        "functions.x",
        "</tool_call>",
        "<|im_end|>",
        '{"name"',
        "a\\b",
        "<parameter=x>",
        "<arg_key>",
        "x" * 200,
    ),
    *("self", "user x", "my", "a"),
)
RESERVED = {"muse_glimmer": {"self", "user x", "a{b}", '{"name"'}, "harmony": {"a{b}", '{"name"'}}
"""What these families cannot tell from their own headers."""
CALL = '{"s": "v"}'


@pytest.mark.parametrize("name", NAMES)
def test_every_tool_that_is_offered_can_be_called(name: str) -> None:
    found = machine(name)
    tools = tuple(Tool(odd, "", TOOL.parameters) for odd in ODD)
    for odd in ODD:
        assert found.format.can_call(odd) == (odd not in RESERVED.get(name, ()))
        if found.format.can_call(odd):
            parsed = found.parse(found.output([ToolCall("call00001", odd, CALL)]), tools)
            called = [(call[1].strip(), *call[2:]) for call in parsed.calls]
            assert called == [(odd.strip(), CALL, "complete")] and not parsed.tolerated, odd


@pytest.mark.parametrize("name", NAMES)
def test_a_grammar_has_every_name_that_can_be_told_and_refuses_the_others(name: str) -> None:
    found = machine(name)
    for odd in ODD[::3]:
        tool = Tool(odd, "", {"type": "object", "properties": {"s": {"type": "string"}}})
        if not found.format.can_call(odd):
            with pytest.raises(GrammarError, match="cannot be told"):
                grammar(name, (tool,), Demand("required"))
            continue
        text = grammar(name, (tool,), Demand("required", parallel=False), thinking=False)
        parsed = found.parse(walk(name, text, 0, ("s",)), (tool,))
        assert [(call[1].strip(), call[3]) for call in parsed.calls] == [(odd.strip(), "complete")], odd


def test_there_is_no_tool_without_a_name() -> None:
    assert not any(form.can_call(name) for form in FORMATS for name in ("", " ", "x" * 201))


def test_a_plain_schema_follows_each_reference_once_and_has_an_end() -> None:
    again = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}
    node = {"type": "object", "properties": {"l": again, "r": again}}
    plain = plain_schema({"properties": {"a": {"$ref": "#/$defs/a"}, "none": {"$ref": "#/no"}}, "$defs": {"a": node}})
    described = {"type": "object", "description": ""}
    assert plain["properties"]["a"] == {**described, "properties": {"l": described, "r": described}}
    assert plain["properties"]["none"] == {"type": "string", "description": ""}
    doubling = {str(n): {"items": {"properties": {k: {"$ref": f"#/$defs/{n + 1}"} for k in "lr"}}} for n in range(99)}
    assert len(json.dumps(plain_schema({"items": {"$ref": "#/$defs/0"}, "$defs": doubling}))) < 300_000
