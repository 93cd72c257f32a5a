from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsers.conversation import Text, Thinking, ToolCall
from sessions.echo import same_arguments, same_text, same_turn

KEYS = st.text("abcdef_é", min_size=1, max_size=6)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4))
ARGUMENTS = st.dictionaries(KEYS, VALUES, min_size=1, max_size=5)
DEFAULTS = st.dictionaries(st.text("xyz", min_size=1, max_size=4), VALUES, max_size=3)


class Respelled:
    """A JSON value written by a client with other habits: permuted keys, other numbers, escapes, spaces."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def spell(self, value: Any) -> str:
        gap = self.draw(st.sampled_from(["", " ", "\n  "]))
        if isinstance(value, dict):
            items = self.draw(st.permutations(sorted(value.items())))
            inner = f",{gap}".join(f"{self.spell(key)}{gap}:{gap}{self.spell(item)}" for key, item in items)
            return "{" + gap + inner + gap + "}"
        if isinstance(value, list):
            return "[" + gap + f",{gap}".join(self.spell(item) for item in value) + "]"
        if isinstance(value, bool) or value is None:
            return json.dumps(value)
        if isinstance(value, int):
            return self.draw(st.sampled_from([str(value), f"{value}.0", f"{value}.000", f"{value}e0", f"{value}.0E+0"]))
        if isinstance(value, float):
            return self.draw(st.sampled_from([repr(value), f"{value:.20e}" if _exact(value) else repr(value)]))
        return json.dumps(value, ensure_ascii=self.draw(st.booleans()))


def _exact(value: float) -> bool:
    return float(f"{value:.20e}") == value and f"{value:.20e}" == f"{value:.30e}"


@settings(max_examples=60)
@given(st.data(), ARGUMENTS, DEFAULTS)
def test_every_spelling_of_the_same_arguments_is_accepted(data: Any, arguments: Any, defaults: Any) -> None:
    schema = {"properties": {name: {"default": value} for name, value in defaults.items()}}
    echoed = {**{key: value for key, value in defaults.items() if key not in arguments}, **arguments}
    spelled = Respelled(data.draw)
    assert same_arguments(spelled.spell(arguments), spelled.spell(echoed), schema)


@given(st.data(), ARGUMENTS)
def test_empty_additions_are_accepted(data: Any, arguments: Any) -> None:
    additions = data.draw(
        st.dictionaries(st.text("xyz", min_size=1), st.sampled_from([None, False, "", [], {}]), max_size=3)
    )
    assert same_arguments(json.dumps(arguments), json.dumps({**additions, **arguments}), {})


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in items for found in paths(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def plain(value: Any) -> Any:
    """With numbers as doubles and types told apart, which is all that a client can keep."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return ("number", float(value))
    return (type(value).__name__, value)


def filled(ours: Any, theirs: Any) -> bool:
    """Whether ``theirs`` differs by empty additions only."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        extra = [theirs[key] for key in theirs if key not in ours]
        return all(key in theirs and filled(ours[key], theirs[key]) for key in ours) and all(
            item is None or item is False or item in ("", [], {}) for item in extra
        )
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(filled(one, two) for one, two in zip(ours, theirs, strict=True))
    return bool(plain(ours) == plain(theirs))


@given(st.data(), ARGUMENTS, VALUES)
def test_every_real_change_of_a_value_is_rejected(data: Any, arguments: Any, new: Any) -> None:
    changed = replaced(arguments, data.draw(st.sampled_from(paths(arguments))), new)
    assert same_arguments(json.dumps(arguments), json.dumps(changed), {}) == filled(arguments, changed)


@given(st.data(), ARGUMENTS)
def test_a_missing_key_and_an_unknown_value_are_rejected(data: Any, arguments: Any) -> None:
    key = data.draw(st.sampled_from(sorted(arguments)))
    fewer = {name: value for name, value in arguments.items() if name != key}
    assert not same_arguments(json.dumps(arguments), json.dumps(fewer), {})
    assert not same_arguments(json.dumps(arguments), json.dumps({**arguments, "zz": 1}), {})


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_is_judged_without_an_exception(one: str, other: str) -> None:
    assert same_arguments(one, other, {}) in (True, False)


@pytest.mark.parametrize(
    ("sent", "echo", "same"),
    [
        ('{"timeout": 5000.0}', '{"timeout":5000}', True),
        ('{"n": 9007199254740993}', '{"n":9007199254740992}', True),
        ('{"n": 9007199254740993}', '{"n":9007199254740995}', False),
        ('{"n": 1e400}', '{"n": 2e400}', False),
        ('{"n": 0}', '{"n": false}', False),
        ('{"n": 1}', '{"n": "1"}', False),
        ('{"n": NaN}', '{"n": null}', False),
        ('{"a": "\\u00e9"}', '{"a":"é"}', True),
        ("", "{}", True),
        ('{"a": 1, "a": 2}', '{"a":2}', True),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ("[" * 100_000, "[" * 100_001, False),
        ('{"n": 1e999999999999999999999}', '{"n": 1}', False),
        ('{"n": ' + "9" * 5000 + "}", '{"n": 1}', False),
    ],
)
def test_edge_spellings(sent: str, echo: str, same: bool) -> None:
    assert same_arguments(sent, echo, {}) is same


def test_added_defaults_follow_the_schema_into_nested_objects() -> None:
    schema = {"properties": {"edits": {"items": {"properties": {"mode": {"default": "all"}}}}}}
    sent = '{"edits": [{"path": "a"}]}'
    assert same_arguments(sent, '{"edits": [{"mode": "all", "path": "a"}]}', schema)
    assert not same_arguments(sent, '{"edits": [{"mode": "one", "path": "a"}]}', schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"all": {"type": "boolean", "default": True}}},
        {"properties": {"all": {"anyOf": [{"type": "boolean", "default": True}, {"type": "null"}]}}},
        {"properties": {"all": {"$ref": "#/$defs/on"}}, "$defs": {"on": {"allOf": [{"default": True}]}}},
        {"allOf": [{"$ref": "#/$defs/whole"}], "$defs": {"whole": {"properties": {"all": {"default": True}}}}},
        {"$ref": "#", "properties": {"all": {"oneOf": [{"$ref": "#/properties/all"}, {"default": True}]}}},
    ],
)
def test_a_declared_default_is_the_only_one(schema: dict[str, Any]) -> None:
    assert same_arguments('{"n": 1}', '{"n": 1, "all": true, "other": false}', schema)
    for said in ("false", "null", '""', "[]", "{}", "1"):
        assert not same_arguments('{"n": 1}', f'{{"n": 1, "all": {said}}}', schema), said
    nested = {"properties": {"parts": {"items": {"$ref": "#/$defs/part"}}}, "$defs": {"part": schema}}
    nested["$defs"] |= schema.get("$defs", {})
    if "#/properties" not in json.dumps(schema):
        assert same_arguments('{"parts": [{}]}', '{"parts": [{"all": true}]}', nested)
        assert not same_arguments('{"parts": [{}]}', '{"parts": [{"all": false}]}', nested)


def test_a_schema_of_circles_is_read_in_no_time() -> None:
    circle: dict[str, Any] = {"anyOf": [{"$ref": "#/properties/a"} for _ in range(50)]}
    schema = {"properties": {"a": circle, "b": {"allOf": [circle] * 10}}}
    assert same_arguments("{}", '{"a": null, "b": false}', schema)
    assert not same_arguments("{}", '{"a": 1}', schema)


@pytest.mark.parametrize("bad", ['{"a": ', "not json", '{"a": 1} trailing', '{"t": "𝄞' + "x" * 3000])
def test_invalid_json_comes_back_wrapped(bad: str) -> None:
    units = bad.encode("utf-16-le")
    raw = units[:4096].decode("utf-16-le", "surrogatepass")
    wrapped = {"__unparsedToolInput": {"raw": raw, "len": len(units) // 2}}
    assert same_arguments(bad, json.dumps(wrapped), {})
    wrapped["__unparsedToolInput"]["len"] = len(units) // 2 + 1
    assert not same_arguments(bad, json.dumps(wrapped), {})
    assert not same_arguments(bad, json.dumps({"__unparsedToolInput": {"raw": "x" + raw, "len": len(units) // 2}}), {})


def test_a_cut_inside_a_character_is_still_the_same_text() -> None:
    bad = "x" * 2047 + "𝄞{"
    raw = bad.encode("utf-16-le")[:4096].decode("utf-16-le", "surrogatepass")
    assert same_arguments(bad, json.dumps({"__unparsedToolInput": {"raw": raw, "len": 2050}}), {})


@pytest.mark.parametrize("half", ["\ud834", "\ufffd"])
def test_half_a_character_at_the_cut_may_be_replaced(half: str) -> None:
    bad = "x" * 2047 + "𝄞{"
    assert same_arguments(bad, json.dumps({"__unparsedToolInput": {"raw": "x" * 2047 + half, "len": 2050}}), {})
    for raw in ("x" * 2046 + half, "x" * 2047 + half + half, "x" * 2047 + "\ud835", "x" * 2047):
        assert not same_arguments(bad, json.dumps({"__unparsedToolInput": {"raw": raw, "len": 2050}}), {})


@pytest.mark.parametrize(
    ("bad", "wrapped"),
    [
        ('{"a": 1', {"raw": "", "len": 7}),
        ('{"a": 1', {"raw": '{"a"', "len": 7}),
        ("x" * 3000, {"raw": "x" * 2047, "len": 3000}),
        ("x" * 3000, {"raw": "x" * 2049, "len": 3000}),
        ("x" * 3000, {"raw": "x" * 3000, "len": 3000}),
        ("[", {"raw": "[", "len": True}),
        ("[", {"raw": "[", "len": 1.0}),
        ("[", {"raw": "[", "len": 1, "more": 0}),
    ],
)
def test_a_wrapping_has_exactly_the_start_and_the_length(bad: str, wrapped: Any) -> None:
    assert not same_arguments(bad, json.dumps({"__unparsedToolInput": wrapped}), {})


def test_what_is_no_wrapping_is_an_edit() -> None:
    for echo in (
        '{"a": null}',
        "[]",
        '{"__unparsedToolInput": 1}',
        '{"__unparsedToolInput": {"raw": "{", "len": "1"}}',
    ):
        assert not same_arguments('{"a": ', echo, {})


@given(st.lists(st.text(" \nab", max_size=5), max_size=4))
def test_text_may_be_merged_trimmed_and_lose_blank_blocks(texts: list[str]) -> None:
    assert same_text(texts, ["".join(text for text in texts if text.strip())])
    assert same_text(texts, [text.strip() for text in texts])
    assert same_text(texts, [text for text in texts if text.strip()])
    assert same_text(texts, ["".join(texts)])
    assert same_text(texts, ["".join(texts).strip()])
    assert not same_text(texts, [*texts, "c"])


@pytest.mark.parametrize(
    ("sent", "echo"),
    [
        (["foo", " bar"], ["foobar"]),
        (["foo ", "bar"], ["foobar"]),
        (["foobar"], ["foo", " bar"]),
        (["a\n", "\nb"], ["ab"]),
        (["a", "\n", "b"], ["a b"]),
        (["ab"], ["a", " ", "b"]),
        (["a", " b", "c"], ["ab", "c"]),
        (["a b"], ["ab"]),
        (["a", "b"], ["b", "a"]),
    ],
)
def test_white_space_between_blocks_does_not_vanish(sent: list[str], echo: list[str]) -> None:
    assert not same_text(sent, echo)


@given(st.lists(st.text(" \nab", max_size=4), max_size=4), st.lists(st.text(" \nab", max_size=4), max_size=4))
def test_words_and_their_borders_are_the_same_in_every_accepted_text(sent: list[str], echo: list[str]) -> None:
    """A border is white space, the border between two blocks, or none at all."""
    if same_text(sent, echo):
        worded = [text for text in sent if text.strip()]
        spellings = ["".join(sent).split(), "".join(worded).split()]
        assert "".join(echo).split() in spellings or " ".join(echo).split() == " ".join(sent).split()


CALL = ToolCall("toolu_1", "Bash", '{"command": "ls"}')
SENT = (Thinking("A1", "t1"), Text("B1"), Thinking("C1", "t2"), Text("\n\n"), CALL)


@pytest.mark.parametrize(
    "echo",
    [
        SENT,
        (Thinking("A1C1"), Text("B1"), CALL),
        (Thinking(" A1", "t1"), Text("B1"), Thinking("C1 ", "t2"), CALL),
        (Text("B1"), CALL),
        (Thinking("", "t1"), Text("B1"), Thinking("", "t2"), CALL),
        (Text("B1"), ToolCall("toolu1", "Bash", '{"command":"ls"}')),
    ],
)
def test_these_echoes_of_a_turn_are_the_turn(echo: Any) -> None:
    assert same_turn(SENT, echo, {})


@pytest.mark.parametrize(
    "echo",
    [
        (Thinking("A1C2"), Text("B1"), CALL),
        (Thinking("A1"), Text("B1"), CALL),
        (Text("B2"), CALL),
        (CALL,),
        (Text("B1"),),
        (Text("B1"), CALL, CALL),
        (Text("B1"), ToolCall("toolu_1", "Bash2", CALL.arguments)),
        (Text("B1"), ToolCall("toolu_2", "Bash", CALL.arguments)),
        (Text("B1"), ToolCall("toolu_1", "Bash", '{"command": "rm"}')),
    ],
)
def test_these_are_edits(echo: Any) -> None:
    assert not same_turn(SENT, echo, {})


def test_free_form_input_is_compared_as_it_is() -> None:
    sent = ToolCall("call_1", "apply_patch", "*** Begin Patch", freeform=True)
    assert same_turn((sent,), (sent,), {})
    assert not same_turn((sent,), (ToolCall("call_1", "apply_patch", "*** Begin  Patch", freeform=True),), {})


FIRST, SECOND = CALL, ToolCall("toolu_2", "Bash", "{}")
MIXED = (Text("One."), FIRST, Text("Two. "), Text(" \n"), SECOND)


@pytest.mark.parametrize(
    ("echo", "same"),
    [
        (MIXED, True),
        ((Text("One. "), FIRST, Text("Two."), SECOND), True),
        ((Text("One.Two."), FIRST, SECOND), True),  # as chat clients hold it
        ((Text("One."), Text("Two."), FIRST, SECOND), True),
        ((Text("One."), FIRST, SECOND, Text("Two.")), False),
        ((FIRST, Text("One."), Text("Two."), SECOND), False),
        ((FIRST, SECOND, Text("One."), Text("Two.")), False),
        ((Text("Two."), FIRST, Text("One."), SECOND), False),
    ],
)
def test_text_keeps_its_place_among_the_calls(echo: Any, same: bool) -> None:
    assert same_turn(MIXED, echo, {}) is same


def test_text_moved_behind_a_call_is_an_edit() -> None:
    assert not same_turn((Text("One."), FIRST), (FIRST, Text("One.")), {})
    assert not same_turn((FIRST, Text("One.")), (FIRST, SECOND, Text("One.")), {})
