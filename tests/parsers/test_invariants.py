"""What holds for every format there is, as properties over random turns, random tokens and every cut."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from parsers.conversation import Block, Text, Thinking, ToolCall
from parsers.events import TextDelta, ToolArgsDelta
from parsers.families.registry import FORMATS
from parsers.format import Elements, Format, Literals
from parsers.schema import is_json
from parsers.source import Source, certain
from tests.parsers.parsed import ANY_TEXT, JSON, TOOLS, TRICKY
from tests.parsers.wire_support import NAMES, Machine, machine, respelled

every_format = pytest.mark.parametrize("name", NAMES)
quick = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
few = settings(quick, max_examples=4)

PLACEHOLDERS = ("{name}", "{n}", "{n1}", "{id}")


def spelled_tags(found: Machine) -> tuple[str, ...]:
    """Delimiters that ordinary text can spell, and with them become one."""
    parts = {part for text in found.format.generated() for part in _literals(text) if len(part) > 3}
    call = {part for text in _calls(found.format) for part in _literals(text)}
    return tuple(part for part in parts if not part.isalnum() and (part in call or not certain(found.wire.code(part))))


def _calls(form: Format) -> Iterator[str]:
    """What opens and closes calls, which is understood in ordinary tokens too."""
    yield from (form.call.open, form.call.close, form.call.tail)
    if form.call.section:
        yield from (form.call.section.open, form.call.section.close)


def _literals(text: str) -> list[str]:
    for hole in PLACEHOLDERS:
        text = text.replace(hole, "\0")
    return [part.strip() for part in text.split("\0")]


def clean(found: Machine, texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    tags = spelled_tags(found)
    return texts.filter(lambda text: not any(tag in text for tag in tags))


@st.composite
def arguments(draw: st.DrawFn, found: Machine) -> dict[str, object]:
    """Arguments of the tool "f" that its schema allows and the format can write."""
    text = clean(found, st.one_of(ANY_TEXT, TRICKY))
    tags = spelled_tags(found)
    nested = isinstance(found.format.call.codec, Elements)
    untyped = text.filter(lambda one: bool(one.strip()) and not is_json(one.strip()))  # else it reads as what it spells
    value = st.none() | st.integers(-9, 9) | untyped if nested else JSON
    every = {
        "s": text,
        "t": st.sampled_from(
            ["", "\n", "\n\n", "true", "007", "[x", "a\n", "\na", "  ", '{"k": 1}', "}", "1e400", '"']
        ),
        "u": st.sampled_from(["007", "true", "[1]", " x "]) | (st.nothing() if nested else st.none()),
        "n": st.integers(-(2**70), 2**70),
        "x": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
        "b": st.booleans(),
        "o": st.dictionaries(st.sampled_from(["k", "two words", "é"] if not nested else ["k", "l"]), value, max_size=3),
        "a": st.lists(value, max_size=3),
    }
    keys = draw(st.lists(st.sampled_from(sorted(every)), unique=True, max_size=4))
    drawn = {key: draw(every[key]) for key in keys}
    assume(not any(tag in json.dumps(drawn, ensure_ascii=False) for tag in tags))
    return drawn


@st.composite
def turns(draw: st.DrawFn, found: Machine, calls: int = 2) -> list[Block]:
    """What the family can say in one turn."""
    form = found.format
    openers = (form.call.open, form.call.section.open if form.call.section else "", form.call.header)
    spelled = any(text.startswith("<") and not certain(found.wire.code(text)) for text in openers if text)
    prose = clean(found, st.one_of(ANY_TEXT, TRICKY)).map(str.strip).filter(bool)
    if spelled:  # calls in quoted code are none
        prose = prose.filter(lambda text: not set("`~") & set(text))
    blocks: list[Block] = []
    if (form.think or form.frames) and draw(st.booleans()):
        blocks.append(Thinking(draw(prose)))
    wanted = draw(st.integers(0, calls))
    if (not wanted or not form.call.bare) and draw(st.booleans()):
        blocks.append(Text(draw(prose)))
    for _ in range(wanted):
        value = json.dumps(draw(arguments(found)), ensure_ascii=draw(st.booleans()))
        blocks.append(ToolCall("call00001", "f", value))
    return blocks


def known(blocks: list[Block], unordered: bool) -> list[tuple[str, object]]:
    """Blocks with decoded arguments, in order."""
    found: list[tuple[str, object]] = []
    for block in blocks:
        if isinstance(block, ToolCall):
            value = json.loads(block.arguments)
            found.append((block.name, json.loads(json.dumps(value, sort_keys=True)) if unordered else value))
        elif isinstance(block, Text | Thinking):
            found.append((type(block).__name__, block.text))
    return found


def said(found: Machine, blocks: list[Block]) -> list[tuple[str, object]]:
    unordered = isinstance(found.format.call.codec, Literals)  # written sorted
    return [(kind, repr(value)) for kind, value in known(blocks, unordered)]


@every_format
@quick
@given(data=st.data())
def test_a_written_turn_parses_back_to_itself(name: str, data: st.DataObject) -> None:
    found = machine(name)
    blocks = data.draw(turns(found))
    opened = (
        bool(found.format.think) and isinstance(blocks[0] if blocks else None, Thinking) and data.draw(st.booleans())
    )
    parsed = found.parse(found.output(blocks, opened), thinking_open=opened)
    assert said(found, parsed.blocks()) == said(found, blocks)
    assert all(call[3] == "complete" for call in parsed.calls)
    assert parsed.tolerated == []


@every_format
@quick
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_tokens_do_not_matter_only_text_does(name: str, data: st.DataObject, seed: int) -> None:
    found = machine(name)
    ids = found.output(data.draw(turns(found)))
    at = data.draw(st.integers(0, len(ids)))
    ids = [*ids[:at], *data.draw(junk(found)), *ids[at:]]  # also for turns that no model should write
    other = respelled(found.tokenizer, ids, seed)
    one, two = found.parse(ids), found.parse(other)
    assert one.parts == two.parts
    assert one.tolerated == two.tolerated
    positions = [(b.kind, found.characters_before(ids, b)) for b in one.boundaries]
    assert positions == [(b.kind, found.characters_before(other, b)) for b in two.boundaries]
    assert [position for _, position in positions] == sorted(position for _, position in positions)


@st.composite
def junk(draw: st.DrawFn, found: Machine, broken: bool = False) -> list[int]:
    """Control tokens, pieces of delimiters, and text; ``broken``: bytes that are none, too."""
    control = sorted(found.tokenizer.control.values())
    strings = sorted({text for text in found.format.generated() if text.strip()})
    pieces = draw(
        st.lists(
            st.one_of(
                st.sampled_from(control).map(lambda token: [token]),
                st.sampled_from(strings).map(found.tokenizer.encode_trusted),
                st.sampled_from(strings).map(lambda text: found.tokenizer.encode_trusted(text[: len(text) // 2])),
                st.one_of(
                    TRICKY,
                    ANY_TEXT,
                    st.sampled_from(['{"n": 2}', '{"name": "f", "arguments": {}}', "f", "[", "f(n=1)"]),
                ).map(found.tokenizer.encode_trusted),
                st.integers(0, 255 if broken else 127).map(lambda byte: [found.tokenizer.piece(bytes([byte]))]),
            ),
            max_size=6,
        )
    )
    return [token for piece in pieces for token in piece]


@every_format
@settings(quick, max_examples=25)
@given(data=st.data(), reason=st.sampled_from(["stop", "length", "abort"]), opened=st.booleans(), tools=st.booleans())
def test_nothing_raises_and_no_call_is_made_up(
    name: str, data: st.DataObject, reason: str, opened: bool, tools: bool
) -> None:
    found = machine(name)
    ids = data.draw(st.lists(junk(found, broken=True), max_size=4))
    tokens = [token for piece in ids for token in piece]
    parsed = found.parse(tokens, TOOLS if tools else (), thinking_open=opened, reason=reason)  # type: ignore[arg-type]
    assert tools or not parsed.calls
    for call in parsed.calls:
        assert call[1] and call[3] in ("complete", "incomplete")
        call[2].encode()
        if call[3] == "complete":
            assert isinstance(json.loads(call[2]), dict)
    kinds = [boundary.kind for boundary in parsed.boundaries]
    assert kinds.count("tool_call_start") == kinds.count("tool_call_end") == len(parsed.calls)


@every_format
@few
@given(data=st.data())
def test_every_cut_gives_a_prefix(name: str, data: st.DataObject) -> None:
    found = machine(name)
    ids = found.output(data.draw(turns(found)))
    whole = found.parse(ids)
    for cut in range(0, len(ids), 1 + len(ids) // 60):
        part = found.parse(ids[:cut], reason="length")
        for number, before in enumerate(part.parts):
            last = number == len(part.parts) - 1
            after = whole.parts[number] if number < len(whole.parts) else ("text", "")
            if before[0] == "call":
                assert before[1] == after[1] and after[2].startswith(before[2])
                assert before[3] == "complete" or last
                assert before[3] == "incomplete" or before[2] == after[2]
            elif last and (after[0] != before[0] or not after[1].startswith(before[1].rstrip())):
                # half a delimiter in ordinary tokens is text when the output ends with it
                common = after[1] if before[0] == after[0] else ""
                assert is_half_delimiter(found, before[1].removeprefix(common)), (before, after)
            else:
                assert last or before == after


def is_half_delimiter(found: Machine, text: str) -> bool:
    strings = [text for text in found.format.generated() if text]
    if found.format.call.bare and text.lstrip().startswith(("{", "[")):
        return True
    return not text.strip() or any(part in string for string in strings for part in [text.strip()])


@every_format
@few
@given(data=st.data())
def test_every_prefix_of_the_arguments_is_one_of_the_json(name: str, data: st.DataObject) -> None:
    found = machine(name)
    blocks = data.draw(turns(found))
    parser, texts = found.parser(), dict[int, str]()
    for token in found.output(blocks):
        for event in parser.feed(token):
            if isinstance(event, ToolArgsDelta):
                texts[event.index] = texts.get(event.index, "") + event.fragment
    calls: list[Block] = [block for block in blocks if isinstance(block, ToolCall)]
    assert said(found, [ToolCall("", "f", texts[index]) for index in sorted(texts)]) == said(found, calls)


@every_format
@quick
@given(data=st.data(), reason=st.sampled_from(["stop", "length"]), tools=st.booleans())
def test_plain_text_is_passed_on_whole(name: str, data: st.DataObject, reason: str, tools: bool) -> None:
    found = machine(name)
    text = data.draw(clean(found, st.one_of(ANY_TEXT, TRICKY)))
    ids = [*text_header(found), *found.tokenizer.encode(text)]
    parsed = found.parse(ids, TOOLS if tools else (), reason=reason)  # type: ignore[arg-type]
    assert (parsed.text, parsed.thinking, parsed.calls, parsed.tolerated) == (text, "", [], [])


def text_header(found: Machine) -> list[int]:
    """What stands in front of text where turns are several messages."""
    frames = found.format.frames
    return found.tokenizer.encode_trusted(frames.text + frames.message) if frames else []


@every_format
def test_text_arrives_at_once(name: str) -> None:
    found = machine(name)
    parser = found.parser()
    for token in text_header(found):
        parser.feed(token)
    for letter in "plain words, one at a time":
        events = [event for token in found.tokenizer.encode(letter) for event in parser.feed(token)]
        assert events == [TextDelta(letter)] or letter == " " or events == [TextDelta(" " + letter)]


@every_format
def test_code_points_split_over_tokens_never_flicker(name: str) -> None:
    found = machine(name)
    text, head = "é😀日本\u2028x", len(text_header(found))
    ids = [*text_header(found), *map(found.tokenizer.piece, map(bytes, zip(text.encode())))]
    assert found.parse(ids).parts == [("text", text)]
    assert found.parse(ids[: head + 3], reason="length").text == "é"
    assert found.parse(ids[: head + 3], reason="stop").text == "é\ufffd"


@every_format
def test_calls_are_numbered_in_order_and_bounded(name: str) -> None:
    found = machine(name)
    ids = found.output([ToolCall("call00001", tool, "{}") for tool in ("g", "f", "g")])
    parsed = found.parse(ids)
    assert parsed.calls == [("call", tool, "{}", "complete") for tool in ("g", "f", "g")]
    kinds = [boundary.kind for boundary in parsed.boundaries]
    ends = ["turn_end"]
    assert kinds == ["tool_call_start", "tool_call_end"] * 3 + ends
    assert parsed.tolerated == []


@every_format
def test_an_unknown_tool_is_forwarded(name: str) -> None:
    found = machine(name)
    parsed = found.parse(found.output([ToolCall("call00001", "nobody", '{"k": 1}')]))
    if found.format.call.bare:  # without any opener only what is declared is a call
        assert parsed.calls == [] and "nobody" in parsed.text
    else:
        assert [(call[1], json.loads(call[2])) for call in parsed.calls] == [("nobody", {"k": 1})]


@every_format
def test_without_tools_nothing_is_called_and_the_text_is_kept(name: str) -> None:
    found = machine(name)
    blocks: list[Block] = [ToolCall("call00001", "f", '{"s": "words"}')]
    if not found.format.call.bare:
        blocks.insert(0, Text("Look:"))
    parsed = found.parse(found.output(blocks), ())
    assert parsed.calls == [] and "words" in parsed.text and "f" in parsed.text
    special = [text for text, token in found.tokenizer.control.items() if token in found.tokenizer.special]
    assert not any(text in parsed.text for text in special)


@every_format
def test_length_leaves_the_last_call_incomplete(name: str) -> None:
    found = machine(name)
    ids = found.output([ToolCall("call00001", "f", '{"s": "long text"}')])
    closed = next(b.token for b in found.parse(ids).boundaries if b.kind == "tool_call_end")
    closes_itself = not found.format.call.close and not found.format.frames
    for cut in range(len(ids)):
        for call in found.parse(ids[:cut], reason="length").calls:
            assert closes_itself or (call[3] == "complete") == (cut >= closed)


CODECS = {type(form.call.codec): form for form in FORMATS}


@pytest.mark.parametrize("form", CODECS.values(), ids=lambda form: form.name)
def test_work_grows_linearly_with_the_argument(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the parser does is proportional to what is buffered when a token comes."""
    found, push = machine(form.name), Source.push
    work = 0

    def counted(source: Source, text: str, unfinished: bool = False) -> None:
        nonlocal work
        push(source, text, unfinished)
        work += len(source.buffer)

    monkeypatch.setattr(Source, "push", counted)
    spent = []
    for size in (10_000, 40_000):
        work = 0
        block = ToolCall("call00001", "f", json.dumps({"s": ("x" * 60 + "\\ \n<p ") * (size // 66)}))
        assert [call[3] for call in found.parse(found.output([block])).calls] == ["complete"]
        spent.append(work)
    assert spent[1] < 4.5 * spent[0] and spent[1] < 40 * 40_000
