"""Traces: what is in them, that they are read as they were written, and what is made of a replay's rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import get_args

import pytest

from launchers import bench_replay
from launchers.bench_replay import SHIPPED
from launchers.replay import Replay, Row, advance, script_lines, write_script
from launchers.replay_chat import Chat
from launchers.trace import Ask, EditKind, Restart, Say, Trace, TraceError, words
from launchers.trace_generate import Plan, generate
from server.script import Script

HEAD = '{"seed":1,"scale":1,"system":1,"tool":1,"tools":[]}'
SMALL = Plan(seed=3, sessions=3, turns=3, steps=2.0, scale=0.05)


def test_the_same_plan_gives_the_same_trace(tmp_path: Path) -> None:
    trace = generate(SMALL)
    trace.save(tmp_path / "a.jsonl")
    generate(SMALL).save(tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert Trace.load(tmp_path / "a.jsonl") == trace


def test_a_large_trace_has_the_published_shape() -> None:
    trace = generate(Plan(sessions=30, turns=20, edits=0.0, restarts=False))
    asks = [step for step in trace.steps if isinstance(step, Ask) and step.kind == "main"]
    outputs = [2 * add.words for ask in asks for add in ask.add if add.role == "output"]
    waits = [ask.idle for ask in asks if ask.trigger == "user" and ask.idle]
    users = sum(ask.trigger in ("first", "user") for ask in asks)
    assert 7 <= len(asks) / users <= 11
    assert 550 <= median(outputs) <= 1_100
    assert sum(size for size in outputs if size >= 10_000) >= 0.4 * sum(outputs)
    assert 50 <= median(waits) <= 150
    assert not any(ask.edits for ask in asks if ask.shape != "chat")


def test_the_shipped_trace_has_every_kind_of_edit_and_both_restarts() -> None:
    trace = Trace.load(SHIPPED)
    asks = [step for step in trace.steps if isinstance(step, Ask)]
    assert {edit.kind for ask in asks for edit in ask.edits} == set(get_args(EditKind))
    assert [step.restart for step in trace.steps if isinstance(step, Restart)] == ["kill", "clean"]
    assert {ask.kind for ask in asks} == {"main", "side", "compaction", "subagent"}
    assert {ask.stop for ask in asks} == {"", "prefill", "decode"}
    assert any(ask.idle > 3600 for ask in asks)


def test_a_script_has_one_answer_for_every_request(tmp_path: Path) -> None:
    trace = Trace.load(SHIPPED)
    write_script(trace, tmp_path / "script.jsonl")
    assert len(Script.load(tmp_path / "script.jsonl").rules) == len(list(script_lines(trace)))
    asks = sum(isinstance(step, Ask) for step in trace.steps)
    again = sum(isinstance(step, Ask) and step.trigger == "retry" for step in trace.steps)
    assert len(list(script_lines(trace))) == asks - again


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "empty"), ("{}\n", "line 1: seed"), (f'{HEAD}\n{{"restart":"no"}}\n', "line 2")],
)
def test_a_bad_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        Trace.load(path)


def test_texts_depend_on_their_names_only() -> None:
    assert words("a", 20) == words("a", 20) != words("b", 20)
    assert words("a", 20).startswith(words("a", 10))


def test_clients_edit_what_they_hold() -> None:
    trace = generate(SMALL)
    chats: dict[tuple[str, str], Chat] = {}
    sizes: Counter[str] = Counter()
    for number, step in enumerate(trace.steps):
        if isinstance(step, Ask):
            chat = advance(trace, chats, number, step)
            assert chat.position()[0], "a request without a user's text cannot be answered by a script"
            sizes[step.session] += len(chat.request(step).body)
    assert len(sizes) == SMALL.sessions


def row(**fields: object) -> Row:
    ask = Ask(session="s", shape="chat", trigger="tool", say=Say(text=1))
    given = {
        "step": 0, "ask": ask, "restarted": False, "prompt": 100, "resumed": 90, "host": 0, "disk": 0, "cause": "none",
        "fresh": 10, "append": True, "expected": 100, "seconds": 0.1, "stopped": False, **fields,
    }  # fmt: skip
    return Row(**given)  # type: ignore[arg-type]


def test_goals_are_missed_by_name() -> None:
    replay = Replay.__new__(Replay)
    replay.rows, replay.skipped_restarts = [row(), row(resumed=50)], 0
    result = bench_replay.report(replay, Counter(prefilled_tokens=60, restored_unused=1), {})
    assert result["amplification_append"] == 3.0
    assert result["excess"]["all edits"]["requests"] == 0
    assert [text.split(" is ")[0] for text in result["missed"]] == [
        "amplification of what only appends",
        "amplification of everything",
        "restored_unused",
    ]
