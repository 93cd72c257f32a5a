"""Families with templates of ours, and conversations for them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest

from parsers.conversation import Block, Conversation, Sampled, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from parsers.encoders.registry import ENCODERS
from parsers.families.registry import FORMATS
from parsers.load import Family, Prompt, comparison
from parsers.template import ChatTemplate
from tests.parsers.parser_support import TEMPLATES, parse
from tests.parsers.wire_support import machine

OURS = Path(__file__).parent / "templates"
WRITTEN = (*sorted(path.stem for path in OURS.glob("*.jinja")), "hermes", "qwen3_xml")
NAMES = (*WRITTEN, *ENCODERS)
SPOILED = ("rewritten", "rewritten_bare")
every = pytest.mark.parametrize("name", NAMES)

TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}})
OTHER = Tool("wait", "Waits.", {"type": "object", "properties": {}})
CALL = ToolCall("call_1", "look", '{"at": "the sky", "n": 3}')
FIRST = Conversation((Turn("system", (Text("Be good."),)), Turn("user", (Text("Question one."),))), (TOOL, OTHER))
TURN = Turn("assistant", (Thinking("Hm hm."), Text("I look."), CALL))


@cache
def family(name: str) -> Family:
    tokenizer = machine(name).tokenizer
    if name in ENCODERS:
        templates = [(one, ENCODERS[name]) for one in FORMATS if one.encoder == name]
    else:
        path = next(p for p in (OURS / f"{name}.jinja", TEMPLATES / f"{name}.jinja") if p.is_file())
        template = ChatTemplate(path.read_text(encoding="utf-8"), {}, datetime(2001, 2, 3))
        templates = [(one, template) for one in FORMATS]
    return Family(comparison(tokenizer, templates).best, tokenizer)


def with_turns(*turns: Turn) -> Conversation:
    return replace(FIRST, turns=FIRST.turns + turns)


def output(call_id: str, text: str) -> Turn:
    return Turn("tool", (ToolOutput(call_id, text),))


def user(text: str) -> Turn:
    return Turn("user", (Text(text),))


def shown(one: Family, prompt: Prompt, kind: str, turn: int | None = None) -> list[str]:
    spans = [span for span in prompt.spans if span.kind == kind and turn in (None, span.turn)]
    return [one.tokenizer.decode(prompt.ids[span.start : span.end]) for span in spans]


def answered(one: Family, prompt: Prompt, blocks: tuple[Block, ...]) -> Turn:
    """The turn as a perfect model samples it."""
    ids = one.encode_output(prompt, blocks)
    ends = [b for b in parse(one, ids, (TOOL, OTHER), thinking_open=prompt.thinking_open).boundaries]
    found = [boundary for boundary in ends if boundary.kind == "thinking_end"]
    end = found[0].token + (not found[0].exact) if found else 0
    return Turn("assistant", blocks, Sampled(ids, end, found[0].rest if found else "", prompt.opener))
