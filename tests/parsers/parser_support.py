"""Families over real vocabularies, and what tests read off a parser's events."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from parsers.conversation import Tool
from parsers.events import Boundary
from parsers.load import Family, Prompt
from parsers.stream import FinishReason
from tests.parsers.parsed import ANY_TEXT, JSON, TOOL, TOOLS, TRICKY, Parsed, parsed_by

__all__ = [
    "ANY_TEXT",
    "FAMILIES",
    "JSON",
    "TOOL",
    "TOOLS",
    "TRICKY",
    "Parsed",
    "characters_before",
    "checkpoint",
    "parse",
    "say",
    "without_tag_tokens",
]
TEMPLATES = Path(__file__).resolve().parents[2] / "engine" / "templates"
FAMILIES = ("byte-qwen3_xml", "byte-hermes", "byte-chatml", "qwen-qwen3_xml", "qwen-hermes", "spelled-hermes")
PLAIN_CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def checkpoint(tokenizer: Path, directory: Path, template: str) -> Path:
    """A directory with what ``load_family`` reads. ``template``: one of ours, or template text."""
    shutil.copytree(tokenizer, directory)
    text = PLAIN_CHATML if template == "chatml" else template
    named = TEMPLATES / f"{template}.jinja"
    (directory / "chat_template.jinja").write_text(named.read_text() if "\n" not in text and named.is_file() else text)
    return directory


def without_tag_tokens(tokenizer: Path, directory: Path) -> Path:
    """A vocabulary whose thinking and call tags are spelled in ordinary tokens, as in many fine-tunes."""
    shutil.copytree(tokenizer, directory)
    path = directory / "tokenizer.json"
    description = json.loads(path.read_text())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["special"]]
    path.write_text(json.dumps(description))
    return directory


def parse(
    family: Family,
    ids: Sequence[int],
    tools: Sequence[Tool] = TOOLS,
    *,
    thinking_open: bool = False,
    reason: FinishReason = "stop",
) -> Parsed:
    return parsed_by(family.parser(Prompt(b"", (), thinking_open, thinking_open), tools), ids, reason)


def say(family: Family, text: str, tools: Sequence[Tool] = TOOLS, **options: bool) -> Parsed:
    """Parses the family's own text."""
    return parse(family, family.encode_raw(text), tools, **options)


def characters_before(family: Family, ids: Sequence[int], boundary: Boundary) -> int:
    """A boundary's position in characters, which does not depend on how the text was cut into tokens."""
    tokens = boundary.token if boundary.exact else boundary.token + 1
    return len(family.tokenizer.decode(ids[:tokens])) - len(boundary.rest)
