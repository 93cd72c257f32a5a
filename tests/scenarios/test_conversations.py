"""Scenarios that begin with what a client does to its history. Each is named after its number in the list of field
reports, which every test quotes in a line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from dialogue import SYSTEM, Dialogue, House

from parsers.conversation import Text, Thinking, ToolCall, ToolOutput, Turn
from server.errors import ApiError
from server.protocols import anthropic
from sessions.tracker import RequestMeta

PAGE = 64


def kept(house: House) -> None:
    stats = house.machine.stats()
    assert house.sessions.stats()["misses_without_cause"] == 0
    assert stats.get("restored_unused", 0) == 0


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_01_an_answer_edited_at_its_end_costs_that_answer(house: House) -> None:
    """Hybrid models computed the whole prompt anew every turn, for want of a state near the edit."""
    chat = Dialogue(house)
    for turn in range(3):
        chat.user(f"Question {turn}? " * 10)
        last = chat.send(Text(f"Answer {turn}, at some length. " * 12))
    answer = chat.turns[-1].blocks
    (text,) = (block for block in answer if isinstance(block, Text))
    chat.turns[-1] = Turn("assistant", tuple(Text(b.text[:-5] + "other") if b is text else b for b in answer))
    chat.user("Go on.")
    reply = chat.send(Text("Yes."))
    assert reply.report.resumed >= len(last.ids) - PAGE
    kept(house)


def test_02_a_head_line_that_changes_with_every_request_costs_nothing(house: House) -> None:
    """A billing header at the prompt's head changed with every request: no reuse at all."""
    chat = Dialogue(house, RequestMeta("anthropic", {"x-claude-code-session-id": "one"}))
    chat.user("What is here?")
    before = None
    for number in range(4):
        head = Text(f"x-anthropic-billing-header: cch={number};")
        chat.turns[0] = Turn("system", (head, Text(SYSTEM)))
        reply = chat.step(number)
        if before is not None:
            assert reply.report.resumed >= len(before.ids)
            assert reply.report.replayed == 0
        before = reply
    kept(house)


def test_03_thinking_dropped_at_the_next_turn_costs_that_turn(house: House) -> None:
    """Templates drop old thinking when the user speaks again: reuse fell back to the system text."""
    chat = Dialogue(house)
    chat.user("Earlier question.")
    chat.send(Thinking("Easy."), Text("Earlier answer."))
    chat.user("Fix the tests.")
    first = chat.step(0)
    for number in range(1, 8):
        chat.step(number)
    chat.send(Thinking("All done."), Text("Fixed."))
    chat.user("And now?")
    reply = chat.send(Text("Nothing."))
    user = common(first.ids, reply.ids)
    assert reply.report.cause == "thinking_stripped"
    assert reply.report.resumed >= user - PAGE
    assert user > len(SYSTEM)
    kept(house)


@pytest.mark.parametrize("spelled", [{"limit": 0, "path": "src/0.py"}, {"path": "src/0.py", "limit": 0.0}])
def test_04_arguments_spelled_otherwise_are_the_tokens_that_were_sampled(house: House, spelled: object) -> None:
    """Clients send calls back with other key orders, spaces and numbers than were sampled."""
    chat = Dialogue(house)
    chat.user("Read it.")
    first = chat.step(0)
    blocks = tuple(
        replace(block, arguments=json.dumps(spelled, indent=1)) if isinstance(block, ToolCall) else block
        for block in chat.turns[-2].blocks
    )
    chat.turns[-2] = Turn("assistant", blocks)
    reply = chat.send(Text("Read."))
    assert reply.ids[: len(first.ids) + len(first.sampled)] == first.ids + first.sampled
    assert reply.report.replayed == 0
    assert reply.report.resumed >= len(first.ids) + len(first.sampled) - 1
    kept(house)


def test_05_a_growing_chat_never_falls_back(house: House) -> None:
    """Coarse alignment silently lost a third of the prompt, or all of it."""
    chat = Dialogue(house)
    chat.user("Begin.")
    before = chat.send(Text("Begun."))
    for turn in range(12):
        chat.user(f"Turn {turn}: " + "and more of it, " * (3 + 7 * (turn % 5)))
        reply = chat.send(Text("Noted. " * (turn + 1)))
        assert reply.report.resumed >= len(before.ids) - PAGE
        before = reply
    kept(house)


def test_08_outputs_cleared_cost_what_comes_after_the_first_of_them(house: House) -> None:
    """Clients replace old tool outputs by a stub: the edit is deep in the history, and the old branch may come back."""
    chat = Dialogue(house)
    chat.user("Look around.")
    for number in range(10):
        last = chat.step(number, 600)
    old = list(chat.turns)
    outputs = [at for at, turn in enumerate(chat.turns) if turn.role == "tool"]
    for at in outputs[4:8]:
        (output,) = chat.turns[at].blocks
        assert isinstance(output, ToolOutput)
        chat.turns[at] = Turn("tool", (replace(output, text="[Old tool result content cleared]"),))
    cleared = chat.send(Text("Tidied."))
    edit = common(last.ids, cleared.ids)
    assert cleared.report.cause == "history_edited"
    assert edit - PAGE - 128 <= cleared.report.resumed <= edit
    chat.turns = old
    assert chat.send(Text("As before.")).report.resumed >= len(last.ids)
    kept(house)


def test_14_a_fork_early_in_a_long_session_has_a_state_near(house: House) -> None:
    """Checkpoints went first in, first out: a fork at an early step found none."""
    chat = Dialogue(house)
    chat.user("A long task.")
    for number in range(60):
        chat.step(number, 60, thinking=False)
    total = sum(len(block.text) for turn in chat.turns for block in turn.blocks if isinstance(block, ToolOutput))
    house.machine.restart(checkpoints=16, pages=1024)
    fork = Dialogue(house, turns=chat.turns[:12])
    fork.user("Another way.")
    reply = fork.send(Text("Yes."))
    assert reply.report.replayed <= total / 4
    kept(house)


def test_20_an_answer_cut_anywhere_goes_on_from_there(plain_house: House) -> None:
    """Text cut off by its reader is encoded as other tokens than were sampled, around the cut."""
    house, family = plain_house, plain_house.family
    chat = Dialogue(house)
    chat.user("Explain.")
    text = "Caches — naïve ones, too — trade memory for time. 三つの例: a, b, c. " * 3
    first = chat.send(Text(text))
    asked = list(chat.turns[:-1])
    for cut in range(1, len(text), 17):
        chat.turns = [*asked, Turn("assistant", (Text(text[:cut]),))]
        chat.user("Stop.")
        reply = chat.send(Text("Stopped."))
        whole = len(family.tokenizer.encode(text[:cut].rstrip()))
        assert common(first.ids + first.sampled, reply.ids) >= len(first.ids) + max(0, whole - 4)
        assert reply.report.resumed >= len(first.ids) - PAGE
    kept(house)


def test_21_a_very_long_first_prompt_leaves_its_head_to_other_sessions(house: House) -> None:
    """The head of prompts beyond 30k tokens was silently never kept, and agents begin with 25k and more."""
    head = Turn("system", (Text(SYSTEM + "Rule: think twice. " * 1_200),))
    first = Dialogue(house, RequestMeta("chat", session_hint="a"), turns=[head])
    first.user("One thing. " * 1_000)
    size = len(first.send(Text("Done.")).ids)
    second = Dialogue(house, RequestMeta("chat", session_hint="b"), turns=[head])
    second.user("Another.")
    reply = second.send(Text("Done."))
    assert size > 30_000
    assert reply.report.resumed >= len(reply.ids) - PAGE - 200
    kept(house)


def test_27_an_image_is_refused_and_the_text_around_it_keeps_its_state(house: House) -> None:
    """An image in the history switched caching off. Here it is refused, by name, before anything is touched."""
    chat = Dialogue(house)
    chat.user("Hello.")
    chat.send(Text("Hello."))
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [picture]}]}
    with pytest.raises(ApiError, match="text only"):
        anthropic.read(body, {}, "")
    for turn in range(5):
        chat.user(f"Text {turn}.")
        assert chat.send(Text("Yes.")).report.replayed < PAGE


def test_28_a_reminder_that_changes_every_turn_costs_itself(house: House) -> None:
    """Countdowns and other volatile text moved into the head, and the whole prompt was computed anew."""
    chat = Dialogue(house, RequestMeta("chat"))
    before: tuple[int, ...] = ()
    for turn in range(6):
        chat.turns = [one for one in chat.turns if not str(one.blocks[0]).startswith("Text(text='<system-reminder>")]
        chat.user(f"Turn {turn}. " * 20)
        asked = len(chat.turns)
        chat.turns.append(Turn("user", (Text(f"<system-reminder>{90 - turn} minutes left</system-reminder>"),)))
        reply = chat.send(Text("Yes. " * 10))
        assert reply.report.resumed >= common(before, reply.ids) - PAGE
        before = reply.ids
        assert chat.turns[asked].role == "user"
    kept(house)


def test_29_a_session_resumed_by_a_new_process_goes_on(house: House) -> None:
    """Resuming dropped or reordered system messages, under another session id: everything was written again."""
    chat = Dialogue(house, RequestMeta("anthropic", {"x-claude-code-session-id": "old"}))
    chat.user("Begin.")
    for number in range(6):
        last = chat.step(number)
    resumed = Dialogue(house, RequestMeta("anthropic", {"x-claude-code-session-id": "new"}), turns=list(chat.turns))
    resumed.turns.insert(1, resumed.turns.pop(0))
    resumed.turns.insert(0, resumed.turns.pop(1))
    reply = resumed.send(Text("Here again."))
    same = common(last.ids + last.sampled, reply.ids)
    assert reply.report.resumed >= same - PAGE - 1
    assert same >= len(last.ids) - PAGE
    kept(house)
