"""Forgetting a session on a model of attention alone, whose pages are shared by nature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine_support import Bench, prompt
from store_fake import FakeStore
from store_support import SHORT, check

STEM = prompt(1, 200)
MINE, OTHERS = STEM + prompt(2, 300), STEM + prompt(3, 300)


def test_pages_on_the_device_go_with_their_session_and_come_to_no_store_again(tiny: Callable[..., Path]) -> None:
    store = FakeStore()
    bench = Bench(tiny("qwen3_moe"), store)
    bench.ask(MINE, SHORT, session="mine")
    bench.ask(OTHERS, SHORT, session="others")
    assert {one.session for one in store.extents} == {"mine", "others"}
    assert store.ends == {"mine": 502, "others": 502}
    for one in [one for one in store.extents if one.session == "mine" and one.position > 200]:
        store.remove(one)
    bench.memory.forget("mine")
    while bench.memory.index.evict(side=False):
        pass
    check(bench, store)
    assert max(one.position for one in store.extents if one.session == "mine") <= 200


def test_another_session_still_has_what_it_shares(tiny: Callable[..., Path]) -> None:
    bench = Bench(tiny("qwen3_moe"))
    bench.ask(MINE, SHORT, session="mine")
    bench.ask(OTHERS, SHORT, session="others")
    bench.memory.forget("mine")
    bench.check()
    assert bench.ask(OTHERS, SHORT, session="others").reuse.resumed == 499
    assert 192 <= bench.ask(MINE, SHORT, session="new").reuse.resumed <= 200
    bench.memory.forget("others")
    bench.memory.forget("new")
    bench.check()
    assert bench.memory.index.pages == 0
