"""Admission, queues, limits, single flight, retention: what the scheduler promises beside bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_support import ARCHITECTURES, GREEDY, Anchor, Bench, Sampling, pending_slots, prompt, replace

from engine.api import Admitted, Done, Tokens
from engine.sampling import Logits, Sampler

LONG = replace(GREEDY, max_tokens=60)


def page_bytes(directory: Path) -> int:
    return int(Bench(directory).stats()["page_bytes"])


def test_replies_come_in_order_and_admission_before_any_work(tiny: Callable[..., Path]) -> None:
    bench = Bench(tiny("qwen3_5_moe"), chunk_tokens=64)
    bench.submit(prompt(1, 200), replace(GREEDY, max_tokens=2))
    assert [type(reply) for reply in bench.step()] == [Admitted]
    assert bench.stats().get("prefilled_tokens", 0) == 0
    kinds = []
    while not bench.scheduler.idle:
        kinds += [type(reply) for reply in bench.step()]
    assert kinds == [Tokens, Tokens, Done]
    assert bench.step() == []


def test_what_can_wait_is_done_once_in_a_step(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the step does, and if it fails; when it computes, before that has ended."""
    bench, done = Bench(tiny("qwen3_5_moe"), chunk_tokens=64), list[str]()

    def step() -> None:
        bench.scheduler.step(lambda: done.append("meanwhile"))

    step()  # idle
    bench.submit(prompt(1, 100), replace(GREEDY, max_tokens=2))
    forward = bench.scheduler.runner.forward

    def noted(*arguments: Any) -> Any:
        done.append("computed")
        return forward(*arguments)

    monkeypatch.setattr(bench.scheduler.runner, "forward", noted)
    for _ in range(4):  # one admits
        step()
    assert done == ["meanwhile"] * 2 + ["meanwhile", "computed"] * 3
    bench.submit(prompt(1, 100), GREEDY)
    step()
    monkeypatch.setattr(bench.scheduler, "_forward", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step()
    assert done[8:] == ["meanwhile"] * 2


def test_decoding_goes_on_while_others_prefill(tiny: Callable[..., Path]) -> None:
    bench = Bench(tiny("qwen3_5_moe"), chunk_tokens=32)
    first = bench.submit(prompt(1, 20), replace(GREEDY, max_tokens=40))
    bench.run(lambda: len(bench.outcomes[first].tokens) >= 1)
    second = bench.submit(prompt(2, 640))
    bench.step()
    before = len(bench.outcomes[first].tokens)
    for step in range(1, 11):
        bench.step()
        assert len(bench.outcomes[first].tokens) == before + step
    assert bench.stats()["prefilled_tokens"] >= 20 + 10 * 31
    bench.run()
    assert bench.outcomes[second].done is not None


def test_a_short_prompt_is_not_stuck_behind_a_long_one(tiny: Callable[..., Path]) -> None:
    bench = Bench(tiny("qwen3_5_moe"), chunk_tokens=64)
    slow, fast = bench.submit(prompt(1, 2000)), bench.submit(prompt(2, 30), replace(GREEDY, max_tokens=1))
    bench.run(lambda: bench.outcomes[fast].done is not None)
    assert not bench.outcomes[slow].tokens


def test_impossible_requests_fail_with_the_limit(tiny: Callable[..., Path]) -> None:
    bench = Bench(tiny("qwen3_moe"), context_length=300)
    failed = bench.ask(prompt(1, 300)).failed
    assert failed is not None and (failed.kind, failed.limit) == ("context_length", 300)
    for tokens, sampling in (([], GREEDY), ([999], GREEDY), ([1], Sampling(max_tokens=-1))):
        failed = bench.ask(tokens, sampling).failed
        assert failed is not None and failed.kind == "invalid"
    small = Bench(tiny("qwen3_moe"), kv_bytes=4 * page_bytes(tiny("qwen3_moe")))
    failed = small.ask(prompt(1, 250)).failed
    assert failed is not None and (failed.kind, failed.limit) == ("context_length", 3 * 64)


def test_output_ends_at_the_context(tiny: Callable[..., Path]) -> None:
    outcome = Bench(tiny("qwen3_moe"), context_length=100).ask(prompt(1, 95), replace(GREEDY, max_tokens=50))
    assert len(outcome.tokens) == 5 and outcome.done is not None and outcome.done.reason == "length"


def test_a_full_queue_is_overload(tiny: Callable[..., Path]) -> None:
    bench = Bench(tiny("qwen3_moe"), max_sequences=1, queue=2)
    names = [bench.submit(prompt(1, 20))]
    bench.step()
    names += [bench.submit(prompt(seed, 20)) for seed in range(2, 5)]
    bench.run()
    outcomes = [bench.outcomes[name] for name in names]
    assert [outcome.done is not None for outcome in outcomes] == [True, True, True, False]
    failed = outcomes[3].failed
    assert failed is not None and (failed.kind, failed.limit) == ("overloaded", 2)


def test_stop_and_forced_tokens(tiny: Callable[..., Path]) -> None:
    bench = Bench(tiny("qwen3_5_moe"))
    free = bench.ask(prompt(1, 30), replace(GREEDY, max_tokens=20)).tokens
    stop = free[7]
    stopped = bench.ask(prompt(1, 30), replace(GREEDY, max_tokens=20, stop_tokens=(stop,)))
    assert stopped.tokens == free[: free.index(stop) + 1]
    assert stopped.done is not None and stopped.done.reason == "stop"
    forced = bench.ask(prompt(1, 30), Sampling(max_tokens=20, forced=(9, 8, 7)))
    assert forced.tokens == [9, 8, 7] and forced.done is not None and forced.done.reason == "stop"
    cut = bench.ask(prompt(1, 30), Sampling(max_tokens=2, forced=(9, 8, 7)))
    assert cut.tokens == [9, 8] and cut.done is not None and cut.done.reason == "length"
    assert bench.ask(prompt(1, 30), Sampling(max_tokens=2, forced=())).tokens == []
    bench.check()


def test_abort_frees_within_the_step_wherever_it_comes(tiny: Callable[..., Path]) -> None:
    for steps in range(12):
        bench = Bench(tiny("qwen3_5_moe"), chunk_tokens=48)
        name = bench.submit(prompt(1, 200), LONG, session="s")
        for _ in range(steps):
            bench.step()
        bench.scheduler.abort(name)
        assert bench.memory.pool.held_pages == 0
        bench.scheduler.abort("unknown")
        bench.run()
        done = bench.outcomes[name].done
        assert done is not None and done.reason == "abort"
        bench.check()
        assert pending_slots(bench.memory) == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_identical_prefix_asked_for_at_once_is_computed_once(tiny: Callable[..., Path], arch: str) -> None:
    bench = Bench(tiny(arch), chunk_tokens=64)
    shared = prompt(1, 500)
    names = [bench.submit(shared + prompt(seed, 30), GREEDY) for seed in (2, 3, 4)]
    bench.run()
    prefilled = bench.stats()["prefilled_tokens"]
    # One computes all 530, the two others their own 30 and what lies between the last whole page and them.
    assert prefilled == 530 + 2 * (530 - 448) if bench.memory.recurrent else prefilled <= 530 + 2 * (530 - 448)
    assert [bench.outcomes[name].reuse.resumed for name in names] == [0, 448, 448]
    bench.check()


def test_nobody_waits_for_a_prefix_of_another_namespace(tiny: Callable[..., Path]) -> None:
    bench = Bench(tiny("qwen3_5_moe"), chunk_tokens=64)
    bench.submit(prompt(1, 500), namespace="a")
    other = bench.submit(prompt(1, 500), namespace="b")
    bench.step()
    assert bench.outcomes[other].admitted is not None
    bench.run()
    assert bench.outcomes[other].reuse.resumed == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_side_requests_read_the_cache_and_never_evict(tiny: Callable[..., Path], arch: str) -> None:
    directory = tiny(arch)
    bench = Bench(directory, kv_bytes=40 * page_bytes(directory), checkpoint_bytes=300_000)
    history = prompt(1, 1500)
    main = bench.ask(history, anchors=tuple(Anchor(at, "user", 1.0) for at in range(64, 1500, 64)), session="main")
    bench.ask(prompt(2, 560), session="other")  # now all pages are used but those reserved for side requests

    def kept() -> set[int]:
        return {id(node) for node in bench.memory.index.nodes() if not node.side}

    def checkpoints() -> set[int]:
        return {id(one) for one in bench.memory.checkpoints.all if not one.side}

    before = kept(), checkpoints()
    served = 0
    for seed in range(30):
        outcome = bench.ask(prompt(100 + seed, 150), replace(GREEDY, max_tokens=10), side=True, session=f"side{seed}")
        served += outcome.done is not None
        bench.check()
    assert served == 30
    assert (kept(), checkpoints()) == before
    title = bench.ask(history[:600] + prompt(3, 20), side=True)
    assert title.reuse.resumed >= (448 if bench.memory.recurrent else 600)  # the slots are fewer than the anchors
    again = bench.ask(history + main.tokens + prompt(4, 20), session="main")
    assert again.reuse.replayed == 0 and again.reuse.resumed == 1507


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_side_request_larger_than_its_reserve_runs_at_the_oldest_sessions_cost(
    tiny: Callable[..., Path], arch: str
) -> None:
    directory = tiny(arch)
    bench = Bench(directory, kv_bytes=40 * page_bytes(directory))
    old = prompt(1, 900)
    bench.ask(old, session="old")
    recent = prompt(2, 1100)
    recent += bench.ask(recent, session="recent").tokens
    outcome = bench.ask(prompt(3, 700), replace(GREEDY, max_tokens=40), side=True)
    assert outcome.done is not None and len(outcome.tokens) == 40
    assert bench.stats()["pages_evicted_for_side"] > 0
    bench.check()
    assert bench.ask(recent + prompt(4, 5), session="recent").reuse.replayed == 0


def test_a_side_request_waits_rather_than_evict_and_is_cut_only_by_its_own_limit(tiny: Callable[..., Path]) -> None:
    directory = tiny("qwen3_moe")
    bench = Bench(directory, kv_bytes=24 * page_bytes(directory))
    bench.ask(prompt(1, 22 * 64 - 10))
    main = bench.submit(prompt(1, 22 * 64 - 10), replace(GREEDY, max_tokens=20))
    bench.run(lambda: bool(bench.outcomes[main].tokens))
    side = bench.submit(prompt(2, 1000), LONG, side=True)
    bench.step()
    assert bench.outcomes[side].admitted is None
    bench.run()
    assert len(bench.outcomes[main].tokens) == 20 and len(bench.outcomes[side].tokens) == 60
    small = bench.ask(prompt(3, 150), replace(GREEDY, max_tokens=300), side=True)  # its prompt fits the reserve
    assert len(small.tokens) == 300
    bench.check()


def test_a_sequence_that_cannot_be_sampled_fails_alone(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tiny("qwen3_5_moe"))
    fine, broken = bench.submit(prompt(1, 50)), bench.submit(prompt(2, 50), replace(GREEDY, seed=13))
    draw = Sampler.next

    def failing(sampler: Sampler, logits: Logits, position: int) -> Any:
        if sampler._sampling.seed == 13 and position == 53:
            raise IndexError("nothing to draw from")
        return draw(sampler, logits, position)

    monkeypatch.setattr(Sampler, "next", failing)
    bench.run()
    failed = bench.outcomes[broken].failed
    assert failed is not None and failed.kind == "internal" and len(bench.outcomes[broken].tokens) == 3
    assert bench.outcomes[fine].done is not None and len(bench.outcomes[fine].tokens) == 8
    assert bench.stats()["failed"] == 1
    bench.check()


def test_evicted_and_no_anchor_are_told_apart(tiny: Callable[..., Path]) -> None:
    directory = tiny("qwen3_5_moe")
    bench = Bench(directory, kv_bytes=16 * page_bytes(directory))
    tokens = prompt(1, 400)
    first = bench.ask(tokens, session="s")
    bench.ask(prompt(2, 800), session="t")
    evicted = bench.ask(tokens + first.tokens + prompt(3, 10), session="s").reuse
    assert (evicted.resumed, evicted.replayed, evicted.new, evicted.cause) == (0, 407, 11, "evicted")
    roomy = Bench(directory)
    roomy.ask(tokens, session="s")
    early = roomy.ask(tokens[:300] + prompt(3, 10), session="s").reuse
    assert (early.resumed, early.replayed, early.new, early.cause) == (0, 300, 10, "no_anchor")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_memory_is_bounded_after_a_hundred_sessions(tiny: Callable[..., Path], arch: str) -> None:
    directory = tiny(arch)
    bench = Bench(directory, kv_bytes=50 * page_bytes(directory), checkpoint_bytes=400_000)
    for session in range(100):
        history = prompt(session, 150)
        for turn in range(2):
            outcome = bench.ask(
                history, replace(GREEDY, max_tokens=3), session=str(session), anchors=(Anchor(100, "user", 1.0),)
            )
            assert outcome.reuse.replayed == 0 if turn else outcome.reuse.resumed < 8
            history = history + outcome.tokens + prompt(1000 + session, 20)
    stats = bench.stats()
    assert stats["pages_cached"] <= stats["pages_total"] == 50
    assert stats["checkpoints_kept"] <= stats["checkpoints_total"]
    assert stats["pages_evicted"] > 0
    bench.check()


def test_the_newest_turn_survives_many_checkpoints(tiny: Callable[..., Path]) -> None:
    """Slots for four checkpoints, and every turn wants more and pins its own end: the tip, the system prompt and the
    last end must not give way."""
    directory = tiny("qwen3_5_moe")
    slot = int(Bench(directory).stats()["checkpoint_slot_bytes"])
    bench = Bench(directory, checkpoint_bytes=4 * slot)
    history = prompt(1, 100)
    for turn in range(8):
        anchors = (
            Anchor(64, "system", 5.0, pinned=True),
            *(Anchor(at, "x", 80.0) for at in range(128, len(history) - 128, 64)),
            Anchor(len(history), "header", 5.0, pinned=True),
        )
        outcome = bench.ask(history, replace(GREEDY, max_tokens=70), session="s", anchors=anchors)
        assert outcome.reuse.replayed == 0 and (outcome.reuse.resumed > 0) == (turn > 0)
        last = len(history) // 64 * 64
        history = history + outcome.tokens + prompt(turn, 100)
    assert bench.ask([*history[:64], *prompt(9, 40)], session="s").reuse.resumed == 64
    assert bench.ask([*history[: last + 10], *prompt(9, 40)], session="s").reuse.resumed == last
    bench.check()


def test_a_prompt_is_fed_beside_answers_as_the_pace_says(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tiny("qwen3_moe"))
    answers = bench.submit(prompt(1, 5), replace(GREEDY, max_tokens=50))
    bench.run(lambda: len(bench.outcomes[answers].tokens) > 1)
    counts = iter((0, 17, 0, 33))
    monkeypatch.setattr(bench.scheduler.pace, "beside", lambda most: next(counts))
    bench.submit(prompt(2, 100))
    fed = []
    while len(fed) < 4:
        before = len(bench.outcomes[answers].tokens)
        bench.step()
        if len(bench.scheduler._running) == 2 and len(bench.outcomes[answers].tokens) > before:
            fed.append(bench.scheduler._running[1].fed)
    assert fed == [0, 16, 16, 48]
