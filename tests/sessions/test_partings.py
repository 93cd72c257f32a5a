"""What changes in the middle of an opening is computed again once, and then has a checkpoint before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parsers.conversation import Conversation, Text, Turn
from sessions.causes import Reuse
from sessions.digest import pack
from sessions.harness import QWEN_CODE
from sessions.partings import DISTANCES, LENGTH, MOST, WIDTH, WORTH, lead, learnt, opening, places, split
from tests.sessions.conftest import BASH, CHAT
from tests.sessions.persist_support import Open

NEAR, FAR = DISTANCES[0], DISTANCES[-1]
RULES = " ".join(f"rule {number}" for number in range(200))


def opened_with(world: Any, project: str, status: str, replayed: int = 0, beside: str = "") -> list[int]:
    """How far before ``status`` the first prompt of a conversation has checkpoints because openings part there. All
    that comes before it was known, and ``replayed`` tokens of it were computed again."""
    middle = f"The snapshot of {beside} was taken when the conversation began, and may be out of date by now."
    system = f"You are an agent. {project} {RULES} {middle} Status: {status}. {RULES}"
    turns = (Turn("system", (Text(system),)), Turn("user", (Text("Build it."),)))
    visit = world.sessions.begin(CHAT, Conversation(turns, (BASH,)), "one")
    prompt = world.family.render(visit.conversation)
    anchors = visit.anchors(prompt)
    parted = prompt.ids.index(world.family.encode(status)[0])
    report = visit.report(prompt, Reuse(parted - replayed, replayed, len(prompt) - parted), "none")
    visit.finish(prompt, world.family.encode("Done."), (Text("Done."),), (), report, True)
    return [parted - anchor.position for anchor in anchors if anchor.kind == "parting" and anchor.pinned]


def test_the_place_is_learnt_and_found_in_other_projects(worlds: Any) -> None:
    world = worlds()
    assert opened_with(world, "a", "clean", beside="x") == []
    assert opened_with(world, "a", "dirty", replayed=WORTH, beside="x") == []
    assert opened_with(world, "a", "messy", replayed=WORTH + 1, beside="x") == []
    assert opened_with(world, "another", "tidy", beside="x") == [NEAR]
    assert opened_with(world, "a third", "new", beside="y") == [DISTANCES[1]]


def test_it_is_kept_over_a_restart_and_forgotten_with_a_session(worlds: Any, opened: Open) -> None:
    world = worlds(persist=opened())
    opened_with(world, "a", "messy", replayed=300)
    world.sessions.close()
    again = worlds(family=world.family, persist=opened())
    assert opened_with(again, "b", "tidy") == [NEAR]
    again.sessions.forget(again.sessions.list()[0].id)
    assert opened_with(again, "c", "neat") == []
    again.sessions.close()
    last = worlds(family=world.family, persist=opened())
    assert opened_with(last, "d", "fine") == []


def test_what_is_no_place_in_the_opening_is_not_remembered() -> None:
    tokens = pack(range(2000))
    assert lead(tokens, 1500, 1000, 300) == pack(range(1300 - LENGTH, 1300))
    assert lead(tokens, 1300, 1000, 300) == b""
    assert lead(tokens, 1500, 1000, WORTH) == b""
    assert lead(tokens, 1500, 0, WORTH + 1) == pack(range(WORTH + 1 - LENGTH, WORTH + 1))
    assert opening(()) == 0


@pytest.mark.parametrize("change", range(0, LENGTH, 7))
def test_the_nearest_words_that_are_there_count(change: int) -> None:
    """Whatever one of them was changed to: some of the others lead there."""
    known = (pack(range(5000, 5000 + LENGTH)),)
    ids = [*range(600), *range(5000, 5000 + LENGTH), *range(700, 900)]
    ids[600 + change] = 1
    end = 600 + LENGTH
    (place,) = places(known, pack(ids), 2000)
    assert place in [end - distance for distance in DISTANCES[:2]]
    assert places(known, pack(ids), 600 + LENGTH - FAR - 1) == set()


def test_tokens_are_found_and_not_bytes() -> None:
    wanted = (pack([0x01010101] * LENGTH),)
    shifted = pack([0x01010100, *[0x01010101] * (WIDTH - 1), 0x01, 5])
    assert places(wanted, shifted, 100) == set()
    assert places(wanted, shifted + wanted[0], 100) == {2 * WIDTH + 2}


def test_the_oldest_give_way() -> None:
    known: tuple[bytes, ...] = ()
    for number in (*range(MOST + 3), 5):
        known = learnt(known, pack([number] * LENGTH))
    assert len(known) == MOST
    assert known[-1] == pack([5] * LENGTH)
    assert split(b"".join(known)) == known


def test_what_is_known_of_a_harness_need_not_be_learnt(worlds: Any) -> None:
    """The first prompt of Qwen Code has a checkpoint before the state of the repository."""
    world, before = worlds(), QWEN_CODE.before_changes[0]
    meta = replace(CHAT, headers={"user-agent": "QwenCode/0.24.4"})
    system = Turn("system", (Text(f"You are Qwen Code. {RULES}\n{before} main\ngit: Status:\n{RULES}"),))
    visit = world.sessions.begin(meta, Conversation((system, Turn("user", (Text("Build it."),))), (BASH,)), "one")
    prompt = world.family.render(visit.conversation)
    (place,) = [anchor.position for anchor in visit.anchors(prompt) if anchor.kind == "parting" and anchor.pinned]
    assert list(prompt.ids[place - WIDTH : place]) == world.family.encode(before)[-WIDTH - 1 : -1]
