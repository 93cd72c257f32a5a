"""Branches that leave a history within a page: what lies before the fork serves them all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_support import ARCHITECTURES, GREEDY, Bench, audit, prompt, replace, same_bits

from engine.memory.keys import encode
from engine.memory.memory import Memory
from engine.memory.mover import ALL
from engine.memory.states import Want
from engine.sequence import TIP

NONE = replace(GREEDY, max_tokens=0)


class Still:
    def copy_page(self, source: int, target: int) -> None: ...
    def copy_state(self, source: int, target: int, parts: slice = ALL) -> None: ...

    def page_finite(self, page: int, tokens: int) -> bool:
        return True

    def state_finite(self, slot: int, parts: slice = ALL) -> bool:
        return True


def turn(memory: Memory, tokens: list[int], session: str = "s") -> int:
    """A whole turn over these tokens; where it went on."""
    plan = memory.plan(encode(tokens), "")
    lease = memory.open(plan, session, side=False)
    memory.unpin(lease, tokens)
    assert memory.grow(lease, len(tokens))
    memory.advance(lease, tokens, len(tokens))
    memory.close(lease, tokens, len(tokens), TIP)
    audit(memory)
    return plan.position


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_second_of_two_branches_can_still_be_edited(tiny: Callable[..., Path], arch: str) -> None:
    bench = Bench(tiny(arch))
    stem, first, second = prompt(1, 1000), prompt(2, 60), prompt(3, 200)
    bench.ask(stem, NONE)
    for branch in (first, second):
        assert bench.ask(stem + branch, NONE).reuse.resumed == 1000
    edited = stem + second[:40] + prompt(4, 20)
    outcome = bench.ask(edited, NONE)
    assert (outcome.reuse.resumed, outcome.reuse.cause) == (
        (1000, "no_anchor") if bench.memory.recurrent else (1040, "none")
    )
    assert same_bits(outcome.logits, Bench(tiny(arch)).ask(edited, NONE).logits)
    bench.check()


def test_a_checkpoint_outlives_the_branch_that_left_it() -> None:
    memory = Memory(Still(), "f", pages=40, live=2, checkpoints=8, recurrent=True)
    stem = prompt(1, 100)
    turn(memory, stem)
    for seed in (2, 3):
        assert turn(memory, stem + prompt(seed, 80)) == 100
    tip = next(one for one in memory.checkpoints.all if one.position == 100)
    home = tip.node
    for child in list(home.children):
        memory.index.remove(child)
    memory.index.remove(home)
    audit(memory)
    assert tip in memory.checkpoints.all and tip.node is not home
    assert memory.plan(encode(stem + prompt(4, 9)), "").position == 100
    while memory.index.evict(side=False):
        audit(memory)
    assert not memory.checkpoints.all and memory.checkpoints.free == 8


def test_a_pin_within_a_page_is_renewed_and_released_from_any_branch() -> None:
    memory = Memory(Still(), "f", pages=40, live=2, checkpoints=8, recurrent=True)
    stem = prompt(1, 100)
    turn(memory, stem, "other")
    for seed in (2, 3):
        tokens = stem + prompt(seed, 80)
        lease = memory.open(memory.plan(encode(tokens), ""), "s", side=False)
        memory.renew(lease, tokens, 100, Want("here", 90.0, pinned=True))
        assert memory.grow(lease, 180)
        memory.advance(lease, tokens, 180)
        slot = memory.reserve_slot(lease, TIP)
        assert slot is not None and memory.capture(lease, tokens, 100, slot, Want("again", 1.0))
        memory.close(lease, tokens, 180, TIP)
        audit(memory)
        (pinned,) = (one for one in memory.checkpoints.all if one.position == 100)
        assert pinned.want.pinned and pinned.want.kind == "here"
    turn(memory, stem + prompt(3, 80) + [5])
    assert not pinned.want.pinned


def test_many_siblings_are_kept_in_order() -> None:
    memory = Memory(Still(), "f", pages=400, live=1, checkpoints=0, recurrent=False)
    for seed in range(300):
        turn(memory, prompt(7, 20) + prompt(seed, 1 + seed % 7, 3))
    root = memory.index.root(memory.plan(encode([1]), "").root)
    assert len(root.children) > 100
    for child in root.children:
        assert memory.index.closest(root, child.tokens + encode([9])) == (child, len(child.tokens) // 4)
