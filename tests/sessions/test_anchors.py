from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from parsers.conversation import Text, Thinking, ToolCall
from parsers.load import Probe, Span
from sessions.anchors import LATTICE, LIMIT, anchor_points, watch_points

STRIPS = Probe(True, True, False, True, False, False)
KEEPS = Probe(True, True, True, True, True, True)


def span(start: int, end: int, kind: Any, turn: int = 0) -> Span:
    return Span(start, end, kind, turn)


def call() -> ToolCall:
    return ToolCall("", "Bash", "{}")


def conversation(world: Any, users: int) -> Any:
    agent = world.claude()
    for _ in range(users):
        agent.user("Do it.").say(Thinking("hm"), call())
        agent.outputs("ok").say(Thinking("so"), call())
        agent.outputs("ok").say(Text("Done."))
    return agent.user("And now?").ask(Text("Yes."))


def test_what_future_prompts_share_is_pinned(world: Any) -> None:
    outcome = conversation(world, 5)
    points = {point.position: point for point in outcome.visit.anchors(outcome.prompt)}
    spans = outcome.prompt.spans
    users = [span.start for span in spans if span.kind == "user"]
    tail = next(span.start for span in spans if span.kind == "generation_prompt")
    assert all(points[position].pinned for position in (users[0], *users[-3:], tail))
    assert not points[users[1]].pinned
    assert points[users[1]].kind == "user_start"
    assert not points[len(outcome.prompt.ids)].pinned
    ends = [span.end for span in spans if span.kind == "tool_output"]
    assert set(ends) <= set(points)


def test_the_start_of_a_loop_is_pinned_only_where_thinking_is_dropped() -> None:
    spans = [span(0, 10, "system"), span(10, 20, "user", 1)]
    spans += [span(20, 22, "assistant_header", 2), span(20, 40, "assistant", 2), span(40, 50, "tool_output", 3)]
    spans += [span(50, 52, "assistant_header", 4), span(50, 70, "assistant", 4), span(70, 80, "tool_output", 5)]
    spans += [span(80, 82, "generation_prompt", -1)]
    pinned = {point.position: point.kind for point in anchor_points(82, spans, STRIPS) if point.pinned}
    assert pinned == {10: "head_end", 20: "loop_start", 80: "generation_prompt"}
    pinned = {point.position: point.kind for point in anchor_points(82, spans, KEEPS) if point.pinned}
    assert pinned == {10: "head_end", 80: "generation_prompt"}
    ends = {point.priority for s in (STRIPS, KEEPS) for point in anchor_points(82, spans, s) if point.position == 82}
    assert len(ends) == 2


def test_every_part_of_the_head_is_pinned() -> None:
    spans = [span(0, 30, "system"), span(5, 20, "tools", -1), span(30, 40, "system", 1), span(40, 50, "user", 2)]
    spans += [span(50, 60, "system", 3), span(60, 62, "generation_prompt", -1)]
    points = {point.position: (point.kind, point.pinned) for point in anchor_points(62, spans, KEEPS)}
    assert {position for position, (kind, _) in points.items() if kind == "head_part"} == {20, 30}
    assert points[20][1] and points[30][1]
    assert points[40] == ("head_end", True)
    assert points[50] == ("turn_start", False)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool_output"]), st.integers(1, 3000)), max_size=120))
def test_anchors_are_bounded_ordered_and_inside(turns: list[tuple[str, int]]) -> None:
    spans, at = [span(0, 7, "system")], 7
    for index, (kind, length) in enumerate(turns):
        if kind == "assistant":
            spans.append(span(at, at + 1, "assistant_header", index))
            spans.append(span(at + length // 3, at + length // 2, "tool_call", index))
        spans.append(span(at, at + length, kind, index))
        at += length
    spans.append(span(at, at + 3, "generation_prompt", -1))
    points = anchor_points(at + 3, spans, STRIPS)
    positions = [point.position for point in points]
    assert positions == sorted(set(positions))
    assert all(0 < position <= at + 3 for position in positions)
    assert len(points) <= LIMIT
    pinned = {point.position for point in points if point.pinned}
    assert {7, at} <= pinned
    assert set([s.start for s in spans if s.kind == "user"][-3:]) <= pinned


def test_places_that_are_one_take_room_once() -> None:
    spans = [span(0, 5, "system"), span(5, 10, "user", 1)]
    for at in range(10, 10 + 2 * LIMIT):  # two calls in one token
        spans += [span(at, at + 1, "assistant", at), *2 * [span(at, at + 1, "tool_call", at)]]
    points = anchor_points(10 + 2 * LIMIT, spans, KEEPS)
    assert len(points) == LIMIT
    assert {point.kind for point in points} == {"head_end", "prompt_end", "tool_call_end"}


def test_a_long_prompt_has_a_lattice_that_widens() -> None:
    for length, step in ((LATTICE, 0), (3 * LATTICE, LATTICE), (200_000, 7 * LATTICE)):
        lattice = [p.position for p in anchor_points(length, [span(0, length, "user")], KEEPS) if p.kind == "lattice"]
        assert lattice == (list(range(step, length, step)) if step else [])


def test_an_empty_prompt_has_no_anchors() -> None:
    assert anchor_points(0, [], KEEPS) == ()


def test_watches_carry_the_familys_token_sequences(world: Any) -> None:
    points = watch_points(world.family.watches)
    assert [(point.tokens, point.kind) for point in points] == list(world.family.watches)
    assert {"thinking_end", "tool_call_start"} <= {point.kind for point in points}
    assert all(point.priority > 0 for point in points)
