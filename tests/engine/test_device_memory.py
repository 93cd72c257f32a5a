"""The tests of restores and stores once more, with pages and states on a device: what moves is late, and lies in rings
and blocks of a host tier before the store. Then what only that has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import engine_support
import pytest
from device_double import Device
from engine_support import GREEDY, Anchor, Bench, prompt, replace, same_bits
from store_fake import FakeStore
from store_support import SHORT, check, page_bytes, resumable
from test_overlap import (  # noqa: F401 - run here, too
    test_a_state_with_a_number_that_is_none,
    test_abort_at_any_step,
    test_another_comes_after_the_first_chunk,
    test_others_go_on_from_the_checkpoint_as_it_was_read,
    test_two_restored_at_once_that_hardly_fit,
    test_what_turns_out_corrupt_on_the_way,
)
from test_poison import poisoned, test_pages_without_numbers_are_not_kept  # noqa: F401
from test_store import (  # noqa: F401
    test_a_store_that_offers_rubbish_again_and_again,
    test_abort_while_something_is_read,
    test_random_cut_points_across_a_restart,
    test_random_lives,
    test_what_is_corrupt_is_computed_again,
)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Every engine that a test loads has its pages there."""
    made, load = Device(seed=len(request.node.name)), engine_support.load_engine
    monkeypatch.setattr("engine.runner.InPlace", lambda cache, ops: made.mover(cache))
    monkeypatch.setattr(
        engine_support, "load_engine",
        lambda config, progress, store, *more: load(config, progress, lambda *it: made.tier(store(*it)), *more),
    )  # fmt: skip
    yield made
    made.check()
