"""Background requests over a store: they give way, and evict nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_support import GREEDY, Anchor, Bench, prompt, replace
from store_fake import FakeStore
from store_support import BOTH, SHORT, check, page_bytes, resumable


@pytest.mark.parametrize("arch", BOTH)
def test_a_background_request_gives_way_within_a_step(tiny: Callable[..., Path], arch: str) -> None:
    store = FakeStore()
    bench = Bench(tiny(arch), store, chunk_tokens=64, max_sequences=1)
    ahead = prompt(1, 600)
    name = bench.submit(ahead, replace(GREEDY, max_tokens=0), session="s", background=True)
    for _ in range(4):
        bench.step()
    other = bench.submit(prompt(2, 30), SHORT)
    bench.step()
    assert bench.outcomes[other].admitted is not None
    assert bench.stats()["background_preempted"] == 1 and bench.stats()["background_tokens"] == 192
    bench.run(lambda: bench.outcomes[other].done is not None)
    assert bench.stats()["background_tokens"] == 192
    bench.run()
    assert bench.outcomes[name].done is not None and bench.stats()["background_tokens"] == 600
    assert bench.stats()["prompt_tokens"] == 30
    outcome = bench.ask([*ahead, *prompt(3, 10)], SHORT, session="s")
    assert outcome.reuse.resumed == 600
    bench.now = 10.0
    bench.step()
    bench.run()
    assert bench.stats()["background_hit_tokens"] == 576
    bench.check()
    assert Bench(tiny(arch), store.restarted()).ask([*ahead, 1], SHORT).reuse.disk == 600


def test_background_waits_for_all_others_and_keeps_the_real_tip(tiny: Callable[..., Path]) -> None:
    bench = Bench(tiny("qwen3_5_moe"), FakeStore())
    first = bench.ask(prompt(1, 100), SHORT, session="s", anchors=(Anchor(64, "system", 9.0, pinned=True),))
    bench.ask([*prompt(1, 80), *prompt(2, 90)], replace(GREEDY, max_tokens=0), session="s", background=True)
    pinned = {(one.want.kind, one.position) for one in bench.memory.checkpoints.all if one.must_keep}
    assert pinned == {("system", 64), ("tip", 102)}
    assert bench.ask([*prompt(1, 100), *first.tokens, 1, 2], SHORT, session="s").reuse.resumed == 102
    running = bench.submit(prompt(5, 20), SHORT)
    later = bench.submit(prompt(6, 20), replace(GREEDY, max_tokens=0), background=True)
    bench.run(lambda: bench.outcomes[running].done is not None)
    assert bench.outcomes[later].admitted is None
    bench.run()
    assert bench.outcomes[later].done is not None


@pytest.mark.parametrize("arch", BOTH)
def test_background_evicts_nothing(tiny: Callable[..., Path], arch: str) -> None:
    directory = tiny(arch)
    bench = Bench(directory, kv_bytes=40 * page_bytes(directory), checkpoint_bytes=300_000)
    for seed in range(4):
        anchors = tuple(Anchor(at, "user", 1.0, pinned=True) for at in range(64, 600, 64))
        bench.ask(prompt(seed, 600), SHORT, anchors=anchors, session=str(seed))
    before = {id(node) for node in bench.memory.index.nodes()}
    slots = {id(one) for one in bench.memory.checkpoints.all if one.must_keep}
    for seed in range(10, 20):
        bench.ask(prompt(seed, 200), replace(GREEDY, max_tokens=0), background=True, session=str(seed))
        bench.check()
    assert before <= {id(node) for node in bench.memory.index.nodes()}
    assert slots <= {id(one) for one in bench.memory.checkpoints.all}


def test_what_was_read_for_a_background_request_that_gives_way_at_once_was_not_restored(
    tiny: Callable[..., Path],
) -> None:
    """It is not started only to be stopped before it is fed."""
    store, tokens, _ = resumable(tiny("qwen3_5_moe"))
    bench = Bench(tiny("qwen3_5_moe"), store, max_sequences=2)
    store.delay = 1
    ahead = bench.submit(tokens, replace(GREEDY, max_tokens=0), session="s", background=True)
    while store.reading:
        bench.step()
        assert bench.outcomes[ahead].admitted is None
    bench.submit(prompt(9, 30), replace(GREEDY, max_tokens=2), session="t")
    bench.step()
    assert bench.outcomes[ahead].admitted is None and bench.stats()["restored_bytes"] == 0
    bench.run()
    assert bench.outcomes[ahead].reuse.disk == 300
    check(bench, store)


def test_a_restoring_background_request_gives_way(tiny: Callable[..., Path]) -> None:
    store, tokens, _ = resumable(tiny("qwen3_5_moe"))
    store.delay = 20
    bench = Bench(tiny("qwen3_5_moe"), store, max_sequences=2)
    ahead = bench.submit(tokens, replace(GREEDY, max_tokens=0), session="s", background=True)
    bench.step()
    assert bench.stats()["restoring"] == 1
    other = bench.submit(prompt(2, 30), SHORT)
    bench.step()
    assert bench.outcomes[other].admitted is not None and bench.stats()["restoring"] == 0
    bench.run()
    assert bench.outcomes[ahead].done is not None
    check(bench, store)


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────
