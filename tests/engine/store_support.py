"""What the tests of the engine over a store share."""

from __future__ import annotations

from pathlib import Path

from engine_support import GREEDY, Anchor, Bench, Outcome, pending_slots, prompt, replace
from store_fake import FakeStore

SHORT = replace(GREEDY, max_tokens=3)
BOTH = ("qwen3_5_moe", "qwen3_moe")


def check(bench: Bench, store: FakeStore) -> None:
    bench.check()
    assert pending_slots(bench.memory) == 0
    assert store.reading == 0 and not any(one.holds for one in store.extents)


def page_bytes(directory: Path) -> int:
    return int(Bench(directory).stats()["page_bytes"])


def resumable(directory: Path) -> tuple[FakeStore, list[int], Outcome]:
    """A store with a turn of 300 tokens and an anchor at 128, from another process; the prompt that goes on from it."""
    store = FakeStore()
    bench = Bench(directory, store)
    bench.ask(
        prompt(1, 293), replace(GREEDY, max_tokens=8), session="s", anchors=(Anchor(128, "user", 9.0, pinned=True),)
    )
    tokens = [*prompt(1, 293), *bench.outcomes["r1"].tokens, *prompt(2, 50)]
    bench.scheduler.close(1.0)
    return store.restarted(), tokens, Bench(directory).ask(tokens, SHORT)
