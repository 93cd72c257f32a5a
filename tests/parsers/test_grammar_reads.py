"""Whatever a grammar admits, the reader reads as a value of that kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from parsers.conversation import Tool, ToolCall
from parsers.families.registry import FORMATS
from parsers.grammar import Demand
from parsers.write import assistant_text
from tests.parsers.grammar_support import accepts, grammar, walk
from tests.parsers.wire_support import NAMES, machine

MARK = 777_777
NUMBERS = ("1", "-0", "007", "1.50", "1e-7", "1E+5000", "9" * 400, ".5", "1.", "1_0", "0x1F", "NaN", "Infinity", " 1")
WORDS = ("true", "True", "TRUE", "null", "None", "", " ", "x", "x\n", "\nx", "`", "'x'", '"x"', '""', r'"\ud800"')
NESTED = ("[1]", "[1E+5000]", "[1,2]", "[", '{"k": 1}', '{"k": 1e999}', "{'k': 1}", '{"k": "</x>"}', "{k:1}", "{", "[]")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


KINDS: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "integer": ({"type": "integer"}, lambda v: type(v) is int),
    "number": ({"type": "number"}, _number),
    "bounded": ({"type": "integer", "minimum": -5, "maximum": 9}, lambda v: type(v) is int and -5 <= v <= 9),
    "boolean": ({"type": "boolean"}, lambda v: type(v) is bool),
    "null": ({"type": "null"}, lambda v: v is None),
    "string": ({"type": "string"}, lambda v: isinstance(v, str)),
    "short": ({"type": "string", "maxLength": 2}, lambda v: isinstance(v, str) and len(v) <= 2),
    "enum": ({"enum": ["x", 1, None, "true"]}, lambda v: type(v) is not bool and v in ("x", 1, None, "true")),
    "mixed": ({"type": ["string", "null"]}, lambda v: v is None or isinstance(v, str)),
    "object or string": ({"anyOf": [{"type": "object"}, {"type": "string"}]}, lambda v: isinstance(v, dict | str)),
    "list": ({"type": "array", "items": {"type": "number"}}, lambda v: isinstance(v, list) and all(map(_number, v))),
    "object": ({"type": "object"}, lambda v: isinstance(v, dict)),
    "any": ({}, lambda v: True),
}
CODECS = {repr(form.call.codec) + repr(form.call.tail): form.name for form in FORMATS}


def tool(schema: Any) -> Tool:
    return Tool("f", "", {"type": "object", "properties": {"a": schema}, "required": ["a"]}, strict=True)


def delimiters(name: str) -> list[str]:
    """A format's own strings, alone and two by two, as text and inside a string of JSON."""
    found = machine(name)
    texts = sorted({text.strip() for text in found.format.generated() if len(text) < 40} - {""})
    texts += [one + two for one in texts for two in texts if one[:2] == two[:2] == "</"]
    return [*texts, *(json.dumps({"k": text}) for text in texts)]


@pytest.mark.parametrize("name", CODECS.values())
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_grammar_admits_is_read_as_that(name: str, kind: str) -> None:
    schema, right = KINDS[kind]
    found, text = machine(name), grammar(name, (tool(schema),), Demand("required", parallel=False), thinking=False)
    candidates = [*NUMBERS, *WORDS, *NESTED, *(delimiters(name) if kind in ("string", "object", "any") else ())]
    for written, value in product((_written(name, MARK), _written(name, str(MARK))), candidates):
        answer = written.replace(str(MARK), value)
        if accepts(name, text, answer):
            parsed = found.say(answer, (tool(schema),))
            assert [call[3] for call in parsed.calls] == ["complete"], (value, parsed)
            assert right(json.loads(parsed.calls[0][2], parse_int=_integer)["a"]), (value, parsed)


def _written(name: str, mark: object) -> str:
    """A call with this value in it."""
    text = grammar(name, (tool({"const": mark}),), Demand("required", parallel=False), thinking=False)
    return machine(name).tokenizer.decode(walk(name, text, 0, ("a",)))


EVERY = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "b": {"type": "boolean"},
        "o": {"type": "object", "properties": {"z": {"type": ["integer", "null"]}, "a": {"type": "boolean"}}},
    },
    "additionalProperties": False,
}
SAID = '{"s": "it\'s", "n": 1, "b": true, "o": {"z": null, "a": false}}'


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", ["{}", SAID])
def test_the_grammar_admits_what_the_format_writes(name: str, arguments: str) -> None:
    found, tools = machine(name), (Tool("f", "", EVERY, strict=True),)
    several = 1 if found.format.frames and found.format.frames.call_end in found.format.ends else 2
    answer = assistant_text(found.format, found.guard, [ToolCall("call00001", "f", arguments)] * several, "closed")
    assert accepts(name, grammar(name, tools, Demand("required"), thinking=False), answer.lstrip("\n"))


def _integer(text: str) -> int:
    return int(text[:99])
