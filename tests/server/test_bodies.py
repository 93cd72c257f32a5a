"""Bodies that begin as earlier ones did say what they say, and are not read again where nothing is new."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import ValidationError, from_json

from server import bodies
from server.bodies import Bodies, Body, raw_body
from server.protocols import chat, responses
from server.protocols.anthropic import ANTHROPIC
from server.protocols.base import WireProtocol

TEXTS = ["", "a", '"', "\\", '\\"],{"messages":[', "größer 漢", "]}", "\n", "[,]", "x" * 50]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from([0.0, 1.0, *TEXTS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=3),
    max_leaves=6,
)
PROTOCOLS = {"anthropic": ANTHROPIC, "responses": responses.PLAIN, "chat": None}


def read(known: Bodies, data: bytes, field: str = "messages", owner: str = "") -> object:
    """What is read and remembered; the items themselves stand for their models."""
    body, entry = known.read(data, (owner, ""), field)
    if entry is not None:
        known.keep(entry, body[field], body.get("tools"))  # type: ignore[index,attr-defined]
    return raw_body(body)


def outcome(make: Any) -> str:
    try:
        return repr(make())
    except ValueError:
        return "no JSON"


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Bodies that grow, change, and break."""
    texts: list[bytes] = []
    items: list[Any] = []
    rest = {"tools": draw(VALUES), "x": draw(VALUES)}
    for _ in range(6):
        items = items[: draw(st.integers(0, len(items)))] if draw(st.integers(0, 4)) == 0 else items
        items = [*items, *draw(st.lists(VALUES, max_size=2))]
        rest = {"tools": draw(VALUES)} if draw(st.integers(0, 5)) == 0 else rest
        order = draw(st.sampled_from([("before", "after"), ("after", "before")]))
        parts = {"before": {"messages": items}, "after": rest}
        separators = (", ", ": ") if draw(st.booleans()) else (",", ":")
        text = json.dumps(
            {**parts[order[0]], **parts[order[1]]}, separators=separators, ensure_ascii=draw(st.booleans())
        )
        if draw(st.integers(0, 3)) == 0:
            at = draw(st.integers(0, len(text)))
            text = text[:at] + draw(st.sampled_from(["]", ",", '"', "}", '],"messages":[', "[", " ", "1"])) + text[at:]
        texts.append(text.encode())
    return texts


@settings(max_examples=300, deadline=None)
@given(bodies=conversations())
def test_what_was_read_before_changes_nothing(bodies: list[bytes]) -> None:
    known = Bodies()
    for data in bodies:
        for _ in range(2):
            assert outcome(lambda: read(known, data)) == outcome(lambda: from_json(data, allow_inf_nan=False))  # noqa: B023


def test_only_the_news_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes: list[int] = []

    def counted(data: bytes, **options: Any) -> Any:
        read_bytes.append(len(data))
        return from_json(data, **options)

    monkeypatch.setattr(bodies, "from_json", counted)
    known = Bodies()
    messages = [{"role": "user", "content": f"{n:04}" * 100} for n in range(60)]
    for count in range(50, 60):
        data = json.dumps({"model": "m", "messages": messages[:count], "tools": [{"name": "t"}]}).encode()
        read_bytes.clear()
        assert read(known, data) == json.loads(data)
        assert count == 50 or sum(read_bytes) < 1000
    assert len(known._known) == 1  # each has all that the one before had
    read_bytes.clear()
    read(known, data, owner="somebody else")
    assert sum(read_bytes) >= len(data)


def test_a_name_that_comes_twice_is_read_as_ever() -> None:
    known = Bodies()
    for tail in (
        '"messages":[1,2]',
        '"messag\\u0065s":[1,2]',
        '"messages" \n : [1, 2]',
        '"x":{"messages":[3]}',
        '"x":"messages"',
    ):
        for count in (2, 3):
            data = ('{"messages":[' + ",".join(map(str, range(count))) + "]," + tail + "}").encode()
            assert read(known, data) == json.loads(data)


def test_they_are_no_more_than_is_allowed() -> None:
    """In bytes, of which a short message takes more than it has, and in number, for all are looked at."""
    known = Bodies(limit=100_000)
    for number in range(300):
        read(known, json.dumps({"n": number, "messages": ["x" * 500, 1]}).encode())
        assert known._size <= 100_000 and known._size == sum(entry.size for entry in known._known.values())
    one = json.dumps({"n": 299, "messages": ["x" * 500, 1]}).encode()
    assert len(known._known) == 100_000 // (2 * bodies._MODEL + bodies._weight(one))
    for large in ({"messages": ["x" * 90_000, 1]}, {"messages": [1, 2], "x": [{}] * 200}):
        read(known, json.dumps(large).encode())
        assert all(entry.data.startswith(b'{"n"') for entry in known._known.values())
    for message in ("x" * 90_000, [{}] * 200):  # nor do they become so
        read(known, json.dumps({"messages": [1, 2]}).encode())
        read(known, json.dumps({"messages": [1, 2, message]}).encode())
        assert known._size <= 100_000 and max(entry.weight for entry in known._known.values()) <= 25_000
    known = Bodies()
    for number in range(2 * bodies._KEPT):
        read(known, b'{"n":%d,"messages":[1]}' % number)
    assert len(known._known) == bodies._KEPT


def test_what_is_refused_takes_no_one_s_place() -> None:
    """Nor is it remembered: it is read again each time, and what it continued is there for what is right."""
    known = Bodies()
    read(known, b'{"messages":[1,2]}')
    for _ in range(2):
        known.read(b'{"messages":[1,2,"wrong"]}', ("", ""), "messages")
    assert [entry.data for entry in known._known.values()] == [b'{"messages":[1,2]}']


def test_a_body_that_two_protocols_read_is_each_one_s_own() -> None:
    """Their models are not the other's, and nor are those of another API key."""
    known = Bodies()
    said = [{"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "A"), ("user", "And?"))]
    data = json.dumps({"model": "m", "max_tokens": 9, "messages": said}).encode()
    for namespace in ("", "key"):
        for protocol in (chat.reader(lambda _: []), ANTHROPIC) * 2:
            body, entry = known.read(data, (namespace, protocol.shape), protocol.field)
            inbound = protocol.read(body, {}, namespace)
            assert entry is not None and inbound.request is not None
            known.keep(entry, inbound.request.messages, inbound.request.tools)  # type: ignore[attr-defined]
            assert inbound.conversation == protocol.read(json.loads(data), {}, "").conversation
    assert len(known._known) == 4


def grown(protocol: str, steps: int) -> dict[str, Any]:
    """A conversation as clients of that protocol send it, tools and all."""
    tool = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
    items: list[dict[str, Any]] = [{"role": "user", "content": "Q"}]
    for n in range(steps):
        if protocol == "anthropic":
            use = {"type": "tool_use", "id": f"c{n}", "name": "look", "input": {"n": n, "on": True}}
            items.append({"role": "assistant", "content": [{"type": "text", "text": f"Step {n}."}, use]})
            items.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"c{n}", "content": "o"}]})
        elif protocol == "chat":
            call = {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": f'{{"n":{n}}}'}}
            items.append({"role": "assistant", "content": f"Step {n}.", "tool_calls": [call]})
            items.append({"role": "tool", "tool_call_id": f"c{n}", "content": "o"})
        else:
            items.append({"role": "assistant", "content": f"Step {n}."})
            items.append({"type": "function_call", "call_id": f"c{n}", "name": "look", "arguments": f'{{"n":{n}}}'})
            items.append({"type": "function_call_output", "call_id": f"c{n}", "output": "o"})
    match protocol:
        case "anthropic":
            shown = {"name": "look", "description": "Looks.", "input_schema": tool["parameters"]}
            return {"model": "m", "max_tokens": 9, "messages": items, "tools": [shown]}
        case "chat":
            return {"model": "m", "messages": items, "tools": [{"type": "function", "function": tool}]}
    return {"model": "m", "input": items, "tools": [{"type": "function", **tool}]}


@pytest.mark.parametrize("name", ["anthropic", "responses", "chat"])
def test_a_protocol_makes_the_same_of_what_was_read_before(name: str) -> None:
    protocol: WireProtocol = PROTOCOLS[name] or chat.reader(lambda _: [])
    known = Bodies()
    before: Any = None
    for steps in (3, 4, 4, 6, 5, 11, 12, 7, 3, 13, *(random.Random(1).randrange(7, 30) for _ in range(9))):
        data = json.dumps(grown(name, steps)).encode()
        body, entry = known.read(data, ("", ""), protocol.field)
        inbound = protocol.read(body, {}, "")
        assert entry is not None and inbound.request is not None
        known.keep(entry, getattr(inbound.request, protocol.field), inbound.request.tools)  # type: ignore[attr-defined]
        fresh = protocol.read(json.loads(data), {}, "")
        assert inbound.conversation == fresh.conversation and inbound.options == fresh.options
        now = inbound.conversation
        if before is not None and isinstance(body, Body):
            assert now.tools[0] is before.tools[0] and all(
                a is b for a, b in zip(now.turns[:5], before.turns, strict=False)
            )
        before = now


@pytest.mark.parametrize("name", ["anthropic", "responses", "chat"])
def test_what_is_wrong_in_the_news_is_told_with_its_place(name: str) -> None:
    protocol: WireProtocol = PROTOCOLS[name] or chat.reader(lambda _: [])
    known = Bodies()
    good, bad = grown(name, 3), grown(name, 4)
    place = len(bad[protocol.field])
    bad[protocol.field] += [{"role": "user", "content": 7}, {"role": "user", "content": "And?"}]
    for data in (json.dumps(body).encode() for body in (good, bad)):
        body, entry = known.read(data, ("", ""), protocol.field)
        if entry is not None and body is not None and entry.data.count(b"And?") == 0:
            request = protocol.read(body, {}, "").request
            known.keep(entry, getattr(request, protocol.field), getattr(request, "tools", None))
    assert isinstance(body, Body)
    with pytest.raises(ValidationError) as caught:
        protocol.read(body, {}, "")
    assert caught.value.errors()[0]["loc"][:2] == (protocol.field, place)


def test_a_reference_to_a_tool_is_read_anew_where_it_describes_one() -> None:
    """What a message says may depend on the tools that come with it."""
    known = Bodies()
    reference = [{"type": "tool_reference", "tool_name": "late"}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": reference}]}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "late", "input": {}}]}
    late = {"name": "late", "input_schema": {}, "description": "Comes late."}
    for tools in ([], [{**late, "defer_loading": True}], []):
        for more in range(3):
            messages = [{"role": "user", "content": "Q"}, use, result, *[{"role": "user", "content": "And?"}] * more]
            data = json.dumps({"tools": tools, "model": "m", "max_tokens": 9, "messages": messages}).encode()
            body, entry = known.read(data, ("", ""), "messages")
            inbound = ANTHROPIC.read(body, {}, "")
            assert entry is not None and inbound.request is not None
            known.keep(entry, inbound.request.messages, inbound.request.tools)  # type: ignore[attr-defined]
            assert inbound.conversation == ANTHROPIC.read(json.loads(data), {}, "").conversation
