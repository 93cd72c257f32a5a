"""What tests say to parsers of every family, and what they read off the events."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from parsers.conversation import Block, Text, Thinking, Tool, ToolCall
from parsers.events import (
    Boundary,
    Event,
    TextDelta,
    ThinkingDelta,
    Tolerated,
    ToolArgsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from parsers.stream import FinishReason, StreamParser

TOOL = Tool(
    "f",
    "Does it.",
    {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "t": {"type": "string"},
            "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "b": {"type": "boolean"},
            "o": {"type": "object"},
            "a": {"type": "array"},
        },
    },
)
TOOLS = (TOOL, Tool("g", "Nothing."), Tool("patch", "Edits.", freeform=True))


@dataclass
class Parsed:
    """Events, normalised: whatever the chunks, equal output gives equal values."""

    parts: list[tuple[str, ...]] = field(default_factory=list)
    """("text", t), ("thinking", t), ("call", name, arguments, complete)"""
    boundaries: list[Boundary] = field(default_factory=list)
    tolerated: list[str] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case TextDelta(text):
                    self._delta("text", text)
                case ThinkingDelta(text):
                    self._delta("thinking", text)
                case ToolCallStart(index, name):
                    assert index == len(self.calls)
                    self.parts.append(("call", name, "", "open"))
                case ToolArgsDelta(index, fragment):
                    assert index == len(self.calls) - 1 and self.parts[-1][3] == "open"
                    _, name, before, _ = self.parts[-1]
                    self.parts[-1] = ("call", name, before + fragment, "open")
                case ToolCallEnd(index, complete):
                    assert index == len(self.calls) - 1 and self.parts[-1][3] == "open"
                    self.parts[-1] = (*self.parts[-1][:3], "complete" if complete else "incomplete")
                case Boundary():
                    self.boundaries.append(event)
                case Tolerated(rule):
                    self.tolerated.append(rule)

    def _delta(self, kind: str, text: str) -> None:
        assert text
        text.encode()  # no lone surrogates, ever
        if self.parts and self.parts[-1][0] == kind:
            self.parts[-1] = (kind, self.parts[-1][1] + text)
        else:
            self.parts.append((kind, text))

    @property
    def calls(self) -> list[tuple[str, ...]]:
        return [part for part in self.parts if part[0] == "call"]

    @property
    def text(self) -> str:
        return "".join(part[1] for part in self.parts if part[0] == "text")

    @property
    def thinking(self) -> str:
        return "".join(part[1] for part in self.parts if part[0] == "thinking")

    def blocks(self) -> list[Block]:
        found: list[Block] = []
        for part in self.parts:
            if part[0] == "call":
                found.append(ToolCall("", part[1], part[2]))
            else:
                found.append(Text(part[1]) if part[0] == "text" else Thinking(part[1]))
        return found


ANY_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=24).map(
    lambda text: unicodedata.normalize("NFC", text)  # as some tokenizers write it
)
TRICKY = st.lists(
    st.one_of(
        st.sampled_from(
            ["\n", " ", "<", ">", "<tool", "_call>", "</", "<|im_", "end|>", "`", "```\n", '"', "\\", "{", "}"]
        ),
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=", "</function>", "<parameter="]
        ),
        st.sampled_from(["</parameter>", "<|im_end|>", "<|im_start|>user\n", "é", "😀", "\u2028", "\x00", "ab", "007"]),
    ),
    max_size=8,
).map("".join)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)


def parsed_by(parser: StreamParser, ids: Iterable[int], reason: FinishReason = "stop") -> Parsed:
    """What a parser makes of these tokens and their end."""
    parsed = Parsed()
    for token in ids:
        parsed.add(parser.feed(token))
    parsed.add(parser.finish(reason))
    return parsed
