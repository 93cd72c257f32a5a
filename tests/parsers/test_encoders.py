"""Renderers of ours, for checkpoints without a template: whole prompts as the models were trained on them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsers.conversation import Block, Text, Thinking, ToolCall
from parsers.encoders.registry import ENCODERS
from parsers.families.registry import FORMATS
from parsers.template import TemplateRefusal
from parsers.write import assistant_text
from tests.parsers.parsed import ANY_TEXT, JSON
from tests.parsers.wire_support import machine

NAMES = sorted(ENCODERS)
READ: dict[str, Any] = {
    "type": "function",
    "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object", "properties": {}}},
}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def output(call: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


def assistant(text: str, thinking: str = "", **calls: dict[str, Any]) -> dict[str, Any]:
    """``calls`` of ``read``, by id."""
    called = [
        {"id": name, "type": "function", "function": {"name": "read", "arguments": a}} for name, a in calls.items()
    ]
    return {
        "role": "assistant",
        "content": text,
        "reasoning_content": thinking,
        **({"tool_calls": called} if called else {}),
    }


def render(name: str, messages: list[dict[str, Any]], tools: Any = (), **variables: object) -> str:
    return ENCODERS[name].render(messages, tools, variables)


def without_tools(name: str, text: str) -> str:
    """``text`` with the declaration of READ as [tools]; the declaration itself is told by its digest."""
    start = text.index("## Tools")
    end = max(text.rfind(last) + len(last) for last in ("</functions>\n", "to invoke tool calls.\n"))
    assert hashlib.sha256(text[start:end].encode()).hexdigest()[:16] == DECLARED[name]
    return f"{text[:start]}[tools]{text[end:]}"


DECLARED = {
    "deepseek_v32": "a148c3ae3209a2da",
    "deepseek_v4": "3994631a6b6e2c6a",
    "deepseek_v41": "72b006e382cd4789",
}

LOOP = [
    system("Be brief."),
    user("Read it."),
    assistant("One moment.", "Two files.", a={"path": "x y", "lines": [1, None]}, b={}),
    output("b", "second"),
    output("a", "first"),
]
"""Outputs come in another order than their calls."""


# ── DeepSeek V3.2 ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_v32_prompts_end_with_a_thinking_tag() -> None:
    assert render("deepseek_v32", [system("Be brief."), user("Hi")], thinking=True) == (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜><think>"
    )
    assert render("deepseek_v32", [user("Hi")], thinking=False) == (
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
    )


def test_v32_outputs_stand_behind_the_turn_that_asked_for_them() -> None:
    assert without_tools("deepseek_v32", render("deepseek_v32", LOOP, [READ])) == (
        "<｜begin▁of▁sentence｜>Be brief.\n\n[tools]<｜User｜>Read it."
        "<｜Assistant｜><think>Two files.</think>One moment."
        "\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="read">\n'
        '<｜DSML｜parameter name="path" string="true">x y</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="lines" string="false">[1, null]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="read">\n\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls><｜end▁of▁sentence｜>"
        "\n\n<function_results>\n<result>first</result>\n<result>second</result>\n</function_results>"
        "\n\n<think>"
    )


def test_v32_drops_thinking_when_the_user_speaks_again() -> None:
    messages = [user("Hi"), assistant("", "Hm.", a={}), output("a", "ok"), assistant("Done.", "Ah."), user("More?")]
    call = '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="read">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    assert render("deepseek_v32", messages) == (
        f"<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>{call}<｜end▁of▁sentence｜>"
        "\n\n<function_results>\n<result>ok</result>\n</function_results>"
        "\n\n</think>Done.<｜end▁of▁sentence｜><｜User｜>More?<｜Assistant｜><think>"
    )


# ── DeepSeek V4 ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_v4_outputs_are_a_user_turn() -> None:
    assert without_tools("deepseek_v4", render("deepseek_v4", [*LOOP, user("Faster!")], [READ])) == (
        "<｜begin▁of▁sentence｜>Be brief.\n\n[tools]<｜User｜>Read it."
        "<｜Assistant｜><think>Two files.</think>One moment."
        "\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="read">\n'
        '<｜DSML｜parameter name="path" string="true">x y</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="lines" string="false">[1, null]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="read">\n\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls><｜end▁of▁sentence｜>"
        "<｜User｜><tool_result>first</tool_result>\n\n<tool_result>second</tool_result>\n\nFaster!"
        "<｜Assistant｜><think>"
    )


TALK = [user("Hi"), assistant("Hello.", "Polite."), user("More?"), user("Please.")]
KEPT = (
    "<｜User｜>Hi<｜Assistant｜><think>Polite.</think>Hello.<｜end▁of▁sentence｜>"
    "<｜User｜>More?\n\nPlease.<｜Assistant｜><think>"
)
DROPPED = KEPT.replace("<think>Polite.", "")


def test_v4_keeps_thinking_while_there_are_tools() -> None:
    assert render("deepseek_v4", TALK) == "<｜begin▁of▁sentence｜>" + DROPPED
    assert render("deepseek_v4", TALK, drop_thinking=False) == "<｜begin▁of▁sentence｜>" + KEPT
    assert without_tools("deepseek_v4", render("deepseek_v4", TALK, [READ])) == (
        "<｜begin▁of▁sentence｜>\n\n[tools]" + KEPT
    )
    assert render("deepseek_v4", TALK, thinking=False) == (
        "<｜begin▁of▁sentence｜>" + DROPPED.removesuffix("<think>") + "</think>"
    )


def test_v4_writes_the_effort_in_front_of_everything() -> None:
    plain = render("deepseek_v4", LOOP)
    begin = "<｜begin▁of▁sentence｜>"
    assert render("deepseek_v4", LOOP, reasoning_effort="low") == plain
    digests = {}
    for effort in ("high", "max"):
        text = render("deepseek_v4", LOOP, reasoning_effort=effort)
        head = text.removeprefix(begin).removesuffix(plain.removeprefix(begin))
        assert begin + head + plain.removeprefix(begin) == text
        digests[effort] = hashlib.sha256(head.encode()).hexdigest()[:16]
    assert digests == EFFORTS_V4
    assert render("deepseek_v4", LOOP, thinking=False, reasoning_effort="max") == render(
        "deepseek_v4", LOOP, thinking=False
    )
    with pytest.raises(TemplateRefusal, match="huge"):
        render("deepseek_v4", LOOP, reasoning_effort="huge")


EFFORTS_V4 = {"high": "f7a24f3b3050d4a8", "max": "53fb31b8392ec5b4"}


LATE = [user("Hi"), assistant("", "Hm.", a={}), output("a", "ok"), system("Be brief.")]


def test_late_system_texts_are_said_by_the_user_in_older_models_and_end_no_thinking() -> None:
    assert render("deepseek_v32", LATE).endswith(
        "\n<result>ok</result>\n</function_results><｜User｜>Be brief.<｜Assistant｜><think>"
    )
    assert "<think>Hm.</think>" in render("deepseek_v32", LATE)
    assert render("deepseek_v4", LATE).endswith(
        "<｜User｜><tool_result>ok</tool_result>\n\nBe brief.<｜Assistant｜><think>"
    )
    talk = [user("Hi"), assistant("Hello.", "Polite."), system("Be brief.")]
    assert render("deepseek_v4", talk).endswith(
        "<｜User｜>Hi<｜Assistant｜><think>Polite.</think>Hello.<｜end▁of▁sentence｜>"
        "<｜User｜>Be brief.<｜Assistant｜><think>"
    )
    with pytest.raises(TemplateRefusal, match="narrator"):
        render("deepseek_v4", [user("Hi"), {"role": "narrator", "content": ""}])


# ── DeepSeek V4.1 ─────────────────────────────────────────────────────────────────────────────────────────────────

EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def test_v41_writes_a_space_in_every_tag() -> None:
    assert without_tools("deepseek_v41", render("deepseek_v41", LOOP, [READ], thinking=False)) == (
        "<｜begin▁of▁sentence｜><｜System｜>Be brief.\n\n[tools]<｜User｜>Read it.<｜Assistant｜></think>One moment."
        "\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="read">\n'
        '<｜DSML｜ parameter name="path" string="true">x y</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="lines" string="false">[1, null]</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
        '<｜DSML｜ invoke name="read">\n\n</｜DSML｜ invoke>\n'
        "</｜DSML｜ calls><｜end▁of▁sentence｜>"
        "<｜User｜><tool_result>first</tool_result>\n\n<tool_result>second</tool_result><｜Assistant｜></think>"
    )


@pytest.mark.parametrize(
    ("messages", "variables", "head"),
    [
        ([user("Hi")], {"thinking": False}, ""),
        ([user("Hi")], {}, "<｜System｜>" + EFFORT.format(75)),
        ([user("Hi")], {"reasoning_effort": 100}, "<｜System｜>" + EFFORT.format(100)),
        ([system("Be brief."), user("Hi")], {"reasoning_effort": 50}, f"<｜System｜>{EFFORT.format(50)}Be brief."),
        ([system(""), user("Hi")], {"thinking": False}, "<｜System｜>"),
    ],
)
def test_v41_says_the_effort_in_a_system_turn(
    messages: list[dict[str, Any]], variables: dict[str, object], head: str
) -> None:
    opener = "</think>" if variables.get("thinking") is False else "<think>"
    assert render("deepseek_v41", messages, **variables) == (
        f"<｜begin▁of▁sentence｜>{head}<｜User｜>Hi<｜Assistant｜>{opener}"
    )


def test_v41_system_turns_may_come_at_any_time_and_end_what_was_thought() -> None:
    messages = [user("Hi"), assistant("Hello.", "Polite."), user("More?"), system("Be rude."), user("Please.")]
    head = "<｜begin▁of▁sentence｜><｜System｜>" + EFFORT.format(75)
    middle = "<｜User｜>More?<｜System｜>Be rude.<｜User｜>Please.<｜Assistant｜><think>"
    assert render("deepseek_v41", messages) == (
        f"{head}<｜User｜>Hi<｜Assistant｜></think>Hello.<｜end▁of▁sentence｜>{middle}"
    )
    assert render("deepseek_v41", messages, drop_thinking=False) == (
        f"{head}<｜User｜>Hi<｜Assistant｜><think>Polite.</think>Hello.<｜end▁of▁sentence｜>{middle}"
    )
    assert "<think>Two files.</think>" in render("deepseek_v41", LOOP)  # outputs alone ask nothing new
    assert "<think>Two files.</think>" not in render("deepseek_v4", LOOP)


# ── Kimi K3 ───────────────────────────────────────────────────────────────────────────────────────────────────────


def k3(*attributes: str, body: str) -> str:
    return f"<|open|>message {' '.join(attributes)}<|sep|>{body}<|close|>message<|sep|><|end_of_msg|>"


def k3_effort(level: str) -> str:
    return k3(
        'role="system"',
        'type="thinking-effort"',
        body="`thinking_effort` guides on how much to think in your thinking channel (not including the response "
        "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={level}`.",
    )


def test_k3_tools_and_effort_are_messages_in_front() -> None:
    tool = {
        "type": "function",
        "function": {"name": "é", "parameters": {"type": "object", "a": [{"z": 1, "b": "2 3"}]}},
    }
    assert render("kimi_k3", [system("Be brief."), user("Hi")], [tool], thinking_effort="low") == (
        k3(
            'role="system"',
            'type="tool-declare"',
            body="# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
            '[{"function":{"name":"é","parameters":{"a":[{"b":"2 3","z":1}],"type":"object"}},"type":"function"}]\n```',
        )
        + k3_effort("low")
        + k3('role="system"', body="Be brief.")
        + k3('role="user"', body="Hi")
        + '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )
    assert render("kimi_k3", [user("Hi")]).startswith(k3_effort("max"))
    assert render("kimi_k3", [user("Hi")], thinking=False, thinking_effort="low") == (
        k3('role="user"', body="Hi") + '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )
    with pytest.raises(TemplateRefusal, match="huge"):
        render("kimi_k3", [user("Hi")], thinking_effort="huge")


def test_k3_calls_spell_types_and_outputs_are_numbered() -> None:
    loop = [*LOOP[1:2], system("Now."), *LOOP[2:]]
    loop[2]["tool_calls"][1]["function"] = {
        "name": 'a&"b',
        "arguments": {'k"&': True, "n": 1.5, "s": "&<", "o": {"é": 1}},
    }
    think = "<|open|>think<|sep|>Two files.<|close|>think<|sep|>"
    body = (
        "<|open|>response<|sep|>One moment.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="read" index="1"<|sep|>'
        '<|open|>argument key="path" type="string"<|sep|>x y<|close|>argument<|sep|>'
        '<|open|>argument key="lines" type="array"<|sep|>[1, null]<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
        '<|open|>call tool="a&amp;&quot;b" index="2"<|sep|>'
        '<|open|>argument key="k&quot;&amp;" type="boolean"<|sep|>true<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>1.5<|close|>argument<|sep|>'
        '<|open|>argument key="s" type="string"<|sep|>&<<|close|>argument<|sep|>'
        '<|open|>argument key="o" type="object"<|sep|>{"é": 1}<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    )
    around = (
        k3('role="user"', body="Read it.") + k3('role="system"', body="Now."),
        k3('role="tool"', 'tool="read"', 'index="1"', body="first")
        + k3('role="tool"', 'tool="a&amp;&quot;b"', 'index="2"', body="second")
        + '<|open|>message role="assistant"<|sep|>',
    )
    assert render("kimi_k3", loop) == (
        k3_effort("max") + around[0] + k3('role="assistant"', body=think + body) + around[1] + "<|open|>think<|sep|>"
    )
    assert render("kimi_k3", loop, thinking=False) == (
        around[0] + k3('role="assistant"', body=body) + around[1] + "<|open|>response<|sep|>"
    )


def test_k3_outputs_of_unknown_calls_keep_their_order_and_take_names_by_place() -> None:
    loop = [user("Hi"), assistant("", "", a={}, b={}), output("?", "one"), output("a", "two")]
    text = render("kimi_k3", loop)
    assert text.index('index="1"<|sep|>one') < text.index('index="2"<|sep|>two')
    with pytest.raises(TemplateRefusal, match="call"):
        render("kimi_k3", [user("Hi"), output("?", "one")])


def test_k3_thinking_stays_a_channel_of_every_answer() -> None:
    text = render("kimi_k3", [user("Hi"), assistant("Hello."), user("More?")])
    assert "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>Hello.<|close|>response<|sep|>" in text


# ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES)
def test_every_format_with_an_encoder_has_it(name: str) -> None:
    assert [known.name for known in FORMATS if known.encoder == name] == [name]
    assert len({encoder.source for encoder in ENCODERS.values()}) == len(ENCODERS)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_handed_over_decoded(name: str) -> None:
    spelled = [user("Hi"), assistant("", "", a={"n": 1})]
    spelled[1]["tool_calls"][0]["function"]["arguments"] = '{"n":  1}'
    with pytest.raises(TemplateRefusal, match="read"):
        render(name, spelled)


NAMED = st.dictionaries(st.from_regex(r"[\w.-]{1,6}", fullmatch=True), JSON, max_size=2)
STEP = st.tuples(ANY_TEXT, ANY_TEXT, NAMED, ANY_TEXT)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(steps=st.lists(STEP, min_size=1, max_size=4), thinking=st.booleans(), later=ANY_TEXT)
def test_prompts_only_grow_while_tools_are_called(
    name: str, steps: list[tuple[str, str, dict[str, Any], str]], thinking: bool, later: str
) -> None:
    """Each prompt, with what a model would say to it, begins the next one; where thinking stays, also that of the next
    user turn."""
    messages = [system("s"), user("u")]
    prompt = render(name, messages, [READ], thinking=thinking)
    for number, (thought, text, arguments, result) in enumerate(steps):
        messages += [assistant(text, thought, **{f"c{number}": arguments}), output(f"c{number}", result)]
        after = render(name, messages, [READ], thinking=thinking)
        assert after.startswith(prompt)
        prompt = after
    messages += [assistant("Done.", "t")]
    if name != "deepseek_v32":
        assert render(name, [*messages, user(later)], [READ], thinking=thinking).startswith(prompt)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(step=STEP, calls=st.integers(0, 2))
def test_what_is_written_is_read_back(name: str, step: tuple[str, str, dict[str, Any], str], calls: int) -> None:
    thought, text, arguments, _ = step
    guard = machine(name).guard
    quiet = guard.value(arguments)
    assert isinstance(quiet, dict)
    turn = assistant(guard.text(text), guard.text(thought), **{f"c{n}": quiet for n in range(calls)})
    before = render(name, [user("u")], [READ])
    rest = render(name, [user("u"), turn], [READ]).removeprefix(before)
    end = machine(name).format.ends[0]
    called = [ToolCall(f"c{n}", "read", json.dumps(arguments)) for n in range(calls)]
    said_by_format: list[Block] = [Thinking(thought), *([Text(text)] if text or not calls else []), *called]
    written = assistant_text(machine(name).format, guard, said_by_format, "open")
    assert rest.startswith(written) or (name == "kimi_k3" and not (text and thought.strip()))
    parsed = machine(name).say(rest[: rest.index(end) + len(end)], thinking_open=True)
    assert parsed.tolerated == []
    blocks = parsed.blocks()
    said = "".join(block.text for block in blocks if isinstance(block, Text))
    assert said == text or (calls and said == text.rstrip())  # white space in front of calls is layout
    reasoned = "".join(block.text for block in blocks if isinstance(block, Thinking))
    assert reasoned == thought or (name == "kimi_k3" and not (reasoned or thought.strip()))
    assert [json.loads(block.arguments) for block in blocks if isinstance(block, ToolCall)] == [arguments] * calls
