"""The invariants of every format over many more turns than CI has time for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parsers import test_grammar as grammar
from tests.parsers import test_invariants as quick

deep = settings(quick.quick, max_examples=300)
pytestmark = [pytest.mark.deep, quick.every_format]


def inner(test: Callable[..., None]) -> Callable[..., None]:
    """The property without its own number of examples."""
    return test.hypothesis.inner_test  # type: ignore[attr-defined, no-any-return]


@deep
@given(data=st.data())
def test_a_written_turn_parses_back_to_itself(name: str, data: st.DataObject) -> None:
    inner(quick.test_a_written_turn_parses_back_to_itself)(name=name, data=data)


@deep
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_tokens_do_not_matter_only_text_does(name: str, data: st.DataObject, seed: int) -> None:
    inner(quick.test_tokens_do_not_matter_only_text_does)(name=name, data=data, seed=seed)


@deep
@given(data=st.data(), reason=st.sampled_from(["stop", "length", "abort"]), opened=st.booleans(), tools=st.booleans())
def test_nothing_raises(name: str, data: st.DataObject, reason: str, opened: bool, tools: bool) -> None:
    check = inner(quick.test_nothing_raises_and_no_call_is_made_up)
    check(name=name, data=data, reason=reason, opened=opened, tools=tools)


@settings(deep, max_examples=60)
@given(data=st.data())
def test_every_cut_gives_a_prefix(name: str, data: st.DataObject) -> None:
    inner(quick.test_every_cut_gives_a_prefix)(name=name, data=data)


@deep
@given(data=st.data())
def test_every_prefix_of_the_arguments(name: str, data: st.DataObject) -> None:
    inner(quick.test_every_prefix_of_the_arguments_is_one_of_the_json)(name=name, data=data)


@deep
@given(data=st.data(), reason=st.sampled_from(["stop", "length"]), tools=st.booleans())
def test_plain_text_is_passed_on_whole(name: str, data: st.DataObject, reason: str, tools: bool) -> None:
    inner(quick.test_plain_text_is_passed_on_whole)(name=name, data=data, reason=reason, tools=tools)


def test_answers_of_a_grammar_parse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "SEEDS", range(3, 40))
    grammar.test_a_demanded_call_parses_as_one(name)
    grammar.test_a_named_tool_is_called_once(name)
    grammar.test_strict_tools_among_free_text(name)
    grammar.test_text_by_a_schema_or_calls(name)
