"""What holds for every format (``test_invariants``), over a real vocabulary: merges, tags with tokens and without."""

from __future__ import annotations

import json
import random
import unicodedata

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from parsers.conversation import Block, Text, Thinking, ToolCall
from parsers.events import Boundary, TextDelta
from parsers.load import Family, Prompt
from tests.parsers.parser_support import ANY_TEXT, JSON, TOOLS, TRICKY, characters_before, parse

pytestmark = pytest.mark.parametrize("family", ["qwen-qwen3_xml", "qwen-hermes", "spelled-hermes"], indirect=True)
relaxed = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))

TAGS = (
    "<parameter=",
    "</parameter>",
    "</function>",
    "</tool_call>",
    "<tool_call>",
    "<think>",
    "</think>",
    "<function=",
)
VALUE = st.one_of(ANY_TEXT, TRICKY).filter(lambda text: not any(tag in text for tag in TAGS))
PROSE = st.one_of(ANY_TEXT, TRICKY).map(str.strip).filter(lambda t: t and not any(tag in t for tag in TAGS))
OBJECT = st.dictionaries(ANY_TEXT, JSON, max_size=3)


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, object]:
    """Arguments of the tool "f" that its schema allows."""
    every = {
        "s": VALUE,
        "t": st.sampled_from(
            ["", "\n", "\n\n", "true", "007", "[x", "a\n", "\na", "  ", '{"k": 1}', "}", "1e400", '"']
        ),
        "u": st.none() | st.sampled_from(["007", "true", "[1]", " x "]),
        "n": st.integers(-(2**70), 2**70),
        "x": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
        "b": st.booleans(),
        "o": OBJECT.filter(lambda value: not any(tag in json.dumps(value) for tag in TAGS)),
        "a": st.lists(JSON, max_size=3),
    }
    keys = draw(st.lists(st.sampled_from(sorted(every)), unique=True, max_size=4))
    return {key: draw(every[key]) for key in keys}


@st.composite
def turns(draw: st.DrawFn) -> list[Block]:
    blocks: list[Block] = []
    if draw(st.booleans()):
        blocks.append(Thinking(draw(PROSE)))
    if draw(st.booleans()):
        blocks.append(Text(draw(PROSE)))
    for _ in range(draw(st.integers(0, 2))):
        blocks.append(ToolCall("", "f", json.dumps(draw(arguments()), ensure_ascii=draw(st.booleans()))))
    if draw(st.integers(0, 9)) == 0:
        blocks.append(ToolCall("", "patch", draw(VALUE), freeform=True))
    return blocks


def output(family: Family, blocks: list[Block], thinking_open: bool) -> tuple[int, ...]:
    quotes = any(isinstance(block, Text) and set("`~") & set(block.text) for block in blocks)
    if quotes and len(family.watches[0][0]) > 1:  # where tags are ordinary text, calls in quoted code are none
        reject()
    return family.encode_output(Prompt(b"", (), thinking_open, True), blocks)


def respelled(family: Family, ids: tuple[int, ...], seed: int) -> list[int]:
    """The same text in other tokens: control tokens stay, the rest is cut anywhere and encoded piece by piece."""
    chance, found, run = random.Random(seed), [], []
    control = set(family.tokenizer.control.values())

    def flush() -> None:
        text = family.tokenizer.decode(run)
        run.clear()
        while text:
            size = chance.choice((1, 1, 2, 3, 5, 9))
            found.extend(family.tokenizer.encode(text[:size]))
            text = text[size:]

    for token in ids:
        if token in control:
            flush()
            found.append(token)
        else:
            run.append(token)
    flush()
    return found


def known(blocks: list[Block]) -> list[tuple[str, object]]:
    """Blocks with decoded arguments, in order."""
    found: list[tuple[str, object]] = []
    for block in blocks:
        if isinstance(block, ToolCall):
            value = {"input": block.arguments} if block.freeform else json.loads(block.arguments)
            found.append((block.name, json.dumps(value)))
        elif isinstance(block, Text | Thinking):
            found.append((type(block).__name__, block.text))
    return found


@relaxed
@given(blocks=turns(), thinking_open=st.booleans())
def test_a_written_turn_parses_back_to_itself(family: Family, blocks: list[Block], thinking_open: bool) -> None:
    thinks = family.format.think is not None
    parsed = parse(family, output(family, blocks, thinking_open), thinking_open=thinking_open)
    wanted = [block for block in blocks if thinks or not isinstance(block, Thinking)]
    # JSON arguments are passed through verbatim: control tokens in them excepted, they are the same text
    assert known(parsed.blocks()) == known(wanted)
    assert all(call[3] == "complete" for call in parsed.calls)
    assert parsed.tolerated == []
    assert [boundary.kind for boundary in parsed.boundaries][-1] == "turn_end"


@relaxed
@given(blocks=turns(), seed=st.integers(0, 2**32), noise=TRICKY, at=st.integers(0, 40))
def test_tokens_do_not_matter_only_text_does(
    family: Family, blocks: list[Block], seed: int, noise: str, at: int
) -> None:
    ids = output(family, blocks, False)
    ids = (*ids[:at], *family.encode_raw(noise), *ids[at:])  # also for turns that no model should write
    other = respelled(family, ids, seed)
    one, two = parse(family, ids), parse(family, other)
    assert one.parts == two.parts
    assert one.tolerated == two.tolerated
    positions = [(b.kind, characters_before(family, ids, b)) for b in one.boundaries]
    assert positions == [(b.kind, characters_before(family, other, b)) for b in two.boundaries]
    assert [position for _, position in positions] == sorted(position for _, position in positions)


@relaxed
@given(noise=st.lists(TRICKY | ANY_TEXT, max_size=6), reason=st.sampled_from(["stop", "length", "abort"]))
def test_nothing_raises_and_no_text_is_lost(family: Family, noise: list[str], reason: str) -> None:
    text = unicodedata.normalize("NFC", "".join(noise))  # as this vocabulary's tokenizer writes it
    raw = parse(family, family.encode_raw(text), reason=reason)  # type: ignore[arg-type]
    for call in raw.calls:
        if call[3] == "complete":
            assert isinstance(json.loads(call[2]), dict)
    plain = parse(family, family.tokenizer.encode(text), (), reason=reason)  # type: ignore[arg-type]
    if len(family.watches[0][0]) == 1:  # single tokens: spelled characters are text
        assert (plain.text, plain.tolerated) == (text, [])


def test_text_arrives_at_once_unless_it_may_become_a_delimiter(family: Family) -> None:
    parser = family.parser(Prompt(b"", (), False, True), TOOLS)
    for letter in "plain words, one at a time":
        events = [event for token in family.tokenizer.encode(letter) for event in parser.feed(token)]
        assert events or letter == " "
    held = [event for token in family.tokenizer.encode("<too") for event in parser.feed(token)]
    assert held == []
    assert parser.feed(family.tokenizer.encode("x")[0]) == [TextDelta("<toox")]


def test_boundaries_are_token_exact_and_bound_what_they_say(family: Family) -> None:
    if family.format.think is None:
        return
    ids = output(family, [Thinking("Hm."), Text("So."), ToolCall("", "g", "{}")], True)
    parsed = parse(family, ids, thinking_open=True)
    at = {boundary.kind: boundary for boundary in parsed.boundaries}
    text = family.tokenizer.decode
    assert at["thinking_start"] == Boundary("thinking_start", 0)
    end = at["thinking_end"]
    assert (text(ids[: end.token]) + text(ids[end.token : end.token + 1])[: 0 if end.exact else None]).startswith("Hm.")
    assert characters_before(family, ids, end) == len("Hm.\n</think>\n\n")
    start, finish = at["tool_call_start"], at["tool_call_end"]
    first = characters_before(family, ids, start)
    assert text(ids)[first:].startswith("<tool_call>") and text(ids)[: characters_before(family, ids, finish)].endswith(
        "</tool_call>"
    )
    assert at["turn_end"].token == len(ids)
    if len(family.watches[0][0]) == 1:
        assert all(boundary.exact for boundary in parsed.boundaries)


def test_a_straddling_token_says_what_of_it_lies_behind_the_thinking(family: Family) -> None:
    if family.format.think is None or len(family.watches[0][0]) == 1:
        return
    ids = [*family.tokenizer.encode("<think>\nHm.\n</think"), *family.tokenizer.encode(">(yes)")]
    parsed = parse(family, ids)
    end = next(boundary for boundary in parsed.boundaries if boundary.kind == "thinking_end")
    assert (end.exact, end.rest) == (False, "(")
    assert characters_before(family, ids, end) == len("<think>\nHm.\n</think>")
    assert (parsed.thinking, parsed.text) == ("Hm.", "(yes)")


def test_deep_values_are_passed_on(family: Family) -> None:
    deep = "[" * 100 + "1" + "]" * 100
    parsed = parse(family, output(family, [ToolCall("", "f", f'{{"a": {deep}}}')], False))
    assert parsed.calls[0][3] == "complete" and json.loads(parsed.calls[0][2]) == {"a": json.loads(deep)}


def test_after_the_end_of_the_turn_nothing_is_said(family: Family) -> None:
    ids = (*output(family, [Text("Done.")], False), *family.encode_raw("more"))
    assert parse(family, ids).parts == [("text", "Done.")]
