"""Sessions over restarts, kills, other models, keys, and damage."""

from __future__ import annotations

import os
import random
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parsers.conversation import Text, Thinking
from sessions.anchors import PRIORITIES
from sessions.archive import ArchiveError
from sessions.persist import Persist, PersistConfig
from sessions.session import Limits
from sessions.store.config import StoreBusy, StoreConfig, StoreKeyError
from sessions.store.store import open_store
from sessions.store.words import REMEDY
from tests.sessions.persist_support import Open, call, loop, restarted

KEY = b"0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("name", ["strips", "keeps", "qwen3_xml", "hermes"])
@pytest.mark.parametrize("harness", ["claude", "codex", "chat"])
def test_a_restart_in_a_tool_loop_changes_nothing(
    worlds: Any, families: Any, opened: Open, name: str, harness: str
) -> None:
    world = worlds(family=families[name](), persist=opened())
    agent = getattr(world, harness)()
    loop(agent)
    expected = agent.outputs("out").fork().ask(Text("Done."))
    persist = opened()
    again = restarted(worlds, world, agent, persist)
    summary = again.sessions.list()[0]
    assert (summary.id, summary.requests, summary.kept_bytes > 0) == (expected.visit.session_id, 4, True)
    outcome = agent.ask(Text("Done."))
    assert outcome.prompt == expected.prompt
    assert (outcome.visit.session_id, outcome.report.cause) == (expected.visit.session_id, "none")
    assert outcome.visit.conversation == expected.visit.conversation
    assert all(turn.sampled for turn in outcome.visit.conversation.turns if turn.role == "assistant")
    assert [record.number for record in again.sessions.get(summary.id).requests] == [1, 2, 3, 4, 5]
    assert again.sessions.stats()["persist_corrupt"] == 0


def test_a_worker_that_restarts_as_well_is_blamed_only_for_what_its_store_did_not_keep(
    worlds: Any, opened: Open
) -> None:
    world = worlds(persist=opened())
    agent = world.claude()
    loop(agent)
    restarted(worlds, world, agent, opened())
    world.engine.incarnation = "another, with a store"
    assert agent.outputs("out").say(call()).report.cause == "none"
    restarted(worlds, world, agent, opened())
    world.engine.restart()
    report = agent.outputs("out").ask(call()).report
    assert (report.cause, report.resumed, report.replayed > 0) == ("worker_restart", 0, True)


def test_tokens_of_another_tokenizer_are_never_used(worlds: Any, families: Any, opened: Open) -> None:
    world = worlds(family=families["keeps"](), persist=opened())
    agent = world.claude()
    loop(agent)
    agent.outputs("out")
    other = families["strips"]()
    other.identity = b"another template"
    foreign = agent.fork(sessions=worlds(family=other, persist=opened()).sessions, family=other)
    outcome = foreign.ask(Text("Done."))
    assert outcome.report.cause == "fingerprint"
    assert all(turn.sampled is None for turn in outcome.visit.conversation.turns)
    restarted(worlds, world, agent, opened())
    assert agent.ask(Text("Done.")).report.cause == "none"


@pytest.mark.parametrize("harness", ["claude", "chat"])
def test_the_fingerprint_is_named_where_it_is_the_cause_and_only_there(worlds: Any, opened: Open, harness: str) -> None:
    world = worlds(persist=opened())
    agent = getattr(world, harness)()
    loop(agent)
    again = restarted(worlds, world, agent, opened())
    world.engine.restart()
    world.engine.fingerprint = "other weights"
    outcome = agent.outputs("out").say(call())
    assert (outcome.report.cause, outcome.report.resumed, outcome.report.replayed > 0) == ("fingerprint", 0, True)
    assert "cause=fingerprint" in outcome.report.header()
    assert again.sessions.get(outcome.visit.session_id).requests[-1].cause == "fingerprint"
    assert again.sessions.stats()["cause_fingerprint"] == 1
    assert agent.outputs("out").say(call()).report.cause == "none"
    world.engine.restart()
    assert agent.outputs("out").say(call()).report.cause == "worker_restart"


@pytest.mark.parametrize("harness", ["claude", "chat"])
def test_a_conversation_of_another_tokenizer_is_known_and_a_new_one_is_not(
    worlds: Any, families: Any, opened: Open, harness: str
) -> None:
    world = worlds(family=families["keeps"](), persist=opened())
    agent = getattr(world, harness)()
    loop(agent)
    other = families["keeps"]()
    other.identity = b"another template"
    foreign = worlds(family=other, persist=opened())
    new = replace(agent.meta, headers={**agent.meta.headers, "x-claude-code-session-id": "c2"})
    fresh = foreign.agent(new, system=["You are another."]).user("Hello.").ask(Text("Hi."))
    assert fresh.report.cause == "first_request"
    known = agent.fork(sessions=foreign.sessions, family=other).outputs("out").ask(Text("Done."))
    assert known.report.cause == "fingerprint"
    foreign.sessions.forget_all()
    again = agent.fork(sessions=foreign.sessions, family=other).outputs("out").ask(Text("Done."))
    assert again.report.cause == "first_request"


@pytest.mark.parametrize("all_of_it", [True, False])
def test_no_file_has_a_token_of_a_session_that_was_forgotten(
    worlds: Any, opened: Open, tmp_path: Path, all_of_it: bool
) -> None:
    def found() -> bool:
        files = [path for path in (tmp_path / "sessions").rglob("*") if path.is_file()]
        return any(piece in path.read_bytes() for path in files for piece in (b"xylophone", b"marimba"))

    persist = opened()
    world = worlds(persist=persist)
    agent = world.claude().user("xylophone " * 50)
    for number in range(5):
        agent.say(Thinking(f"marimba {number} " * 30), call(f"xylophone {number}"))
        agent.outputs("xylophone")
        assert persist.flush(10)
    other = world.chat().user("Something else.")
    other.say(Text("Yes."))
    assert persist.flush(10) and found()
    session = next(one.id for one in world.sessions.list() if one.harness == "claude-code")
    assert world.sessions.forget_all() if all_of_it else world.sessions.forget(session)
    assert world.sessions.flush(10) and not found()
    again = restarted(worlds, world, other, opened())
    assert len(again.sessions.list()) == (0 if all_of_it else 1)
    assert (other.user("Go on.").ask(Text("No.")).report.cause == "first_request") == all_of_it


def test_a_family_is_known_by_its_tokenizer_and_template(families: Any) -> None:
    one, same, other = families["qwen3_xml"](), families["qwen3_xml"](), families["hermes"]()
    assert one.identity == same.identity != other.identity
    assert len(one.identity) == 16


def test_everything_is_encrypted_with_a_key(worlds: Any, opened: Open, tmp_path: Path) -> None:
    world = worlds(persist=opened(key=KEY))
    agent = world.claude().user("The secret word is xylophone.")
    agent.say(Thinking("xylophone"), call("xylophone"))
    persist = opened(key=KEY)
    restarted(worlds, world, agent, persist)
    assert agent.outputs("ok").ask(Text("Done.")).report.cause == "none"
    persist.close()
    files = [path for path in (tmp_path / "sessions").rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert not [path for path in files if b"xylophone" in path.read_bytes() or b"claude-code" in path.read_bytes()]
    for wrong in (KEY[::-1], None):
        with pytest.raises(StoreKeyError):
            opened(key=wrong)
    restarted(worlds, world, agent, opened(key=KEY))
    assert agent.ask(Text("Done.")).report.cause == "none"


def test_a_key_for_what_is_not_encrypted_is_refused(opened: Open) -> None:
    assert opened().on
    with pytest.raises(StoreKeyError):
        opened(key=KEY)


def test_files_are_private_and_belong_to_one_process(opened: Open, tmp_path: Path) -> None:
    persist = opened()
    persist.write(b"g" * 32, b"head", {b"a": b"1"}, used=0.0)
    assert persist.flush(10)
    for path in [tmp_path / "sessions", *(tmp_path / "sessions").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    with pytest.raises(StoreBusy) as busy:
        Persist(PersistConfig(tmp_path / "sessions"))
    assert busy.value.pid == os.getpid()


def test_a_directory_that_cannot_be_used_keeps_nothing_and_stops_nothing(
    worlds: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    persist = Persist(PersistConfig(tmp_path / "file" / "sessions"))
    assert "(Not a directory)" in caplog.text and REMEDY in caplog.text
    state = open_store(StoreConfig(tmp_path / "file" / "state", "a model", (4096,)))
    assert caplog.text.count(REMEDY) == 2 and "Errno" not in caplog.text
    state.close()
    world = worlds(persist=persist)
    agent = world.claude()
    loop(agent)
    stats = world.sessions.stats()
    assert (persist.on, stats["persist_on"], stats["persist_errors"], stats["sessions"]) == (False, 0, 1, 1)
    world.sessions.close()


def test_the_map_grows_and_only_changed_pieces_are_written(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    persist = opened(map_bytes=1 << 16)
    group, grown = b"g" * 32, random.Random(1).randbytes(3_000_000)
    persist.write(group, b"head", {b"a": grown[:-10]}, used=0.0)
    assert persist.flush(10)
    written: list[bytes] = []
    assert persist._env is not None
    close = persist._env._envelope.close
    monkeypatch.setattr(persist._env._envelope, "close", lambda key, data: (written.append(key), close(key, data))[1])
    persist.write(group, b"head", {b"a": grown, b"b": b""}, used=0.0)
    assert persist.flush(10)
    assert len(written) == 4, "the first piece with the length, the last one, the new value, and the head"
    assert persist.read(group) == {b"a": grown, b"b": b""}
    persist.write(group, b"head", {b"a": b"short", b"b": None}, used=0.0)
    assert persist.read(group) == {b"a": b"short"}
    assert opened().read(group) == {b"a": b"short"}
    assert opened().stats()["persist_errors"] == 0


def test_the_least_recently_used_go_when_there_is_too_much(opened: Open, tmp_path: Path) -> None:
    persist = opened(max_bytes=2_000_000, map_bytes=1 << 16)
    for number in range(60):
        group = number.to_bytes(32, "big")
        persist.write(group, b"head", {b"a": os.urandom(150_000)}, used=float(number), pinned=number == 3)
        assert persist.flush(10)
        assert persist.stats()["persist_bytes"] <= 2_000_000
    kept = [int.from_bytes(group, "big") for group, _ in persist.heads(b"")]
    assert kept[0] == 3
    assert kept[1:] == list(range(60 - len(kept) + 1, 60))
    assert len(kept) > 8
    assert (tmp_path / "sessions" / "env" / "data.mdb").stat().st_size < 4_000_000
    assert persist.stats()["persist_errors"] == 0


def test_what_does_not_fit_at_all_is_not_kept(opened: Open) -> None:
    persist = opened(max_bytes=1 << 20, map_bytes=1 << 16)
    persist.write(b"a" * 32, b"head", {b"a": bytes(20 << 20)}, used=0.0)
    assert persist.flush(20)
    assert persist.stats()["persist_errors"] == 1
    persist.write(b"b" * 32, b"head", {b"a": b"1"}, used=0.0)
    assert persist.read(b"b" * 32) == {b"a": b"1"}


def test_old_sessions_go_and_pinned_ones_stay(worlds: Any, opened: Open) -> None:
    world = worlds(persist=opened())
    for number in range(3):
        meta = world.claude().meta
        headers = {**meta.headers, "x-claude-code-session-id": str(number)}
        world.agent(replace(meta, headers=headers)).user("Hello").say(Text("Hi."))
    pinned = world.sessions.list()[1].id
    assert world.sessions.pin(pinned)
    assert not world.sessions.pin("unknown")
    later = worlds(family=world.family, persist=opened(clock=lambda: 31 * 86400.0))
    assert [(summary.id, summary.pinned) for summary in later.sessions.list()] == [(pinned, True)]
    assert later.sessions.stats()["persist_evicted"] == 2


def test_a_forgotten_session_is_gone_from_disk(worlds: Any, opened: Open) -> None:
    persist = opened()
    world = worlds(persist=persist)
    agent = world.claude()
    loop(agent)
    assert world.sessions.forget(world.sessions.list()[0].id)
    assert persist.flush(10)
    assert persist.stats()["persist_groups"] == 1, "what is known of the harness"
    restarted(worlds, world, agent, opened())
    assert agent.outputs("out").ask(Text("Done.")).report.cause == "first_request"


def test_sessions_sleep_instead_of_being_dropped(worlds: Any, opened: Open) -> None:
    world = worlds(Limits(max_tokens=3000), persist=opened())
    agents = []
    for number in range(12):
        meta = replace(world.claude().meta, session_hint=f"s{number}")
        agents.append(world.agent(meta))
        loop(agents[-1])
        assert world.sessions.stats()["session_tokens"] <= 3000
    agents += [agent.fork() for agent in agents]
    assert world.sessions.stats()["sessions_dropped"] == 0
    for agent in agents[:12]:
        outcome = agent.outputs("out").ask(Text("Done."))
        assert outcome.report.cause == "none"
        assert all(turn.sampled for turn in outcome.visit.conversation.turns if turn.role == "assistant")
    assert {summary.kept_bytes > 0 for summary in world.sessions.list()} == {True}
    assert [len(world.sessions.get(summary.id).requests) for summary in world.sessions.list()] == [4] * 12


def test_a_dropped_branch_leaves_no_values(worlds: Any, opened: Open) -> None:
    persist = opened()
    world = worlds(Limits(branches=2), persist=persist)
    meta = world.claude().meta
    for number in range(6):
        headers = {**meta.headers, "x-claude-code-agent-id": str(number)}
        world.agent(replace(meta, headers=headers)).user("Help.").say(call())
    session = world.sessions.list()[0]
    values = persist.read(world.family.identity + bytes.fromhex(session.id))
    assert len([name for name in values if name.startswith(b"branch/")]) == 2
    again = worlds(family=world.family, persist=opened())
    assert again.sessions.get(session.id).branches == ("4", "5")


def test_an_archive_moves_a_session(worlds: Any, families: Any, opened: Open) -> None:
    world = worlds(family=families["qwen3_xml"](), persist=opened())
    agent = world.chat()
    loop(agent)
    id = world.sessions.list()[0].id
    text = world.sessions.export(id)
    assert world.sessions.export("unknown") is None
    other = worlds(family=world.family, persist=opened(directory=opened()._config.directory.parent / "other"))
    assert other.sessions.import_archive(text) == id
    assert other.sessions.import_archive(text) == id
    assert len(other.sessions.list()) == 1
    assert other.sessions.export(id).splitlines()[2:-1] == text.splitlines()[2:-1]
    agent.sessions = other.sessions
    outcome = agent.outputs("out").ask(Text("Done."))
    assert (outcome.visit.session_id, outcome.report.cause) == (id, "none")
    assert other.sessions.stats()["echo_exact"] == 3


@pytest.mark.parametrize("harm", ["", "{}", "cut", "flip", "foreign"])
def test_an_archive_that_is_none_is_refused(worlds: Any, harm: str) -> None:
    world = worlds()
    loop(world.claude())
    text = world.sessions.export(world.sessions.list()[0].id)
    middle = len(text) // 2
    changed = {
        "cut": text[:middle],
        "flip": text[:middle] + chr(ord(text[middle]) ^ 1) + text[middle + 1 :],
        "foreign": text,
    }
    family = replace(world.family, identity=b"other") if harm == "foreign" else world.family
    with pytest.raises(ArchiveError):
        worlds(family=family).sessions.import_archive(changed.get(harm, harm))


def test_habits_of_a_harness_are_kept(worlds: Any, opened: Open) -> None:
    world = worlds(persist=opened())
    agent = world.claude()
    for _ in range(12):
        agent.user("Do it.").say(Thinking("hm"), call())
        agent.outputs("ok").say(Text("Done."))
    again = restarted(worlds, world, agent, opened())
    assert loop_start_priority(agent) > 1.5 * PRIORITIES["loop_start"]
    assert loop_start_priority(loop_ended(again.chat())) == pytest.approx(PRIORITIES["loop_start"])


def loop_ended(agent: Any) -> Any:
    loop(agent, 1)
    agent.outputs("ok").say(Text("Done."))
    return agent


def loop_start_priority(agent: Any) -> float:
    outcome = agent.user("Go on.").ask(Text("Yes."))
    return next(p.priority for p in outcome.visit.anchors(outcome.prompt) if p.kind == "loop_start")


def test_everything_is_forgotten_whoever_it_belongs_to(worlds: Any, families: Any, opened: Open) -> None:
    other = families["strips"]()
    other.identity = b"another template"
    loop(worlds(family=other, persist=opened()).claude())
    world = worlds(persist=opened())
    loop(world.claude())
    loop(world.codex())
    assert world.sessions.forget_all() == 3
    assert world.sessions.list() == []
    persist = opened()
    assert worlds(persist=persist).sessions.list() == [] and persist.stats()["persist_groups"] == 0


def test_an_archive_is_for_its_own_namespace(worlds: Any) -> None:
    world = worlds()
    loop(world.claude())
    (summary,) = world.sessions.list()
    archive = world.sessions.export(summary.id)
    with pytest.raises(ArchiveError, match="another API key"):
        world.sessions.import_archive(archive, "a namespace")
    assert world.sessions.import_archive(archive) == summary.id
