"""Rendering with what is remembered of earlier prompts: the same as from scratch, and only the news costs anything."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parsers.conversation import Block, Conversation, Text, Thinking, ToolCall, Turn
from parsers.guard import Guard
from parsers.load import Family, Prompt, RenderError
from parsers.memory import Memory
from parsers.render import Renderer
from parsers.template import ChatTemplate, TemplateRefusal
from parsers.tokens import Tokenizer
from tests.parsers.template_support import NAMES, OTHER, TOOL, answered, family, output, user

every = pytest.mark.parametrize("name", NAMES)
TEXTS = st.sampled_from(["a", " b\n", "", "<think>x</think> y", "a </s><|im_end|>", "größer 漢"])
COUNTS = st.integers(0, 2)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Turn, ...]:
    """What may come next: a query, calls with their outputs, an answer, system text."""
    kind = draw(st.sampled_from(["query", "calls", "answer", "system"]))
    if kind in ("query", "system"):
        return (Turn("user" if kind == "query" else "system", (Text(draw(TEXTS)),)),)
    said: tuple[Block, ...] = (Thinking(draw(TEXTS)),) if draw(st.booleans()) else ()
    said += (Text(draw(TEXTS)),)
    if kind == "answer":
        return (Turn("assistant", said),)
    calls = tuple(
        ToolCall(f"call_{n}", "look", json.dumps({"at": draw(TEXTS), "n": [n]})) for n in range(1 + draw(COUNTS))
    )
    return (Turn("assistant", (*said, *calls)), *(output(call.id, draw(TEXTS)) for call in calls))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[tuple[Turn, ...], ...]]:
    """A conversation as it is grown, cut, edited, and taken up again where it was before."""
    versions: list[tuple[tuple[Turn, ...], ...]] = [((user("Q"),), *draw(st.lists(steps(), max_size=3)))]
    for _ in range(4):
        base = draw(st.sampled_from(versions))
        at = draw(st.integers(0, len(base)))
        new = draw(steps())
        changed = draw(
            st.sampled_from([(*base, new), (*base, new), base[:at], (*base[:at], new, *base[at:])])
            | st.just((*base[:at], new, *base[at + 1 :]))
        )
        versions.append(changed)
    return versions


def rendered(one: Family | Renderer, conversation: Conversation, thinking: bool = True) -> Prompt | str:
    try:
        return one.render(conversation, thinking=thinking)
    except RenderError as error:
        return str(error)


def with_tokens(one: Family, conversation: Conversation, at: int) -> Conversation:
    """The assistant turn ``at`` as it would have been sampled."""
    turns = conversation.turns
    before = rendered(one, replace(conversation, turns=turns[:at]))
    if isinstance(before, str):
        return conversation
    blocks = turns[at].blocks if before.thinking_open or one.probe.thinking_in_loop else turns[at].blocks[-1:]
    return replace(conversation, turns=(*turns[:at], answered(one, before, blocks), *turns[at + 1 :]))


def cold_tokenizer(name: str) -> Tokenizer:
    """The family's, with nothing remembered."""
    tokenizer = copy(family(name).tokenizer)
    tokenizer._memo = Memory(0, lambda *_: 1)
    return tokenizer


@every
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(versions=histories(), sampled=st.sets(st.integers(0, 6)), thinking=st.booleans(), tools=st.booleans())
def test_what_is_remembered_changes_nothing(
    name: str, versions: list[tuple[tuple[Turn, ...], ...]], sampled: set[int], thinking: bool, tools: bool
) -> None:
    one = family(name)
    warm = one._renderer
    for version in versions:
        turns = (Turn("system", (Text("S"),)), *(turn for step in version for turn in step))
        conversation = Conversation(turns, (TOOL, OTHER) if tools else ())
        for at in sampled:
            if at < len(turns) and turns[at].role == "assistant":
                conversation = with_tokens(one, conversation, at)
        cold = Renderer(warm.format, cold_tokenizer(name), warm._template, warm.traits)
        scratch = rendered(cold, conversation, thinking)
        for _ in range(2):
            assert rendered(one, conversation, thinking) == scratch


@every
def test_one_more_message_costs_the_same_in_any_history(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted: texts made harmless, arguments read, characters encoded."""
    one = family(name)
    work: Counter[str] = Counter()

    def counted(owner: type, method: str, size: Callable[..., int]) -> None:
        plain = getattr(owner, method)

        def call(self: object, *arguments: Any, **options: Any) -> object:
            work[method] += size(*arguments)
            return plain(self, *arguments, **options)

        monkeypatch.setattr(owner, method, call)

    counted(Guard, "_text", len)
    counted(Guard, "value", lambda value: isinstance(value, dict))
    counted(Tokenizer, "encode_trusted", lambda text, *_: len(text))
    costs = []
    for length in (4, 40):
        turns: tuple[Turn, ...] = (user("Q"),)
        for step in range(length):
            call = ToolCall(f"c{step:08}", "look", json.dumps({"at": f"{step:04}", "n": step}))
            turns += (Turn("assistant", (Thinking(f"T {step:04}"), call)), output(call.id, f"Output {step:04}. " * 20))
        conversation = Conversation(turns, (TOOL,))
        one.render(conversation)
        work.clear()
        call = ToolCall(f"c{length:08}", "look", json.dumps({"at": f"{length:04}", "n": length}))
        more = (Turn("assistant", (Thinking(f"T {length:04}"), call)), output(call.id, f"Output {length:04}. " * 20))
        one.render(replace(conversation, turns=turns + more))
        costs.append(Counter(work))
    assert costs[1]["value"] <= costs[0]["value"] + 1 and costs[1]["_text"] <= 1.2 * costs[0]["_text"] + 10
    assert costs[1]["encode_trusted"] <= 1.2 * costs[0]["encode_trusted"] + 100


def test_the_oldest_goes_first_and_what_is_too_large_is_not_kept() -> None:
    memory: Memory[str, str] = Memory(100, lambda key, value: len(key) + len(value))
    for number in range(20):
        assert memory.of(f"{number:05}", f"{number:05}".strip) == f"{number:05}"
        assert memory.get("00000") == "00000" and memory.used <= 100
    assert memory.get("00001") is None and memory.get("00019") == "00019"
    memory.put("large", "x" * 50)
    assert memory.get("large") is None and memory.get("00000") == "00000"


def test_a_template_cannot_change_what_others_are_handed() -> None:
    value = Guard(()).value({"list": [1, [2]], "text": "x"})
    for change in ("v.list.append(3)", "v.list[1].pop()", "v.update(x=1)"):
        template = ChatTemplate("{{ tools[0].v.list }}{% set v = tools[0].v %}{{ " + change + " }}", {})
        with pytest.raises(TemplateRefusal):
            template.render([], [{"v": value}], {})
    assert value == {"list": [1, [2]], "text": "x"}
    assert ChatTemplate("{{ tools[0].v.list }}", {}).render([], [{"v": value}], {}) == "[1, [2]]"


def taken(value: object) -> int:
    """Bytes, with all that is in it."""
    inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sys.getsizeof(value) + sum(map(taken, inside))


@pytest.mark.parametrize(
    "item",
    ["{}", "[]", "[[]]", '{"b":{"c":{}}}', '{"a":1,"b":2,"c":3,"d":4,"e":5,"f":6}', '"ä"', "123456", '"<a>"', "1.5"],
)
def test_decoded_arguments_are_no_larger_than_is_told(item: str) -> None:
    planner = family("qwen3_xml")._renderer._planner
    for text in ('{"a":[' + ",".join([item] * 3000) + "]}", "{" + ",".join(f'"{n}":{item}' for n in range(3000)) + "}"):
        call = ToolCall("c", "look", text)
        before = planner._known.used
        assert taken(planner._arguments(call)) + sys.getsizeof(text) <= planner._known.used - before
