"""Every feature of every protocol with the vendor's own SDK: synchronous and not, streamed and not, over a socket too.
Whichever way is taken, the same is said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import anthropic
import openai
import pytest

from engine.api import Request
from parsers.load import Family
from tests.server import contract_chat, contract_messages, contract_responses
from tests.server.contract import WAYS, Case, Clients, Protocol, RefusedOnSocket, Way, meaning
from tests.server.support import Answer, FakeWorker, served

CASES = [*contract_messages.CASES, *contract_responses.CASES, *contract_chat.CASES, *contract_chat.COMPLETIONS]
FEATURES: dict[Protocol, tuple[str, ...]] = {
    "messages": contract_messages.FEATURES,
    "responses": contract_responses.FEATURES,
    "chat": contract_chat.FEATURES,
    "completions": contract_chat.RAW,
}
REFUSALS = (anthropic.APIStatusError, openai.APIStatusError, RefusedOnSocket)


@dataclass
class Stage:
    """A server whose worker says what the case at hand wants."""

    clients: Clients
    worker: FakeWorker
    case: list[Case]


@contextmanager
def staged(family: Family, **settings: Any) -> Iterator[Stage]:
    at_hand = CASES[:1]
    with served(family, lambda request: said(at_hand[0], request), **settings) as (server, loop):
        clients = Clients(server.url, loop)
        yield Stage(clients, server.worker, at_hand)
        clients.close()


@pytest.fixture(scope="module")
def stage(family: Family) -> Iterator[Stage]:
    with staged(family) as one:
        yield one


def said(case: Case, request: Request) -> Answer:
    answer = case.answer(request) if callable(case.answer) else case.answer
    return Answer(answer) if isinstance(answer, str) else answer


@pytest.mark.parametrize("protocol", FEATURES)
def test_no_feature_is_left_out(protocol: Protocol) -> None:
    tested = {(case.feature, way) for case in CASES if case.protocol == protocol for way in case.ways}
    assert tested == {(feature, way) for feature in FEATURES[protocol] for way in WAYS[protocol]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{cast(Case, case).protocol}: {cast(Case, case).feature}")
def test_feature(family: Family, stage: Stage, case: Case) -> None:
    stage.case[:] = [case]
    meanings = []
    for way in case.ways:
        for sync in (True, False):
            del stage.worker.requests[:]
            if case.refused:
                with pytest.raises(REFUSALS, match=case.refused):
                    stage.clients.ask(case, way, sync=sync)
                continue
            made = stage.clients.ask(case, way, sync=sync)
            assert case.holds(made), (way, sync, made)
            check_engine(family, case, stage.worker.requests)
            meanings.append(meaning(made))
    for one in meanings[1:]:
        assert one == meanings[0]


TEXTS = [next(case for case in CASES if (case.protocol, case.feature) == (one, "text")) for one in FEATURES]
"""The plainest case of each protocol."""


def test_signs_of_life_are_no_part_of_an_answer(family: Family) -> None:
    """While the model takes its time, at the beginning and within."""

    def slow(case: Case) -> Answer:
        answer = Answer(str(case.answer), hold_at=3)
        asyncio.get_running_loop().call_later(0.05, answer.release.set)
        return answer

    with staged(family, keepalive_seconds=0.01) as stage:
        for case in TEXTS:
            stage.case[:] = [replace(case, answer=lambda _, case=case: slow(case))]
            for way in case.ways:
                for sync in (True, False):
                    assert case.holds(stage.clients.ask(stage.case[0], way, sync=sync)), (case.protocol, way, sync)


@pytest.mark.parametrize(
    ("refuse", "settings", "status"),
    [
        (None, {"api_keys": ("other",)}, 401),
        (("overloaded", "full"), {}, 429),
    ],
)
def test_refusals_have_the_types_of_the_sdks(family: Family, refuse: Any, settings: Any, status: int) -> None:
    """Before a stream begins, so that the SDK can ask again."""
    with staged(family, **settings) as stage:
        for case in TEXTS:
            stage.case[:] = [replace(case, answer=Answer("", refuse=refuse))]
            for way in ("whole", "stream"):
                for sync in (True, False):
                    with pytest.raises(REFUSALS) as caught:
                        stage.clients.ask(stage.case[0], cast(Way, way), sync=sync)
                    error = cast(anthropic.APIStatusError, caught.value)
                    assert error.status_code == status
                    assert ("retry-after" in error.response.headers) == (status == 429)


def check_engine(family: Family, case: Case, requests: list[Request]) -> None:
    """What it was asked for."""
    first, last = requests[0], requests[-1]
    text, at = family.tokenizer.decode(last.tokens), 0
    for mark in case.prompt:
        at = text.find(mark, at) + len(mark)
        assert at >= len(mark), (mark, text)
    assert not [mark for mark in case.absent if mark in text], text
    if case.sampled is not None:
        assert case.sampled(last), last.sampling
    if case.spliced:
        sampled = family.encode_raw(said(case, first).text)
        assert last.tokens[: len(first.tokens) + len(sampled)] == first.tokens + sampled, text
