"""Every family with a template: templates of ours with the habits of the real ones, over small vocabularies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from parsers.conversation import Conversation, Sampled, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from parsers.guard import visible
from parsers.load import RenderError
from parsers.messages import native_id
from parsers.write import assistant_text
from tests.parsers.parser_support import parse
from tests.parsers.template_support import (
    CALL,
    FIRST,
    OTHER,
    SPOILED,
    TOOL,
    TURN,
    answered,
    every,
    family,
    output,
    shown,
    user,
    with_turns,
)


@every
def test_the_family_is_recognised(name: str) -> None:
    assert family(name).name == name


@every
def test_what_is_rendered_is_what_the_template_writes(name: str) -> None:
    one = family(name)
    blocks = (Thinking("Hm hm."), Text("Done."))
    turns = (TURN, output("call_1", "Blue."), Turn("assistant", blocks), user("Question two."))
    for conversation in (FIRST, with_turns(turns[2], turns[3]), with_turns(*turns)):
        if one._renderer.traits.tools_move:
            conversation = replace(conversation, tools=())
        text = visible(one._renderer.text(conversation))
        rendered = one.tokenizer.decode(one.render(conversation).ids)
        if one._renderer.traits.calls not in SPOILED or conversation.turns[2:3] != (TURN,):
            assert rendered == text


@every
def test_spans_are_where_their_contents_are(name: str) -> None:
    one = family(name)
    second = replace(CALL, id="call_2")
    turns = (TURN, output("call_1", "Blue."), Turn("assistant", (second,)), output("call_2", "Green."))
    prompt = one.render(with_turns(*turns, Turn("assistant", (Text("Done."),)), user("Question two.")))
    wanted = [("system", 0, "Be good."), ("user", 1, "Question one."), ("assistant", 2, "the sky")]
    wanted += [("tool_output", 3, "Blue."), ("assistant", 4, "the sky"), ("tool_output", 5, "Green.")]
    wanted += [("assistant", 6, "Done."), ("user", 7, "Question two.")]
    whole = [span for span in prompt.spans if span.kind in ("system", "user", "assistant", "tool_output")]
    assert [(span.kind, span.turn) for span in whole if span.turn >= 0] == [pair[:2] for pair in wanted]
    for kind, turn, text in wanted:
        (found,) = shown(one, prompt, kind, turn)
        assert text in found
        assert not any(other in found for _, number, other in wanted if number != turn and other != text)
    outer = [*whole, prompt.spans[-1]] if prompt.spans[-1].kind == "generation_prompt" else whole
    assert outer[-1].kind == "generation_prompt" and outer[-1].end == len(prompt.ids)
    for before, after in pairwise(outer):
        assert before.end == after.start
    assert not one.tokenizer.decode(prompt.ids[: outer[0].start]).strip() or one.name in ("glm45", "glm47", "glm53")
    inner = [span for span in prompt.spans if span.kind in ("assistant_header", "thinking", "text", "tool_call")]
    for span in inner:
        assert any(o.start <= span.start <= span.end <= o.end and o.turn == span.turn for o in whole)
    calls = [text for turn in (2, 4) for text in shown(one, prompt, "tool_call", turn)]
    assert len(calls) == 2 and all("look" in text and "the sky" in text for text in calls)
    assert all("Looks." in text and "Be good." not in text for text in shown(one, prompt, "tools"))


@every
def test_the_assistants_part_parses_back(name: str) -> None:
    one = family(name)
    conversation = with_turns(TURN, output("call_1", "Blue."))
    prompt = one.render(conversation)
    header = next(span for span in prompt.spans if span.kind == "assistant_header")
    turn = next(span for span in prompt.spans if span.kind == "assistant")
    parsed = parse(one, prompt.ids[header.end : turn.end], (TOOL, OTHER))
    assert parsed.text == "I look."
    assert parsed.thinking == ("Hm hm." if one.probe.thinking_in_loop else "")
    ((_, called, arguments, complete),) = parsed.calls
    assert (called, json.loads(arguments), complete) == ("look", json.loads(CALL.arguments), "complete")


ALL_TYPES = '{"at": "a b", "l": [1, true], "o": {"x": null, "y": [2.5]}, "f": 1.5, "b": false}'
PRINTED = {"llama4": (CALL.arguments, ALL_TYPES), "seed_oss": (ALL_TYPES,)}
"""What these templates print as Python does, whatever its type."""


@every
@pytest.mark.parametrize("arguments", [CALL.arguments, "{}", ALL_TYPES])
def test_the_format_writes_what_the_template_writes(name: str, arguments: str) -> None:
    one = family(name)
    renderer, call = one._renderer, replace(CALL, arguments=arguments)
    turn = Turn("assistant", (*TURN.blocks[:2], call))
    block = next(b for b in renderer.blocks(with_turns(turn, output("call_1", "Blue."))) if b.assistant)
    blocks = [b for b in turn.blocks if one.probe.thinking_in_loop or not isinstance(b, Thinking)]
    blocks = [b for b in blocks if renderer.traits.calls not in SPOILED or not isinstance(b, Text)]
    identity = native_id(one.format.call_ids, call.id, call.name, 0)
    named = [replace(b, id=identity) if isinstance(b, ToolCall) else b for b in blocks]
    ours = visible(assistant_text(one.format, renderer.guard, named, "unopened"))
    assert (ours in visible(block.body)) == (arguments not in PRINTED.get(one.name, ())), (ours, block.body)


@every
def test_a_sampled_turn_continues_its_prompt(name: str) -> None:
    one = family(name)
    keeps = one.probe.thinking_in_loop
    first = one.render(FIRST, thinking=keeps)
    blocks = TURN.blocks if keeps else TURN.blocks[1:]
    turn = answered(one, first, blocks)
    assert turn.sampled is not None
    grown = one.render(with_turns(turn, output("call_1", "Blue.")), thinking=keeps)
    ends = set(one.stop_tokens[1:] if one.format.turns.assistant.close else one.stop_tokens)
    sampled = turn.sampled.ids[:-1] if turn.sampled.ids[-1] in ends else turn.sampled.ids
    expected = first.ids + sampled
    assert grown.ids[: len(expected)] == expected
    again = one.render(with_turns(turn, output("call_1", "Blue."), Turn("assistant", (Text("Done."),)), user("More.")))
    if one.probe.turn_end_survives:
        assert again.ids[: len(expected)] == expected


@every
def test_the_place_before_the_header_is_shared_when_probed_so(name: str) -> None:
    """Reports 56 and 54: what comes later changes nothing before it."""
    one = family(name)
    turns = (TURN, output("call_1", "Blue."), Turn("assistant", (Text("Done."),)), user("Two."))
    prompts = [one.render(with_turns(*turns[:size])) for size in (0, 2, 4)]
    starts = [next(s.start for s in p.spans if s.kind == "generation_prompt") for p in prompts]
    same = [prompts[-1].ids[:start] == p.ids[:start] for p, start in zip(prompts, starts, strict=True)]
    assert same[0] == one.probe.header_survives
    assert same[1] or not one.probe.turn_end_survives


@every
def test_control_tokens_in_any_text_are_text(name: str) -> None:
    """Every added token of the vocabulary, whole and in parts, wherever a client can put text."""
    one = family(name)
    control = set(one.tokenizer.control.values())

    def tokens(ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in control]

    def everywhere(text: str) -> tuple[list[int], list[int]]:
        schema = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
        call = ToolCall(text, text, json.dumps({text: text}))
        said = (Thinking(text), Text(text), call)
        turns = (Turn("system", (Text(text),)), user(text), Turn("assistant", said))
        turns += (Turn("tool", (ToolOutput(text, text), Text(text))), Turn("assistant", (Text(text),)), user(text))
        prompt = one.render(Conversation(turns, (Tool(text, text, schema),)))
        return tokens(prompt.ids), tokens(one.encode_output(prompt, said))

    harmless = [everywhere(text) for text in ("x", "x.", "<x", "a x")]  # keys that are no words are quoted by some
    for token in one.tokenizer.control:
        for text in (token, f"a {token}{token} b", f"{token[:-1]} {token[1:]}", f"{token[:2]}{token}"):
            assert everywhere(text) in harmless


@every
def test_the_prompt_says_whether_thinking_is_open(name: str) -> None:
    """Reports 27, 28 and 29: neither closers in older text nor outputs decide, only the last header does."""
    one = family(name)
    think = one.format.think
    edges = f" {think.open} {think.close} {think.open}" if think else ""
    loop = with_turns(TURN, output("call_1", f"Blue.{edges}"))
    for conversation in (FIRST, loop, with_turns(Turn("assistant", (Text("Yes."),)), user(f"Well{edges}"))):
        on, off = one.render(conversation), one.render(conversation, thinking=False)
        headed = one.tokenizer.decode(on.opener).endswith(one.tokenizer.decode(one.render(FIRST).opener))
        assert on.thinking_open == (one.probe.opener_prefilled and headed)
        assert not off.thinking_open or off.opener == on.opener
        closed = parse(one, one.encode_output(off, (Text("Hi."),)), thinking_open=off.thinking_open)
        assert closed.text == "Hi." and not closed.thinking
        opened = parse(one, one.encode_output(on, (Thinking("Ah."), Text("Hi."))), thinking_open=on.thinking_open)
        assert opened.text == "Hi."
        assert opened.thinking == ("Ah." if think or one.format.frames else "")


def test_calls_and_outputs_have_the_familys_own_ids() -> None:
    """Report 53: counted over the conversation where the template prints them, nine letters where it insists."""
    second = replace(CALL, id="toolu_zzz", name="wait", arguments="{}")
    turns = (TURN, output("call_1", "Blue."), Turn("assistant", (second,)), output("toolu_zzz", "Late."))
    kimi = family("kimi_k2")
    text = kimi.tokenizer.decode(kimi.render(with_turns(*turns)).ids)
    assert "functions.look:0<|tool_call_argument_begin|>" in text and "## Return of functions.look:0\nBlue." in text
    assert "functions.wait:1<|tool_call_argument_begin|>" in text and "## Return of functions.wait:1\nLate." in text
    mistral = family("mistral_v11")
    ids = [part[:9] for part in mistral.tokenizer.decode(mistral.render(with_turns(*turns)).ids).split("[CALL_ID]")[1:]]
    assert len(set(ids)) == 2 and all(part.isalnum() for part in ids)
    assert all(
        f"[TOOL_RESULTS]{part}[TOOL_CONTENT]" in mistral.tokenizer.decode(mistral.render(with_turns(*turns)).ids)
        for part in ids
    )


@every
def test_arguments_come_as_text_or_as_objects(name: str) -> None:
    """Report 57: JSON text is decoded where the template needs an object; what is none breaks nothing."""
    one = family(name)
    for raw in (CALL.arguments, '{"at": "half', "{}", ""):
        call = replace(CALL, arguments=raw)
        prompt = one.render(with_turns(Turn("assistant", (call,)), output("call_1", "Blue.")))
        (written,) = shown(one, prompt, "assistant", 2)
        assert "look" in written and ("half" in written) == ("half" in raw) and ("the sky" in written) == ("sky" in raw)


def test_odd_spelling_of_a_turn_that_the_next_header_ends_is_kept() -> None:
    """Report 55: the template would put line breaks that the model did not write."""
    one = family("glm45")
    prompt = one.render(FIRST)
    ids = one.encode_raw(
        "<think>Hm.</think>I look.<tool_call>look\n<arg_key>at</arg_key><arg_value>x</arg_value></tool_call>"
    )
    for end in ("<|observation|>", "<|endoftext|>"):
        sampled = (*ids, *one.encode_raw(end))
        turn = Turn("assistant", TURN.blocks, Sampled(sampled, len(one.encode_raw("<think>Hm.</think>"))))
        grown = one.render(with_turns(turn, output("call_1", "Blue.")))
        assert grown.ids[: len(prompt.ids) + len(ids)] == prompt.ids + ids
        rest = one.tokenizer.decode(grown.ids[len(prompt.ids) + len(ids) :])
        assert rest == "<|observation|>\n<tool_response>\nBlue.\n</tool_response><|assistant|>"


def test_a_channel_turn_ends_as_history_ends_it() -> None:
    one = family("harmony")
    prompt = one.render(FIRST)
    final = one.encode_raw("<|channel|>final<|message|>Done.<|return|>")
    turn = Turn("assistant", (Text("Done."),), Sampled(final))
    grown = one.render(with_turns(turn, user("More.")))
    assert grown.ids[: len(prompt.ids) + len(final) - 1] == prompt.ids + final[:-1]
    rest = one.tokenizer.decode(grown.ids[len(prompt.ids) + len(final) - 1 :])
    assert rest == "<|end|><|start|>user<|message|>More.<|end|><|start|>assistant"
    thought = one.encode_raw("<|channel|>analysis<|message|>Hm.<|end|>")
    both = Turn(
        "assistant",
        (Thinking("Hm."), Text("Done.")),
        Sampled(thought + one.encode_raw("<|start|>assistant") + final, len(thought)),
    )
    (kept,) = shown(one, one.render(with_turns(both, user("More."))), "assistant", 2)
    assert kept == "<|start|>assistant<|channel|>final<|message|>Done.<|end|>"


@every
def test_parallel_calls_stand_with_their_outputs(name: str) -> None:
    one = family(name)
    calls = (CALL, replace(CALL, id="call_2", name="wait", arguments='{"at": "noon"}'))
    outputs = Turn("tool", (ToolOutput("call_1", "Blue."), ToolOutput("call_2", "Green.")))
    prompt = one.render(with_turns(Turn("assistant", calls), outputs))
    text = one.tokenizer.decode(prompt.ids)
    assert text.index("the sky") < text.index("noon") and text.index("Blue.") < text.index("Green.")
    assert len(shown(one, prompt, "tool_call")) >= 1
    assert all(any(word in piece for piece in shown(one, prompt, "tool_output")) for word in ("Blue.", "Green."))


@every
def test_an_output_without_its_call_is_refused_by_name(name: str) -> None:
    with pytest.raises(RenderError, match=r"call_lost.*no earlier turn has made.*Blue"):
        family(name).render(with_turns(TURN, output("call_lost", "Blue.")))


def test_dates_stand_still() -> None:
    one = family("harmony")
    assert "Today is 2001-02-03." in one.tokenizer.decode(one.render(FIRST).ids)


def test_efforts_reach_the_template() -> None:
    one = family("harmony")
    texts = [one.tokenizer.decode(one.render(FIRST, effort=effort).ids) for effort in ("low", "xhigh")]
    assert "Reasoning: low" in texts[0] and "Reasoning: high" in texts[1]
    assert "low" in one.efforts


KEPT = {  # thinking in the loop, thinking and whole turns behind a new query, the prompt's end there
    **dict.fromkeys(("hermes", "glm45", "kimi_k2", "harmony", "gemma4", "lfm2", "longcat"), (True, False, False, True)),
    **dict.fromkeys(("qwen3_xml", "step35", "minimax_m2", "mimo", "ernie45"), (True, False, False, False)),
    **dict.fromkeys(("seed_oss", "glm47", "glm53", "ling3", "hy3", "nemotron3"), (True, True, True, True)),
    **dict.fromkeys(("minimax_m3", "muse_glimmer", "mistral_v13", "kimi_k3", "qwen38"), (True, True, True, True)),
    **dict.fromkeys(("deepseek_v4", "deepseek_v41"), (True, True, True, True)),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31", "granite3", "granite4"), (False, False, True, True)),
    **dict.fromkeys(("llama3", "llama4", "hunyuan_a13b", "chatml", "chatml_thinking"), (False, False, True, True)),
    **dict.fromkeys(("mistral_v3", "mistral_v11"), (False, False, True, True)),
    "deepseek_v32": (True, False, False, False),
    **dict.fromkeys(("nemotron_nano2", "step3", "olmo3"), (False, False, True, False)),
}


@every
def test_what_survives_a_new_query(name: str) -> None:
    probe = family(name).probe
    found = (probe.thinking_in_loop, probe.thinking_survives, probe.turn_end_survives, probe.prompt_end_survives)
    assert found == KEPT[name]
    assert probe.header_survives


def test_a_list_that_is_none_does_not_hold_up_the_machine() -> None:
    """Names where objects belong: another version's calls, in the text of this one."""
    parsed = parse(family("mistral_v3"), family("mistral_v3").encode_raw('[TOOL_CALLS]look[ARGS]{"n": 1}</s>'), (TOOL,))
    assert "look" in parsed.text and not parsed.calls and "malformed_call" in parsed.tolerated


@every
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("silent", [True, False])
def test_nothing_sampled_is_read_again_in_a_loop(name: str, thinking: bool, silent: bool) -> None:
    """Also what the prompt put before it where no thinking was wanted, and where the model chose not to think."""
    one = family(name)
    blocks = TURN.blocks[1:] if silent or not thinking else TURN.blocks
    conversation, computed = FIRST, tuple[int, ...]()
    for step in range(3):
        prompt = one.render(conversation, thinking=thinking)
        assert prompt.ids[: len(computed)] == computed or not (silent or one.probe.thinking_in_loop)
        turn = answered(one, prompt, (*blocks[:-1], replace(CALL, id=f"call_{step}")))
        assert turn.sampled
        computed = (*prompt.ids, *turn.sampled.ids[:-1])
        conversation = replace(conversation, turns=(*conversation.turns, turn, output(f"call_{step}", "Blue.")))
    if silent or not thinking:
        later = one.render(replace(conversation, turns=(*conversation.turns, user("And?"))), thinking=thinking)
        assert later.ids[: len(computed)] == computed


@pytest.mark.parametrize(
    ("name", "call", "result"),
    [
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>%s<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "## Return of %s\n",
        ),
        ("mistral_v11", "[TOOL_CALLS]look[CALL_ID]%s[ARGS]{}", "[TOOL_RESULTS]%s[TOOL_CONTENT]"),
        ("mistral_v3", '[TOOL_CALLS][{"name": "look", "arguments": {}, "id": "%s"}]', '"call_id": "%s"'),
    ],
)
def test_outputs_name_calls_as_the_model_did(name: str, call: str, result: str) -> None:
    """It may have miscounted, or made its id up; one that no template takes is replaced."""
    one = family(name)
    for written in ("functions.look:7" if name == "kimi_k2" else "AbCdEf123", "no good"):
        ids = one.encode_raw(call % written)
        turn = Turn("assistant", (replace(CALL, arguments="{}"),), Sampled(ids))
        prompt = one.render(with_turns(turn, output("call_1", "Blue.")))
        (shown_output,) = shown(one, prompt, "tool_output", 3)
        assert (result % written in shown_output) == (written != "no good")
        assert "Blue." in shown_output


@every
def test_outputs_stand_in_the_order_of_their_calls(name: str) -> None:
    """In whatever order they come, in one turn or in several: nothing else tells most models which is whose."""
    one = family(name)
    calls = (CALL, replace(CALL, id="call_2"))
    first, second = output("call_1", "Blue."), output("call_2", "Green.")
    for outputs in ((second, first), (Turn("tool", second.blocks + first.blocks),)):
        text = one.tokenizer.decode(one.render(with_turns(Turn("assistant", calls), *outputs)).ids)
        assert text.index("Blue.") < text.index("Green.")


@every
def test_a_user_may_speak_behind_outputs(name: str) -> None:
    """As when an answer was interrupted."""
    one = family(name)
    turns = (TURN, output("call_1", "Blue."), user("Stop that."))
    prompt = one.render(with_turns(*turns))
    assert "Blue." in shown(one, prompt, "tool_output", 3)[0] and "Stop that." in shown(one, prompt, "user", 4)[0]
    answer = Turn("assistant", (Text("Yes."),))
    more = one.render(with_turns(*turns, answer, user("Well?"), Turn("assistant", (CALL,)), turns[1], turns[2]))
    assert [span.turn for span in more.spans if span.kind == "user"] == [1, 4, 6, 9]


def test_text_before_a_call_is_no_final_answer() -> None:
    one = family("harmony")
    loop = with_turns(TURN, output("call_1", "Blue."), Turn("assistant", (Text("Done."),)), user("More."))
    text = one.tokenizer.decode(one.render(loop).ids)
    assert "<|channel|>commentary<|message|>I look.<|end|>" in text and "<|channel|>final<|message|>Done." in text


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v41"])
def test_thinking_stays_without_tools_too(name: str) -> None:
    one = family(name)
    alone = replace(FIRST, tools=())
    prompt = one.render(alone)
    turn = answered(one, prompt, (Thinking("Hm hm."), Text("Done.")))
    assert turn.sampled
    later = one.render(replace(alone, turns=(*alone.turns, turn, user("More."))))
    computed = (*prompt.ids, *turn.sampled.ids)
    assert later.ids[: len(computed)] == computed


@pytest.mark.parametrize("name", ["mistral_v3", "mistral_v11"])
def test_tools_stay_where_the_first_query_had_them(name: str) -> None:
    """Their templates have them before the last one, which costs all of the conversation at each query."""
    one = family(name)
    first = one.render(FIRST)
    assert one.tokenizer.decode(first.ids) == visible(one._renderer.text(replace(FIRST, tools=()))).replace(
        "[INST]", f"{shown(one, first, 'tools')[0]}[INST]"
    )
    assert "Looks." in shown(one, first, "tools")[0]
    later = one.render(with_turns(Turn("assistant", (Text("Yes."),)), user("And?")))
    assert later.ids[: len(first.ids)] == first.ids
    assert one.tokenizer.decode(later.ids).count("Looks.") == 1
