"""What gives way: always the least valuable by the plain rule, found without looking at everything."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from engine_support import audit, prompt

from engine.memory.index import Node, PageIndex
from engine.memory.keys import encode
from engine.memory.memory import Memory
from engine.memory.mover import ALL
from engine.memory.queue import LeastFirst
from engine.memory.states import FRESH, LIVE_SESSIONS, Checkpoint, Checkpoints, Want
from engine.sequence import TIP


class Still:
    def copy_page(self, source: int, target: int) -> None: ...
    def copy_state(self, source: int, target: int, parts: slice = ALL) -> None: ...

    def page_finite(self, page: int, tokens: int) -> bool:
        return True

    def state_finite(self, slot: int, parts: slice = ALL) -> bool:
        return True


@pytest.mark.parametrize("seed", range(4))
def test_the_queue_agrees_with_looking_at_all(seed: int) -> None:
    rng = random.Random(seed)
    values: dict[int, int] = {}
    queue = LeastFirst[int](lambda item: (values[item], item))
    for number in range(3000):
        match rng.randrange(4):
            case 0:
                values[number] = rng.randrange(100)
                queue.push(number)
            case 1 if values:
                values[rng.choice(list(values))] += rng.randrange(30)
            case 2 if values:
                item = rng.choice(list(values))
                if rng.random() < 0.5:
                    values[item] -= rng.randrange(30)
                    queue.push(item)
                else:
                    queue.discard(item)
                    del values[item]
            case 3:
                expected = min(values, key=lambda item: (values[item], item), default=None)
                assert queue.pop() == expected
                values.pop(-1 if expected is None else expected, None)


class Watched(Checkpoints):
    """``looks``: how often a checkpoint's value was computed."""

    looks = 0

    def _value(self, one: Checkpoint) -> tuple[bool, bool, bool, float, int, int, int]:
        self.looks += 1
        return super()._value(one)


def plain_value(one: Checkpoint, alive: list[str], now: int, everyone: set[Checkpoint]) -> tuple[Any, ...]:
    peers = sorted((peer.position, peer.slot) for peer in everyone if peer.session == one.session)
    at = peers.index((one.position, one.slot))
    before = peers[at - 1][0] if at else 0
    after = peers[at + 1][0] if at + 1 < len(peers) else one.position
    lives = one.session in alive and not one.side and now - one.used <= FRESH
    pinned = lives and (one.want.pinned or one.want.tip)
    priority = 0.0 if pinned else one.want.priority
    return pinned, lives, not one.superseded, priority, one.used, after - before, one.position


@pytest.mark.parametrize("seed", range(6))
def test_the_checkpoint_that_gives_way_is_the_least_valuable(seed: int) -> None:
    rng = random.Random(seed)
    victims: list[Checkpoint] = []
    checkpoints = Checkpoints(1, 40, victims.append)
    root = Node(None, b"", -1, b"", 0, False)
    activity: list[str] = []
    now = 0

    def touch(session: str) -> None:
        checkpoints.touch(session)
        activity[:] = [*(one for one in activity if one != session), session]

    for _ in range(2500):
        if rng.random() < 0.4:
            now += rng.choice((1, 1, 1, 20))
        session, side = f"s{rng.randrange(25)}", rng.random() < 0.2
        if not side:
            touch(session)
        want = Want("x", float(rng.randrange(3)), rng.random() < 0.3, rng.random() < 0.2)
        alive = activity[-LIVE_SESSIONS:]
        everyone = sorted(checkpoints.all, key=lambda one: one.slot)
        match rng.randrange(5):
            case 0 if everyone:
                checkpoints.use(rng.choice(everyone), now)
            case 1 if everyone:
                checkpoints.renew(rng.choice(everyone), session, want, now)
                touch(session)
            case 2 if everyone:
                one = rng.choice(everyone)
                checkpoints.release(one, replace(one.want, pinned=False))
            case _:
                candidates = [one for one in everyone if one.side or not side]
                worth = [(plain_value(one, alive, now, checkpoints.all), one) for one in candidates]
                full, before = checkpoints.free == 0, len(victims)
                slot = checkpoints.take(want, now, side=side)
                if full and slot is None:
                    pinned = want.pinned or want.tip
                    bound = (pinned, True, True, 0.0 if pinned else want.priority)
                    assert not worth or (not side and min(worth, key=lambda one: one[0])[0][:4] > bound)
                elif full:
                    (victim,) = victims[before:]
                    assert min(value for value, _ in worth) == next(value for value, one in worth if one is victim)
                if slot is not None:
                    new = Checkpoint(rng.randrange(1, 50) * 64, slot, want, session, side, now, root)
                    checkpoints.add(new)
                    if want.tip and not side:
                        checkpoints.tip(new, lambda old: old.position % 128 == 0)
    assert len(victims) > 300


@pytest.mark.parametrize("sessions", [1, 50])
def test_giving_way_looks_at_few_of_many(sessions: int) -> None:
    checkpoints = Watched(1, 4096, lambda one: None)
    root, rng = Node(None, b"", -1, b"", 0, False), random.Random(1)

    def add(number: int) -> None:
        slot = checkpoints.take(Want("x", 5.0), 1, side=False)
        assert slot is not None
        session = f"s{number % sessions}"
        checkpoints.add(Checkpoint(rng.randrange(10**6), slot, Want("x", 5.0), session, False, 1, root))
        checkpoints.touch(session)

    for number in range(4096):
        add(number)
    checkpoints.looks = 0
    for number in range(500):
        add(number)
    assert checkpoints.evicted == 500 and checkpoints.looks < 500 * (40 + 2 * 4096 / sessions * (sessions > 16))


class WatchedIndex(PageIndex):
    looks = 0

    def _value(self, leaf: Node) -> tuple[bool, bool, bool, int]:
        self.looks += 1
        return super()._value(leaf)


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_page_that_gives_way_is_the_least_valuable(
    recurrent: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    memory = Memory(Still(), "f", pages=60, live=1, checkpoints=20, recurrent=recurrent)
    index, pool = memory.index, memory.pool
    remove = index.remove

    def value(leaf: Node) -> tuple[Any, ...]:
        pinned = any(one.want.pinned or one.want.tip for one in leaf.checkpoints.values())
        return not leaf.side, not (recurrent and not leaf.checkpoints), pinned, leaf.used

    def checked(node: Node) -> None:
        free = [one for one in index.nodes() if not one.children and not pool.held(one.page)]
        assert node in free and value(node) == min(value(one) for one in free)
        remove(node)

    monkeypatch.setattr(index, "remove", checked)
    stems = [prompt(seed * 10 + one, 400, 50) for one in range(6)]
    for _ in range(250):
        tokens = rng.choice(stems)[: rng.randint(1, 400)] + prompt(rng.randint(0, 10**9), rng.randint(1, 60), 50)
        side, session = rng.random() < 0.3, rng.choice("abc")
        plan = memory.plan(encode(tokens), "")
        if not memory.fits(plan, len(tokens), modest=side):
            continue
        lease = memory.open(plan, session, side=side)
        memory.unpin(lease, tokens)
        if memory.grow(lease, len(tokens)):
            memory.advance(lease, tokens, len(tokens))
            slot = memory.reserve_slot(lease, Want("x", 1.0, rng.random() < 0.4))
            if slot is not None:
                memory.capture(lease, tokens, len(tokens) - 1, slot, Want("x", 1.0, rng.random() < 0.4))
            memory.close(lease, tokens, len(tokens), TIP)
        else:
            memory.close(lease, tokens, plan.position, TIP)
        audit(memory)
        assert index.side_pages() == sum(node.side and not pool.held(node.page) for node in index.nodes())
    assert index.evicted > 100


def test_eviction_looks_at_few_of_many() -> None:
    memory = Memory(Still(), "f", pages=3000, live=1, checkpoints=0, recurrent=False)
    memory.index = WatchedIndex(memory.pool, False, lambda node: None, memory.checkpoints.remove)
    for seed in range(3500):
        if seed == 3000:
            memory.index.looks = 0
        tokens = prompt(seed, 70)
        lease = memory.open(memory.plan(encode(tokens), ""), "s", side=False)
        assert memory.grow(lease, 70)
        memory.advance(lease, tokens, 70)
        memory.close(lease, tokens, 70, TIP)
    assert memory.index.evicted >= 1000 and memory.index.looks < 500 * 40
