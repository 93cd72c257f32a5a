"""The engine on the real store: resumed = uninterrupted = cold, bit for bit, from host memory and from disk."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from engine_support import GREEDY, Anchor, Bench, Sampling, pending_slots, prompt, replace, same_bits

from sessions.store.config import MIB, StoreConfig
from sessions.store.store import Store, open_store

SHORT = replace(GREEDY, max_tokens=3)
BOTH = ("qwen3_5_moe", "qwen3_moe")


def opened(
    directory: Path,
    fingerprint: str,
    pages: tuple[int, ...],
    states: tuple[int, ...],
    hosted: bool = False,
    **options: object,
) -> Store:
    limits = {"quota_bytes": 256 * MIB, "host_bytes": 32 * MIB, "queue_bytes": 64 * MIB, "readers": 4} | options
    return open_store(StoreConfig(directory, fingerprint, pages, states, **limits))  # type: ignore[arg-type]


def finish(bench: Bench) -> None:
    bench.run()
    bench.check()
    assert pending_slots(bench.memory) == 0
    bench.scheduler.close(20.0)


def check_cuts(directory: Path, store: Path, seeds: range, together: int) -> None:
    """``together`` prompts at a time: computed up to a random cut, partly by decoding, the worker ended, then resumed
    at once with chunks of another size, others running; against each computed alone in one go."""
    whole = Bench(directory)
    for first in range(seeds.start, seeds.stop, together):
        rng = random.Random(first)
        before = Bench(directory, partial(opened, store), chunk_tokens=37)
        cases = []
        for seed in range(first, min(first + together, seeds.stop)):
            length = rng.randint(3, 330)
            tokens, cut = prompt(seed, length), rng.randint(1, length - 1)
            start = cut - min(cut - 1, rng.randint(0, 20))
            forced = replace(GREEDY, max_tokens=0)
            if start < cut:
                forced = Sampling(max_tokens=99, forced=tuple(tokens[start : cut + 1]))
            before.submit(tokens[:start], forced, session=str(seed), namespace=str(seed))
            cases.append((tokens, cut, {"session": str(seed), "namespace": str(seed)}))
        finish(before)
        after = Bench(directory, partial(opened, store), chunk_tokens=rng.choice((20, 64, 150)))
        names = []
        for tokens, _, where in cases:
            names.append(after.submit(tokens, SHORT, **where))
            after.submit(prompt(rng.randint(10**6, 10**7), 40), SHORT, side=True)
            for _ in range(rng.randint(0, 3)):
                after.step()
        finish(after)
        for name, (tokens, cut, where) in zip(names, cases, strict=True):
            outcome, cold = after.outcomes[name], whole.ask(tokens, SHORT, **where)
            assert (outcome.reuse.disk, outcome.reuse.replayed, outcome.reuse.new) == (cut, 0, len(tokens) - cut)
            assert len(outcome.logits) == 3 and same_bits(outcome.logits, cold.logits)
            assert outcome.tokens == cold.tokens
            said = Sampling(max_tokens=99, forced=(tokens[-1], *cold.tokens))
            uninterrupted = whole.ask(tokens[:-1], said, namespace=f"{where['namespace']} again")
            assert same_bits(uninterrupted.logits, cold.logits)


@pytest.mark.parametrize("arch", BOTH)
def test_cut_points_across_a_restart(tiny: Callable[..., Path], tmp_path: Path, arch: str) -> None:
    check_cuts(tiny(arch), tmp_path, range(60), 6)


@pytest.mark.deep
@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_cut_points_across_a_restart(tiny: Callable[..., Path], tmp_path: Path, arch: str, dtype: str) -> None:
    check_cuts(tiny(arch, dtype=dtype), tmp_path, range(200), 8)


@pytest.mark.parametrize("arch", BOTH)
def test_sessions_that_do_not_fit_the_device(tiny: Callable[..., Path], tmp_path: Path, arch: str) -> None:
    """Four sessions take turns on a device that holds one and a half of them. Each look-up comes right after the turn
    before it, when nothing is on disk yet; then, with no host tier, everything has to come from disk."""
    directory = tiny(arch)
    size = int(Bench(directory).stats()["page_bytes"])
    whole = Bench(directory)
    for host in (32 * MIB, 0):
        store = partial(opened, tmp_path / str(host), host_bytes=host)
        bench = Bench(directory, store, kv_bytes=24 * size, checkpoint_bytes=200_000)
        histories = {str(seed): prompt(seed, 500) for seed in range(4)}
        for turn in range(3):
            for session, history in histories.items():
                anchors = (Anchor(128, "system", 9.0, pinned=True),)
                outcome = bench.ask(history, SHORT, session=session, anchors=anchors)
                reuse = outcome.reuse
                assert (reuse.replayed, reuse.resumed) == (0, len(history) - 41 if turn else 0)
                assert (reuse.disk > 0) == (turn > 0 and not host) and (reuse.host > 0) == (turn > 0 and host > 0)
                assert same_bits(outcome.logits, whole.ask(history, SHORT).logits)
                histories[session] = [*history, *outcome.tokens, *prompt(50 + turn, 40)]
            if not host:
                assert bench.scheduler.memory.behind.store is not None
                assert bench.scheduler.memory.behind.store.flush(20.0)
        finish(bench)


@pytest.mark.parametrize("arch", BOTH)
def test_a_turn_is_on_disk_a_second_later(tiny: Callable[..., Path], tmp_path: Path, arch: str) -> None:
    """Nothing is flushed, and nothing else has settled."""
    bench = Bench(tiny(arch), partial(opened, tmp_path / "one", settle_seconds=600.0))
    history = prompt(1, 300)
    history = [*history, *bench.ask(history, SHORT, session="s").tokens]
    time.sleep(1.0)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    after = Bench(tiny(arch), partial(opened, tmp_path / "two"))
    outcome = after.ask([*history, 7], SHORT, session="s")
    assert (outcome.reuse.disk, outcome.reuse.new) == (302, 2)
    finish(after)
    finish(bench)


@pytest.mark.parametrize("arch", BOTH)
def test_damaged_segments_never_change_an_answer(tiny: Callable[..., Path], tmp_path: Path, arch: str) -> None:
    directory, rng = tiny(arch), random.Random(arch)
    whole = Bench(directory)
    history = prompt(1, 600)
    failed = 0
    for round_ in range(6):
        before = Bench(directory, partial(opened, tmp_path))
        anchors = tuple(Anchor(at, "user", 9.0, pinned=True) for at in range(64, len(history), 128))
        history = [*history, *before.ask(history, SHORT, session="s", anchors=anchors).tokens, *prompt(round_, 30)]
        finish(before)
        segments = [path for path in tmp_path.rglob("*.seg") if path.stat().st_size > 4096]
        with rng.choice(segments).open("r+b") as file:
            size = file.seek(0, 2)
            for _ in range(rng.randint(1, 3)):
                file.seek(rng.randrange(4096, size - 600))
                file.write(rng.randbytes(500))
        after = Bench(directory, partial(opened, tmp_path))
        outcome, cold = after.ask(history, SHORT, session="s"), whole.ask(history, SHORT, namespace=str(round_))
        assert same_bits(outcome.logits, cold.logits) and outcome.tokens == cold.tokens
        count = after.stats().get("failed_restores", 0)
        assert (outcome.reuse.cause == "corrupt") == (count > 0)
        failed += count
        history = [*history, *outcome.tokens]
        finish(after)
    assert failed > 0


def test_forget_and_verify(tiny: Callable[..., Path], tmp_path: Path) -> None:
    directory = tiny("qwen3_5_moe")
    bench = Bench(directory, partial(opened, tmp_path))
    shared = prompt(1, 128)
    tokens = {}
    for session in ("a", "b"):
        asked = [*shared, *prompt(ord(session), 200)]
        anchors = (Anchor(128, "system", 9.0, pinned=True),)
        tokens[session] = [*asked, *bench.ask(asked, SHORT, session=session, anchors=anchors).tokens, 7]
    store = bench.memory.behind.store
    assert store is not None and store.flush(20.0)
    assert store.verify()["damaged"] == 0
    bench.memory.forget("a")
    forgotten = store.forget("a")
    assert forgotten == 5  # its tip, the three pages that it does not share, and the one that is not full
    finish(bench)
    after = Bench(directory, partial(opened, tmp_path))
    assert after.ask(tokens["a"], SHORT).reuse.resumed == 128
    assert after.ask(tokens["b"], SHORT).reuse.resumed == 330
    finish(after)
