"""A token whose numbers overflow fails the request that has it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_support import ARCHITECTURES, GREEDY, Anchor, Bench, Outcome, replace, same_bits
from store_fake import FakeStore
from torch import Tensor

from engine.layers.loader import Loader

BAD = 7
ONE = replace(GREEDY, max_tokens=1)


@pytest.fixture(params=ARCHITECTURES)
def poisoned(
    request: pytest.FixtureRequest, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], Path]:
    """A model in which everything that token ``BAD`` touches becomes infinite or NaN. No file says so: such files are
    refused."""
    embedding = Loader.embedding

    def make(value: float) -> Path:
        def read(loader: Loader, vocab: int, hidden: int) -> Tensor:
            table = embedding(loader, vocab, hidden)
            table[BAD] = value
            return table

        monkeypatch.setattr(Loader, "embedding", read)
        directory: Path = tiny(request.param)
        return directory

    return make


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_what_came_before_is_as_if_computed_alone(poisoned: Callable[[float], Path], value: float) -> None:
    directory = poisoned(value)
    bench = Bench(directory)
    start = [1, 2, 3, 4, 5]
    bench.ask([*start, BAD, 8, 9], ONE, anchors=(Anchor(5, "x", 1.0),))
    after = [*start, 9, 9]
    again = bench.ask(after, ONE)
    assert same_bits(again.logits, Bench(directory).ask(after, ONE).logits)
    assert again.failed is None


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_state_without_numbers_is_not_kept(poisoned: Callable[[float], Path], tokens: int) -> None:
    bench = Bench(poisoned(float("nan")))
    company = bench.submit([1, 2, 3], replace(GREEDY, max_tokens=5))
    failed: Outcome = bench.outcomes[bench.submit([4, 5, BAD, 6], replace(GREEDY, max_tokens=tokens))]
    bench.run()
    assert failed.failed is not None and failed.failed.kind == "internal"
    assert len(bench.outcomes[company].tokens) == 5
    assert all(one.position != 4 for one in bench.memory.checkpoints.all)
    again = bench.ask([4, 5, BAD, 6, 1], ONE)
    assert again.admitted is not None and again.admitted.resumed == 0
    bench.check()


def test_pages_without_numbers_are_not_kept(poisoned: Callable[[float], Path]) -> None:
    store = FakeStore()
    bench = Bench(poisoned(float("nan")), store)
    tokens = [*([1, 2, 3, 4] * 40), BAD, *([4, 5, 6] * 60)]
    for resumed in (0, 128):
        failed = bench.ask(tokens, ONE, anchors=(Anchor(128, "user", 9.0, pinned=True),))
        assert failed.failed is not None and failed.failed.kind == "internal"
        assert failed.admitted is not None and failed.admitted.resumed == resumed
    assert sorted(one.position for one in store.extents if not one.state) == [64, 128]
    assert bench.memory.index.pages == 2 and bench.stats()["pages_not_finite"] > 0
    bench.check()
