"""Prompts: spans, splices, untrusted text, turns in unusual places."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parsers.conversation import Block, Conversation, Sampled, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from parsers.load import Family, Prompt, RenderError, load_family
from tests.parsers.parser_support import ANY_TEXT, FAMILIES, TOOLS, TRICKY, checkpoint, parse

relaxed = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
every = pytest.mark.parametrize("family", FAMILIES, indirect=True)
thinkers = pytest.mark.parametrize("family", [n for n in FAMILIES if "chatml" not in n], indirect=True)
SOME = st.one_of(ANY_TEXT, TRICKY)
TITLE = st.sampled_from(["A", "b c", "x.\ny", "<p>", "  led"])
WHOLE = ("system", "user", "assistant", "tool_output")


def user(text: str) -> Turn:
    return Turn("user", (Text(text),))


def output(call_id: str, text: str) -> Turn:
    return Turn("tool", (ToolOutput(call_id, text),))


def words(family: Family, prompt: Prompt, kind: str, turn: int | None = None) -> list[str]:
    """The texts of the spans of a kind."""
    return [
        family.tokenizer.decode(prompt.ids[span.start : span.end])
        for span in prompt.spans
        if span.kind == kind and turn in (None, span.turn)
    ]


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    turns: list[Turn] = [Turn("system", (Text(draw(SOME)),))] if draw(st.booleans()) else []
    turns.append(user(draw(SOME)))
    for number in range(draw(st.integers(0, 3))):
        blocks: list[Block] = [Thinking(draw(SOME))] if draw(st.booleans()) else []
        blocks.append(Text(draw(SOME)))
        calls = [ToolCall(f"c{number}{n}", "f", json.dumps({"s": draw(SOME)})) for n in range(draw(st.integers(0, 2)))]
        turns.append(Turn("assistant", (*blocks, *calls)))
        if draw(st.booleans()):
            outputs = [ToolOutput(call.id, draw(SOME)) for call in calls]
            turns.append(Turn("tool", (*outputs, Text(draw(SOME)))))
        else:
            turns += [output(call.id, draw(SOME)) for call in calls]
        if not calls or draw(st.booleans()):
            turns.append(Turn(draw(st.sampled_from(["user", "system"])), (Text(draw(SOME)),)))
    return Conversation(tuple(turns), draw(st.sampled_from([(), TOOLS])))


@every
@relaxed
@given(conversation=conversations(), thinking=st.booleans())
def test_spans_cover_and_nest(family: Family, conversation: Conversation, thinking: bool) -> None:
    prompt = family.render(conversation, thinking=thinking)
    assert all(0 <= span.start <= span.end <= len(prompt.ids) for span in prompt.spans)
    outer = [span for span in prompt.spans if span.kind in (*WHOLE, "generation_prompt")]
    gaps = [prompt.ids[before.end : after.start] for before, after in pairwise(outer)]
    around_refused = {family.encode_raw("<|im_end|>\n"), family.encode_raw("<|im_start|>user")}
    assert set(gaps) <= {(), *around_refused}  # a system turn between two outputs closes and reopens their turn
    assert (outer[0].start, outer[-1].end, outer[-1].kind) == (0, len(prompt.ids), "generation_prompt")
    for span in prompt.spans:
        if span not in outer:
            assert any(
                (o.start <= span.start and span.end <= o.end and o.turn in (span.turn, -1)) or span.turn == -1
                for o in outer
            )
    whole = [(span.turn, span.kind) for span in outer if span.turn >= 0]
    wanted = [
        (index, kind)
        for index, turn in enumerate(conversation.turns)
        for kind in ["tool_output" if any(isinstance(b, ToolOutput) for b in turn.blocks) else turn.role]
        if kind != "assistant" or any(isinstance(b, ToolCall) or b.text.strip() for b in turn.blocks)  # else left out
    ]
    assert whole == [(index, "user" if kind == "tool" else kind) for index, kind in wanted]


@every
@relaxed
@given(conversation=conversations())
def test_remembered_pieces_change_nothing(family: Family, conversation: Conversation) -> None:
    assert family.render(conversation, prefix_ok=True) == family.render(conversation, prefix_ok=False)


def test_only_the_tail_of_a_growing_prompt_is_encoded_anew(
    families: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = families("qwen-qwen3_xml")
    encoded: list[str] = []
    plain = family.tokenizer._plain

    class Counting:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> object:
            encoded.extend(texts)
            return plain.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    turns: tuple[Turn, ...] = (user("q" * 5000),)
    family.render(Conversation(turns, TOOLS))
    monkeypatch.setattr(family.tokenizer, "_plain", Counting())
    for step in range(5):
        call = ToolCall(f"c{step}", "f", "{}")
        turns += (Turn("assistant", (Thinking(f"t{step}"), call)), output(call.id, f"new{step} " * 100))
        encoded.clear()
        family.render(Conversation(turns, TOOLS))
        assert sum(map(len, encoded)) < 1000


@pytest.mark.parametrize("family", ["byte-qwen3_xml", "byte-hermes", "byte-chatml", "qwen-qwen3_xml"], indirect=True)
def test_control_tokens_in_untrusted_text_are_text(family: Family) -> None:
    """Every added token, whole and in halves, in every place a client can put text."""
    for name in family.tokenizer.control:
        for text in (name, f"a {name}{name} b", name[:-1], name[1:], f" {name} ", f"{name[:3]}{name}"):
            evil = Tool(text, text, {"type": "object", "properties": {text: {"type": "string", "description": text}}})
            blocks = (Thinking(text), Text(text), ToolCall(text, text, json.dumps({text: text})))
            turns = (Turn("system", (Text(text),)), user(text), Turn("assistant", blocks))
            turns += (Turn("tool", (ToolOutput(text, text), Text(text))), Turn("system", (Text(text),)), user(text))
            tame = tuple(replace(turn, blocks=tuple(map(_tame, turn.blocks))) for turn in turns)
            harmless = Tool("x", "x", {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}})
            prompt = family.render(Conversation(turns, (evil,)))
            assert _control(family, prompt) == _control(family, family.render(Conversation(tame, (harmless,))))
            written = family.encode_output(prompt, (*blocks, ToolCall("", "f", "{}")))
            assert _control_in(family, written) == _control_in(
                family, family.encode_output(prompt, (*map(_tame, blocks), ToolCall("", "f", "{}")))
            )


def _tame(block: Block) -> Block:
    match block:
        case Text():
            return Text("x")
        case Thinking():
            return Thinking("x")
        case ToolCall():
            return ToolCall("x", "x", '{"x": "x"}')
    return ToolOutput("x", "x")


def _control(family: Family, prompt: Prompt) -> list[int]:
    return _control_in(family, prompt.ids)


def _control_in(family: Family, ids: tuple[int, ...]) -> list[int]:
    control = set(family.tokenizer.control.values())
    return [token for token in ids if token in control]


@every
@relaxed
@given(text=SOME.filter(lambda t: t.strip()))
def test_broken_up_text_is_encoded_as_if_it_had_never_been(family: Family, text: str) -> None:
    prompt = family.render(Conversation((user(f"a{text}b"),)))
    assert words(family, prompt, "user") == [f"<|im_start|>user\na{text}b<|im_end|>\n"]
    inside = prompt.ids[prompt.spans[-2].start + 1 : prompt.spans[-2].end - 2]
    assert inside == family.tokenizer.encode(f"user\na{text}b")


# ── splice ────────────────────────────────────────────────────────────────────────────────────────────────────────


def sampled(family: Family, prompt: Prompt, blocks: tuple[Block, ...], text: str = "") -> Turn:
    """The turn as sampled: in the family's perfect spelling, or as ``text``."""
    ids = family.encode_raw(text) if text else family.encode_output(prompt, blocks)
    parsed = parse(family, ids, thinking_open=prompt.thinking_open)
    ends = [b for b in parsed.boundaries if b.kind == "thinking_end"]
    end = ends[0].token + (not ends[0].exact) if ends else 0
    return Turn("assistant", blocks, Sampled(ids, end, ends[0].rest if ends else "", prompt.opener))


@every
@relaxed
@given(title=TITLE, thought=TITLE, value=SOME, more=SOME, thinking=st.booleans(), silent=st.booleans())
def test_sampled_turns_stay_a_prefix_and_lose_only_their_thinking(
    family: Family, title: str, thought: str, value: str, more: str, thinking: bool, silent: bool
) -> None:
    call = ToolCall("c1", "f", json.dumps({"s": value}))
    first = Conversation((Turn("system", (Text("Sys."),)), user("Q")), TOOLS)
    prompt = family.render(first, thinking=thinking)
    thoughts = () if silent or not thinking else (Thinking(thought),)
    blocks: tuple[Block, ...] = (*thoughts, Text(title), call)
    turn = sampled(family, prompt, blocks)
    assert turn.sampled is not None
    loop = replace(first, turns=(*first.turns, turn, output("c1", more)))
    grown = family.render(loop, thinking=thinking)
    assert grown.ids[: len(prompt.ids) + len(turn.sampled.ids)] == prompt.ids + turn.sampled.ids
    # a new query: header and what came after the thinking, where the family strips it
    later = replace(loop, turns=(*loop.turns, user("Q2")))
    stripped = family.render(later, thinking=thinking)
    header = next(span for span in stripped.spans if span.kind == "assistant_header")
    assert stripped.ids[: header.start] == prompt.ids[: header.start]
    body = stripped.ids[header.end :]
    rest = family.tokenizer.encode(turn.sampled.thinking_rest) + turn.sampled.ids[turn.sampled.thinking_end :]
    if not thoughts:  # there is nothing to lose, so nothing is read again
        rest = turn.sampled.opener + turn.sampled.ids
    assert body[: len(rest)] == rest
    assert family.tokenizer.decode(body[len(rest) :]).startswith("\n<|im_start|>user\n")


@thinkers
def test_thinking_the_client_left_out_is_still_spliced_in_the_loop(family: Family) -> None:
    first = Conversation((user("Q"),), TOOLS)
    prompt = family.render(first)
    call = ToolCall("c1", "g", "{}")
    turn = sampled(family, prompt, (Thinking("Hm."), call))
    echo = replace(turn, blocks=(call,))
    grown = family.render(replace(first, turns=(*first.turns, echo, output("c1", "ok"))))
    assert turn.sampled and grown.ids[: len(prompt.ids) + len(turn.sampled.ids)] == prompt.ids + turn.sampled.ids
    assert words(family, grown, "thinking")[0].endswith("Hm.\n</think>\n\n") or family.watches[0][0][1:]


@thinkers
def test_odd_spelling_is_kept_and_a_cut_off_turn_is_closed(family: Family) -> None:
    first = Conversation((user("Q"),), TOOLS)
    prompt = family.render(first)
    opener = "" if prompt.thinking_open else "<think>\n"
    turn = sampled(family, prompt, (Thinking("Hm."), Text("Half a sen")), f"{opener}Hm.</think>\n\n\n Half a sen")
    assert turn.sampled is not None
    grown = family.render(replace(first, turns=(*first.turns, turn, user("go on"))))
    assert words(family, grown, "assistant") == ["<|im_start|>assistant\n Half a sen<|im_end|>\n"]
    endless = replace(turn, sampled=Sampled(turn.sampled.ids[:3], 3), blocks=(Thinking("Hm."),))
    grown = family.render(replace(first, turns=(*first.turns, endless, user("go on"))))
    assert words(family, grown, "assistant") == ["<|im_start|>assistant\n<|im_end|>\n"]


@pytest.mark.parametrize("family", ["byte-qwen3_xml"], indirect=True)
def test_another_stop_token_is_replaced_by_the_end_of_the_turn(family: Family) -> None:
    turn = Turn("assistant", (Text("Hi"),), Sampled(family.encode_raw("Hi<|endoftext|>")))
    grown = family.render(Conversation((user("Q"), turn, user("R"))))
    assert words(family, grown, "assistant") == ["<|im_start|>assistant\nHi<|im_end|>\n"]


@pytest.mark.parametrize("family", ["qwen-qwen3_xml"], indirect=True)
def test_what_a_splice_means_is_what_was_rendered(family: Family) -> None:
    """Without a splice, the rendered turn has the same spans and text as the perfectly sampled one."""
    first = Conversation((user("Q"),), TOOLS)
    blocks = (Thinking("Hm."), Text("So."), ToolCall("c1", "f", '{"n": 1}'), ToolCall("c2", "g", "{}"))
    turn = sampled(family, family.render(first), blocks)
    after = (output("c1", "1"), output("c2", "2"))
    spliced = family.render(replace(first, turns=(*first.turns, turn, *after)))
    plain = family.render(replace(first, turns=(*first.turns, Turn("assistant", blocks), *after)))
    assert spliced == plain
    assert words(family, plain, "thinking") == ["<think>\nHm.\n</think>\n\n"]
    assert [text.strip() for text in words(family, plain, "text")] == ["So."]
    assert len(words(family, plain, "tool_call")) == 2


# ── unusual places ────────────────────────────────────────────────────────────────────────────────────────────────


@every
def test_a_system_turn_in_the_middle_stays_in_its_place(family: Family) -> None:
    call = ToolCall("c1", "g", "{}")
    turns = (user("Q"), Turn("system", (Text("Mid <|im_end|>"),)), Turn("assistant", (call,)), output("c1", "out"))
    turns += (Turn("system", (Text("Late"),)),)
    prompt = family.render(Conversation(turns, TOOLS))
    assert words(family, prompt, "system", 1) == ["<|im_start|>system\nMid <|im_end|><|im_end|>\n"]
    assert words(family, prompt, "system", 4) == ["<|im_start|>system\nLate<|im_end|>\n"]
    starts = [span.start for turn in range(5) for span in prompt.spans if span.turn == turn and span.kind in WHOLE]
    assert starts == sorted(starts) and len(starts) == 5
    before = family.render(Conversation(turns[:4], TOOLS))
    end = next(span.end for span in before.spans if span.turn == 3)
    assert prompt.ids[:end] == before.ids[:end]


@every
def test_a_system_turn_between_two_outputs_splits_them(family: Family) -> None:
    calls = (ToolCall("c1", "g", "{}"), ToolCall("c2", "g", "{}"))
    turns = (
        user("Q"),
        Turn("assistant", calls),
        output("c1", "one"),
        Turn("system", (Text("S"),)),
        output("c2", "two"),
    )
    prompt = family.render(Conversation(turns, TOOLS))
    text = family.tokenizer.decode(prompt.ids)
    assert text.index("one") < text.index("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n<tool_response>\ntwo")
    assert [w.count("two") for w in words(family, prompt, "tool_output")] == [0, 1]


@every
def test_outputs_of_one_turn_are_one_span_and_of_two_turns_two(family: Family) -> None:
    calls = (ToolCall("c1", "g", "{}"), ToolCall("c2", "g", "{}"))
    head = (user("Q"), Turn("assistant", calls))
    one = (Turn("tool", (ToolOutput("c1", "one"), ToolOutput("c2", "two"))),)
    joined = family.render(Conversation((*head, *one), TOOLS))
    apart = family.render(Conversation((*head, output("c1", "one"), output("c2", "two")), TOOLS))
    assert joined.ids == apart.ids
    assert len(words(family, joined, "tool_output")) == 1
    assert [text.count("one") for text in words(family, apart, "tool_output")] == [1, 0]
    empty = family.render(Conversation((*head, output("c1", ""), output("c2", " ")), TOOLS))
    assert len(words(family, empty, "tool_output")) == 2


@thinkers
def test_a_reminder_beside_tool_outputs_is_no_query(family: Family) -> None:
    call = ToolCall("c1", "g", "{}")
    head = (user("Q"), Turn("assistant", (Thinking("Deep."), call)))
    for blocks in ((ToolOutput("c1", "out"), Text("Remember.")), (Text("Remember."), ToolOutput("c1", "out"))):
        beside = family.render(Conversation((*head, Turn("user", blocks)), TOOLS))
        assert "Deep." in family.tokenizer.decode(beside.ids)
        (shown,) = words(family, beside, "tool_output")
        assert "Remember." in shown and "out" in shown
    query = family.render(Conversation((*head, output("c1", "out"), user("Q2")), TOOLS))
    assert "Deep." not in family.tokenizer.decode(query.ids)


@every
def test_tools_have_a_span_of_their_own(family: Family) -> None:
    for system in ("", "Sys <|im_end|> text."):
        turns = ((Turn("system", (Text(system),)),) if system else ()) + (user("Q"),)
        prompt = family.render(Conversation(turns, TOOLS))
        (tools,) = words(family, prompt, "tools")
        assert "Does it." in tools and "Sys" not in tools
        (whole,) = words(family, prompt, "system")
        assert system in whole and "Does it." in whole
    assert words(family, family.render(Conversation((user("Q"),))), "tools") == []


@every
def test_arguments_that_are_no_json_are_shown_as_they_are(family: Family) -> None:
    for raw in ('{"s": "half', "plain", "[1]", ""):
        turns = (user("Q"), Turn("assistant", (ToolCall("c1", "f", raw),)), output("c1", "bad arguments"))
        prompt = family.render(Conversation(turns, TOOLS))
        assert raw in family.tokenizer.decode(prompt.ids)


@every
def test_freeform_input_travels_as_one_string(family: Family) -> None:
    raw = '*** Begin\n"x" <|im_end|>\n'
    prompt = family.render(Conversation((user("Q"),), TOOLS))
    ids = family.encode_output(prompt, [ToolCall("c1", "patch", raw, freeform=True)])
    parsed = parse(family, ids, thinking_open=prompt.thinking_open)
    assert [json.loads(call[2]) for call in parsed.calls] == [{"input": raw}]
    turns = (user("Q"), Turn("assistant", (ToolCall("c1", "patch", raw, freeform=True),)), output("c1", "ok"))
    again = family.render(Conversation(turns, TOOLS))
    header, turn = (next(s for s in again.spans if s.kind == kind) for kind in ("assistant_header", "assistant"))
    body = parse(family, again.ids[header.end : turn.end])
    assert [json.loads(call[2]) for call in body.calls] == [{"input": raw}]


@pytest.mark.parametrize("family", ["byte-qwen3_xml"], indirect=True)
def test_a_refusal_says_what_is_wrong(family: Family) -> None:
    with pytest.raises(RenderError, match="no user message"):
        family.render(Conversation((Turn("system", (Text("S"),)),)))


def test_a_template_that_drops_a_turn_is_not_believed(vocabulary: Callable[[str], Path], tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if 'drop' not in m.content %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}{{ '<|im_start|>assistant\n' }}"
    )
    family = load_family(checkpoint(vocabulary("byte"), tmp_path / "c", template))
    with pytest.raises(RenderError, match=r"turn 1 of the conversation \(assistant: .drop.\) where it stands: leave"):
        family.render(Conversation((user("Q"), Turn("assistant", (Text("drop"),)), user("R"))))
    with pytest.raises(RenderError, match="cannot go on with the last turn: 'drop'"):
        family.render(Conversation((user("Q"), Turn("assistant", (Text("drop"),)))))
    twice = template.replace("in messages", "in messages + (messages if 'twice' in messages[0].content else [])")
    family = load_family(checkpoint(vocabulary("byte"), tmp_path / "d", twice))
    with pytest.raises(RenderError, match="turns that nobody sent; use another template"):
        family.render(Conversation((user("twice"),)))


@every
def test_a_tool_whose_calls_could_not_be_told_is_refused_by_its_name(family: Family) -> None:
    for name in ("", " ", "x" * 201):
        with pytest.raises(RenderError, match=f"the tool '{name[:70]}.*give it another"):
            family.render(Conversation((user("Q"),), (*TOOLS, Tool(name))))


def test_lone_surrogates_from_json_do_no_harm(families: Callable[[str], Family]) -> None:
    family = families("byte-qwen3_xml")
    turns = (
        user("a\ud800b\udfffc"),
        Turn("assistant", (ToolCall("c", "f", '{"s": "\\ud83d x"}'),)),
        output("c", "\udffe"),
    )
    text = family.tokenizer.decode(family.render(Conversation(turns, TOOLS)).ids)
    assert "a\ufffdb\ufffdc" in text and "\ufffd x" in text


@pytest.mark.parametrize("family", ["byte-qwen3_xml", "byte-hermes"], indirect=True)
def test_arguments_of_any_depth_are_rendered(family: Family) -> None:
    for depth in (100, 600, 5_000, 100_000):
        text = '{"a": ' + "[" * depth + "]" * depth + "}"
        call = ToolCall("c1", "f", text)
        rendered = family.tokenizer.decode(
            family.render(Conversation((user("Q"), Turn("assistant", (call,)), output("c1", "x")), TOOLS)).ids
        )
        assert "[" * depth in rendered
        family.encode_output(family.render(Conversation((user("Q"),), TOOLS)), [call])


def test_a_template_that_gets_lost_in_depth_refuses(vocabulary: Callable[[str], Path], tmp_path: Path) -> None:
    template = (
        "{% macro deep(n) %}{% if n %}{{ deep(n - 1) }}{% endif %}{% endmacro %}"
        "{% for m in messages %}{% if 'bottom' in m.content %}{{ deep(5000) }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
    )
    family = load_family(checkpoint(vocabulary("byte"), tmp_path / "c", template))
    with pytest.raises(RenderError, match="recursion"):
        family.render(Conversation((user("bottom"),)))


@every
@relaxed
@given(conversation=conversations())
def test_no_prompt_is_shorter_than_its_least_length(family: Family, conversation: Conversation) -> None:
    squeezed = Turn("user", (Text("\u1100\u1161\u11a8" * 50 + "\u03b1\u0313\u0300\u0345" * 50 + " " * 500 + "x"),))
    for one in (conversation, Conversation((squeezed,))):
        assert family.least_tokens(one) <= len(family.render(one).ids)
    assert family.least_tokens(Conversation((user("a" * 10_000),))) >= -(-10_000 // family.tokenizer.longest)
