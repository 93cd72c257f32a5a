"""What the tests of public bug reports share: a format's text, heard in many chunkings that must not matter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from parsers.conversation import Tool
from tests.parsers.parsed import TOOLS, Parsed
from tests.parsers.wire_support import machine, respelled

CHUNKS = ((1,), (2,), (1, 2, 3, 5, 9), (8, 40), (10**6,))
"""Bytes per token: one at a time to all at once."""


def heard(
    name: str,
    text: str,
    tools: Sequence[Tool] = TOOLS,
    *,
    thinking_open: bool = False,
    reason: Literal["stop", "length", "abort"] = "stop",
    plain: bool = False,
) -> Parsed:
    """``text`` in the format ``name``, its control tokens recognised (unless ``plain``), in every chunking."""
    family = machine(name)
    ids = family.tokenizer.encode(text) if plain else family.tokenizer.encode_trusted(text)
    found = [
        family.parse(respelled(family.tokenizer, ids, 0, sizes), tools, thinking_open=thinking_open, reason=reason)
        for sizes in CHUNKS
    ]
    for other in found[1:]:
        assert (other.parts, other.tolerated) == (found[0].parts, found[0].tolerated)
    return found[0]


def arguments(parsed: Parsed) -> list[Any]:
    """The decoded arguments of every call, all of which are complete."""
    assert [call[3] for call in parsed.calls] == ["complete"] * len(parsed.calls)
    return [json.loads(call[2]) for call in parsed.calls]


def tool(**properties: object) -> tuple[Tool, ...]:
    """One tool ``f`` with these properties."""
    return (Tool("f", "", {"type": "object", "properties": properties}),)
