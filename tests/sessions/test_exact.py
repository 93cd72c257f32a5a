from __future__ import annotations

from dataclasses import replace

from parsers.conversation import Sampled, Text, Thinking, ToolCall, ToolOutput, Turn
from parsers.events import Boundary
from sessions.digest import turn_digest
from sessions.exact import NAMESAKES, Journal, next_link, sampled_turn

USER = next_link(b"", turn_digest(Turn("user", (Text("Hello"),))).key)
OTHER = next_link(b"", turn_digest(Turn("user", (Text("Other"),))).key)
IDS = Sampled((5, 6, 4_000_000_000, 7), 2, "rest", (8, 9))
CALLS = (
    Thinking("hm", "ftabc"),
    ToolCall("toolu_a1", "Bash", '{"command": "a"}'),
    ToolCall("toolu_b2", "Bash", '{"command": "b"}'),
)


def journal(*blocks: object, max_tokens: int = 1000) -> Journal:
    made = Journal(max_tokens)
    made.record(blocks, IDS, USER, "main")  # type: ignore[arg-type]
    return made


def test_a_turn_is_found_by_its_call_ids_anywhere_in_the_session() -> None:
    restored = journal(*CALLS).restore(Turn("assistant", CALLS[1:]), OTHER, "main", {})
    assert (restored.verdict, restored.turn.sampled, restored.turn.blocks) == ("exact", IDS, CALLS)
    assert restored.digest == turn_digest(restored.turn)


def test_call_ids_keep_the_clients_spelling_because_its_outputs_refer_to_it() -> None:
    stripped = tuple(replace(call, id=call.id.replace("_", "")) for call in CALLS[1:])
    restored = journal(*CALLS).restore(Turn("assistant", stripped), OTHER, "main", {})
    assert restored.verdict == "exact"
    assert restored.digest == turn_digest(restored.turn)
    assert [block.id for block in restored.turn.blocks if isinstance(block, ToolCall)] == ["toolua1", "toolub2"]


def test_all_parallel_calls_must_match() -> None:
    made = journal(*CALLS)
    for blocks in (CALLS[1:2], (CALLS[1], replace(CALLS[2], id="toolu_x")), (CALLS[2], CALLS[1])):
        restored = made.restore(Turn("assistant", blocks), USER, "main", {})
        assert (restored.verdict, restored.turn) == ("edited", Turn("assistant", blocks))
        assert restored.digest == turn_digest(restored.turn)


def test_calls_of_two_turns_are_not_one_turn() -> None:
    made = Journal(1000)
    for call in CALLS[1:]:
        made.record((call,), IDS, USER, "main")
    assert made.restore(Turn("assistant", CALLS[1:]), USER, "main", {}).verdict == "edited"


def test_a_ticket_finds_a_turn_without_calls() -> None:
    made = journal(Thinking("hm", "ftabc"), Text("Yes."))
    assert made.restore(Turn("assistant", (Thinking("", "ftabc"), Text("Yes."))), OTHER, "main", {}).verdict == "exact"
    assert (
        made.restore(Turn("assistant", (Thinking("other", "ftabc"), Text("Yes."))), USER, "main", {}).verdict
        == "edited"
    )


def test_text_finds_a_turn_only_after_the_same_turn() -> None:
    made = journal(Thinking("hm", "ftabc"), Text("\n\nYes,  it is. "))
    echo = Turn("assistant", (Text("Yes,  it is."),))
    restored = made.restore(echo, USER, "main", {})
    assert (restored.verdict, restored.turn.sampled) == ("exact", IDS)
    assert restored.turn.blocks[0] == Thinking("hm", "ftabc")
    assert made.restore(echo, OTHER, "main", {}).verdict == "unknown"
    assert made.restore(Turn("assistant", (Text("Yes, it is."),)), USER, "main", {}).verdict == "edited"
    assert made.restore(Turn("assistant", (Text("No."),)), USER, "main", {}).verdict == "unknown"


def test_the_latest_of_two_equal_answers_is_taken() -> None:
    made = journal(Text("Yes."))
    later = Sampled((9,))
    made.record((Text("Yes."),), later, USER, "main")
    assert made.restore(Turn("assistant", (Text("Yes."),)), USER, "main", {}).turn.sampled == later


def test_equal_answers_to_the_same_turns_are_told_apart_by_their_thinking() -> None:
    made = Journal(1000)
    for n in range(3):
        made.record((Thinking(f"thought {n}", f"ft{n}"), Text("Yes.")), Sampled((n,)), USER, "main")
    for n in (1, 0, 2):
        echo = Turn("assistant", (Thinking(f"thought {n}"), Text("Yes.")))
        restored = made.restore(echo, USER, "main", {})
        assert (restored.verdict, restored.turn.sampled) == ("exact", Sampled((n,)))
    other = Turn("assistant", (Thinking("thought 3"), Text("Yes.")))
    assert made.restore(other, USER, "main", {}).verdict == "edited"


def test_equal_answers_to_the_same_turns_are_told_apart_by_their_white_space() -> None:
    made = Journal(1000)
    for n, text in enumerate(("x = 1", "x=1")):
        made.record((Text(text),), Sampled((n,)), USER, "main")
    for n, text in enumerate(("x = 1", "x=1")):
        assert made.restore(Turn("assistant", (Text(text),)), USER, "main", {}).turn.sampled == Sampled((n,))


def test_each_branch_finds_its_own_answer_and_else_that_of_another() -> None:
    made = Journal(1000)
    for n, branch in enumerate(("one", "two", "three")):
        made.record((Thinking(branch), Text("Yes.")), Sampled((n,)), USER, branch)
    echo = Turn("assistant", (Text("Yes."),))
    found = [made.restore(echo, USER, branch, {}).turn.sampled for branch in ("one", "two", "three", "four")]
    assert found == [Sampled((0,)), Sampled((1,)), Sampled((2,)), Sampled((2,))]


def test_a_thousand_equal_answers_leave_a_bounded_number_to_look_at() -> None:
    made = Journal(100_000)
    for n in range(1000):
        made.record((Thinking(f"thought {n}"), Text("Yes.")), Sampled((n,)), USER, "main")

    def verdict(n: int) -> str:
        return made.restore(Turn("assistant", (Thinking(f"thought {n}"), Text("Yes."))), USER, "main", {}).verdict

    assert [verdict(n) for n in (999, 1000 - NAMESAKES)] == ["exact", "exact"]
    assert [verdict(n) for n in (999 - NAMESAKES, 0)] == ["edited", "edited"]
    assert made.restore(Turn("assistant", (Text("Yes."),)), USER, "main", {}).turn.sampled == Sampled((999,))


def test_what_is_found_goes_on_with_the_link_it_was_recorded_with() -> None:
    made = journal(*CALLS)
    unedited = made.restore(Turn("assistant", CALLS), USER, "main", {}).link
    made.record((Text("Done."),), IDS, next_link(unedited, b"output"), "main")
    link = made.restore(Turn("assistant", CALLS), OTHER, "main", {}).link
    assert link == unedited
    done = Turn("assistant", (Text("Done."),))
    assert made.restore(done, next_link(link, b"output"), "main", {}).verdict == "exact"


def test_links_go_on_the_same_whether_an_answer_is_still_known_or_not() -> None:
    made, emptied = journal(*CALLS), Journal(1000)
    turn = Turn("assistant", CALLS)
    assert made.restore(turn, USER, "main", {}).link == emptied.restore(turn, USER, "main", {}).link


def test_the_journal_is_bounded_and_forgets_what_is_not_echoed() -> None:
    made = Journal(12)
    turns = [Turn("assistant", (ToolCall(f"toolu_{n}", "Bash", "{}"),)) for n in range(5)]
    for turn in turns[:3]:
        made.record(turn.blocks, IDS, USER, "main")
    assert made.restore(turns[0], USER, "main", {}).verdict == "exact"
    made.record(turns[3].blocks, IDS, USER, "main")
    assert made.tokens == 12
    assert [made.restore(turn, USER, "main", {}).verdict for turn in turns] == [
        "exact",
        "unknown",
        "exact",
        "exact",
        "unknown",
    ]


def test_an_entry_larger_than_the_journal_is_not_kept() -> None:
    assert journal(*CALLS, max_tokens=3).tokens == 0


def test_the_end_of_thinking() -> None:
    blocks = (Thinking("hm"), Text("Yes."))
    end = Boundary("thinking_end", 3)
    assert sampled_turn((1, 2, 3, 4), blocks, (Boundary("thinking_start", 0), end), ()).thinking_end == 3
    straddling = sampled_turn((1, 2, 3, 4), blocks, (Boundary("thinking_end", 2, False, "Yes"),), ())
    assert (straddling.thinking_end, straddling.thinking_rest) == (3, "Yes")
    assert sampled_turn((1, 2), (Thinking("hm"),), (), ()).thinking_end == 2
    assert sampled_turn((1, 2), (Text("hm"),), (), (8, 9)) == Sampled((1, 2), 0, "", (8, 9))


def test_digests_of_outputs_tell_errors_and_calls_apart() -> None:
    one, two, three = (
        turn_digest(Turn("tool", (output,)))
        for output in (ToolOutput("a", "x"), ToolOutput("b", "x"), ToolOutput("a", "x", is_error=True))
    )
    assert len({one.key, two.key, three.key}) == 3
