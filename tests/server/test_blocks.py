"""Parser events to delivered blocks: stop strings, white space, free-form input, ids."""

from __future__ import annotations

from itertools import count, pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.api import TokenLogprob
from parsers.conversation import Text, Thinking, ToolCall
from parsers.events import (
    Boundary,
    Event,
    TextDelta,
    ThinkingDelta,
    ToolArgsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from server.answers import Finished, Usage
from server.blocks import Assembler, BlockDelta, BlockEnd, BlockEvent, BlockStart, freeform_input
from server.protocols.anthropic_events import AnthropicWriter
from server.stops import StopMatcher


def assembler(**options: object) -> Assembler:
    calls, tickets = count(), count()
    return Assembler(
        new_call_id=lambda: f"call{next(calls)}",
        new_ticket=lambda: f"ticket{next(tickets)}",
        **options,  # type: ignore[arg-type]
    )


def run(machine: Assembler, *events: Event) -> list[BlockEvent]:
    out = [block for event in events for block in machine.feed([event])]
    return out + machine.close(complete=True)


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [ToolCallStart(index, name), ToolArgsDelta(index, arguments), ToolCallEnd(index, True)]


def test_blocks_follow_each_other_with_ids() -> None:
    machine = assembler()
    out = run(
        machine, ThinkingDelta("why"), TextDelta("so "), TextDelta("it is"), *call(0, "ls", "{}"), *call(1, "cat", "{}")
    )
    assert machine.blocks == [
        Thinking("why", "ticket0"),
        Text("so it is"),
        ToolCall("call0", "ls", "{}"),
        ToolCall("call1", "cat", "{}"),
    ]
    assert [event.index for event in out if isinstance(event, BlockStart)] == [0, 1, 2, 3]
    assert machine.calls == 2


def test_white_space_waits_for_content() -> None:
    machine = assembler()
    out = run(machine, ThinkingDelta("\n"), TextDelta("\n\n"), *call(0, "ls", "{}"), TextDelta("\n"), TextDelta("  x "))
    assert machine.blocks == [ToolCall("call0", "ls", "{}"), Text("\n  x ")]
    assert out[-2] == BlockDelta(1, "text", "\n  x ")


def test_an_answer_of_white_space_has_no_blocks() -> None:
    machine = assembler()
    assert run(machine, TextDelta(" \n"), TextDelta("\n")) == []
    assert machine.say("(no answer)")[0] == BlockStart(0, "text")


def test_a_stop_string_ends_the_text_before_it() -> None:
    machine = assembler(stops=("STOP",))
    out = run(machine, TextDelta("go S"), TextDelta("TO"), TextDelta("P on"), TextDelta("more"))
    assert machine.blocks == [Text("go ")]
    assert (machine.stopped, machine.stop_string) == ("stop_sequence", "STOP")
    assert isinstance(out[-1], BlockEnd)


def test_held_back_text_comes_before_a_call() -> None:
    machine = assembler(stops=("<stop>",))
    run(machine, TextDelta("a <st"), *call(0, "ls", "{}"))
    assert machine.blocks == [Text("a <st"), ToolCall("call0", "ls", "{}")]


def test_stop_strings_do_not_reach_into_thinking_or_arguments() -> None:
    machine = assembler(stops=("STOP",))
    run(machine, ThinkingDelta("STOP"), *call(0, "ls", '{"a":"STOP"}'), TextDelta("ST"), TextDelta("O"))
    assert machine.stopped == ""
    assert machine.blocks[-1] == Text("STO")


def test_a_second_call_is_refused_when_calls_may_not_be_parallel() -> None:
    machine = assembler(parallel_calls=False)
    run(machine, *call(0, "ls", "{}"), Boundary("tool_call_start", 9), *call(1, "rm", "{}"))
    assert machine.blocks == [ToolCall("call0", "ls", "{}")]
    assert machine.stopped == "one_call"


def test_a_call_that_was_cut_off_is_incomplete() -> None:
    machine = assembler()
    out = run(machine, ToolCallStart(0, "ls"), ToolArgsDelta(0, '{"a'))
    assert out[-1] == BlockEnd(0, "tool_call", '{"a', "call0", "ls", complete=False)
    assert machine.calls == 1


def test_a_call_that_ended_before_its_arguments_cannot_be_run() -> None:
    """Clients read no arguments as an empty object."""
    machine = assembler()
    out = run(machine, ToolCallStart(0, "wipe"), ToolCallEnd(0, False))
    assert [event.text for event in out if isinstance(event, BlockDelta)] == ["{"]
    assert machine.blocks == [ToolCall("call0", "wipe", "{")]
    whole = run(assembler(), ToolCallStart(0, "ls"), ToolCallEnd(0, True))
    assert [event for event in whole if isinstance(event, BlockDelta)] == []


def test_free_form_input_is_unwrapped_at_its_end() -> None:
    machine = assembler(freeform=frozenset({"apply_patch"}))
    out = run(
        machine,
        ToolCallStart(0, "apply_patch"),
        ToolArgsDelta(0, '{"input": "*** Beg'),
        ToolArgsDelta(0, 'in\\n"}'),
        ToolCallEnd(0, True),
    )
    assert [event.text for event in out if isinstance(event, BlockDelta)] == ["*** Begin\n"]
    assert machine.blocks == [ToolCall("call0", "apply_patch", "*** Begin\n", freeform=True)]
    assert freeform_input('{"input": "\\ud800"}') == '{"input": "\\ud800"}'
    assert freeform_input('{"input": 3}') == '{"input": 3}'
    assert freeform_input("raw") == "raw"


WORDS = ["<think>", "hm", "</think>", "\n\n", "a", "\xc3", "\xa9", "<", "b STOP", " c"]


def entry(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0)


def spelled(out: list[BlockEvent]) -> list[tuple[str, list[int]]]:
    return [(event.text, [one.token for one in event.logprobs]) for event in out if isinstance(event, BlockDelta)]


def test_logprobs_go_with_the_text_their_tokens_became() -> None:
    """Not those of thinking, of what the format swallows, or of what a stop string cuts off."""
    machine = assembler(token_size=lambda token: len(WORDS[token].encode("latin-1")), stops=["STOP"])
    out = machine.feed([ThinkingDelta("hm")], entry(1)) + machine.feed([], entry(2)) + machine.feed([], entry(3))
    assert spelled(out) == [("hm", [])]
    out = (
        machine.feed([TextDelta("a")], entry(4)) + machine.feed([], entry(5)) + machine.feed([TextDelta("é")], entry(6))
    )
    assert spelled(out) == [("a", [4]), ("é", [5, 6])]
    out = machine.feed([], entry(7)) + machine.feed([TextDelta("<b STOP")], entry(8))
    assert spelled(out) == [("<b ", [7, 8])]
    assert machine.stopped == "stop_sequence"


def test_logprobs_of_what_is_held_back_for_a_stop_string_come_with_it() -> None:
    machine = assembler(token_size=lambda token: 1, stops=["xyz"])
    out = machine.feed([TextDelta("x")], entry(1)) + machine.feed([TextDelta("y")], entry(2))
    assert out == []
    assert spelled(machine.feed([TextDelta("a")], entry(3))) == [("xya", [1, 2, 3])]
    machine.feed([TextDelta("x")], entry(4))
    assert spelled(machine.feed([ToolCallStart(0, "ls"), ToolArgsDelta(0, "{}")], entry(5))) == [("x", [4]), ("{}", [])]


def test_arguments_of_calls_outside_a_stream() -> None:
    def body(arguments: str, complete: bool = True) -> list[dict[str, object]]:
        writer = AnthropicWriter("m")
        writer.write(BlockEnd(0, "tool_call", arguments, "id", "ls", complete=complete))
        writer.write(Finished("tool_calls", "", Usage(1)))
        return [block["input"] for block in writer.body()["content"]]

    assert body('{"a": 1.5}') == [{"a": 1.5}]
    assert body("") == [{}]
    assert body('{"a', complete=False) == [{"invalid_json": '{"a'}]
    for odd in ("[1]", '{"a": "\\ud800"}', "{" + '"a":{' * 300, '{"a": NaN}', '{"a": 1e999}', "{" + '"a":{' * 5000):
        assert body(odd) == [{"invalid_json": odd}]


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(
    st.text("ab<", max_size=30),
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30)),
)
def test_stop_strings_are_found_however_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    assert matched(pieces(text, cuts), stops) == matched([text], stops)


def matched(parts: list[str], stops: list[str]) -> tuple[str, str]:
    matcher, shown, found = StopMatcher(stops), "", ""
    for part in parts:
        more, found = matcher.feed(part)
        shown += more
        if found:
            break
    assert not any(stop in shown for stop in stops)
    return shown + ("" if found else matcher.flush()), found
