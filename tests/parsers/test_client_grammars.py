"""Grammars that a client sends along with a tool: Lark and regular expressions."""

from __future__ import annotations

import json

import pytest

from parsers.conversation import Tool
from parsers.grammar import Demand, GrammarError
from parsers.lark import regex_of_lark
from tests.parsers.grammar_support import HERMES, accepts, grammar, xml

PATCH = r"""
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?   // all of it
hunk: add | "*** Delete File: " name LF
add.2: "*** Add File: " name LF ("+" /(.*)/ LF -> line)+
     | "*** Copy File: "i name~1..2 LF
name: /([^\/\n]+)/

# what others call it
%import common.LF
"""


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("*** Begin Patch\n*** Delete File: a\n*** End Patch", True),
        ('*** Begin Patch\n*** Add File: a"\\\n+x\n+\n*** Delete File: b\n*** End Patch\n', True),
        ("*** Begin Patch\n*** copy file: ab\n*** End Patch\n", True),
        ("*** Begin Patch\n*** End Patch", False),
        ("*** Begin Patch\n*** Add File: a/b\n+x\n*** End Patch", False),
        ("*** Begin Patch\n*** Add File: a\nx\n*** End Patch", False),
    ],
)
def test_a_lark_grammar_is_enforced_in_every_spelling(text: str, right: bool) -> None:
    tool = Tool("probe", freeform=True, grammar=("lark", PATCH))
    hermes = grammar("hermes", (tool,), Demand("required"))
    assert accepts("hermes", hermes, HERMES.format(json.dumps({"input": text}))) is right
    assert accepts("qwen3_xml", grammar("qwen3_xml", (tool,), Demand("auto")), f"Hm.\n\n{xml(input=text)}") is right


def test_a_regex_grammar_is_the_whole_input_with_anchors_or_without() -> None:
    for definition in ("^ha+$", "ha+"):
        text = grammar("qwen3_xml", (Tool("probe", freeform=True, grammar=("regex", definition)),), Demand("required"))
        assert accepts("qwen3_xml", text, xml(input="haa")) and not accepts("qwen3_xml", text, xml(input="aha"))


def chain(rules: int, times: int) -> str:
    """Rules that consist of the next one, so many times."""
    body = "\n".join(f"r{n}: {' '.join([f'r{n + 1}'] * times)}" for n in range(rules))
    return f'start: r0\n{body}\nr{rules}: "a"'


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ('start: "(" start ")" | "x"', "'start' is recursive"),
        ("start: missing", "'missing' is not defined"),
        ('start: ("a"', r"'\)' is missing"),
        ('start: "a" )', "was not expected"),
        ('start "a"', "a definition was expected"),
        ('start: ("a"]', r"'\]' was not expected"),
        ('start: "a', "not understood"),
        ('%ignore WS\nstart: "a"', "%ignore"),
        ("%import common.NOTHING\nstart: NOTHING", "not known"),
        ("start: " + "(" * 100 + '"a"' + ")" * 100, "nested too deeply"),
        ('start: "a".."z"', "not understood"),
        (chain(100, 1), "nested too deeply"),
        (chain(40, 2), "too large"),
    ],
)
def test_lark_grammars_that_are_refused(definition: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        regex_of_lark(definition)
