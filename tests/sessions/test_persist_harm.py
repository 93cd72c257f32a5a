"""Kept sessions over kills, damage and a full disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from parsers.conversation import Text
from tests.sessions.persist_support import Open, loop, restarted


def harmed(data: bytes, seed: int) -> bytes:
    chance = random.Random(seed)
    match seed % 4:
        case 0:
            return data[: chance.randrange(len(data))]
        case 1:
            return b""
        case 2:
            at = chance.randrange(len(data) - 4096)
            return data[:at] + chance.randbytes(4096) + data[at + 4096 :]
    changed = bytearray(data)
    for _ in range(40):
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(8, 200))])
def test_a_damaged_environment_stops_no_start_and_gives_no_wrong_tokens(
    worlds: Any, opened: Open, tmp_path: Path, seed: int
) -> None:
    persist = opened(map_bytes=1 << 16)
    world = worlds(persist=persist)
    agent = world.claude()
    loop(agent, 12)
    expected = agent.outputs("out").fork().ask(Text("Done."))
    sampled = {turn.sampled for turn in expected.visit.conversation.turns}
    persist.close()
    path = tmp_path / "sessions" / "env" / "data.mdb"
    path.write_bytes(harmed(path.read_bytes(), seed))
    again = restarted(worlds, world, agent, opened())
    outcome = agent.ask(Text("Done."))
    assert {turn.sampled for turn in outcome.visit.conversation.turns} <= sampled | {None}
    assert again.sessions.stats()["persist_on"] == 1
    if seed % 4 < 2:
        assert again.sessions.stats()["persist_damaged"] == 1
        assert (tmp_path / "sessions" / "damaged" / "data.mdb").exists()
    loop(again.claude())
    assert opened().on


FULL_DISK = """
import os, resource, sys
from pathlib import Path
from sessions.persist import Persist, PersistConfig

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
persist = Persist(PersistConfig(Path(sys.argv[1]), commit_seconds=0.001, map_bytes=1 << 16, clock=lambda: 0.0))
for number in range(30):
    persist.write(number.to_bytes(32, "big"), b"head", {b"a": os.urandom(100_000)}, used=0.0)
    assert persist.flush(10)
assert persist.stats()["persist_errors"] > 5
assert len(persist.read(bytes(32))[b"a"]) == 100_000
"""


def test_a_full_disk_loses_only_what_does_not_fit(opened: Open, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FULL_DISK, str(tmp_path / "sessions")],
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    persist = opened()
    kept = [group for group, _ in persist.heads(b"")]
    assert 4 < len(kept) < 12
    assert all(len(persist.read(group)[b"a"]) == 100_000 for group in kept)
    persist.write(bytes(32), b"head", {b"a": b"1"}, used=0.0)
    assert persist.read(bytes(32)) == {b"a": b"1"}
    assert persist.stats()["persist_damaged"] == persist.stats()["persist_corrupt"] == 0


def child_environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


WRITER = """
import sys
from pathlib import Path
from tests.sessions.conftest import FakeFamily, make_world, BASH
from sessions.anchors import PRIORITIES
from sessions.archive import ArchiveError
from sessions.persist import Persist, PersistConfig
from parsers.conversation import Text, ToolCall

config = PersistConfig(Path(sys.argv[1]), commit_seconds=0.01, map_bytes=1 << 16, max_bytes=3 << 20, clock=lambda: 0.0)
persist = Persist(config)
world = make_world(persist=persist)
agents = []
for number in range(10**6):
    world.clock[0] = 10_000.0 * int(sys.argv[2]) + number
    agent = world.chat().user(f"Task {sys.argv[2]} {number % 50}. " + "word " * 50)
    for step in range(3):
        agent.say(ToolCall("", "Bash", '{"command": "%d"}' % step))
        agent.outputs("ok")
    if number % 7 == 6:
        world.sessions.forget(world.sessions.list()[-1].id)
    if number % 5 == 0:
        persist.flush(10)
        print(world.sessions.list()[0].id, flush=True)
"""


def kill_a_writer(directory: Path, seed: int) -> str:
    """At any moment: in a commit, a growth, an eviction. Returns the last session that was there for certain."""
    command = [sys.executable, "-P", "-c", WRITER, str(directory), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(), text=True) as child:
        assert child.stdout is not None
        certain = child.stdout.readline()
        time.sleep(random.Random(seed).random() * 0.1)
        child.send_signal(signal.SIGKILL)
        certain += child.stdout.read()
    return certain.split("\n")[-2]


@pytest.mark.parametrize("rounds", [20, pytest.param(300, marks=[pytest.mark.deep, pytest.mark.timeout(1800)])])
def test_killed_at_any_moment(worlds: Any, opened: Open, tmp_path: Path, rounds: int) -> None:
    for seed in range(rounds):
        certain = kill_a_writer(tmp_path / "sessions", seed)
        if seed % 4 and seed < rounds - 1:
            continue  # the next writer opens what this one left
        persist = opened()
        sessions = worlds(persist=persist).sessions
        assert persist.stats()["persist_damaged"] == 0
        summaries = sessions.list()
        assert certain in {summary.id for summary in summaries}
        for summary in summaries:
            detail = sessions.get(summary.id)
            assert [record.number for record in detail.requests] == list(range(1, summary.requests + 1))
            assert detail.summary.kept_bytes > 0
        assert persist.stats()["persist_corrupt"] == persist.stats()["persist_errors"] == 0
        persist.close()
