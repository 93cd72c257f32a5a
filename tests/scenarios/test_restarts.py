"""Scenarios in which the server ends, or its files are not what they were."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from dialogue import Dialogue, House
from machine import HOUR, Machine, Make, tokens

from engine.memory.store import PageRef, Part, Reading, StateRef
from parsers.conversation import Text
from sessions.store.config import StoreKeyError
from sessions.store.store import Store

PAGE = 64


def fill(machine: Machine, count: int = 1000, seed: int = 1, session: str = "main") -> list[int]:
    """A prompt and its answer, on disk."""
    answer = machine.ask(tokens(seed, count), tokens(seed + 1, 20), session=session)
    machine.settle()
    return answer.tokens


def test_06_a_restart_costs_only_what_is_new(machines: Make) -> None:
    """Saving and restoring succeeded, and the state was computed again all the same."""
    machine = machines()
    known = fill(machine)
    machine.restart()
    answer = machine.ask(known + tokens(3, 40))
    assert answer.reuse.disk >= len(known) - 1
    assert machine.stats()["prefilled_tokens"] <= 41
    assert machine.stats().get("restored_unused", 0) == 0


def test_06_a_session_goes_on_after_a_restart_with_its_exact_tokens(house: House) -> None:
    """The same through the session layer: what was sampled is remembered, too."""
    chat = Dialogue(house)
    chat.user("Begin.")
    for number in range(4):
        last = chat.step(number)
    house.machine.settle()
    house.restart()
    reply = chat.send(Text("Still here."))
    assert reply.ids[: len(last.ids) + len(last.sampled)] == last.ids + last.sampled
    assert reply.report.resumed >= len(last.ids) + len(last.sampled) - 1
    assert reply.report.replayed == 0
    assert house.sessions.stats()["misses_without_cause"] == 0


def test_10_other_weights_never_get_state(hashes: Make) -> None:
    """State of other weights, template or dtype was used: fluent garbage, reported as a hit."""
    machine = hashes()
    known = fill(machine)
    machine.restart(weights="A'")
    answer = machine.ask(known + tokens(3, 40))
    assert answer.reuse.resumed == 0
    machine.restart(weights="A")
    assert machine.ask(known + tokens(3, 40)).reuse.disk >= len(known) - 1


class Lossy:
    """A store that has lost, or cannot read, some of what it once had."""

    def __init__(self, store: Store) -> None:
        self.inner = store
        self.lose_page = self.lose_states = -1
        self.fail: set[str] = set()
        self.failed = 0

    def page(self, parent: bytes, key: bytes, tokens: bytes) -> PageRef | None:
        ref = self.inner.page(parent, key, tokens)
        return None if ref is not None and ref.position == PAGE * self.lose_page else ref

    def pages(self, parent: bytes, keys: Sequence[bytes], tokens: bytes) -> list[PageRef]:
        return list(
            takewhile(lambda ref: ref.position != PAGE * self.lose_page, self.inner.pages(parent, keys, tokens))
        )

    def states(self, parent: bytes, rest: bytes) -> list[StateRef]:
        limit = self.lose_states
        return [one for one in self.inner.states(parent, rest) if limit < 0 or one.position <= limit]

    def read_parts(self, parts: Sequence[Part]) -> list[Reading]:
        return [self._read(part) for part in parts]

    def _read(self, part: Part) -> Reading:
        kind = "state" if hasattr(part[0], "tail") and not part[0].tokens else "page"  # type: ignore[union-attr]
        if kind in self.fail or "any" in self.fail:
            self.failed += 1
            return Lost()
        return self.inner.read_parts([part])[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Lost:
    def done(self) -> bool:
        return True

    def wait(self) -> bool:
        return False


def lossy(machines: Make, **more: Any) -> tuple[Machine, list[Lossy]]:
    made: list[Lossy] = []

    def wrap(store: Store) -> Lossy:
        made.append(Lossy(store))
        return made[-1]

    return machines(wrap=wrap, **more), made


@pytest.mark.parametrize("what", ["page", "states"])
def test_11_a_missing_component_moves_the_resume_point_back(machines: Make, what: str) -> None:
    """One component was missing in a tier, the others were restored: wrong answers in 20 of 20."""
    machine, stores = lossy(machines)
    first = machine.ask(tokens(1, 500), tokens(2, 30))
    asked = first.tokens + tokens(3, 500)
    known = machine.ask(asked, tokens(4, 30), anchors=(7 * PAGE, len(asked) - 1)).tokens
    machine.settle()
    machine.restart()
    if what == "page":
        stores[-1].lose_page = 12
    else:
        stores[-1].lose_states = 600
    answer = machine.ask(known + tokens(5, 30))
    assert 7 * PAGE <= answer.reuse.resumed <= 11 * PAGE
    machine.restart(store=False)
    again = machine.ask(known + tokens(5, 30))
    assert again.logits.keys() == answer.logits.keys()
    assert all((again.logits[at] == answer.logits[at]).all() for at in again.logits)


def test_13_damaged_files_cost_time_and_nothing_else(hashes: Make, tmp_path: Path) -> None:
    """A kill during a save left a checkpoint that failed to load, for ever."""
    machine = hashes(options={"segment_bytes": 1 << 18})
    known = fill(machine, 700)
    machine.stop()
    sound = tmp_path / "sound"
    shutil.copytree(machine.directory, sound)
    files = sorted(path.relative_to(sound) for path in sound.rglob("*") if path.is_file() and path.stat().st_size)
    for file in files:
        for damage in ("cut", "flip"):
            shutil.rmtree(machine.directory)
            shutil.copytree(sound, machine.directory)
            path = machine.directory / file
            raw = bytearray(path.read_bytes())
            if damage == "cut":
                del raw[len(raw) // 2 :]
            else:
                for at in range(len(raw) // 3, len(raw), max(1, len(raw) // 7)):
                    raw[at] ^= 0xFF
            path.write_bytes(raw)
            machine.start()
            machine.ask(known + tokens(3, 10))
            failures = machine.stats().get("failed_restores", 0)
            assert failures <= 20
            machine.settle()
            second = machine.ask(known + tokens(4, 10))
            assert second.reuse.resumed >= len(known) - PAGE
            machine.stop()
    machine.start()


@pytest.mark.parametrize("change", [{"context": 4096}, {"live": 1}, {"pages": 64}, {"checkpoints": 8}, {"chunk": 128}])
def test_19_settings_of_the_machine_are_not_part_of_a_states_name(machines: Make, change: dict[str, int]) -> None:
    """A key depended on the context size or on free memory: after a restart nothing was ever found."""
    if "context" in change:
        change = {**change, "live": 2}
    machine = machines()
    known = fill(machine)
    machine.restart(**change)
    assert machine.ask(known + tokens(3, 9)).reuse.disk >= len(known) - 1


def test_24_settings_of_the_store_keep_its_contents_or_refuse_loudly(hashes: Make) -> None:
    """A changed setting silently disabled the cache, or wiped it."""
    machine = hashes()
    known = fill(machine)
    for options in ({"host_bytes": 0}, {"quota_bytes": 1 << 27}, {"daily_write_bytes": 1}, {"session_states": 4}):
        machine.restart(options=options)
        assert machine.ask(known + tokens(3, 9)).reuse.disk >= len(known) - 1
    machine.stop()
    with pytest.raises(StoreKeyError):
        machine.start(options={"key": b"k" * 32})
    machine.start(options={})
    assert machine.ask(known + tokens(3, 9)).reuse.disk >= len(known) - 1


def test_25_a_failed_read_is_computed_instead(machines: Make) -> None:
    """A load that failed ended the request, or repeated for ever; an exact hit crashed."""
    machine, stores = lossy(machines)
    known = fill(machine)
    machine.restart()
    stores[-1].fail = {"any"}
    answer = machine.ask(known + tokens(3, 9))
    assert stores[-1].failed
    assert answer.reuse.resumed < len(known)
    assert answer.reuse.cause == "corrupt"
    assert machine.ask(answer.tokens[: len(known) + 9]).reuse.new == 1


def test_26_a_draft_models_state_is_a_component_like_any_other(hashes: Make) -> None:
    """The state of speculation was not saved: wrong tokens, or no speed, after a restore."""
    machine = hashes(extra=True)
    known = fill(machine)
    machine.restart()
    assert machine.ask(known + tokens(3, 40), tokens(4, 20)).reuse.disk >= len(known) - 1


def test_30_a_session_comes_back_after_hours_and_an_unload(hashes: Make) -> None:
    """An idle model was unloaded, and its state with it: minutes for the next message."""
    machine = hashes()
    known = fill(machine)
    machine.clock.now += 9 * HOUR
    machine.restart()
    machine.clock.now += 9 * HOUR
    machine.settle()
    assert machine.ask(known + tokens(3, 9)).reuse.disk >= len(known) - 1


def test_31_what_is_on_disk_is_found_without_its_index(machines: Make) -> None:
    """Files were on disk, their index was not: never loaded after a restart."""
    machine = machines()
    known = fill(machine)
    machine.stop()
    lost = [path for path in machine.directory.rglob("*.mdb")]
    assert lost
    for path in lost:
        path.unlink()
    machine.start()
    assert machine.ask(known + tokens(3, 9)).reuse.disk >= len(known) - 1


def test_32_kills_leave_nothing_behind(hashes: Make) -> None:
    """Temporary files and stale maps stayed after each kill."""
    machine = hashes(options={"segment_bytes": 1 << 18, "quota_bytes": 1 << 24})
    known = fill(machine, 500)
    machine.restart(kill=True)
    machine.settle()
    names = {path.name for path in machine.directory.rglob("*")}
    size = sum(path.stat().st_size for path in machine.directory.rglob("*") if path.is_file())
    for life in range(12):
        machine.ask(known + tokens(3, 10 + life % 3))
        machine.settle()
        machine.restart(kill=True)
        assert machine.ask(known + tokens(3, 9)).reuse.disk >= len(known) - 1
    after = {path.name for path in machine.directory.rglob("*")}
    assert not [name for name in after if name.endswith((".tmp", ".new", ".part"))]
    assert len(after) <= len(names) + 4
    assert sum(path.stat().st_size for path in machine.directory.rglob("*") if path.is_file()) <= size + (2 << 20)
