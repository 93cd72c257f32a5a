"""What the machine makes of turns that are not quite as the format has them, family by family."""

from __future__ import annotations

import pytest

from parsers.conversation import Text, Thinking, ToolCall
from parsers.events import Boundary
from parsers.source import Source, Stops, certain
from tests.parsers.parsed import Parsed
from tests.parsers.wire_support import NAMES, machine

K2 = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|><|im_end|>"
K2_CALL = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
F = ("call", "f", "{}", "complete")
G = ("call", "g", "{}", "complete")


def say(name: str, text: str, thinking_open: bool = False) -> Parsed:
    return machine(name).say(text, thinking_open=thinking_open)


@pytest.mark.parametrize(
    ("name", "text", "tool", "rules"),
    [
        ("kimi_k2", K2.format(K2_CALL.format("f")), "f", []),
        ("kimi_k2", K2.format(K2_CALL.format("f").replace("functions.", "")), "f", ["header_spelling"]),
        ("kimi_k2", K2.format(K2_CALL.format("f").replace(":0", "")), "f", ["header_spelling"]),
        ("kimi_k2", K2.format(K2_CALL.format("f2").replace(":0", "")), "f2", ["header_spelling"]),
        ("kimi_k2", K2.format(K2_CALL.format("f").replace(":0", ":\n0\n")), "f", []),
        ("kimi_k2", K2.format(K2_CALL.format("mcp:f")), "mcp:f", []),
        (
            "kimi_k2",
            K2.format(K2_CALL.format("f").replace("<|tool_call_argument_begin|>", "")),
            "f",
            ["missing_header_end"],
        ),
        ("qwen3_xml", '<tool_call>\n<function="f">\n</function>\n</tool_call><|im_end|>', "f", ["header_spelling"]),
        ("qwen3_xml", "<tool_call>\n<function= f >\n</function>\n</tool_call><|im_end|>", "f", []),
        ("qwen3_xml", "<tool_call>\n<function=f</function>\n</tool_call><|im_end|>", "f", ["missing_header_end"]),
        (
            "minimax_m2",
            "<minimax:tool_call>\n<invoke name='f'>\n</invoke>\n</minimax:tool_call>[e~[",
            "f",
            ["header_spelling"],
        ),
        (
            "minimax_m2",
            "<minimax:tool_call>\n<invoke name=f>\n</invoke>\n</minimax:tool_call>[e~[",
            "f",
            ["header_spelling"],
        ),
        ("glm47", "<tool_call>f</tool_call><|user|>", "f", []),
        ("glm47", "<tool_call>f\n</tool_call><|user|>", "f", []),
        ("gemma4", "<|tool_call>f{}<tool_call|><turn|>", "f", ["header_spelling"]),
        ("mistral_v11", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}</s>", "f", []),
        ("mistral_v11", "[TOOL_CALLS]f[ARGS]{}</s>", "f", ["header_spelling"]),
        ("mistral_v13", "[TOOL_CALLS]f{}</s>", "f", ["missing_header_end"]),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="a&amp;b" index="1"<|sep|><|close|>call<|sep|>'
            "<|close|>tools<|sep|><|end_of_msg|>",
            "a&b",
            [],
        ),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|end_of_msg|>',
            "f",
            ["header_spelling"],
        ),
    ],
)
def test_a_header_names_the_tool(name: str, text: str, tool: str, rules: list[str]) -> None:
    parsed = say(name, text)
    assert [(call[1], call[3]) for call in parsed.calls] == [(tool, "complete")]
    assert (parsed.text, parsed.tolerated) == ("", rules)


@pytest.mark.parametrize("header", ["", " \n", "two words", "x" * 600, "functions.:0", "<|tool_call_argument_begin|>"])
def test_a_header_that_names_nothing_is_text(header: str) -> None:
    call = f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    parsed = say("kimi_k2", "So" + K2.format(call + K2_CALL.format("g")))
    assert parsed.calls == [G]
    assert call.removesuffix("<|tool_call_end|>") in parsed.text


@pytest.mark.parametrize(
    ("text", "parts", "rules"),
    [
        (K2.format(K2_CALL.format("f") + " \n" + K2_CALL.format("g")), [F, G], []),
        (K2.format(K2_CALL.format("f") + " and " + K2_CALL.format("g")), [F, G], ["text_between_calls"]),
        (K2.format(K2_CALL.format("f")).replace("<|tool_calls_section_end|>", ""), [F], ["missing_section_close"]),
        (
            "<|tool_calls_section_begin|>" + K2_CALL.format("f") + "Done.<|im_end|>",
            [F, ("text", "Done.")],
            ["missing_section_close"],
        ),
        (K2_CALL.format("f") + "<|im_end|>", [F], ["bare_head"]),
        (K2.format(K2_CALL.format("f")) * 2, [F], []),
        (
            K2.format(K2_CALL.format("f")).removesuffix("<|im_end|>") + "x" + K2.format(K2_CALL.format("g")),
            [F, ("text", "x"), G],
            [],
        ),
        (K2.format("nothing"), [("text", K2.format("nothing").removesuffix("<|im_end|>"))], ["malformed_call"]),
        (
            K2.format(K2_CALL.format("f")).replace("<|tool_call_end|>", ""),
            [F],
            ["missing_call_close"],
        ),
        (
            K2.format(K2_CALL.format("f")).replace("tool_calls_section", "tool_call_section"),
            [F],
            ["alias"],
        ),
    ],
)
def test_sections(text: str, parts: list[tuple[str, ...]], rules: list[str]) -> None:
    parsed = say("kimi_k2", text)
    assert (parsed.parts, parsed.tolerated) == (parts, rules)


def test_lists_of_calls_end_by_themselves() -> None:
    one, two = (f'{{"name": "{name}", "arguments": {{}}}}' for name in ("f", "g"))
    for name, opener, end in (("granite3", "<|tool_call|>", "<|end_of_text|>"), ("mistral_v3", "[TOOL_CALLS]", "</s>")):
        assert say(name, f"{opener}[{one}, {two}]{end}").parts == [F, G]
        assert say(name, f"{opener}[{one}]\nDone.{end}").parts == [F, ("text", "\nDone.")]
        broken = say(name, f"{opener}[{one}, oops]{end}")
        assert broken.calls == [F] and "oops" in broken.text
        nothing = say(name, f"{opener}[oops]{end}")
        assert nothing.parts == [("text", f"{opener}[oops]")]
    starts = [b.token for b in say("mistral_v3", f"[TOOL_CALLS][{one}, {two}]</s>").boundaries if "start" in b.kind]
    assert starts == [0, len(f" [{one}, ") - 0]


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("llama3", '{"name": "f", "parameters": {}}', 1),
        ("llama3", ' \n{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}\n', 2),
        ("llama3", '{"name": "f", "parameters": {}} is what I call', 0),
        ("llama3", '{"name": "f", "parameters": {}}{"k": 1}', 0),
        ("llama3", '{"name": "nobody", "parameters": {}}', 0),
        ("llama3", '{"city": "Ulm", "size": [1, 2]}', 0),
        ("llama3", "[1, 2, 3]", 0),
        ("llama3", "{", 0),
        ("llama4", "[f(), g()]", 2),
        ("llama4", "[f()] it is", 0),
        ("llama4", "[1] says so", 0),
        ("llama4", "[f(), nobody()]", 0),
        ("llama4", "[f(", 0),
    ],
)
def test_bare_answers_are_calls_only_if_they_are_nothing_else(name: str, text: str, calls: int) -> None:
    end = machine(name).format.ends[0]
    for ending in (end, ""):
        parsed = say(name, text + ending)
        assert parsed.calls == [F, G][:calls]
        assert parsed.text == ("" if calls else text)
        assert parsed.tolerated == []
    assert say(name, "Text first. " + text + end).calls == []


def test_an_answer_may_be_wrapped_or_not() -> None:
    for text in ("<answer>\nHi.\n</answer>", "Hi.", "<answer>\nHi.", "Hi.\n</answer>", "\n<answer>\nHi.\n</answer>\n"):
        assert say("hunyuan_a13b", text + "<|eos|>").text.rstrip() == "Hi."
    thought = say("hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\nHi.\n</answer><|eos|>")
    assert (thought.parts, thought.tolerated) == ([("thinking", "Hm."), ("text", "Hi.")], [])
    ended = say("hunyuan_a13b", "Hm.\n<answer>\nHi.\n</answer><|eos|>", thinking_open=True)
    assert (ended.parts, ended.tolerated) == ([("thinking", "Hm."), ("text", "Hi.")], ["unclosed_thinking"])


def test_k3_channels() -> None:
    answer = "<|open|>response<|sep|>Hi.<|close|>response<|sep|><|end_of_msg|>"
    clean = say("kimi_k3", "Hm.<|close|>think<|sep|>" + answer, thinking_open=True)
    assert (clean.parts, clean.tolerated) == ([("thinking", "Hm."), ("text", "Hi.")], [])
    prefilled = say("kimi_k3", "Hi.<|close|>response<|sep|><|end_of_msg|>")
    assert (prefilled.parts, prefilled.tolerated) == ([("text", "Hi.")], [])
    unopened = say("kimi_k3", "Hi.<|close|>response<|sep|><|end_of_msg|>", thinking_open=True)
    assert (unopened.parts, unopened.tolerated) == ([("thinking", "Hi.")], ["unclosed_thinking"])
    unknown = say("kimi_k3", "<|open|>other<|sep|>Hi.<|end_of_msg|>")
    assert (unknown.text, unknown.tolerated) == ("otherHi.", ["stray_control_token"] * 2)
    spelled = machine("kimi_k3").tokenizer.encode("<|close|>response<|sep|>")
    assert machine("kimi_k3").parse(spelled).text == "<|close|>response<|sep|>"


def test_a_thinking_closer_alone_says_that_there_is_no_thinking() -> None:
    parsed = say("minimax_m3", "</mm:think>Hi.[e~[")
    assert (parsed.parts, parsed.tolerated) == ([("text", "Hi.")], [])
    later = say("minimax_m3", "Hi.</mm:think>[e~[")
    assert (later.parts, later.tolerated) == ([("text", "Hi.")], ["stray_delimiter"])


CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 2}<|call|>'


@pytest.mark.parametrize(
    ("text", "parts", "rules"),
    [
        (CALL, [("call", "f", '{"n": 2}', "complete")], []),
        (CALL.replace("<|constrain|>", ""), [("call", "f", '{"n": 2}', "complete")], []),
        (CALL.replace("commentary", "analysis"), [("call", "f", '{"n": 2}', "complete")], []),
        (CALL.replace("<|message|>", ""), [("call", "f", '{"n": 2}', "complete")], ["missing_message"]),
        (
            ' to=functions.f<|channel|>commentary json<|message|>{"n": 2}<|call|>',
            [("call", "f", '{"n": 2}', "complete")],
            [],
        ),
        (CALL.replace("<|call|>", "<|end|>"), [("call", "f", '{"n": 2}', "complete")], []),
        (CALL.replace("functions.f", "browser.open"), [("call", "browser.open", '{"n": 2}', "complete")], []),
        (CALL.replace('{"n": 2}', ""), [F], []),
        (CALL.replace('{"n": 2}', "print(2)"), [("text", "print(2)")], ["malformed_call"]),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL,
            [("text", "I look."), ("call", "f", '{"n": 2}', "complete")],
            [],
        ),
        ("<|channel|>final<|channel|>analysis<|message|>Hi.<|return|>", [("text", "Hi.")], ["repeated_header"]),
        ("<|channel|>analysis<|channel|>final<|message|>Hm.<|return|>", [("thinking", "Hm.")], ["repeated_header"]),
        ("Hello there.<|return|>", [("text", "Hello there.")], ["malformed_header"]),
        ("x" * 3000 + "<|return|>", [("text", "x" * 3000)], []),
        ("<|start|>assistant<|channel|>final<|message|>Hi.<|return|>", [("text", "Hi.")], []),
        ("<|start|><|channel|>final<|message|>Hi.<|return|>", [("text", "Hi.")], ["foreign_role"]),
        ("<|channel|>final<|return|>", [("text", "final")], ["malformed_header", "stray_control_token"]),
        (
            "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
            [("thinking", "Hm."), ("text", "Hi.")],
            ["missing_message_end"],
        ),
        ("<|return|>", [], []),
    ],
)
def test_harmony_headers(text: str, parts: list[tuple[str, ...]], rules: list[str]) -> None:
    parsed = say("harmony", text)
    assert parsed.parts == parts
    assert sorted(parsed.tolerated) == sorted(rules)
    assert parsed.boundaries[-1].kind == "turn_end" or not text.endswith(("<|return|>", "<|call|>"))


def test_muse_channels() -> None:
    invoke = '<atem:function_calls>\n<atem:invoke name="{}">\n</atem:invoke>\n</atem:function_calls>'
    thought = " to=self<|message|>Hm.<|eom|><|start|>assistant"
    two = invoke.format("f") + "\n" + invoke.format("g")
    assert say("muse_glimmer", f"{thought} to=f<|message|>{two}<|eot|>").parts == [("thinking", "Hm."), F, G]
    prose = say("muse_glimmer", f" to=f<|message|>I call {invoke.format('f')}<|eot|>")
    assert (prose.parts, prose.tolerated) == ([F], ["text_between_calls"])
    assert say("muse_glimmer", " to=user<|message|>Hi.<|eot|>").parts == [("text", "Hi.")]
    nothing = say("muse_glimmer", " to=f<|message|>just words<|eot|>")
    assert (nothing.parts, nothing.tolerated) == ([("text", "just words")], ["malformed_call"])


@pytest.mark.parametrize("name", NAMES)
def test_boundaries_are_where_they_say(name: str) -> None:
    found = machine(name)
    form, call = found.format, found.format.call
    blocks = [Thinking("Hm."), Text("So:"), ToolCall("call00001", "f", "{}")]
    wanted = [block for block in blocks if form.think or form.frames or not isinstance(block, Thinking)]
    ids = found.output([block for block in wanted if not call.bare or isinstance(block, ToolCall)])
    text = found.tokenizer.decode(ids)
    at = {
        b.kind: (text[: found.characters_before(ids, b)], text[found.characters_before(ids, b) :])
        for b in found.parse(ids).boundaries
    }
    opener = (call.section.open if call.section else call.open) if not form.frames else form.frames.start
    closer = call.close or (form.frames.call_end if form.frames else "")
    assert at["tool_call_start"][1].startswith("" if call.bare else opener)
    assert at["tool_call_end"][0].endswith(closer) and "f" in at["tool_call_end"][0]
    assert at["turn_end"] == (text, "")
    if form.think:
        assert at["thinking_start"][1].startswith(form.think.open)
        assert at["thinking_end"][0].endswith(form.think.close + form.think.after)
        assert at["thinking_end"][1].lstrip().startswith(("So:", form.answer.open if form.answer else "So:"))
    if form.frames:
        assert at["thinking_start"][1] == text
        assert at["thinking_end"][0].endswith(form.frames.ends[0])


def test_positions_are_in_tokens() -> None:
    source = Source()
    for text in ("ab", "", "cd", "e"):
        source.push(text)
    for _ in source.until(Stops("c"), lambda text: None):
        raise AssertionError("all of it is there")
    assert source.token_at(source.at) == (1, True, "")
    assert source.token_at(source.position) == (2, False, "d")
    assert Boundary("turn_end", 2, False, "d").rest == "d"


def test_half_a_code_point_belongs_to_the_token_that_has_it() -> None:
    """Behind the line break, in its token: the thinking ends inside of that token."""
    family = machine("glm45")
    opener, closer = family.tokenizer.encode_trusted("<think></think>")
    for behind in ([opener], [family.tokenizer.piece(b"\xa9")], [family.tokenizer.piece(b"\xc3")]):
        for pieces in ((b"\n", b"\xc3"), (b"\n\xc3",)):
            ids = [opener, closer, *map(family.tokenizer.piece, pieces), *behind]
            end = next(one for one in family.parse(ids).boundaries if one.kind == "thinking_end")
            assert end.exact == (len(pieces) == 2)
            assert family.characters_before(ids, end) == len("<think></think>\n")


def test_a_token_that_ends_within_a_code_point_straddles_with_all_that_it_has() -> None:
    """Half a code point is no edge between tokens, but what is in the token after it is none of the one before."""
    source = Source()
    source.push("ab", unfinished=True)
    source.advance(1)
    assert source.token_at(1) == (0, False, "b\ufffd")
    source.advance(1)
    assert source.token_at(2) == (0, False, "\ufffd")
    source.push("écd")
    assert source.token_at(2) == (0, False, "\ufffd")
    source.advance(1)
    assert source.token_at(3) == (1, False, "cd")
    source.advance(2)
    assert source.token_at(5) == (2, True, "")


@pytest.mark.parametrize("name", NAMES)
def test_a_delimiter_with_a_control_token_is_never_shown_in_part(name: str) -> None:
    found = machine(name)
    form, control = found.format, set(found.tokenizer.control.values())
    pairs = [pair for pair in (form.think, form.answer, form.call.section) if pair]
    texts = (form.call.open, *form.ends, *(text for pair in pairs for text in (pair.open, pair.close)))
    for text in (text for text in texts if certain(found.wire.code(text))):
        ids = found.tokenizer.encode_trusted(text)
        for cut in (cut for cut in range(1, len(ids)) if set(ids[:cut]) & control):
            assert not found.parse(ids[:cut], reason="length").parts
            assert not found.parse(ids[:cut], reason="stop").parts
