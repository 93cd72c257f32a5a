"""What constrained decoding costs: grammars of many tools over a large vocabulary, per family."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.api import Sampling
from engine.grammar import Grammars, Guide, Vocabulary
from launchers.bench import chosen_formats
from parsers.conversation import Tool
from parsers.format import Format
from parsers.grammar import Demand, Tokens, constraint

_TAG = re.compile(r"[<\[｜]\S*[>\]｜]")
_TYPES: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"enum": ["read", "write", "append"]},
    {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "string"}}, "required": ["x"]},
)


@dataclass(frozen=True)
class Row:
    """One grammar: seconds to write it, to compile it and for its first mask, then for the masks of an answer."""

    family: str
    calls: str
    write: float
    compile: float
    first: float
    median: float
    worst: float


def tools(count: int, parameters: int) -> tuple[Tool, ...]:
    def schema(tool: int) -> dict[str, Any]:
        names = [f"parameter_{number}" for number in range(parameters)]
        properties = {name: _TYPES[(tool + number) % len(_TYPES)] for number, name in enumerate(names)}
        return {"type": "object", "properties": properties, "required": names[:2], "additionalProperties": False}

    return tuple(Tool(f"tool_{number}", parameters=schema(number), strict=True) for number in range(count))


def mistral_vocabulary() -> list[bytes]:
    """The 131,072 tokens that come with mistral-common. Raises FileNotFoundError."""
    found = importlib.util.find_spec("mistral_common")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("the package mistral-common is not installed; it brings the vocabulary")
    (path, *_) = sorted((Path(found.submodule_search_locations[0]) / "data").glob("tekken_*.json"), reverse=True)
    data = json.loads(path.read_text(encoding="utf-8"))
    reserved, size = data["config"]["default_num_special_tokens"], data["config"]["default_vocab_size"]
    words = [base64.b64decode(entry["token_bytes"]) for entry in data["vocab"][: size - reserved]]
    return [*(f"<SPECIAL_{number}>".encode() for number in range(reserved)), *words]


def measure(words: Sequence[bytes], formats: Sequence[Format], given: Sequence[Tool], steps: int) -> Iterator[Row]:
    """A row for each family, with calls demanded and with calls allowed."""
    for wire_format in formats:
        marks = dict.fromkeys(mark for text in wire_format.generated() for mark in _TAG.findall(text))
        control = {mark: number for number, mark in enumerate(marks)}
        tokens = [*(mark.encode() for mark in marks), *words[len(marks) :]]
        grammars = Grammars(partial(_vocabulary, tokens, control), len(tokens))
        _timed(_guide(grammars, "start: /a/"))
        for calls in ("required", "auto"):
            began = time.perf_counter()
            text = constraint(wire_format, Tokens(control, ()), "", False, given, Demand(calls))
            wrote = time.perf_counter() - began
            began = time.perf_counter()
            guide = _guide(grammars, text or "")
            while not guide.ready:
                guide.wait()
            compiled = time.perf_counter() - began
            first, *others = _masks(guide, steps)
            yield Row(wire_format.name, calls, wrote, compiled, first, statistics.median(others), max(others))


def _vocabulary(tokens: Sequence[bytes], control: dict[str, int]) -> Vocabulary:
    return Vocabulary(tokens, frozenset(control.values()))


def _guide(grammars: Grammars, text: str) -> Guide:
    guide = grammars.guide(Sampling(max_tokens=1, constraint=text))
    if guide is None:
        raise ValueError("no grammar")
    return guide


def _timed(guide: Guide) -> tuple[float, Any]:
    began = time.perf_counter()
    allowed = guide.allowed()
    return time.perf_counter() - began, allowed


def _masks(guide: Guide, steps: int) -> Iterator[float]:
    """Seconds for the masks of a random answer."""
    chance = random.Random(0)  # noqa: S311 - it draws an example
    seconds, allowed = _timed(guide)
    yield seconds
    for _ in range(steps):
        possible = np.flatnonzero(allowed)
        if not len(possible):
            return
        began = time.perf_counter()
        guide.advance(int(chance.choice(possible)))
        _, allowed = _timed(guide)
        yield time.perf_counter() - began


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ft bench grammar",
        description=f"{__doc__}\n\nThe vocabulary is that of the package mistral-common.",
        epilog="examples:\n  ft bench grammar\n  ft bench grammar --family qwen3_xml --family kimi_k2 --tools 100",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default, text in (
        ("--tools", 20, "strict tools of the request"),
        ("--parameters", 6, "of each tool"),
        ("--steps", 200, "tokens of an answer"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--family", action="append", metavar="NAME", help="only this one; may be repeated (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON; seconds")
    options = parser.parse_args(arguments)
    for name in ("tools", "parameters", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    formats = chosen_formats(parser, options.family)
    try:
        words = mistral_vocabulary()
    except FileNotFoundError as error:
        parser.error(f"{error}: pip install mistral-common")
    rows = list(measure(words, formats, tools(options.tools, options.parameters), options.steps))
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print(f"{options.tools} tools with {options.parameters} parameters each, {len(words):,} tokens; masks in µs")
    print(f"{'family':16}{'calls':10}{'write ms':>10}{'compile ms':>12}{'first':>8}{'median':>8}{'worst':>8}")
    for row in rows:
        masks = "".join(f"{1e6 * seconds:8.0f}" for seconds in (row.first, row.median, row.worst))
        print(f"{row.family:16}{row.calls:10}{1e3 * row.write:10.1f}{1e3 * row.compile:12.1f}{masks}")
    return 0
