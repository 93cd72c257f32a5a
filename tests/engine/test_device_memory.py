"""The tests of restores and stores once more, with pages and states on a device: what moves is late, and lies in rings
and blocks of a host tier before the store. Then what only that has."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
from device_double import Device, LateLanes, on_device  # noqa: F401
from engine_support import GREEDY, Anchor, Bench, prompt, replace, same_bits
from store_fake import FakeStore
from store_support import SHORT, check, page_bytes
from test_overlap import (  # noqa: F401 - run here, too
    LAYERS,
    test_abort_at_any_step,
    test_others_go_on_from_the_checkpoint_as_it_was_read,
)
from test_poison import poisoned, test_pages_without_numbers_are_not_kept  # noqa: F401
from test_store import test_abort_while_something_is_read  # noqa: F401

from engine.api import Admin
from engine.memory.keys import encode
from engine.memory.restore import AFTER, LAYER_GROUPS
from engine.sequence import TIP


def histories(bench: Bench, sessions: int, turns: int, cold: Bench) -> tuple[int, list[int]]:
    """Sessions take turns, in less memory than they need; each goes on from where it was. -> tokens that came from the
    host, and what one of them would go on with."""
    told = {str(seed): prompt(seed, 500) for seed in range(sessions)}
    hosted = 0
    for turn in range(turns):
        for session, history in told.items():
            anchors = (Anchor(128, "system", 9.0, pinned=True),)
            outcome = bench.ask(history, SHORT, session=session, anchors=anchors)
            assert (outcome.reuse.resumed, outcome.reuse.replayed) == (len(history) - 41 if turn else 0, 0)
            assert same_bits(outcome.logits, cold.ask(history, SHORT).logits)
            hosted += outcome.reuse.host
            told[session] = [*history, *outcome.tokens, *prompt(50 + turn, 40)]
    return hosted, told["0"]


@pytest.mark.parametrize(
    ("arch", "store"),
    [("qwen3_5_moe", False), ("qwen3_moe", True), pytest.param("qwen3_5_moe", True, marks=pytest.mark.deep)],
)
def test_what_the_device_gave_up_comes_from_host_memory(
    tiny: Callable[..., Path], arch: str, store: bool, device: Device
) -> None:
    """With no store behind it, too."""
    directory = tiny(arch)
    bench = Bench(directory, FakeStore() if store else None, kv_bytes=24 * page_bytes(directory), checkpoint_bytes=1)
    assert histories(bench, 4, 3, Bench(directory))[0] > 1000
    bench.check()
    assert bench.stats()["pages_evicted"] > 0 and bench.stats()["store_host_bytes"] > 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 9))])
def test_rings_smaller_than_a_checkpoint(tiny: Callable[..., Path], device: Device, seed: int) -> None:
    """Whatever is late."""
    directory, device.seed = tiny("qwen3_5_moe", layers=LAYERS), seed
    state = int(Bench(directory).stats()["checkpoint_slot_bytes"])
    device.gathered, device.ring, device.eager = state // 2, state // 2, 0.02
    store = FakeStore()
    bench = Bench(directory, store, kv_bytes=24 * page_bytes(directory), checkpoint_bytes=1)
    _, tokens = histories(bench, 2, 2, Bench(directory))
    bench.scheduler.close(1.0)
    again = store.restarted()
    again.delay = 10**9
    for bench in (Bench(directory, again), Bench(directory, again, chunk_tokens=16)):
        names = [bench.submit([*tokens, *prompt(end, 20)], SHORT, session=f"{end}") for end in range(3)]
        bench.run()
        for end, name in enumerate(names):
            cold = Bench(directory).ask([*tokens, *prompt(end, 20)], SHORT)
            assert same_bits(bench.outcomes[name].logits, cold.logits)
            assert bench.outcomes[name].reuse.resumed == len(tokens) - 41
        check(bench, again)


@pytest.mark.parametrize("arch", ["qwen3_5_moe", pytest.param("qwen3_moe", marks=pytest.mark.deep)])
def test_a_host_tier_that_has_room_for_little(tiny: Callable[..., Path], device: Device, arch: str) -> None:
    directory = tiny(arch)
    device.page_blocks, device.state_blocks = 12, 2
    bench = Bench(directory, kv_bytes=24 * page_bytes(directory), checkpoint_bytes=60_000)
    tier, cold = device.tiers[-1], Bench(directory)
    rng, asked = random.Random(arch), [prompt(seed, 640) for seed in range(4)]
    for step in range(16):
        tokens = [*asked[rng.randrange(4)][: rng.randint(64, 640)], *prompt(step, 9)]
        outcome = bench.ask(tokens, SHORT, session=f"{step % 3}", side=rng.random() < 0.2)
        assert same_bits(outcome.logits, cold.ask(tokens, SHORT).logits)
    bench.check()
    assert tier.evicted > 0


def test_host_memory_first_gives_up_what_the_device_has(tiny: Callable[..., Path], device: Device) -> None:
    """What is in both goes before what left the device, however long ago that was computed."""
    directory, device.state_blocks, device.eager = tiny("qwen3_5_moe"), 3, 1.0
    state = int(Bench(directory).stats()["checkpoint_slot_bytes"])
    bench = Bench(directory, checkpoint_bytes=3 * state)
    said = [bench.ask(prompt(session, 100), SHORT, session=f"{session}").tokens for session in range(5)]
    assert bench.ask([*prompt(0, 100), *said[0], 3], SHORT, session="0").reuse.resumed == 102
    bench.check()


def test_what_was_on_its_way_when_the_process_died_is_computed_again(tiny: Callable[..., Path], device: Device) -> None:
    """Only what had arrived is with the store, and it is right."""
    directory, device.eager = tiny("qwen3_moe"), 0.0
    store, tokens = FakeStore(), prompt(1, 400)
    bench = Bench(directory, store)
    device.eager = 0.3
    bench.submit(tokens, replace(GREEDY, max_tokens=11), session="s")
    found = set()
    for _ in range(12):
        bench.step()
        cold = Bench(directory).ask([*tokens, 3], SHORT)
        after = Bench(directory, deepcopy(store).restarted())
        outcome = after.ask([*tokens, 3], SHORT, session="s")
        assert same_bits(outcome.logits, cold.logits)
        found.add(outcome.reuse.resumed)
        device.stagings[0]._lanes.eager = 0.8
    bench.run()
    assert min(found) == 0 and max(found) >= 128


@pytest.mark.deep
def test_a_turn_that_had_to_give_way_goes_on_from_host_memory(tiny: Callable[..., Path], device: Device) -> None:
    directory = tiny("qwen3_5_moe", layers=LAYERS)
    whole = Bench(directory)
    bench = Bench(directory, kv_bytes=12 * page_bytes(directory), checkpoint_bytes=60_000)
    sampling = replace(GREEDY, max_tokens=70)
    names = [bench.submit(prompt(seed, 200), sampling, session=f"{seed}") for seed in range(3)]
    bench.run()
    assert bench.stats()["preempted"] > 0 and bench.stats()["restored_bytes"] > 0
    assert bench.stats()["recomputed_tokens"] < 64 * bench.stats()["preempted"]
    for seed, name in enumerate(names):
        cold = whole.ask(prompt(seed, 200), sampling)
        assert bench.outcomes[name].tokens == cold.tokens and same_bits(bench.outcomes[name].logits, cold.logits)
    bench.check()


def test_a_session_is_forgotten_in_host_memory_too(tiny: Callable[..., Path], device: Device) -> None:
    bench = Bench(tiny("qwen3_5_moe"), FakeStore())
    tier = device.tiers[-1]
    for session in "ab":
        bench.ask([*prompt(1, 128), *prompt(ord(session), 100)], SHORT, session=session)
    bench.scheduler.admin(Admin("1", "store_forget", {"session": "a"}))()
    assert {one.session for one in tier._all() if one.state} == {"b"}
    assert bench.ask([*prompt(1, 128), *prompt(ord("b"), 100), 7], SHORT).reuse.resumed > 0
    bench.scheduler.admin(Admin("1", "store_forget", {}))()
    assert not tier._all()
    bench.check()


@pytest.mark.parametrize(
    "lost", ["wait", *(pytest.param(lost, marks=pytest.mark.deep) for lost in ("copy_out", "move"))]
)
def test_the_double_finds_out_who_does_not_wait(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Without what orders the lanes, or with a copy that is not made, answers are wrong or requests fail."""

    def nothing(*_: object, **__: object) -> None: ...

    if lost == "wait":
        monkeypatch.setattr(LateLanes, lost, nothing)
    else:
        made = getattr(LateLanes, lost)
        monkeypatch.setattr(
            LateLanes, lost, lambda lanes, *it, **how: (it[0] == "main" and made(lanes, *it, **how)) or None
        )
    directory = tiny("qwen3_5_moe", layers=LAYERS)
    bench = Bench(directory, kv_bytes=24 * page_bytes(directory), checkpoint_bytes=1)
    cold = Bench(directory)
    with pytest.raises((AssertionError, IndexError)):
        histories(bench, 4, 3, cold)


def test_all_of_it_is_on_its_way_before_a_layer_is_computed(tiny: Callable[..., Path], device: Device) -> None:
    """Else a layer's part would come only after the layers before it had been computed."""
    bench = Bench(tiny("qwen3_5_moe", layers=LAYERS))
    tokens, memory, lanes = prompt(1, 400), bench.memory, device.stagings[-1]._lanes
    bench.ask(tokens, replace(GREEDY, max_tokens=0), session="s")
    memory.index.clear()
    lease = memory.open(memory.plan(encode([*tokens, 1]), ""), "s", side=False, layered=True)
    submitted = lanes.submitted["in"]
    restore, wait = lease.restore, memory.overlap(lease)
    assert restore is not None and [group for group, _ in restore._arriving] == list(range(LAYER_GROUPS))
    for layer in (*range(LAYERS), AFTER):
        wait(layer)
    assert lanes.submitted["in"] == submitted and restore.poll()
    assert memory.restored(lease, [*tokens, 1]) is None
    memory.close(lease, tokens, len(tokens), TIP)
    bench.check()
