"""Rendering with what is remembered of earlier prompts: the same as from scratch, and only the news costs anything."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import nodes

from parsers.conversation import Block, Conversation, Text, Thinking, ToolCall, Turn
from parsers.encoders.message import Encoder
from parsers.guard import Fixed, Guard
from parsers.load import Family, Prompt, RenderError
from parsers.loops import At, Loops, Run
from parsers.memory import Memory
from parsers.prompt import Writer
from parsers.render import Renderer
from parsers.template import ChatTemplate, TemplateRefusal
from parsers.tokens import Tokenizer
from tests.parsers.template_support import NAMES, OTHER, TOOL, answered, family, output, user

every = pytest.mark.parametrize("name", NAMES)
LOOK_AT_ALL = ("gemma4", "kimi_k2", "lfm2", "mistral_v11", "mistral_v3", "muse_glimmer")
"""Their loops have something in them that an earlier iteration cannot be compared by."""
TEXTS = st.sampled_from(["a", " b\n", "", "<think>x</think> y", "a </s><|im_end|>", "größer 漢", "words " * 30])
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


@cache
def plain(template: Encoder) -> Encoder:
    """The template as its checkpoint has it, which renders all messages each time."""
    if not isinstance(template, ChatTemplate):
        return template
    other, environment = copy(template), template._template.environment
    other._template = environment.from_string(template.source)
    other._loops = Loops(environment, nodes.Template([]))
    return other


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
        cold = Renderer(warm.format, cold_tokenizer(name), plain(warm._template), warm.traits)
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
    counted(Writer, "place", lambda *_: 1)
    iterate = Run.rest

    def rest(run: Run, number: int) -> Iterator[tuple[Any, At]]:
        for one in iterate(run, number):
            work["iterations"] += 1
            yield one

    monkeypatch.setattr(Run, "rest", rest)
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
    assert costs[1]["iterations"] <= costs[0]["iterations"] or name in LOOK_AT_ALL
    assert costs[1]["place"] <= costs[0]["place"]


def test_the_oldest_goes_first_and_what_is_too_large_is_not_kept() -> None:
    memory: Memory[str, str] = Memory(100, lambda key, value: len(key) + len(value))
    for number in range(20):
        assert memory.of(f"{number:05}", f"{number:05}".strip) == f"{number:05}"
        assert memory.get("00000") == "00000" and memory.used <= 100
    assert memory.get("00001") is None and memory.get("00019") == "00019"
    memory.put("large", "x" * 50)
    assert memory.get("large") is None and memory.get("00000") == "00000"


@pytest.mark.parametrize(
    "body",
    [
        "{{ loop.length }}",
        "{{ messages | length }}",
        "{{ messages[-1].content }}",
        "{{ loop.nextitem.content }}{{ loop.last }}",
        "{{ messages[loop.index0 + 1].content }}",
        "{{ messages[loop.index0 - 1].content }}",
        "{{ messages[0].content if loop.index0 > ns.last else loop.index > late }}",
        "{% if ns.last < loop.index0 %}{{ loop.previtem.content }}{% endif %}",
        "{{ ns.last }}",
        "{{ ns.count }}{% set ns.count = ns.count + 1 %}",
        "{% set ns.words = ns.words + [m.content] %}{{ ns.words }}",
        "{% set _ = ns.words.append(m.content) %}{{ ns.words }}",
        "{% set _ = m.parts.append(1) %}{{ m.parts }}",
        "{{ said(m.content) }}",
        "{% for o in messages %}{% if loop.last %}{{ o.content }}{% endif %}{% endfor %}",
        "{% for o in [1] %}{{ loop.index0 }}{% for p in [loop.index] %}{{ p }}{% endfor %}{% endfor %}{{ loop.index }}",
        "{{ loop.changed(m.content[:1]) }}",
        "{% set shown %}{{ m.content }}{{ loop.index }}{% endset %}{{ shown }}",
        "{% if m.content == '7' %}{{ raise_exception('seven') }}{% endif %}{{ m.content }}",
        "{% with x = loop.index0 %}{{ x }}{{ tone }}{% endwith %}",
        "{{ other[loop.index0].content }}{{ other[loop.index0 + 40] }}",
        "{% set counts.n = counts.n + 1 %}{{ alias.n }}",
        "{{ zero }}",
        "{% if m.content == '3' and loop.index0 < 9 %}{% set _ = queue.append(m) %}{% endif %}{{ loop.last }}",
        "{% if m.content == '4' %}{% set _ = queue.pop() %}{% endif %}{{ m.content }}{{ loop.last }}",
    ],
)
def test_whatever_a_loop_reads_it_writes_what_it_always_did(body: str) -> None:
    source = (
        "{% macro said(text) %}{{ text }}{{ late }}{% endmacro %}{% set late = messages | length // 2 %}"
        "{% set ns = namespace(last=-1, count=0, words=[]) %}{% set other = messages[::-1] %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% set counts = namespace(n=0) %}{% set alias = counts if late > 3 else namespace(n=0) %}"
        "{% set zero = 0.0 if late > 3 else -0.0 %}{% set queue = messages[:] %}"
        "{% for m in queue %}<{{ m.role }}>" + body + "{% endfor %}"
        "{{ ns.count }}{{ ns.words }}{{ messages[0].parts }}"
    )
    template = ChatTemplate(source, {})
    every = [{"role": "user" if n % 4 == 0 else "tool", "content": str(n), "parts": Fixed()} for n in range(12)]
    for size, tone in [(3, 0), (7, 0), (7, 1), (12, 1), (5, 1), (11, 1), (9, True), (10, 1)]:
        for messages in (every[:size], [*every[: size // 2], *every[size:]]):
            shown = [written(one, messages, tone) for one in (plain(template), template, template)]
            assert shown[0] == shown[1] == shown[2]


def written(template: Encoder, messages: list[dict[str, Any]], tone: int) -> str:
    try:
        return template.render(messages, [], {"tone": tone})
    except TemplateRefusal as refusal:
        return str(refusal)


def test_what_a_template_is_lent_for_its_loops_it_cannot_open() -> None:
    peeks = ("ft_loops", "ft_at", "ft_loops.known(0)", "ft_loops.enter(0, messages, ())", "self.ft_loops")
    for peek in peeks:
        source = "{% for m in messages %}{{ m.content }}{{ loop.index }}{% endfor %}{{ " + peek + " }}"
        assert written(ChatTemplate(source, {}), [{"content": "x"}], 0) == written(
            plain(ChatTemplate(source, {})), [{"content": "x"}], 0
        )
    at = At([{}], ChatTemplate("", {})._template.environment, -1)
    assert [name for name in vars(at) if not name.startswith("_")] == ["index0"]
    assert not [name for name in vars(Run(Loops(at._environment, nodes.Template([])))) if not name.startswith("_")]


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


@every
def test_what_has_little_news_goes_on(name: str) -> None:
    one, news = family(name), (Turn("assistant", (Text("A"),)), user("R"))
    turns = (user("Q"), Turn("assistant", (Text("P"),)), user("x" * 5000))
    first, second = Conversation(turns), Conversation((*turns, *news))
    assert one.render_on(first) is None, "nothing was rendered before"
    one.render(first)
    one.render(second)
    third = Conversation((*second.turns, *news))
    assert one.render_on(third) == one.render(third, prefix_ok=False)
    assert one.render_on(third, thinking=False) is None, "nor was it that way"
    long = Conversation((*second.turns, news[0], user("y" * 5000)))
    assert one.render_on(long) is None, "it has much to tokenize"
    assert one.render(long) == one.render(long, prefix_ok=False)


def test_short_turns_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parsers.stems._BYTES", 64 << 10)
    monkeypatch.setattr("parsers.loops._ITEMS", 100)
    one = family("qwen38")
    one.forget()
    stems, template = one._renderer._stems, one._renderer._template
    assert isinstance(template, ChatTemplate)
    for number in range(8):
        one.render(Conversation((user(str(number)), *(Turn("assistant", (Text("A"),)), user("R")) * 20)))
        assert 0 < sum(len(stem.turns) for stem in stems._known) <= 64
        assert 0 < max(sum(len(one.items) for one in known) for known in template._loops._known) <= 100
