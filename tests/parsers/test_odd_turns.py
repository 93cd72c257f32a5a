"""Conversations that are no plain exchange: answers first, in a row, begun or empty, and outputs that are missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsers.conversation import Conversation, Sampled, Text, Thinking, Turn
from parsers.load import RenderError
from tests.parsers.parser_support import parse
from tests.parsers.template_support import (
    FIRST,
    OTHER,
    TOOL,
    TURN,
    every,
    family,
    output,
    shown,
    user,
    with_turns,
)


@every
def test_empty_answers_do_no_harm(name: str) -> None:
    """One that the client made up is nothing; one that was sampled stays, whatever the template makes of it."""
    one = family(name)
    prompt = one.render(FIRST, thinking=False)
    for blocks in ((), (Text(""),), (Text(" \n"),)):
        told = one.render(with_turns(Turn("assistant", blocks), user("More.")), thinking=False)
        assert "More." in shown(one, told, "user")[-1]
    sampled = one.stop_tokens[:1]
    turn = Turn("assistant", (), Sampled(sampled, opener=prompt.opener))
    grown = one.render(with_turns(turn, user("More.")), thinking=False)
    assert grown.ids[: len(prompt.ids)] == prompt.ids and "More." in shown(one, grown, "user")[-1]


@every
def test_calls_may_stay_without_outputs(name: str) -> None:
    text = family(name).tokenizer.decode(family(name).render(with_turns(TURN, user("Stop that."))).ids)
    assert text.index("the sky") < text.index("Stop that.")


@every
def test_system_text_may_come_last(name: str) -> None:
    one = family(name)
    for turns in ((), (TURN, output("call_1", "Blue."))):
        prompt = one.render(with_turns(*turns, Turn("system", (Text("Be quick."),))))
        assert "Be quick." in shown(one, prompt, "system")[-1]


ANSWERS = tuple(Turn("assistant", (Text(text),)) for text in ("One.", "Two."))


@every
@pytest.mark.parametrize("place", ["behind a query", "behind an answer to outputs", "first", "with calls", "apart"])
def test_answers_may_come_first_and_follow_each_other(name: str, place: str) -> None:
    """As after an interruption, or where a client says hello in the model's name."""
    one = family(name)
    told = output("call_1", "Blue.")
    system, query = FIRST.turns
    turns, texts = {
        "behind a query": ((system, query, *ANSWERS, user("More.")), ("Question one.", "One.", "Two.", "More.")),
        "behind an answer to outputs": ((*FIRST.turns, TURN, told, *ANSWERS, user("More.")), ("Blue.", "One.", "Two.")),
        "first": ((system, ANSWERS[0], query), ("One.", "Question one.")),
        "with calls": ((system, query, ANSWERS[0], TURN, told), ("One.", "I look.", "Blue.")),
        "apart": (
            (system, query, ANSWERS[0], system, ANSWERS[1], user("More.")),
            ("One.", "Be good.", "Two.", "More."),
        ),
    }[place]
    prompt = one.render(replace(FIRST, turns=turns))
    text = one.tokenizer.decode(prompt.ids)
    at = 0
    for wanted in texts:
        at = text.find(wanted, at) if one._renderer.traits.system != "in_user" or wanted != "Be good." else at
        assert at >= 0, (wanted, text)
    assert prompt.spans[-1].kind == "generation_prompt" and not prompt.continues
    assert [s.turn for s in prompt.spans if s.kind == "user" and s.turn >= 0] == [
        number for number, turn in enumerate(turns) if turn.role == "user"
    ]


@every
def test_a_begun_answer_goes_on(name: str) -> None:
    """The last turn is the model's own, and has no end: what it says next are the words behind it."""
    one = family(name)
    for turns in ((), (TURN, output("call_1", "Blue."))):
        for begun in ((Text("The sky is "),), (Thinking("Hm hm."), Text("The sky is"))):
            prompt = one.render(with_turns(*turns, Turn("assistant", begun)))
            text = one.tokenizer.decode(prompt.ids)
            if one.format.frames:  # a message begins with its header
                assert not prompt.continues and "The sky is" in text
                continue
            assert prompt.continues and text.endswith("The sky is") and not prompt.thinking_open
            rest = one.encode_output(prompt, (Text(" blue."),))
            parsed = parse(one, rest, (TOOL, OTHER))
            assert (parsed.text, parsed.thinking, parsed.calls) == (" blue.", "", [])
            assert one.tokenizer.decode(rest).startswith(" blue.")
            before = one.render(with_turns(*turns))
            start = next(s.start for s in before.spans if s.kind == "generation_prompt")
            assert turns or prompt.ids[:start] == before.ids[:start] == prompt.ids[: prompt.spans[-1].start]


@every
def test_calls_that_wait_for_their_outputs_are_no_begun_answer(name: str) -> None:
    """Most templates write the calls last, whatever stands behind them."""
    prompt = family(name).render(with_turns(Turn("assistant", (*TURN.blocks, Text("So.")))))
    text = family(name).tokenizer.decode(prompt.ids)
    assert not prompt.continues and "So." in text and text.count("look") > 1


@every
def test_an_answer_that_says_nothing_is_none(name: str) -> None:
    begun, nothing = Turn("assistant", (Text("The sky is"),)), Turn("assistant", (Text(" \n"),))
    for turns in ((begun,), (begun, user("More.")), (TURN, output("call_1", "Blue."))):
        silent = [turn for one in turns for turn in (one, nothing)]
        one, other = family(name).render(with_turns(*turns)), family(name).render(with_turns(*silent))
        assert (one.ids, one.continues) == (other.ids, other.continues)


@every
def test_an_answer_may_be_thinking_alone(name: str) -> None:
    """As an agent sends it after it was interrupted: alone, in a row, beside empty text, and in a loop of tools."""
    one = family(name)
    for blocks in ((Thinking("Hm hm."),), (Thinking("Hm hm."), Text(""))):
        thought = Turn("assistant", blocks)
        for before in ((), (TURN, output("call_1", "Blue."))):
            for turns in ((thought, user("More.")), (thought, thought, user("More.")), (thought, *ANSWERS)):
                prompt = one.render(with_turns(*before, *turns))
                assert ("More." if turns[-1].role == "user" else "Two.") in one.tokenizer.decode(prompt.ids)


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("kimi_k2", (TURN, output("call_1", "Blue."), output("call_1", "Red."), *ANSWERS)),
        ("kimi_k3", (TURN, user("Go on."), output("call_1", "Blue."), *ANSWERS)),
    ],
)
def test_what_a_template_refuses_is_named(name: str, turns: tuple[Turn, ...]) -> None:
    with pytest.raises(RenderError, match="refuses this conversation at turn 4: "):
        family(name).render(with_turns(*turns))


def test_what_no_turn_is_to_blame_for_names_none() -> None:
    with pytest.raises(RenderError, match="refuses this conversation: there is no user message"):
        family("qwen3_xml").render(replace(FIRST, turns=FIRST.turns[:1]))


@every
def test_every_conversation_has_a_prompt_or_a_reason(name: str) -> None:
    for turns in ((), (Turn("assistant", (Thinking("Hm."),)),), (user("Q"), Turn("assistant", (Thinking("Hm."),)))):
        try:
            assert family(name).render(Conversation(turns)).spans[-1].kind == "generation_prompt"
        except RenderError as error:
            assert "refuses this conversation" in str(error) or "cannot go on with the last turn" in str(error)
