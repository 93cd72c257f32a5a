"""Memory without a model: random lives of many leases, checked against a plain list of what was computed."""

from __future__ import annotations

import random

import pytest
from engine_support import audit, pending_slots, prompt

from engine.memory.history import History, Known
from engine.memory.index import Node
from engine.memory.keys import common_tokens, encode, page_key, page_keys, root_key
from engine.memory.memory import Lease, Memory
from engine.memory.mover import ALL
from engine.memory.resize import DoesNotFit, resize
from engine.memory.states import Want
from engine.sequence import TIP


class Bytes:
    """Pages and slots as lists of the tokens that made them, so that a wrong copy or a stale page is seen."""

    def __init__(self) -> None:
        self.pages: dict[int, list[int | None]] = {}
        self.slots: dict[int, list[int]] = {0: []}

    def copy_page(self, source: int, target: int) -> None:
        self.pages[target] = list(self.pages[source])

    def page_finite(self, page: int, tokens: int) -> bool:
        return True

    def state_finite(self, slot: int, parts: slice = ALL) -> bool:
        return True

    def copy_state(self, source: int, target: int, parts: slice = ALL) -> None:
        self.slots[target] = list(self.slots[source])

    def feed(self, lease: Lease, tokens: list[int], start: int, end: int) -> None:
        """What the model does: write pages, advance the state; and check all that attention would read."""
        for at in range(start, end):
            self.pages.setdefault(lease.table[at // 64], [None] * 64)[at % 64] = tokens[at]
            self.slots[lease.slot] = [*self.slots[lease.slot], tokens[at]]
        read = [self.pages[lease.table[at // 64]][at % 64] for at in range(end)]
        assert read == tokens[:end]
        assert self.slots[lease.slot] == tokens[:end]


def deepest(memory: Memory, tokens: bytes) -> int:
    """From where a prompt can go on, looking at all there is, one by one."""

    def before(node: Node | None) -> bytes:
        return before(node.parent) + node.tokens if node is not None else b""

    limit = len(tokens) // 4 - 1
    if not memory.recurrent:
        return max((min(limit, common_tokens(before(node), tokens)) for node in memory.index.nodes()), default=0)
    return max(
        (
            one.position
            for one in memory.checkpoints.all
            if one.position <= limit and tokens.startswith(before(one.node)[: 4 * one.position])
        ),
        default=0,
    )


def change_size(memory: Memory, store: Bytes, pages: int, checkpoints: int) -> None:
    """What lies beyond the new bounds is gone; unless running sequences need more: then nothing has happened."""
    before = memory.pool.total, memory.checkpoints.total, memory.index.pages
    try:
        resize(memory, pages, checkpoints)
    except DoesNotFit as error:
        assert memory.pool.held_pages > pages
        assert f"{64 * pages} tokens is less than the {64 * memory.pool.held_pages} that running" in str(error)
        assert before == (memory.pool.total, memory.checkpoints.total, memory.index.pages)
        return
    assert (memory.pool.total, memory.checkpoints.total) == (pages, checkpoints)
    live = memory.checkpoints.first + checkpoints
    store.pages = {page: tokens for page, tokens in store.pages.items() if page < pages}
    store.slots = {slot: tokens for slot, tokens in store.slots.items() if slot < live or not memory.recurrent}


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_random_lives(recurrent: bool, seed: int) -> None:
    """Prompts that share starts, running at once in little memory that grows and shrinks: every page read is right,
    nothing leaks."""
    rng = random.Random(seed)
    store = Bytes()
    memory = Memory(store, "f", pages=40, live=3, checkpoints=7, recurrent=recurrent)
    stems = [prompt(seed * 10 + one, 400, 50) for one in range(3)]
    running: list[tuple[Lease, list[int], int]] = []
    if not recurrent:
        store.slots = {slot: [] for slot in range(20)}
    for _ in range(300):
        if len(running) < 3 and rng.random() < 0.5:
            stem = rng.choice(stems)
            cut = rng.randint(1, 400)
            tokens = stem[:cut] + prompt(rng.randint(0, 10**9), rng.randint(1, 60), 50)
            side = rng.random() < 0.3
            plan = memory.plan(encode(tokens), "")
            assert plan.reuse.resumed + plan.reuse.replayed + plan.reuse.new == len(tokens)
            assert plan.position == deepest(memory, encode(tokens))
            if memory.fits(plan, len(tokens), modest=side):
                lease = memory.open(plan, rng.choice("abc"), side=side)
                if not recurrent:
                    store.slots[lease.slot] = tokens[: plan.position]
                assert store.slots[lease.slot] == tokens[: plan.position]
                running.append((lease, tokens, plan.position))
        elif running:
            number = rng.randrange(len(running))
            lease, tokens, fed = running[number]
            end = min(len(tokens), fed + rng.randint(1, 100))
            if fed < len(tokens) and rng.random() < 0.8 and memory.grow(lease, end):
                store.feed(lease, tokens, fed, end)
                memory.advance(lease, tokens, end)
                running[number] = (lease, tokens, end)
                slot = memory.reserve_slot(lease, Want("x", rng.random(), rng.random() < 0.1))
                if slot is not None:
                    store.copy_state(lease.slot, slot)
                    memory.capture(lease, tokens, end, slot, Want("x", rng.random()))
            else:
                memory.close(lease, tokens, fed, TIP)
                running.pop(number)
        if rng.random() < 0.1:
            change_size(memory, store, rng.randint(4, 60), rng.randint(0, 12) if recurrent else 0)
        audit(memory)
        assert pending_slots(memory) == 0
    for lease, tokens, fed in running:
        memory.close(lease, tokens, fed, TIP)
    audit(memory)
    assert memory.pool.held_pages == 0 and len(memory.free_live) == 3
    assert memory.index.evicted > 0


def test_a_key_collision_is_not_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys that are all alike, tokens decide."""
    monkeypatch.setattr("engine.memory.index.page_key", lambda previous, page: b"same")
    alike = [b"same"] * 3
    monkeypatch.setattr("engine.memory.resume.page_keys", lambda root, tokens: [root, *alike])
    store = Bytes()
    memory = Memory(store, "f", pages=20, live=1, checkpoints=0, recurrent=False)
    for seed in (1, 2, 1):
        tokens = prompt(seed, 200)
        plan = memory.plan(encode(tokens), "")
        assert plan.position <= 64 or seed == 1
        lease = memory.open(plan, "", side=False)
        store.slots[lease.slot] = tokens[: plan.position]
        assert memory.grow(lease, 200)
        store.feed(lease, tokens, plan.position, 200)
        memory.advance(lease, tokens, 200)
        memory.close(lease, tokens, 200, TIP)
        audit(memory)


def test_keys_are_a_chain_seeded_by_fingerprint_and_namespace() -> None:
    roots = {root_key("a", "b"), root_key("ab", ""), root_key("a", ""), root_key("", "ab")}
    assert len(roots) == 4
    page = encode(range(64))
    first = page_key(root_key("a", ""), page)
    assert len(first) == 16 and page_key(first, page) != first


@pytest.mark.parametrize("shared", [0, 1, 2, 63, 64, 99, 100])
def test_common_tokens(shared: int) -> None:
    a, b = list(range(100)), [*range(shared), *range(1000, 1100 - shared)]
    assert common_tokens(encode(a), encode(b)) == shared
    assert common_tokens(encode(a), encode(a[:shared])) == shared


def look_up(history: History, root: bytes, tokens: bytes) -> Known:
    return history.look_up(page_keys(root, tokens), tokens)


def test_history_knows_what_was_computed_and_forgets_the_oldest() -> None:
    root, tokens = root_key("f", ""), prompt(1, 200)
    history = History(limit=6)
    key = root
    for at in range(0, 192, 64):
        page = encode(tokens[at : at + 64])
        history.add_page(key, page)
        key = page_key(key, page)
    history.add_page(key, encode(tokens[192:197]))
    history.add_checkpoint(key, encode(tokens[192:195]))
    known = look_up(history, root, encode([*tokens[:196], 999, 999]))
    assert known.tokens == 196 and known.checkpoints == (195,)
    assert look_up(history, root, encode(tokens[:100])).tokens == 100
    assert look_up(history, root, encode([999])).tokens == 0
    for other in range(6):
        history.add_page(root_key("g", str(other)), encode([1]))
    assert look_up(history, root, encode(tokens)).tokens < 196


def test_history_holds_no_more_than_its_limit_however_flat_it_is() -> None:
    """Many short prompts under one key, and chains that all leave one page: each page counts."""
    history, root = History(limit=50), root_key("f", "")
    for seed in range(200):
        tokens = encode(prompt(seed, 30))
        history.add_page(root, tokens)
        history.add_checkpoint(root, tokens[:80])
        assert look_up(history, root, tokens + encode([1])).tokens == 30
    assert len(history) == 50
    assert look_up(history, root, encode(prompt(199, 40))).checkpoints == (20,)
    assert look_up(history, root, encode(prompt(0, 40))).tokens == 0


def test_history_agrees_with_a_list_of_all_that_was_computed() -> None:
    rng = random.Random(1)
    history, root = History(limit=10_000), root_key("f", "")
    computed: list[list[int]] = []
    for _ in range(150):
        stem = rng.choice(computed)[: rng.randint(0, 200)] if computed else []
        tokens = stem + [rng.randint(0, 2) for _ in range(rng.randint(1, 100))]
        best = max((common_tokens(encode(one), encode(tokens)) for one in computed), default=0)
        assert look_up(history, root, encode(tokens)).tokens == best
        key = root
        for at in range(0, len(tokens), 64):
            page = encode(tokens[at : at + 64])
            history.add_page(key, page)
            key = page_key(key, page)
        computed.append(tokens)


def test_a_superseded_tip_goes_before_the_rest() -> None:
    store = Bytes()
    memory = Memory(store, "f", pages=40, live=1, checkpoints=3, recurrent=True)
    tokens: list[int] = []
    for turn in range(6):
        tokens = tokens + prompt(turn, 70)
        lease = memory.open(memory.plan(encode(tokens), ""), "s", side=False)
        fed = memory.plan(encode(tokens), "").position
        assert memory.grow(lease, len(tokens))
        store.feed(lease, tokens, fed, len(tokens))
        memory.advance(lease, tokens, len(tokens))
        if turn == 0:
            slot = memory.reserve_slot(lease, Want("system", 0.1))
            assert slot is not None
            store.copy_state(lease.slot, slot)
            memory.capture(lease, tokens, 70, slot, Want("system", 0.1))
            tokens = [*tokens, 7]
            assert memory.grow(lease, 71)
            store.feed(lease, tokens, 70, 71)
            memory.advance(lease, tokens, 71)
        memory.close(lease, tokens, len(tokens), TIP)
    assert {one.position for one in memory.checkpoints.all} >= {70, len(tokens)}
    audit(memory)


def test_equal_checkpoints_are_thinned_where_they_are_dense() -> None:
    store = Bytes()
    memory = Memory(store, "f", pages=60, live=1, checkpoints=8, recurrent=True)
    tokens = prompt(1, 3000)
    lease = memory.open(memory.plan(encode(tokens), ""), "s", side=False)
    for at in range(64, 3000, 64):
        assert memory.grow(lease, at)
        store.feed(lease, tokens, at - 64, at)
        memory.advance(lease, tokens, at)
        slot = memory.reserve_slot(lease, Want("x", 1.0))
        assert slot is not None
        store.copy_state(lease.slot, slot)
        memory.capture(lease, tokens, at, slot, Want("x", 1.0))
    positions = sorted(one.position for one in memory.checkpoints.all)
    assert len(positions) == 8
    assert max(b - a for a, b in zip([0, *positions], [*positions, 2944], strict=True)) <= 1024
