"""Formats from a tokenizer's response_template: three shapes of calls, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parsers.conversation import Text, Thinking, Tool, ToolCall
from parsers.load import Family, FamilyError, Prompt, compare, load_family
from parsers.ranks import byte_level
from parsers.response_template import ResponseTemplateError, response_format
from parsers.template import ChatTemplate
from tests.parsers.parsed import Parsed

TOOLS = (
    Tool("find", "Finds.", {"type": "object", "properties": {"where": {"type": "string"}, "n": {"type": "integer"}}}),
)
FRAMES = """
{%- for m in messages -%}
{%- if m.role == 'system' -%}
<|o|>sys<|m|>{{ m.content }}{% if tools %}TOOLS {{ tools | tojson }}{% endif %}<|c|>
{%- elif m.role == 'user' -%}
{%- if loop.first and tools -%}<|o|>sys<|m|>TOOLS {{ tools | tojson }}<|c|>{%- endif -%}
<|o|>usr<|m|>{{ m.content }}<|c|>
{%- elif m.role == 'tool' -%}
<|o|>out<|m|>{{ m.content }}<|c|>
{%- else -%}
<|o|>bot<|m|>{% if m.reasoning_content %}<|t|>{{ m.reasoning_content }}<|/t|>{% endif %}{{ m.content }}CALLS<|c|>
{%- endif -%}
{%- endfor -%}
<|o|>bot<|m|>"""
EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}BODY{% endfor %}"
BODIES = {
    "json": EACH.replace("BODY", "<|f|>{{ {'tool': f.name, 'input': f.arguments} | tojson }}<|/f|>"),
    "named": EACH.replace("BODY", "<|f|>{{ f.name }}<|m|>{{ f.arguments | tojson }}<|/f|>"),
    "xml": EACH.replace(
        "BODY",
        "<|f|>\n<use={{ f.name }}>\n{% for k, v in f.arguments | items %}<arg={{ k }}>\n{{ v }}\n</arg>\n{% endfor %}"
        "</use>\n<|/f|>",
    ),
    "python": "{% if m.tool_calls %}<|f|>[{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}"
    "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{% if not loop.first %}, {% endif %}"
    "{{ k }}={{ v | tojson }}{% endfor %}){% endfor %}]<|/f|>{% endif %}",
}
SHAPES: dict[str, dict[str, Any]] = {
    "json": {
        "open": "<|f|>",
        "close": "<|/f|>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.input}"}},
    },
    "named": {
        "open_pattern": r"<\|f\|>(?P<name>[^<]+)<\|m\|>",
        "close": "<|/f|>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
    "xml": {
        "open_pattern": r"<\|f\|>\s*<use=(?P<name>[\w.-]+)>",
        "close_pattern": r"</use>\s*<\|/f\|>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<arg=(?P<key>[^>(\]]+)>\n(?P<value>.*?)\n</arg>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
    "python": {"open": "<|f|>", "close": "<|/f|>", "content": "python-call-list", "transform_each": True},
}


def metadata(shape: str) -> dict[str, Any]:
    fields = {
        "thinking": {"open": "<|t|>", "close": "<|/t|>"},
        "content": {"close": ["<|c|>"]},
        "tool_calls": SHAPES[shape],
    }
    return {"version": 1, "defaults": {"role": "assistant"}, "start_anchor": "<|o|>bot<|m|>", "fields": fields}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str, dict[str, Any] | None], Path]:
    """A directory of a model that no family knows."""

    def make(shape: str, response: dict[str, Any] | None) -> Path:
        marks = [f"<|{name}|>" for name in ("o", "m", "c", "t", "/t", "f", "/f")]
        added = [(mark, 256 + n, True) for n, mark in enumerate(marks)]
        description = byte_level({bytes([byte]): byte for byte in range(256)}, r"\s+|\S+", added)
        (tmp_path / "tokenizer.json").write_text(json.dumps(description))
        (tmp_path / "chat_template.jinja").write_text(FRAMES.replace("CALLS", BODIES[shape]))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": response} if response else {}))
        return tmp_path

    return make


def blocks_of(family: Family, text: str) -> list[tuple[str, str]]:
    parser, parsed = family.parser(Prompt(b"", (), False, True), TOOLS), Parsed()
    for token in family.encode_raw(text):
        parsed.add(parser.feed(token))
    parsed.add(parser.finish("stop"))
    return [(part[0], *part[1:]) for part in parsed.parts]  # type: ignore[misc]


@pytest.mark.parametrize("shape", list(SHAPES))
def test_an_unknown_model_is_read_by_its_metadata(
    checkpoint: Callable[[str, dict[str, Any] | None], Path], shape: str
) -> None:
    family = load_family(checkpoint(shape, metadata(shape)))
    assert family.name == "response_template"
    written = {
        "json": '<|f|>{"tool": "find", "input": {"where": "a b", "n": 2}}<|/f|>' * 2,
        "named": '<|f|>find<|m|>{"where": "a b", "n": 2}<|/f|>' * 2,
        "xml": "<|f|>\n<use=find>\n<arg=where>\na b\n</arg>\n<arg=n>\n2\n</arg>\n</use>\n<|/f|>" * 2,
        "python": '<|f|>[find(where="a b", n=2), find(where="a b", n=2)]<|/f|>',
    }[shape]
    said = blocks_of(family, f"<|t|>Hm.<|/t|>I look.{written}<|c|>")
    assert said[:2] == [("thinking", "Hm."), ("text", "I look.")]
    assert [(name, json.loads(arguments), how) for _, name, arguments, how in said[2:]] == [  # type: ignore[misc]
        ("find", {"where": "a b", "n": 2}, "complete")
    ] * 2
    prompt = Prompt(b"", (), False, True)
    call = ToolCall("c1", "find", '{"where": "x\\ny", "n": 7}')
    again = family.tokenizer.decode(family.encode_output(prompt, (Thinking("So."), Text("Well."), call)))
    again_said = blocks_of(family, again)
    assert [part[1] for part in again_said[:2]] == ["So.", "Well."]
    assert json.loads(again_said[2][2]) == {"where": "x\ny", "n": 7}  # type: ignore[misc]


def test_without_metadata_the_same_model_is_refused(checkpoint: Callable[[str, dict[str, Any] | None], Path]) -> None:
    with pytest.raises(FamilyError, match="fits no known family"):
        load_family(checkpoint("json", None))


def test_what_metadata_says_wrongly_is_a_reason(checkpoint: Callable[[str, dict[str, Any] | None], Path]) -> None:
    wrong = metadata("json")
    wrong["fields"]["tool_calls"] |= {"open": "<|m|>"}
    directory = checkpoint("json", wrong)
    assert not compare(directory).fits
    with pytest.raises(FamilyError, match="response_template: "):
        load_family(directory)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"version": 2}, "version 2 is not known"),
        ({"fields": []}, "no fields"),
        ({"fields": {}}, "nothing of tool calls"),
        ({"fields": {"citations": {}}}, "field 'citations'"),
        ({"fields": {"content": {"opens": "x"}}}, "content: 'opens' is not known"),
        ({"fields": {"tool_calls": {"content": "json"}}}, "need an opener"),
        ({"fields": {"tool_calls": {"open": "<", "content": "kv-lines"}}}, "content 'kv-lines'"),
        ({"fields": {"tool_calls": {"open": "<", "content": "json", "transform": "{x}"}}}, "transform '{x}'"),
        ({"fields": {"tool_calls": {"open_pattern": "(?P<id>a)"}}}, "nothing else"),
        ({"fields": {"tool_calls": {"open_pattern": "a|b"}}}, r"not understood from '\|b' on"),
        ({"fields": {"tool_calls": {"open_pattern": "ab?c"}}}, "not understood from 'b"),
        ({"fields": {"tool_calls": {"open_pattern": "(?P<name>(a)"}}}, "a group that does not end"),
        ({"fields": {"tool_calls": {"open_pattern": "a(?P<name>b)", "content": "kv-lines"}}}, "content 'kv-lines'"),
        (
            {"fields": {"tool_calls": SHAPES["xml"] | {"content_args": {"tag_pattern": "(?P<key>a)"}}}},
            "tag_pattern .* is not understood",
        ),
        (
            {"fields": {"tool_calls": SHAPES["xml"] | {"content_args": {"merge_duplicates": True}}}},
            "repeated tags that make a list",
        ),
        (
            {"fields": {"tool_calls": SHAPES["named"] | {"content_args": {"string_delims": [["<", ">"]]}}}},
            "strings between",
        ),
        (
            {"fields": {"tool_calls": SHAPES["named"] | {"content_args": {"string_delims": ["<"]}}}},
            "strings between",
        ),
        ({"fields": {"tool_calls": SHAPES["named"] | {"content_args": "x"}}}, "content_args 'x'"),
        ({"fields": {"thinking": {"open": "<"}, "tool_calls": SHAPES["json"]}}, "thinking: only text"),
        ({"start_anchor": "<|none|>"}, "does not put '<|none|>' before"),
    ],
)
def test_what_no_format_can_say_is_named(damage: dict[str, Any], reason: str) -> None:
    template = ChatTemplate(FRAMES.replace("CALLS", BODIES["json"]), {})
    with pytest.raises(ResponseTemplateError, match=reason.replace("|none|", r"\|none\|")):
        response_format(metadata("json") | damage, template)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('never') }}", "refuses a simple conversation: never"),
        (
            "{% for m in messages %}{{ m.content }}{{ loop.index }}<|o|>bot<|m|>{% endfor %}",
            "a way that is not understood",
        ),
    ],
)
def test_templates_that_frame_turns_otherwise_are_refused(source: str, reason: str) -> None:
    with pytest.raises(ResponseTemplateError, match=reason):
        response_format(metadata("json"), ChatTemplate(source, {}))


def test_quoted_strings_and_outputs_inside_a_user_turn() -> None:
    source = FRAMES.replace("CALLS", BODIES["named"])
    source = source.replace("<|o|>out<|m|>{{ m.content }}<|c|>", "<|o|>usr<|m|><res>\n{{ m.content }}\n</res><|c|>")
    damage = SHAPES["named"] | {"content_args": {"unquoted_keys": True, "string_delims": [["<|q|>", "<|q|>"]]}}
    fields = {"tool_calls": damage}
    found = response_format(metadata("named") | {"fields": fields}, ChatTemplate(source, {}))
    assert found.call.codec.quote == "<|q|>"  # type: ignore[union-attr]
    assert (found.turns.tools.open, found.result.open, found.result.close) == ("<|o|>usr<|m|>", "<res>", "</res>")
