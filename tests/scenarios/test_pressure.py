"""Scenarios of too little room, of requests that end early or come together, and of a slow disk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from machine import Make, tokens

from engine.api import Anchor
from sessions.store.files import Buffer, Files

PAGE = 64


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def disk_use(directory: Path) -> int:
    return sum(path.stat().st_size for path in files_of(directory))


def test_07_side_requests_leave_the_main_session_alone(machines: Make) -> None:
    """A title generator drained the few snapshots: the main session's next request took minutes."""
    machine = machines(pages=64, checkpoints=6)
    known = machine.ask(tokens(1, 2000), tokens(2, 20)).tokens
    for number in range(20):
        machine.ask(tokens(100 + number, 700), session=f"side {number}", side=True)
    answer = machine.ask(known + tokens(3, 30))
    assert answer.reuse.device >= len(known) - 1
    assert answer.reuse.replayed == 0


def test_09_an_aborted_prefill_is_kept_and_progress_is_monotone(machines: Make) -> None:
    """Clients time out and send again: what was computed was lost, for ever. 84 of 86 misses were exact repeats."""
    machine = machines(chunk=128, pages=256)
    prompt = tokens(1, 3000)
    resumed = -1
    for _ in range(4):
        name = machine.submit(prompt)
        for _ in range(6):
            machine.step()
        machine.scheduler.abort(name)
        machine.step()
        assert machine.answers[name].reuse.resumed > resumed
        resumed = machine.answers[name].reuse.resumed
    name = machine.submit(prompt, tokens(2, 40))
    while len(machine.answers[name].tokens) < len(prompt) + 10:
        machine.step()
    machine.scheduler.abort(name)
    answer = machine.ask(prompt, tokens(2, 40))
    assert answer.reuse.replayed + answer.reuse.new <= PAGE


def test_12_a_state_that_is_no_number_is_never_kept(hashes: Make) -> None:
    """States with NaN in them were stored, and answered `!!!!` for ever after."""
    machine = hashes()
    known = machine.ask(tokens(1, 500), tokens(2, 20)).tokens
    name = machine.submit(known + tokens(3, 20), tokens(4, 40))
    while len(machine.answers[name].tokens) < len(known) + 30:
        machine.step()
    states = machine.scheduler.runner.cache.states
    slots = [one.lease.slot for one in machine.scheduler._running if one.lease]
    for slot in slots:
        states[0][slot].fill_(float("nan"))
    while name not in machine.done and name not in machine.failed:
        machine.step()
    poisoned = machine.answers[name].tokens
    assert machine.stats()["states_not_finite"] > 0
    machine.settle()
    machine.restart()
    machine.ask(poisoned + tokens(5, 20))


def test_15_eviction_never_takes_what_the_request_needs(hashes: Make) -> None:
    """With room for little more than one session, storing the one evicted what the other was about to use."""
    machine = hashes(pages=40, checkpoints=6)
    known = {name: machine.ask(tokens(seed, 2000), session=name).tokens for seed, name in ((1, "a"), (2, "b"))}
    for turn in range(4):
        for name in known:
            machine.settle()
            answer = machine.ask(known[name] + tokens(10 + turn, 20), session=name)
            assert answer.reuse.resumed >= len(known[name]) - 1 - PAGE
            assert answer.reuse.replayed <= PAGE
            known[name] = answer.tokens


@pytest.mark.parametrize("sessions", [60, pytest.param(1000, marks=pytest.mark.deep)])
def test_16_the_quota_holds_at_every_moment(hashes: Make, sessions: int) -> None:
    """Quotas were not honoured, millions of files used up the inodes, temporary ones stayed."""
    quota = 2 << 20
    machine = hashes(pages=64, options={"quota_bytes": quota, "host_bytes": 1 << 20, "segment_bytes": 1 << 17})
    for number in range(sessions):
        machine.ask(tokens(number, 600), session=f"s{number}")
        machine.settle(10.0)
        assert disk_use(machine.directory) <= quota
        assert len(files_of(machine.directory)) <= quota // (1 << 17) + 16
    last = machine.ask(tokens(sessions - 1, 600), session=f"s{sessions - 1}")
    assert last.reuse.resumed >= 600 - PAGE


def test_17_states_are_weighed_not_counted(hashes: Make) -> None:
    """Checkpoints were counted, not weighed: gigabytes of RAM with many sessions."""
    host = 1 << 18
    machine = hashes(pages=128, checkpoints=16, options={"host_bytes": host, "queue_bytes": 1 << 18})
    for number in range(32):
        machine.ask(tokens(number, 500), session=f"s{number}")
        stats = machine.stats()
        assert stats["store_host_bytes"] <= host
        assert stats["store_queue_bytes"] <= 1 << 18
        assert stats["checkpoints_kept"] <= 16


def test_18_what_is_written_is_written_once(hashes: Make) -> None:
    """Every save wrote the whole prefix again: 137 GB in one session."""
    machine = hashes(pages=512, checkpoints=64)
    known = tokens(1, 1000)
    for step in range(20):
        known = machine.ask(known + tokens(10 + step, 850), tokens(100 + step, 50)).tokens
        machine.settle(2.0)
    machine.settle()
    stats = machine.stats()
    assert stats["store_bytes_written"] <= 1.3 * stats["store_live_bytes"]


class SlowFiles(Files):
    """Writes wait until they may go on."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def write(self, descriptor: int, parts: Sequence[Buffer], offset: int) -> None:
        self.gate.wait()
        super().write(descriptor, parts, offset)


def test_22_what_is_being_written_is_found(machines: Make) -> None:
    """The next turn looked up before the last one's write was committed, and computed everything again."""
    slow = SlowFiles()
    machine = machines(files=slow, pages=40, checkpoints=8)
    slow.gate.clear()
    try:
        known = machine.ask(tokens(1, 1500), tokens(2, 20), session="one").tokens
        machine.ask(tokens(3, 2200), session="two")
        answer = machine.ask(known + tokens(4, 20), session="one")
        assert answer.reuse.host > 0
        assert answer.reuse.resumed >= len(known) - 1
    finally:
        slow.gate.set()


@pytest.mark.parametrize("count", [63, 64, 65, 1000, 1024])
def test_23_a_repeated_prompt_costs_a_page_at_most(machines: Make, count: int) -> None:
    """Restores were cut to large blocks: a constant tax of 17 to 27 s."""
    machine = machines()
    prompt = tokens(count, count)
    machine.ask(prompt)
    again = machine.ask(prompt)
    assert again.reuse.replayed + again.reuse.new <= PAGE
    machine.settle()
    machine.restart()
    assert machine.ask(prompt).reuse.resumed >= count - PAGE


def test_33_the_host_tier_is_used(machines: Make) -> None:
    """The host tier was filled and never matched."""
    machine = machines(pages=40, checkpoints=8)
    known = machine.ask(tokens(1, 1500), session="one").tokens
    machine.settle()
    machine.ask(tokens(2, 2200), session="two")
    answer = machine.ask(known + tokens(3, 20), session="one")
    assert answer.reuse.host > 0
    assert answer.reuse.resumed >= len(known) - 1 - PAGE


def test_34_equal_prefixes_are_computed_once(machines: Make) -> None:
    """Parallel sub-agents each computed the same prefix."""
    machine = machines(chunk=256)
    shared = tokens(1, 2000)
    names = [machine.submit(shared + tokens(10 + one, 50), session=f"agent {one}") for one in range(4)]
    for name in names:
        machine.finish(name)
    assert machine.stats()["prefilled_tokens"] <= 2000 + 4 * (50 + PAGE)


@pytest.mark.parametrize("change", [{"chunk": 64}, {"live": 1}, {"pages": 48}])
def test_35_numbers_do_not_depend_on_how_the_engine_was_set_up(machines: Make, change: dict[str, int]) -> None:
    """Cache pressure flipped an answer: restored and computed state differed for reasons outside the store."""
    machine = machines()
    prompt, say = tokens(1, 900), tokens(2, 30)
    first = machine.ask(prompt, say, anchors=(Anchor(512, "user", 0.5), len(prompt) - 1))
    machine.settle()
    machine.restart(**change)
    second = machine.ask(prompt, say)
    machine.restart(store=False)
    third = machine.ask(prompt, say)
    assert second.reuse.disk > 0
    assert third.reuse.resumed == 0
    for answer in (second, third):
        assert answer.logits.keys() == first.logits.keys()
        assert all((answer.logits[at] == first.logits[at]).all() for at in first.logits)
