"""Public bug reports on streams, written anew from their abstract shapes: what several tokens in one delta, half a
delimiter or the end of the output did to calls.

Tests are named after the number of a report in the project's list. Every text is heard in chunks of one byte, of all
there is, and of sizes between.
"""

from __future__ import annotations

import json
import random

import pytest

from parsers import source
from parsers.conversation import Block, Text, Thinking, ToolCall
from parsers.events import TextDelta, ThinkingDelta, ToolArgsDelta, ToolCallEnd, ToolCallStart
from tests.parsers.parsed import Parsed
from tests.parsers.report_support import arguments, heard
from tests.parsers.wire_support import NAMES, machine, respelled

BLOCKS: list[Block] = [
    Text("First."),
    ToolCall("functions.f:0", "f", '{"s": "a } \\" </b>\\nc", "n": 3, "b": true}'),
    ToolCall("functions.g:1", "g", "{}"),
    ToolCall("functions.f:2", "f", '{"n": -1, "t": "007"}'),
]


def wanted() -> list[tuple[str, object]]:
    return [(block.name, json.loads(block.arguments)) for block in BLOCKS if isinstance(block, ToolCall)]


def called(parsed: Parsed) -> list[tuple[str, object]]:
    return [(call[1], decoded) for call, decoded in zip(parsed.calls, arguments(parsed), strict=True)]


def turn_of(name: str) -> list[Block]:
    """Channels whose calls end the turn have one."""
    return BLOCKS[:2] if name == "harmony" else BLOCKS


@pytest.mark.parametrize("name", NAMES)
def test_report_1_one_character_at_a_time_is_one_shot(name: str) -> None:
    family = machine(name)
    ids = family.output(turn_of(name))
    letters = family.parse(respelled(family.tokenizer, ids, 0, (1,)))
    whole = family.parse(respelled(family.tokenizer, ids, 0, (10**6,)))
    assert letters.parts == whole.parts
    assert called(letters) == wanted()[: len(turn_of(name)) - 1]
    assert letters.tolerated == []


@pytest.mark.parametrize("name", NAMES)
def test_report_2_several_tokens_in_one_delta(name: str) -> None:
    family = machine(name)
    ids = family.output(turn_of(name))
    for seed in range(12):
        assert called(family.parse(respelled(family.tokenizer, ids, seed))) == wanted()[: len(turn_of(name)) - 1]


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "deepseek_v41"])
def test_report_3_dsml_in_two_chunks_anywhere(name: str) -> None:
    family = machine(name)
    text = family.tokenizer.decode(family.output(BLOCKS))
    for cut in range(0, len(text), 3):
        if "DSML" in text[cut - 5 : cut + 5]:
            continue  # inside the control token
        both = [family.tokenizer.encode_trusted(part) for part in (text[:cut], text[cut:])]
        ids = [token for part in both for token in respelled(family.tokenizer, part, 0, (10**6,))]
        assert called(family.parse(ids)) == wanted()


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "deepseek_v31", "mistral_v13", "granite3", "llama3"])
def test_report_4_the_closing_brace_comes_before_the_end_of_the_call(name: str) -> None:
    family = machine(name)
    for size in (1, 7, 13, 10**6):
        parser, text = family.parser(), ""
        ids = respelled(family.tokenizer, family.output([ToolCall("functions.f:0", "f", '{"n": 3}')]), 0, (size,))
        for event in [event for token in ids for event in parser.feed(token)] + parser.finish("stop"):
            text += event.fragment if isinstance(event, ToolArgsDelta) else ""
            if isinstance(event, ToolCallEnd):
                assert (text, event.complete) == ('{"n": 3}', True)
                text = "ended"
        assert text == "ended"


@pytest.mark.parametrize("name", ["hunyuan_a13b", "nemotron_nano2", "ling3", "olmo3"])
def test_report_5_start_and_end_marker_in_one_delta(name: str) -> None:
    family = machine(name)
    text = family.tokenizer.decode(family.output([ToolCall("", "f", '{"n": 3}')]))
    ids = respelled(family.tokenizer, family.tokenizer.encode_trusted(text), 0, (10**6,))
    assert len(ids) <= 2
    assert called(family.parse(ids)) == [("f", {"n": 3})]


def test_report_6_step3_arguments_in_any_delta() -> None:
    call = (
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="f"><steptml:parameter name="s">a b</steptml:parameter>'
        '<steptml:parameter name="n">2</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>'
    )
    assert arguments(heard("step3", call)) == [{"s": "a b", "n": 2}]


def test_report_7_gemma_keeps_the_arguments_of_the_first_call() -> None:
    one, two = '<|tool_call>call:f{n:1,s:<|"|>x<|"|>}<tool_call|>', "<|tool_call>call:g{}<tool_call|>"
    assert arguments(heard("gemma4", one + two)) == [{"n": 1, "s": "x"}, {}]


def test_report_8_hermes_keeps_the_last_brace_behind_values_that_are_no_strings() -> None:
    for value in ("12", "true", "null", "[1]", "{}", "1.5e3"):
        parsed = heard("hermes", f'<tool_call>\n{{"name": "f", "arguments": {{"n": {value}}}}}\n</tool_call>')
        assert parsed.calls == [("call", "f", f'{{"n": {value}}}', "complete")]


@pytest.mark.parametrize("name", ["kimi_k2", "qwen3_xml", "glm47", "deepseek_v4", "minimax_m3", "kimi_k3", "seed_oss"])
def test_report_9_nothing_is_lost_between_thinking_and_a_call(name: str) -> None:
    family = machine(name)
    ids = family.output([Thinking("Hm <|"), ToolCall("functions.f:0", "f", '{"n": 1}')], True)
    for seed in range(8):
        parsed = family.parse(respelled(family.tokenizer, ids, seed), thinking_open=True)
        assert (parsed.thinking, parsed.text, called(parsed)) == ("Hm <|", "", [("f", {"n": 1})])


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "qwen3_xml", "minimax_m2", "seed_oss", "muse_glimmer"])
def test_report_10_half_a_closer_never_enters_an_argument(name: str) -> None:
    family = machine(name)
    ids = respelled(family.tokenizer, family.output([ToolCall("", "f", '{"s": "ab"}')]), 0, (1,))
    for cut in range(len(ids)):
        for call in family.parse(ids[:cut], reason="length").calls:
            assert '{"s": "ab"}'.startswith(call[2])


@pytest.mark.parametrize("name", ["hunyuan_a13b", "nemotron_nano2"])
def test_report_11_pieces_of_a_marker_are_never_content(name: str) -> None:
    family = machine(name)
    ids = respelled(family.tokenizer, family.output([ToolCall("", "f", '{"n": 1}')]), 0, (1,))
    parser = family.parser()
    events = [event for token in ids for event in parser.feed(token)] + parser.finish("stop")
    assert not [event for event in events if isinstance(event, TextDelta)]
    assert len([event for event in events if isinstance(event, ToolCallStart)]) == 1


def test_report_12_a_marker_that_arrives_in_pieces_does_not_leak() -> None:
    text = '<invoke name="f">\n<parameter name="n">1</parameter>\n</invoke>\n</minimax:tool_call>'
    parsed = heard("minimax_m2", text)
    assert (parsed.text, arguments(parsed)) == ("", [{"n": 1}])


def test_report_13_text_before_a_control_token_is_kept_and_the_token_is_not_shown() -> None:
    begin = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
    parsed = heard("kimi_k2", f"a <|tool{begin}<|tool_call_end|><|tool_calls_section_end|>")
    assert (parsed.text, arguments(parsed)) == ("a <|tool", [{}])


def test_report_14_gemma_quotes_do_not_leak() -> None:
    family = machine("gemma4")
    call = '<|tool_call>call:f{s:<|"|>it<|"|>,a:[<|"|>x<|"|>]}<tool_call|>'
    ids = family.tokenizer.encode_trusted(call)
    for cut in range(len(ids)):
        for found in family.parse(ids[:cut], reason="length").calls:
            assert '{"s": "it", "a": ["x"]}'.startswith(found[2])


@pytest.mark.parametrize("name", NAMES)
def test_report_32_a_truncated_opener_is_the_same_at_once_and_in_pieces(name: str) -> None:
    family = machine(name)
    ids = family.output([Text("So."), ToolCall("functions.f:0", "f", '{"n": 1}')])
    for cut in range(0, len(ids), 5):
        part = ids[:cut]
        one = family.parse(respelled(family.tokenizer, part, 0, (1,)), reason="length")
        two = family.parse(respelled(family.tokenizer, part, 0, (10**6,)), reason="length")
        assert (one.parts, one.tolerated) == (two.parts, two.tolerated)
        assert all(call[3] == "incomplete" or call[2] == '{"n": 1}' for call in one.calls)


@pytest.mark.parametrize("name", NAMES)
def test_report_47_finishing_never_raises_after_a_good_stream(name: str) -> None:
    family = machine(name)
    chance = random.Random(name)
    ids = family.output(turn_of(name))
    noise = sorted(family.tokenizer.control.values())
    for cut in range(0, len(ids), 7):
        for reason in ("stop", "length", "abort"):
            parsed = family.parse([*ids[:cut], chance.choice(noise)], reason=reason)  # type: ignore[arg-type]
            for call in parsed.calls:
                if call[3] == "complete":
                    assert isinstance(json.loads(call[2]), dict)


@pytest.mark.parametrize("name", NAMES)
def test_report_48_a_long_string_streams(name: str) -> None:
    family = machine(name)
    parser = family.parser()
    ids = family.output([ToolCall("functions.f:0", "f", json.dumps({"s": "word " * 200}))])
    early = [event for token in ids[: len(ids) // 2] for event in parser.feed(token)]
    waits = family.format.call.bare  # a turn that may yet turn out to be text
    assert (sum(isinstance(event, ToolArgsDelta) for event in early) > 50) == (not waits)


@pytest.mark.parametrize("name", NAMES)
def test_report_49_arguments_may_be_of_any_size(name: str) -> None:
    family = machine(name)
    value = 'line "quoted" \\ \n' * 2000
    ids = family.output([ToolCall("functions.f:0", "f", json.dumps({"s": value}))])
    assert called(family.parse(respelled(family.tokenizer, ids, 0, (16,)))) == [("f", {"s": value})]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "harmony"])
def test_report_50_51_52_indices_count_calls_in_order(name: str) -> None:
    family = machine(name)
    parser = family.parser()
    ids = family.output([ToolCall(f"functions.{tool}:{n}", tool, "{}") for n, tool in enumerate("gfgg")])
    events = [event for token in ids for event in parser.feed(token)] + parser.finish("stop")
    starts = [(event.index, event.name) for event in events if isinstance(event, ToolCallStart)]
    assert starts == [(0, "g"), (1, "f"), (2, "g"), (3, "g")]
    ends = [(event.index, event.complete) for event in events if isinstance(event, ToolCallEnd)]
    assert ends == [(number, True) for number in range(4)]


def test_report_61_a_header_may_end_in_a_delta_of_its_own() -> None:
    family = machine("mistral_v13")
    parser = family.parser()
    pieces = ["[TOOL_CALLS]", "f", "[ARGS]", '{"n"', ": 1}", "</s>"]
    events = [e for piece in pieces for token in family.tokenizer.encode_trusted(piece) for e in parser.feed(token)]
    assert ToolCallStart(0, "f") in events
    assert arguments(heard("mistral_v13", "".join(pieces))) == [{"n": 1}]


def test_report_72_finding_the_end_of_thinking_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    held = source.Stops.held

    def counted(self: source.Stops, text: str) -> int:
        nonlocal seen
        seen += len(text)
        return held(self, text)

    monkeypatch.setattr(source.Stops, "held", counted)
    family, spent = machine("qwen3_xml"), []
    for size in (10_000, 40_000):
        seen = 0
        ids = family.output([Thinking("so <t " * (size // 6)), Text("Done.")], True)
        assert family.parse(ids, thinking_open=True).text == "Done."
        spent.append(seen)
    assert spent[1] < 4.5 * spent[0]


@pytest.mark.parametrize("name", NAMES)
def test_report_f1_text_is_not_held_until_the_end_because_tools_exist(name: str) -> None:
    family = machine(name)
    parser = family.parser()
    ids = family.output([Text("word " * 40 + "end")])
    shown = [event for token in ids[: len(ids) // 2] for event in parser.feed(token) if isinstance(event, TextDelta)]
    assert len(shown) > 20


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "glm45", "ling3", "kimi_k2", "minimax_m2", "deepseek_v3"])
def test_report_f2_layout_between_two_calls_destroys_nothing(name: str) -> None:
    family = machine(name)
    call = family.tokenizer.decode(family.output([ToolCall("functions.g:0", "g", "{}")]))
    head = call.removesuffix(family.format.ends[0])
    inner = family.format.call
    body = head
    if inner.section:
        body = head.removeprefix(inner.section.open).removesuffix(inner.section.close)
    twice = f"{body}\n \n{body}"
    if inner.section:
        twice = inner.section.open + twice + inner.section.close
    assert called(heard(name, twice + family.format.ends[0])) == [("g", {}), ("g", {})]


@pytest.mark.parametrize("name", NAMES)
def test_report_f3_a_call_without_arguments_comes_once(name: str) -> None:
    family = machine(name)
    assert called(family.parse(family.output([ToolCall("functions.g:0", "g", "{}")]))) == [("g", {})]


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "glm47", "minimax_m3", "deepseek_v4", "kimi_k3"])
def test_report_f4_a_call_behind_thinking_comes_before_later_text(name: str) -> None:
    family = machine(name)
    blocks = [Thinking("Hm."), ToolCall("", "g", "{}"), Text("Later.")]
    kinds = [part[0] for part in family.parse(family.output(blocks, True), thinking_open=True).parts]
    assert kinds == ["thinking", "call", "text"]


@pytest.mark.parametrize(
    "text",
    [
        "<|start|><|start|>assistant to=user<|message|>Hi.<|eot|>",
        " to=user " + "x" * 3000 + "<|message|>Hi.<|eot|>",
        " to=us<|eot|>",
    ],
)
def test_report_f5_a_damaged_header_swallows_no_reply(text: str) -> None:
    parsed = heard("muse_glimmer", text)
    assert parsed.calls == []
    assert "Hi." not in text or "Hi." in parsed.text
    assert parsed.tolerated != []


def test_thinking_and_text_are_never_empty_deltas() -> None:
    parser = machine("muse_glimmer").parser()
    ids = machine("muse_glimmer").tokenizer.encode_trusted(" to=self<|message|>a<|message|>b<|eot|>")
    deltas = [e for token in ids for e in parser.feed(token) if isinstance(e, TextDelta | ThinkingDelta)]
    assert [delta.text for delta in deltas] == ["a", "b"]
