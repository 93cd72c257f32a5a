"""Digests of turns are remembered, within bounds."""

from __future__ import annotations

import pytest

from parsers.conversation import Text, Thinking, ToolCall, ToolOutput, Turn
from sessions import digest
from sessions.digest import Digests, TurnDigest, turn_digest

TURNS = (
    Turn("user", (Text("Hello"), Text(" "))),
    Turn("assistant", (Thinking("hm", "ftabc"), Text("Hi."), ToolCall("call_1", "ls", '{"a": 1}'))),
    Turn("tool", (ToolOutput("call_1", "a b"),)),
)


def test_each_turn_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Turn] = []

    def reading(turn: Turn) -> TurnDigest:
        read.append(turn)
        return turn_digest(turn)

    monkeypatch.setattr(digest, "turn_digest", reading)
    digests = Digests(10_000)
    for _ in range(3):
        again = [Turn(turn.role, tuple(turn.blocks)) for turn in TURNS]
        assert [digests.of(turn) for turn in again] == [turn_digest(turn) for turn in TURNS]
    assert read == list(TURNS)


def test_what_was_asked_for_least_recently_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Turn] = []
    monkeypatch.setattr(digest, "turn_digest", lambda turn: (read.append(turn), turn_digest(turn))[1])
    digests = Digests(200)
    one, two, three, huge = (Turn("user", (Text(text),)) for text in ("a" * 99, "b" * 99, "c" * 99, "d" * 9999))
    for turn in (one, two, three, one, three, huge, huge, two):
        assert digests.of(turn) == turn_digest(turn)
    assert read == [one, two, three, one, huge, huge, two]
