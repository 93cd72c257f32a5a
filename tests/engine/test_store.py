"""State that outlives the device and the worker: what is handed to the store, and what is made of what it has."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_support import GREEDY, Anchor, Bench, Sampling, prompt, replace, same_bits
from store_fake import FakeStore
from store_support import BOTH, SHORT, check, page_bytes, resumable

from engine.api import Admin, StoreSettings


def test_a_store_that_cannot_be_had_is_told(tiny: Callable[..., Path], tmp_path: Path) -> None:
    for settings, told in ((None, 0.0), (StoreSettings(str(tmp_path)), 1.0)):
        assert Bench(tiny("qwen3_moe"), None, store_settings=settings).stats()["store_unavailable"] == told
    with_one = Bench(tiny("qwen3_moe"), FakeStore(), store_settings=StoreSettings(str(tmp_path)))
    assert with_one.stats()["store_unavailable"] == 0.0


def computed(bench: Bench, tokens: list[int], cut: int, decoded: int, **where: str) -> None:
    """Leave a tip at ``cut``, the last ``decoded`` tokens of it by decoding."""
    start = cut - decoded
    forced = Sampling(max_tokens=99, forced=tuple(tokens[start : cut + 1]))
    first = bench.ask(tokens[:start], forced if decoded else replace(GREEDY, max_tokens=0), **where)
    assert first.done is not None and cut in first.done.checkpoints


@pytest.mark.parametrize("arch", BOTH)
def test_random_cut_points_across_a_restart(tiny: Callable[..., Path], arch: str) -> None:
    """Several prompts resumed at once, others running, reads of any speed: the bits of a cold run."""
    rng = random.Random(arch)
    store, whole, before = FakeStore(), Bench(tiny(arch)), Bench(tiny(arch), chunk_tokens=37)
    before = Bench(tiny(arch), store, chunk_tokens=37)
    cases = []
    for seed in range(12):
        length = rng.randint(3, 330)
        tokens, cut = prompt(seed, length), rng.randint(1, length - 1)
        computed(before, tokens, cut, min(cut - 1, rng.randint(0, 20)), session=str(seed), namespace=str(seed))
        cases.append((tokens, cut, {"session": str(seed), "namespace": str(seed)}))
    before.scheduler.close(1.0)
    assert store.closed
    store = store.restarted()
    after = Bench(tiny(arch), store, chunk_tokens=50)
    names = []
    for seed, (tokens, _, where) in enumerate(cases):
        store.delay = rng.choice((0, 1, 5))
        names.append(after.submit(tokens, SHORT, **where))
        after.submit(prompt(100 + seed, 70), replace(GREEDY, max_tokens=5))
        for _ in range(rng.randint(0, 3)):
            after.step()
    after.run()
    for name, (tokens, cut, where) in zip(names, cases, strict=True):
        outcome, cold = after.outcomes[name], whole.ask(tokens, SHORT, **where)
        assert (outcome.reuse.disk, outcome.reuse.replayed, outcome.reuse.new) == (cut, 0, len(tokens) - cut)
        assert len(outcome.logits) == 3 and same_bits(outcome.logits, cold.logits) and outcome.tokens == cold.tokens
    check(after, store)


@pytest.mark.parametrize("arch", BOTH)
def test_what_the_device_had_to_give_up_comes_from_the_host(tiny: Callable[..., Path], arch: str) -> None:
    directory = tiny(arch)
    store = FakeStore()
    bench = Bench(directory, store, kv_bytes=24 * page_bytes(directory), checkpoint_bytes=200_000)
    histories = {str(seed): prompt(seed, 500) for seed in range(4)}
    for turn in range(3):
        for session, history in histories.items():
            outcome = bench.ask(history, SHORT, session=session, anchors=(Anchor(128, "system", 9.0, pinned=True),))
            assert outcome.reuse.replayed == 0 and outcome.reuse.cause == "none"
            assert outcome.reuse.resumed == (len(history) - 41 if turn else 0)
            if turn:
                assert outcome.reuse.host > 0 and outcome.reuse.disk == 0
            cold = Bench(directory).ask(history, SHORT)
            assert same_bits(outcome.logits, cold.logits)
            histories[session] = [*history, *outcome.tokens, *prompt(50 + turn, 40)]
    check(bench, store)
    assert bench.stats()["pages_evicted"] > 0 and bench.stats()["store_extents"] > 0


@pytest.mark.parametrize("arch", BOTH)
def test_what_is_read_and_no_number_is_computed_again(tiny: Callable[..., Path], arch: str) -> None:
    store, tokens, cold = resumable(tiny(arch))
    for one in store.states_kept:
        if one.position == 300:
            one.data = [b"\xff" * len(part) for part in one.data]
    bench = Bench(tiny(arch), store)
    outcome = bench.ask(tokens, SHORT, session="s")
    assert same_bits(outcome.logits, cold.logits) and outcome.tokens == cold.tokens
    recurrent = arch == "qwen3_5_moe"
    assert outcome.reuse.resumed == (128 if recurrent else 300)
    assert bench.stats()["states_not_finite"] == recurrent
    check(bench, store)


@pytest.mark.parametrize(
    ("arch", "damaged"),
    [("qwen3_5_moe", what) for what in ("tip", "anchor", "both")]
    + [(arch, what) for arch in BOTH for what in ("first", "second", "fourth", "partial", "all")],
)
def test_what_is_corrupt_is_computed_again(tiny: Callable[..., Path], arch: str, damaged: str) -> None:
    store, tokens, cold = resumable(tiny(arch))
    recurrent = arch == "qwen3_5_moe"
    pages = sorted((one for one in store.extents if not one.state), key=lambda one: one.position)
    states = sorted(store.states_kept, key=lambda one: one.position)
    assert [one.position for one in pages] == [64, 128, 192, 256, 300]
    assert [one.position for one in states] == ([128, 300] if recurrent else [])
    bad = {
        "tip": states[1:], "anchor": states[:1], "both": states, "first": pages[:1], "second": pages[1:2],
        "fourth": pages[3:4], "partial": pages[4:], "all": store.extents,
    }[damaged]  # fmt: skip
    for one in bad:
        one.lost = True
    store.delay = 2
    bench = Bench(tiny(arch), store)
    outcome = bench.ask(tokens, SHORT, session="s")
    reached = {"tip": 128, "anchor": 300, "both": 0, "first": 0, "second": 64, "fourth": 192, "partial": 256, "all": 0}
    at = reached[damaged]
    if recurrent and damaged in ("second", "fourth", "partial"):
        at = 128 if at >= 128 else 0
    assert outcome.reuse.resumed == at
    assert outcome.reuse.cause == ("none" if damaged == "anchor" else "corrupt")
    assert outcome.reuse.replayed == 300 - at and outcome.reuse.new == len(tokens) - 300
    assert outcome.admitted == outcome.reuse
    assert same_bits(outcome.logits, cold.logits) and outcome.tokens == cold.tokens
    assert bench.stats().get("failed_restores", 0) <= len(bad)
    check(bench, store)
    # What was computed again is in the store again.
    again = Bench(tiny(arch), store.restarted()).ask([*tokens, *outcome.tokens, *prompt(3, 5)], SHORT)
    assert again.reuse.resumed >= len(tokens)


@pytest.mark.parametrize("arch", BOTH)
def test_a_store_that_offers_rubbish_again_and_again(tiny: Callable[..., Path], arch: str) -> None:
    store, tokens, cold = resumable(tiny(arch))
    store.stubborn = True
    for one in store.extents:
        one.lost = True
    bench = Bench(tiny(arch), store)
    outcome = bench.ask(tokens, SHORT)
    assert outcome.reuse.resumed == 0 and outcome.reuse.cause == "corrupt"
    assert same_bits(outcome.logits, cold.logits)
    assert bench.stats()["failed_restores"] <= 2
    check(bench, store)


@pytest.mark.parametrize("arch", BOTH)
def test_the_last_token_is_always_fed(tiny: Callable[..., Path], arch: str) -> None:
    store, tokens, _ = resumable(tiny(arch))
    for length in (*range(1, 301, 23), 64, 128, 192, 256, 257, 300):
        outcome = Bench(tiny(arch), store.restarted()).ask(tokens[:length], SHORT)
        assert len(outcome.tokens) == 3 and outcome.reuse.new >= 1
        if arch == "qwen3_moe":
            assert outcome.reuse.disk == length - 1


def test_others_go_on_while_one_is_restored(tiny: Callable[..., Path]) -> None:
    store, tokens, cold = resumable(tiny("qwen3_5_moe"))
    bench = Bench(tiny("qwen3_5_moe"), store)
    other = bench.submit(prompt(7, 20), replace(GREEDY, max_tokens=60))
    bench.run(lambda: len(bench.outcomes[other].tokens) == 1)
    store.delay = 30
    slow = bench.submit(tokens, SHORT, session="s")
    for step in range(2, 25):
        bench.step()
        assert len(bench.outcomes[other].tokens) == step
        assert bench.outcomes[slow].admitted is None and bench.stats()["restoring"] == 1
    bench.run()
    assert same_bits(bench.outcomes[slow].logits, cold.logits) and bench.outcomes[slow].reuse.disk == 300
    check(bench, store)


def test_abort_while_something_is_read(tiny: Callable[..., Path]) -> None:
    """The pages stay held until nothing is written into them any more."""
    store, tokens, _ = resumable(tiny("qwen3_5_moe"))
    store.delay = 50
    bench = Bench(tiny("qwen3_5_moe"), store)
    name = bench.submit(tokens, session="s")
    bench.submit(prompt(8, 10))
    for _ in range(3):
        bench.step()
    bench.scheduler.abort(name)
    bench.step()
    done = bench.outcomes[name].done
    assert done is not None and done.reason == "abort"
    assert store.reading > 0 and bench.memory.pool.held_pages >= 5
    bench.run()
    check(bench, store)
    store.delay = 0
    assert bench.ask(tokens, session="s").reuse.resumed == 300


def test_identical_prefixes_are_read_once(tiny: Callable[..., Path]) -> None:
    store, tokens, _ = resumable(tiny("qwen3_5_moe"))
    store.delay = 3
    bench = Bench(tiny("qwen3_5_moe"), store)
    names = [bench.submit([*tokens[:300], *prompt(20 + one, 30)], SHORT, session=f"sub{one}") for one in range(4)]
    bench.run()
    assert store.counts["reads_disk"] == 6
    assert [bench.outcomes[name].reuse.resumed for name in names] == [300] * 4
    assert [bench.outcomes[name].reuse.device for name in names] == [0, 300, 300, 300]
    check(bench, store)


def test_too_few_pages_for_all_that_is_restored(tiny: Callable[..., Path]) -> None:
    directory = tiny("qwen3_5_moe")
    store, tokens, cold = resumable(directory)
    store.delay = 10
    bench = Bench(directory, store, kv_bytes=10 * page_bytes(directory))
    first = bench.submit(prompt(5, 120), replace(GREEDY, max_tokens=300))
    for _ in range(3):
        bench.step()
    second = bench.submit(tokens, SHORT, session="s")
    bench.run()
    done = bench.outcomes[first].done
    assert done is not None and len(bench.outcomes[first].tokens) == 300
    assert same_bits(bench.outcomes[second].logits, cold.logits)
    check(bench, store)


@pytest.mark.parametrize("arch", BOTH)
def test_side_requests_never_reach_the_store(tiny: Callable[..., Path], arch: str) -> None:
    store = FakeStore()
    bench = Bench(tiny(arch), store, kv_bytes=20 * page_bytes(tiny(arch)))
    bench.ask(prompt(1, 200), SHORT, session="main")
    before = set(store.extents)
    for seed in range(40):
        anchors = (Anchor(64, "user", 9.0, pinned=True),)
        bench.ask([*prompt(1, 150), *prompt(seed, 200)], SHORT, session=f"side{seed}", side=True, anchors=anchors)
    bench.now = 100.0
    bench.step()
    bench.scheduler.close(1.0)
    assert set(store.extents) == before
    # What a main request then goes on from is its own, and kept.
    store = FakeStore()
    bench = Bench(tiny(arch), store)
    title = bench.ask(prompt(3, 200), SHORT, side=True)
    assert not store.extents
    tokens = [*prompt(3, 200), *title.tokens, 5, 6]
    main = bench.ask(tokens, SHORT, session="main")
    assert main.reuse.device == 202
    after = Bench(tiny(arch), store.restarted()).ask([*tokens, *main.tokens, 7], SHORT)
    assert after.reuse.disk == 207 and after.reuse.replayed == 0


def test_what_must_be_kept_is_handed_over_at_once_and_the_rest_when_it_survives(tiny: Callable[..., Path]) -> None:
    store = FakeStore()
    bench = Bench(tiny("qwen3_5_moe"), store)
    anchors = (Anchor(64, "system", 9.0, pinned=True), Anchor(128, "lattice", 1.0), Anchor(192, "lattice", 1.0))
    bench.ask(prompt(1, 250), SHORT, session="s", anchors=anchors)
    assert sorted((one.position, one.kind, one.pinned) for one in store.states_kept) == [
        (64, "system", True), (252, "tip", True),
    ]  # fmt: skip
    bench.now = 4.0
    bench.step()
    assert len(store.states_kept) == 2
    bench.now = 6.0
    bench.step()
    assert not bench.scheduler.idle  # one at a time
    bench.run()
    assert sorted(one.position for one in store.states_kept) == [64, 128, 192, 252]
    assert {one.session for one in store.states_kept} == {"s"}


def test_tips_that_are_superseded_and_anchors_that_are_released_are_demoted(tiny: Callable[..., Path]) -> None:
    for restart in (False, True):
        store = FakeStore()
        bench = Bench(tiny("qwen3_5_moe"), store)
        history = prompt(1, 100)
        for turn in range(3):
            anchors = (Anchor(64, "system", 9.0, pinned=True), Anchor(len(history) - 30, "header", 9.0, pinned=True))
            outcome = bench.ask(history, SHORT, session="s", anchors=anchors)
            assert outcome.reuse.resumed == (102 + 72 * (turn - 1) if turn else 0)
            history = [*history, *outcome.tokens, *prompt(9 + turn, 69)]
            if restart:
                store = store.restarted()
                bench = Bench(tiny("qwen3_5_moe"), store)
        tips = {one.position: one.pinned for one in store.states_kept if one.kind == "tip"}
        assert tips == {102: False, 174: False, 246: True}
        if not restart:
            pinned = [one.position for one in store.states_kept if one.pinned and one.kind != "tip"]
            assert sorted(pinned) == [64, 192]


def test_shutdown_hands_over_all_that_lives(tiny: Callable[..., Path]) -> None:
    store = FakeStore()
    bench = Bench(tiny("qwen3_5_moe"), store, chunk_tokens=64)
    bench.ask(prompt(1, 250), SHORT, anchors=(Anchor(128, "lattice", 1.0),), session="a")
    bench.submit(prompt(2, 600), session="b")
    for _ in range(6):
        bench.step()
    bench.scheduler.close(1.0)
    assert sorted(one.position for one in store.states_kept) == [128, 252, 320]
    after = Bench(tiny("qwen3_5_moe"), store.restarted())
    assert after.ask(prompt(2, 600), session="b").reuse.disk == 320


def test_a_full_store_is_asked_again_later_and_never_waited_for(tiny: Callable[..., Path]) -> None:
    store = FakeStore(full=True)
    bench = Bench(tiny("qwen3_5_moe"), store)
    first = bench.ask(prompt(1, 250), SHORT, session="s")
    assert not store.extents
    store.full = False
    bench.now = 30.0
    bench.step()
    assert not store.extents
    bench.now = 70.0
    bench.step()
    assert [one.position for one in store.states_kept] == [252]
    bench.ask([*prompt(1, 250), *first.tokens, 1], SHORT, session="s")  # its pages go along with the next tip
    history = [*prompt(1, 250), *first.tokens, 1, *bench.outcomes["r2"].tokens, 3]
    assert Bench(tiny("qwen3_5_moe"), store.restarted()).ask(history, SHORT).reuse.disk == 256


def test_a_state_without_a_slot_goes_straight_to_the_store(tiny: Callable[..., Path]) -> None:
    store = FakeStore()
    bench = Bench(tiny("qwen3_5_moe"), store, checkpoint_bytes=0)
    first = bench.ask(prompt(1, 100), SHORT, session="s")
    assert first.done is not None and first.done.checkpoints == (102,)
    again = bench.ask([*prompt(1, 100), *first.tokens, 4, 5], SHORT, session="s")
    assert again.reuse.device == 102 and again.reuse.replayed == 0
    assert same_bits(again.logits, Bench(tiny("qwen3_5_moe")).ask([*prompt(1, 100), *first.tokens, 4, 5], SHORT).logits)


def test_other_prompts_namespaces_and_models_find_nothing(tiny: Callable[..., Path]) -> None:
    store, tokens, _ = resumable(tiny("qwen3_5_moe"))
    bench = Bench(tiny("qwen3_5_moe"), store)
    assert bench.ask(tokens, SHORT, namespace="another key").reuse.resumed == 0
    assert bench.ask([tokens[0] ^ 1, *tokens[1:]], SHORT).reuse.resumed == 0
    assert Bench(tiny("qwen3_5_moe", seed=9), store).ask(tokens, SHORT).reuse.resumed == 0
    assert bench.ask(tokens, SHORT).reuse.disk == 300


def test_divergence_inside_stored_pages(tiny: Callable[..., Path]) -> None:
    for arch, expected in (("qwen3_5_moe", 128), ("qwen3_moe", 200)):
        store, tokens, _ = resumable(tiny(arch))
        other = [*tokens[:200], *prompt(77, 60)]
        outcome = Bench(tiny(arch), store).ask(other, SHORT)
        assert outcome.reuse.disk == expected and outcome.reuse.replayed == 200 - expected
        assert same_bits(outcome.logits, Bench(tiny(arch)).ask(other, SHORT).logits)


def check_lives(directory: Path, seed: int, steps: int) -> None:
    """Sessions that go on, branch and retry, side and background requests, aborts and restarts, on a device that holds
    two sessions, over a store that is slow, loses extents and takes nothing at times: always the bits of a cold run."""
    rng = random.Random(seed)
    store, whole = FakeStore(), Bench(directory)
    size = page_bytes(directory)

    def start() -> Bench:
        room = {"kv_bytes": 20 * size, "checkpoint_bytes": rng.choice((100_000, 400_000)), "max_sequences": 3}
        return Bench(directory, store, chunk_tokens=rng.choice((30, 100)), **room)

    bench = start()
    histories = {str(one): prompt(seed * 100 + one, rng.randint(40, 400)) for one in range(4)}
    asked: dict[str, list[int]] = {}
    open_: dict[str, str] = {}
    for step in range(steps):
        store.delay, store.full = rng.choice((0, 0, 2, 9)), rng.random() < 0.1
        bench.now += rng.choice((0.0, 1.0, 7.0))
        action = rng.random()
        session = rng.choice(sorted(histories))
        if action < 0.5 and session not in open_:
            tokens = histories[session]
            if rng.random() < 0.2:
                tokens = histories[session] = [*tokens[: rng.randint(1, len(tokens))], *prompt(step, 9)]
            kind = rng.random()
            sampling = replace(GREEDY, max_tokens=rng.randint(1, 6))
            anchors = tuple(
                Anchor(rng.randint(1, len(tokens)), "user", rng.random(), pinned=rng.random() < 0.5) for _ in range(3)
            )
            options = {"side": 0.7 < kind < 0.85, "background": kind > 0.85}
            if options["background"]:
                sampling = replace(GREEDY, max_tokens=0)
            name = bench.submit(tokens, sampling, session=session, anchors=anchors, **options)
            asked[name], open_[session] = tokens, name
        elif action < 0.55 and session in open_:
            bench.scheduler.abort(open_[session])
        elif action < 0.6 and store.extents:
            rng.choice(store.extents).lost = True
        elif action < 0.63:
            for name in open_.values():
                bench.scheduler.abort(name)
            bench.run()
            bench.scheduler.close(1.0)
            check(bench, store)
            store = store.restarted()
            outcomes = bench.outcomes
            bench = start()
            bench.outcomes, bench._number = outcomes, len(outcomes)
        for _ in range(rng.randint(1, 12)):
            bench.step()
        for each, name in list(open_.items()):
            outcome = bench.outcomes[name]
            if outcome.done is None and outcome.failed is None:
                continue
            del open_[each]
            if outcome.failed is not None:
                assert outcome.failed.kind == "overloaded"
                continue
            reuse, tokens = outcome.reuse, asked[name]
            assert reuse.resumed + reuse.replayed + reuse.new == len(tokens)
            if outcome.logits:
                cold = whole.ask(tokens, replace(GREEDY, max_tokens=len(outcome.tokens)), namespace=name)
                assert same_bits(outcome.logits, cold.logits) and outcome.tokens == cold.tokens
            if len(tokens) < 500:
                histories[each] = [*tokens, *outcome.tokens, *prompt(step, rng.randint(1, 70))]
    bench.run()
    check(bench, store)


@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("seed", range(3))
def test_random_lives(tiny: Callable[..., Path], arch: str, seed: int) -> None:
    check_lives(tiny(arch), seed, 120)


@pytest.mark.deep
@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_random_lives(tiny: Callable[..., Path], arch: str, seed: int) -> None:
    check_lives(tiny(arch), seed, 200)


def test_commands(tiny: Callable[..., Path]) -> None:
    store = FakeStore()
    bench = Bench(tiny("qwen3_5_moe"), store)
    bench.ask(prompt(1, 100), SHORT, session="s", anchors=(Anchor(64, "user", 9.0),))
    bench.ask(prompt(2, 100), SHORT, session="t")

    def ask(action: object, **arguments: str) -> tuple[bool, dict[str, str | float]]:
        reply = bench.scheduler.admin(Admin("1", action, arguments))()  # type: ignore[arg-type]
        return reply.ok, reply.values

    assert ask("store_stat") == (True, {"extents": 6.0})
    assert ask("store_verify") == (True, {"damaged": 0.0})
    assert ask("store_pin", session="s") == (True, {"checkpoints": 1.0})
    assert not ask("store_pin")[0] and not ask("store_forget", everything="yes")[0]
    ok, values = ask("store_forget", session="s")
    assert ok and values == {"forgotten": 1.0}
    bench.now = 100.0
    bench.step()
    assert {one.session for one in store.states_kept} == {"t"}
    assert {one.session for one in bench.memory.checkpoints.all} == {"t"}
    assert bench.ask([*prompt(1, 100), 1], SHORT).reuse.resumed == 0
    assert bench.ask([*prompt(2, 100), 1], SHORT).reuse.resumed == 0
    assert ask("store_forget")[0]
    bench.run()
    assert not store.extents and not bench.memory.index.pages
    bench.scheduler.close(1.0)
    assert not store.extents
    assert not Bench(tiny("qwen3_5_moe")).scheduler.admin(Admin("1", "store_stat"))().ok


def test_pages_of_a_worker_that_is_gone_are_told_from_what_was_computed_here(tiny: Callable[..., Path]) -> None:
    """It kept its pages and no checkpoint near enough; whoever comes next has to compute again."""
    store, tokens, cold = resumable(tiny("qwen3_5_moe"))
    for one in [one for one in store.states_kept if one.position == 300]:
        store.remove(one)
    bench = Bench(tiny("qwen3_5_moe"), store)
    outcome = bench.ask(tokens, SHORT, session="s")
    assert same_bits(outcome.logits, cold.logits)
    assert (outcome.reuse.resumed, outcome.reuse.replayed, outcome.reuse.cause) == (128, 172, "worker_restart")
    again = bench.ask([*tokens[:310], *prompt(9, 40)], SHORT, session="s")
    assert again.reuse.replayed > 0 and again.reuse.cause == "no_anchor"
