"""A restore that a forward goes along with, layer by layer: the bits of a cold run, or nothing has happened.

Nothing is read before it is waited for (``slow``), so a layer that went on too early would compute with what is not
there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
from engine_support import (
    ARCHITECTURES,
    GREEDY,
    Anchor,
    Bench,
    Outcome,
    Sampling,
    audit,
    prompt,
    replace,
    same_bits,
)
from store_fake import Extent, FakeStore
from store_support import SHORT, check, page_bytes, resumable

from engine.memory.restore import AFTER, LAYER_GROUPS, Restore, layer_groups
from engine.pace import Pace
from engine.scheduler import Scheduler

LAYERS = 8


def slow(directory: Path) -> tuple[FakeStore, list[int], Outcome]:
    store, tokens, cold = resumable(directory)
    store.delay = 10**9
    return store, tokens, cold


def watched(monkeypatch: pytest.MonkeyPatch, store: FakeStore) -> list[tuple[int, int]]:
    """(layer, parts still on their way) after each wait of a layer."""
    seen: list[tuple[int, int]] = []
    wait = Restore.wait_layer

    def watch(restore: Restore, layer: int) -> None:
        wait(restore, layer)
        if layer < AFTER:
            seen.append((layer, store.reading))

    monkeypatch.setattr(Restore, "wait_layer", watch)
    return seen


def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore first, then prefill."""
    monkeypatch.setattr(Scheduler, "_overlap", lambda _: False)


def kept(bench: Bench) -> tuple[list[object], ...]:
    """What the device has cached, whoever left it."""
    nodes = [(node.start, node.tokens, node.side) for node in bench.memory.index.nodes()]
    states = [(one.position, one.want.kind, one.want.pinned, one.session) for one in bench.memory.checkpoints.all]
    return sorted(nodes), sorted(states)


@pytest.mark.parametrize("seed", range(200))
def test_every_component_is_in_one_group(seed: int) -> None:
    rng = random.Random(seed)
    layers, most = rng.randint(1, 60), rng.randint(1, 12)
    attention = [rng.random() < rng.choice((0.2, 0.5, 1.0)) for _ in range(layers)]
    pages = [layer for layer in range(layers) if attention[layer] for _ in range(2)]
    states = [layer for layer in range(layers) if not attention[layer] for _ in range(2)]
    groups = layer_groups(pages, states, most)
    assert 1 <= len(groups) <= most
    for of, each in ((pages, [one.pages for one in groups]), (states, [one.states for one in groups])):
        assert [at for part in each for at in range(len(of))[part]] == list(range(len(of)))
        for group, after, part in zip(groups, (*groups[1:], None), each, strict=True):
            assert all(group.layer <= layer and (after is None or layer < after.layer) for layer in of[part])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_layer_waits_for_its_own_part(
    tiny: Callable[..., Path], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny(arch, layers=LAYERS)
    store, tokens, cold = slow(directory)
    seen = watched(monkeypatch, store)
    bench = Bench(directory, store)
    outcome = bench.ask(tokens, SHORT, session="s")
    assert same_bits(outcome.logits, cold.logits) and outcome.tokens == cold.tokens
    assert (outcome.reuse.disk, outcome.reuse.replayed) == (300, 0) and outcome.admitted == outcome.reuse
    assert [layer for layer, _ in seen] == list(range(LAYERS))
    left = [reading for _, reading in seen]
    assert left == sorted(left, reverse=True) and left[-1] == 0
    assert len(set(left)) == LAYER_GROUPS  # some came with each
    assert bench.stats()["overlapped_restores"] == 1
    check(bench, store)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("cut", [65, 128, 131, 192, 300])
def test_any_resume_point_and_any_chunk(tiny: Callable[..., Path], arch: str, cut: int) -> None:
    directory, store = tiny(arch, layers=LAYERS), FakeStore()
    tokens = prompt(5, 340)
    before = Bench(directory, store)
    before.ask(tokens[:cut], replace(GREEDY, max_tokens=0), session="s")
    before.scheduler.close(1.0)
    cold = Bench(directory).ask(tokens, SHORT)
    for chunk in (1, 7, 64, 400):
        again = deepcopy(store.restarted())
        again.delay = 10**9
        bench = Bench(directory, again, chunk_tokens=chunk)
        outcome = bench.ask(tokens, SHORT, session="s", anchors=(Anchor(320, "user", 5.0),))
        assert outcome.reuse.disk == cut and same_bits(outcome.logits, cold.logits)
        assert outcome.tokens == cold.tokens and bench.stats()["overlapped_restores"] == 1
        assert outcome.done is not None and 320 in outcome.done.checkpoints
        # What was kept in that very step is what a cold run keeps.
        more = [*tokens[:321], 9, 8, 7]
        assert same_bits(bench.ask(more, SHORT).logits, Bench(directory).ask(more, SHORT).logits)
        check(bench, again)


def damage(store: FakeStore, what: str, share: float) -> Extent:
    """One component of one extent, ``share`` of the way from the first layer to the last."""
    pages = sorted((one for one in store.extents if not one.state), key=lambda one: one.position)
    states = sorted(store.states_kept, key=lambda one: one.position)
    bad = {"first": pages[0], "fourth": pages[3], "partial": pages[-1], "tip": states[-1] if states else None}[what]
    assert bad is not None
    bad.bad = round(share * (len(bad.data) - 1))
    return bad


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("arch", "what"),
    [(arch, what) for arch in ARCHITECTURES for what in ("first", "fourth", "partial")] + [("qwen3_5_moe", "tip")],
)
def test_what_turns_out_corrupt_on_the_way(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, arch: str, what: str, share: float
) -> None:
    """In the first, a middle or the last layer: the same report, answer and cache as when all had been read before."""
    directory = tiny(arch, layers=LAYERS)
    found = []
    for overlapped in (True, False):
        store, tokens, cold = slow(directory)
        damage(store, what, share)
        with monkeypatch.context() as patch:
            if not overlapped:
                one_after_the_other(patch)
            bench = Bench(directory, store)
            anchors = (Anchor(320, "user", 5.0, pinned=True),)
            name = bench.submit(tokens, SHORT, session="s", anchors=anchors)
            replies = [reply for _ in range(200) for reply in bench.step()]
        outcome = bench.outcomes[name]
        assert sum(type(reply).__name__ == "Admitted" for reply in replies) == 1
        assert outcome.reuse.cause == "corrupt" and outcome.admitted == outcome.reuse
        assert outcome.reuse.resumed + outcome.reuse.replayed == 300
        assert same_bits(outcome.logits, cold.logits) and outcome.tokens == cold.tokens
        assert bench.stats()["failed_restores"] == 1
        assert bench.stats()["prefilled_tokens"] == len(tokens) - outcome.reuse.resumed
        check(bench, store)
        found.append((outcome.reuse, outcome.done and outcome.done.checkpoints, kept(bench)))
        later = [*tokens, *outcome.tokens, 1]
        assert bench.ask(later, SHORT).reuse.cause == "none"
    assert found[0] == found[1]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_step_that_is_given_up_leaves_nothing(tiny: Callable[..., Path], arch: str) -> None:
    """The last layer's part of the first page is corrupt: everything but that was computed, and nothing is told."""
    directory = tiny(arch, layers=LAYERS)
    store, tokens, _ = slow(directory)
    damage(store, "first", 1.0)
    bench = Bench(directory, store)
    name = bench.submit(tokens, SHORT, session="s", anchors=(Anchor(320, "user", 5.0),))
    assert bench.step() == []
    stats = bench.stats()
    assert stats["restoring"] == 1 and stats["running"] == 0 and stats.get("steps", 0) == 0
    assert stats.get("prefilled_tokens", 0) == 0 and stats["overlapped_restores"] == 0
    assert not list(bench.memory.index.nodes()) and not bench.memory.checkpoints.all
    bench.scheduler.abort(name)
    bench.run()
    done = bench.outcomes[name].done
    assert done is not None and done.reason == "abort" and done.checkpoints == ()
    check(bench, store)


def test_others_go_on_from_the_checkpoint_as_it_was_read(tiny: Callable[..., Path]) -> None:
    """Not from what the sequence it was read for has made of it."""
    directory = tiny("qwen3_5_moe", layers=LAYERS)
    store, tokens, _ = slow(directory)
    bench = Bench(directory, store)
    bench.ask(tokens, SHORT, session="s")
    other = [*tokens[:300], *prompt(8, 30)]
    outcome = bench.ask(other, SHORT, session="t")
    assert outcome.reuse.device == 300 and same_bits(outcome.logits, Bench(directory).ask(other, SHORT).logits)
    check(bench, store)


def test_a_state_with_a_number_that_is_none(tiny: Callable[..., Path]) -> None:
    directory = tiny("qwen3_5_moe", layers=LAYERS)
    for component in range(12):
        store, tokens, cold = slow(directory)
        tip = next(one for one in store.states_kept if one.position == 300)
        tip.data[component] = b"\xff" * len(tip.data[component])
        bench = Bench(directory, store)
        outcome = bench.ask(tokens, SHORT, session="s")
        assert outcome.reuse.resumed == 128 and same_bits(outcome.logits, cold.logits)
        assert bench.stats()["states_not_finite"] == 1 and bench.stats()["pages_not_finite"] == 0
        check(bench, store)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_others_do_not_wait_for_the_store(tiny: Callable[..., Path], arch: str) -> None:
    """Where another can be fed, it is, and what is restored is waited for by nobody."""
    directory = tiny(arch, layers=LAYERS)
    store, tokens, cold = slow(directory)
    bench = Bench(directory, store)
    slow_one = bench.submit(tokens, SHORT, session="s")
    other = bench.submit(prompt(7, 20), replace(GREEDY, max_tokens=30))
    bench.run(lambda: len(bench.outcomes[other].tokens) == 29)
    assert bench.outcomes[slow_one].admitted is None and store.ended == 0
    bench.run()
    assert bench.stats()["overlapped_restores"] == 1  # when the other had ended
    assert same_bits(bench.outcomes[slow_one].logits, cold.logits)
    assert same_bits(bench.outcomes[other].logits, Bench(directory).ask(prompt(7, 20), GREEDY).logits)
    check(bench, store)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("corrupt", [False, True])
def test_another_comes_after_the_first_chunk(tiny: Callable[..., Path], arch: str, corrupt: bool) -> None:
    directory = tiny(arch, layers=LAYERS)
    store, tokens, cold = slow(directory)
    if corrupt:
        damage(store, "fourth", 0.5)
    bench = Bench(directory, store, chunk_tokens=16)
    first = bench.submit(tokens, SHORT, session="s")
    bench.step()
    assert bench.stats()["restoring"] == corrupt and bench.stats()["running"] != corrupt
    other = bench.submit(prompt(7, 40), replace(GREEDY, max_tokens=30), session="t")
    bench.run()
    assert same_bits(bench.outcomes[first].logits, cold.logits)
    assert bench.outcomes[first].reuse.cause == ("corrupt" if corrupt else "none")
    assert same_bits(bench.outcomes[other].logits, Bench(directory).ask(prompt(7, 40), GREEDY).logits)
    check(bench, store)


@pytest.mark.parametrize("corrupt", [False, True])
@pytest.mark.parametrize("steps", range(4))
def test_abort_at_any_step(tiny: Callable[..., Path], steps: int, corrupt: bool) -> None:
    directory = tiny("qwen3_5_moe", layers=LAYERS)
    store, tokens, cold = slow(directory)
    if corrupt:
        damage(store, "partial", 0.5)
    bench = Bench(directory, store, chunk_tokens=8)
    name = bench.submit(tokens, SHORT, session="s")
    for _ in range(steps):
        bench.step()
    bench.scheduler.abort(name)
    bench.run()
    done = bench.outcomes[name].done
    assert done is not None and done.reason == "abort"
    check(bench, store)
    assert same_bits(bench.ask(tokens, SHORT, session="s").logits, cold.logits)
    check(bench, store)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["side", "background"])
def test_side_and_background_requests(tiny: Callable[..., Path], arch: str, kind: str) -> None:
    """What runs in the background gives way to others at once, so it never makes them wait for the store."""
    directory = tiny(arch, layers=LAYERS)
    store, tokens, cold = slow(directory)
    bench = Bench(directory, store)
    outcome = bench.ask(tokens, SHORT, session="s", **{kind: True})
    assert outcome.reuse.disk == 300 and same_bits(outcome.logits, cold.logits)
    assert bench.stats()["overlapped_restores"] == (kind == "side")
    check(bench, store)


def test_two_restored_at_once_that_hardly_fit(tiny: Callable[..., Path]) -> None:
    """A chunk that finds no page beside what the other reads waits for that."""
    directory = tiny("qwen3_moe", layers=LAYERS)
    store, one, cold = slow(directory)
    other, overlapped = [*one[:300], *prompt(12, 60)], 0
    for room in range(7, 15):
        again = deepcopy(store)
        bench = Bench(directory, again, kv_bytes=room * page_bytes(directory))
        names = [bench.submit(one, SHORT, session="s", namespace=""), bench.submit(other, SHORT, side=True)]
        bench.run()
        for name, tokens in zip(names, (one, other), strict=True):
            assert same_bits(bench.outcomes[name].logits, Bench(directory).ask(tokens, SHORT).logits)
        overlapped += bench.stats()["overlapped_restores"] > 0
        check(bench, again)
    assert same_bits(bench.outcomes[names[0]].logits, cold.logits) and overlapped == 8


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_first_chunk_that_finds_no_page_waits_for_the_reads(tiny: Callable[..., Path], arch: str) -> None:
    """Its pages are with another that is restored, too: it is started when everything was read."""
    directory, store = tiny(arch, layers=LAYERS), FakeStore()
    before = Bench(directory, store)
    for seed in (1, 2):
        before.ask(prompt(seed, 300), replace(GREEDY, max_tokens=0), session=f"{seed}")
    before.scheduler.close(1.0)
    asked = [[*prompt(1, 300), *prompt(3, 200)], [*prompt(2, 300), *prompt(4, 20)]]
    again = store.restarted()
    again.delay = 10**9
    bench = Bench(directory, again, kv_bytes=11 * page_bytes(directory))
    names = [
        bench.submit(tokens, SHORT, session=f"{number}", side=number == 2) for number, tokens in enumerate(asked, 1)
    ]
    bench.step()
    first = bench.scheduler._restoring[0]
    assert first.request.id == names[0] and len(first.leased.table) == 6 < -(-500 // 64)
    assert bench.stats()["restoring"] == 2 and bench.stats()["overlapped_restores"] == 0 and again.ended == 1
    bench.run()
    for name, tokens in zip(names, asked, strict=True):
        outcome = bench.outcomes[name]
        assert same_bits(outcome.logits, Bench(directory).ask(tokens, SHORT).logits)
        assert outcome.reuse.resumed == 300 and outcome.reuse.cause == "none"
    assert bench.scheduler.idle and again.reading == 0 and not any(one.holds for one in again.extents)
    audit(bench.memory)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_where_the_forward_would_not_hide_it_the_restore_comes_first(tiny: Callable[..., Path], arch: str) -> None:
    """Read whole, and nothing is computed before all of it is there."""
    directory = tiny(arch, layers=LAYERS)
    store, tokens, cold = slow(directory)
    bench = Bench(directory, store)
    bench.scheduler.pace.always = False
    name = bench.submit(tokens, SHORT, session="s")
    while bench.outcomes[name].admitted is None:
        assert bench.stats().get("steps", 0) == 0
        bench.step()
    assert store.reading == 0 and store.ended > 0
    bench.run()
    assert bench.stats()["overlapped_restores"] == 0 and same_bits(bench.outcomes[name].logits, cold.logits)
    check(bench, store)


def test_the_rates_seen_decide(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Told of what was read whole from the disk, and of every forward that did not wait."""
    directory = tiny("qwen3_5_moe", layers=LAYERS)
    asked: list[tuple[int, int]] = []
    for overlapped in (False, True):
        store, tokens, _ = slow(directory)
        told: list[tuple[str, int]] = []
        with monkeypatch.context() as patch:
            patch.setattr(Pace, "hides", lambda _, *what, answer=overlapped: asked.append(what) or answer)
            patch.setattr(Pace, "read", lambda _, size, seconds, told=told: told.append(("read", size)))
            patch.setattr(Pace, "fed", lambda _, count, seconds, beside, told=told: told.append(("fed", count)))
            bench = Bench(directory, store)
            bench.ask(tokens, SHORT, session="s")
        size = int(bench.stats()["restored_bytes"])
        fed = [("fed", 1), ("fed", 1)]
        assert told == (fed if overlapped else [("read", size), ("fed", len(tokens) - 300), *fed])
        assert asked.pop() == (size, len(tokens) - 300) and not asked


def test_a_model_that_does_not_wait_is_found_out(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    store, tokens, _ = slow(tiny("qwen3_moe"))
    bench = Bench(tiny("qwen3_moe"), store)
    runner = bench.scheduler.runner
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda parts, wait=None: forward(parts))
    bench.submit(tokens, SHORT, session="s")
    with pytest.raises(RuntimeError, match="not been read"):
        bench.run()


def test_a_turn_preempted_in_decode_comes_back(tiny: Callable[..., Path]) -> None:
    """What it had sampled is fed again behind what is read, in the same step."""
    directory = tiny("qwen3_5_moe", layers=LAYERS)
    store, whole = FakeStore(), Bench(directory)
    bench = Bench(directory, store, kv_bytes=12 * page_bytes(directory), checkpoint_bytes=60_000)
    sampling = Sampling(max_tokens=150, temperature=0.0)
    names = [bench.submit(prompt(seed, 200), sampling, session=f"{seed}") for seed in range(3)]
    bench.run()
    assert bench.stats()["preempted"] > 0
    for seed, name in enumerate(names):
        cold = whole.ask(prompt(seed, 200), sampling)
        assert bench.outcomes[name].tokens == cold.tokens and same_bits(bench.outcomes[name].logits, cold.logits)
    check(bench, store)
