"""The hardest case first: a checkpoint taken while decoding, used after the history behind it was edited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_support import GREEDY, Anchor, Bench, Sampling, Watch, pending_slots, prompt, replace, same_bits

SESSION = {"session": "s"}


@pytest.fixture
def hybrid(tiny: Callable[..., Path]) -> Bench:
    return Bench(tiny("qwen3_5_moe"))


def cold(bench: Bench, tokens: list[int], sampling: Sampling = GREEDY) -> dict[int, object]:
    """Logits of a run that finds nothing cached."""
    return bench.ask(tokens, sampling, namespace="cold").logits  # type: ignore[return-value]


def test_resumes_at_a_sampled_tool_call_opener_after_the_history_behind_it_was_edited(
    hybrid: Bench, tiny: Callable[..., Path]
) -> None:
    opener = 259  # any control token
    start = prompt(1, 150)
    said = [*prompt(2, 37), opener, *prompt(3, 20)]
    first = hybrid.ask(
        start,
        Sampling(max_tokens=100, forced=tuple(said)),
        watches=(Watch((opener,), "tool_call_start", 2.0),),
        **SESSION,
    )
    at_opener = len(start) + 37
    assert at_opener % 64 != 0  # off the grid: exactly where the opener was sampled
    assert first.done is not None and at_opener in first.done.checkpoints

    # The client keeps what was said before the call, and replaces the call and everything after it.
    edited = start + said[:37] + prompt(4, 90)
    again = hybrid.ask(edited, replace(GREEDY, max_tokens=16), **SESSION)
    assert again.reuse.resumed == at_opener
    assert again.reuse.replayed == 0 and again.reuse.new == 90

    fresh = Bench(tiny("qwen3_5_moe")).ask(edited, replace(GREEDY, max_tokens=16))
    assert fresh.reuse.resumed == 0
    assert again.tokens == fresh.tokens
    assert len(again.logits) == 16 and same_bits(again.logits, fresh.logits)
    hybrid.check()
    assert pending_slots(hybrid.memory) == 0


def test_a_delimiter_of_several_tokens_is_checkpointed_before_its_first(
    hybrid: Bench, tiny: Callable[..., Path]
) -> None:
    start, opener = prompt(1, 70), (7, 7, 8, 9)
    said = [*prompt(2, 11, 6), 7, 7, *opener, 5, 5]  # a false start, then "7 7 7 7 8 9"
    first = hybrid.ask(
        start, Sampling(max_tokens=100, forced=tuple(said)), watches=(Watch(opener, "call", 2.0),), **SESSION
    )
    position = 70 + 13
    assert first.done is not None and set(first.done.checkpoints) >= {position}
    edited = start + said[:13] + prompt(5, 70, 6)
    again = hybrid.ask(edited, **SESSION)
    assert again.reuse.resumed == position
    assert same_bits(again.logits, Bench(tiny("qwen3_5_moe")).ask(edited).logits)
    hybrid.check()
    assert pending_slots(hybrid.memory) == 0


def test_the_next_turn_replays_nothing(hybrid: Bench, tiny: Callable[..., Path]) -> None:
    history = prompt(1, 100)
    for turn in range(4):
        outcome = hybrid.ask(history, replace(GREEDY, max_tokens=23), **SESSION)
        if turn:
            # Everything but the last sampled token, which was never fed.
            assert outcome.reuse.resumed == len(history) - 41
            assert outcome.reuse.replayed == 0 and outcome.reuse.cause == "none"
        if turn == 3:
            assert same_bits(outcome.logits, Bench(tiny("qwen3_5_moe")).ask(history).logits)
        history = history + outcome.tokens + prompt(turn, 40)
    hybrid.check()


def test_prefill_checkpoints_lie_on_the_grid_at_or_before_their_anchor(hybrid: Bench) -> None:
    tokens = prompt(1, 600)
    first = hybrid.ask(tokens, anchors=(Anchor(300, "user", 1.0), Anchor(448, "header", 1.0)), **SESSION)
    assert first.done is not None and {256, 448} <= set(first.done.checkpoints)
    edited = tokens[:310] + prompt(2, 100)
    assert hybrid.ask(edited, **SESSION).reuse.resumed == 256
    # The anchor at 300 was moved down by 44 tokens; with the 10 after it they are replayed, and counted so.
    edited = tokens[:440] + prompt(3, 100)
    again = hybrid.ask(edited, **SESSION)
    assert (again.reuse.resumed, again.reuse.replayed, again.reuse.new) == (256, 184, 100)
    assert again.reuse.cause == "no_anchor"
    hybrid.check()
