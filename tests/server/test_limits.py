"""What one API key may ask for at once, while others are served."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from parsers.load import Family
from server.errors import ApiError
from server.limits import Limits
from tests.server.support import Answer, Server, serving
from tests.server.test_lifecycle import BODIES, PATHS, TEXT, leave

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

ANN: Any = {"x-api-key": "a"}
BOB: Any = {"x-api-key": "b"}
KEYS: Any = ({"name": "ann", "secret": "a"}, {"name": "bob", "secret": "b"})


async def post(http: httpx.AsyncClient, path: str, key: Any) -> httpx.Response:
    return await http.post(path, json=BODIES[path], headers=key)


async def until_waiting(server: Server, count: int) -> None:
    while server.state.limits.stats().get("ann", {}).get("waiting") != count:
        await asyncio.sleep(0.005)


@PATHS
async def test_a_key_with_too_many_waits_then_is_told_to_come_back(family: Family, path: str) -> None:
    answer = Answer(TEXT, hold_at=4)
    async with (
        serving(family, answer, api_keys=KEYS, key_running=1, key_waiting=1) as server,
        server.http() as http,
    ):
        first = asyncio.create_task(post(http, path, ANN))
        while not server.worker.requests:
            await asyncio.sleep(0.005)
        second = asyncio.create_task(post(http, path, ANN))
        await until_waiting(server, 1)
        third = await post(http, path, ANN)
        other = asyncio.create_task(post(http, path, BOB))
        while len(server.worker.requests) < 2:
            await asyncio.sleep(0.005)
        assert server.worker.requests[0].namespace != server.worker.requests[1].namespace
        answer.release.set()
        answers = await asyncio.gather(first, second, other)
        stats = (await http.get("/v1/stats", headers=ANN)).json()["keys"]
    assert [one.status_code for one in answers] == [200, 200, 200]
    assert third.status_code == 429
    assert int(third.headers["retry-after"]) >= 1
    assert third.json()["error"]["type"] == "rate_limit_error"
    assert stats == {
        "ann": {"requests": 3, "refused": 1, "running": 0, "waiting": 0},
        "bob": {"requests": 1, "refused": 0, "running": 0, "waiting": 0},
    }


@PATHS
async def test_nobody_waits_for_ever_for_a_place(family: Family, path: str) -> None:
    answer = Answer(TEXT, hold_at=4)
    limits: Any = {"api_keys": KEYS, "key_running": 1, "key_wait_seconds": 0.02}
    async with serving(family, answer, **limits) as server, server.http() as http:
        first = asyncio.create_task(post(http, path, ANN))
        while not server.worker.requests:
            await asyncio.sleep(0.005)
        assert (await post(http, path, ANN)).status_code == 429
        answer.release.set()
        assert (await first).status_code == 200
        assert len(server.worker.requests) == 1


@PATHS
@pytest.mark.parametrize("stream", [True, False])
async def test_whoever_goes_away_leaves_the_place(family: Family, path: str, stream: bool) -> None:
    answer = Answer(TEXT, hold_at=4)
    async with serving(family, answer, key_running=1) as server, server.http() as http:
        await leave(server, path, {**BODIES[path], "stream": stream})
        answer.hold_at = -1
        assert (await post(http, path, {})).status_code == 200
        await server.idle()
        assert server.state.limits.stats()[""]["running"] == 0


@PATHS
async def test_a_refused_request_leaves_the_place(family: Family, path: str) -> None:
    async with serving(family, "Hi<|im_end|>", key_running=1, context_length=20) as server, server.http() as http:
        for _ in range(3):
            assert (await post(http, path, {})).status_code == 400
        assert server.state.limits.stats()[""] == {"requests": 3, "refused": 0, "running": 0, "waiting": 0}


async def test_places_go_to_those_who_came_first() -> None:
    limits, order = Limits(1, 9, 60.0), []

    async def take(number: int) -> None:
        leave = await limits.enter("k")
        order.append(number)
        await asyncio.sleep(0)
        leave()

    await asyncio.gather(*(take(number) for number in range(9)))
    assert order == list(range(9))


async def test_a_place_given_to_one_who_just_left_goes_on() -> None:
    limits = Limits(1, 9, 60.0)
    leave = await limits.enter("k")
    waiting = [asyncio.create_task(limits.enter("k")) for _ in range(3)]
    await asyncio.sleep(0)
    leave()
    waiting[0].cancel()
    waiting[1].cancel()
    last = await asyncio.wait_for(waiting[2], 10)
    last()
    assert limits.stats()["k"] == {"requests": 4, "refused": 0, "running": 0, "waiting": 0}
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]


async def test_several_places_are_given_together_and_in_order() -> None:
    limits = Limits(3, 9, 60.0)
    order: list[str] = []

    async def take(name: str, places: int) -> Any:
        leave = await limits.enter("k", places)
        order.append(name)
        return leave

    first, second = await take("first", 2), await take("second", 1)
    wide, narrow = asyncio.create_task(take("wide", 3)), asyncio.create_task(take("narrow", 1))
    await asyncio.sleep(0)
    second()
    await asyncio.sleep(0)
    assert order == ["first", "second"]
    first()
    (await wide)()
    (await narrow)()
    assert order == ["first", "second", "wide", "narrow"]
    assert limits.stats()["k"]["running"] == 0


async def test_who_gives_up_waiting_lets_the_next_one_through() -> None:
    limits = Limits(2, 9, 60.0)
    await limits.enter("k")
    wide, narrow = asyncio.create_task(limits.enter("k", 2)), asyncio.create_task(limits.enter("k"))
    await asyncio.sleep(0)
    wide.cancel()
    await asyncio.wait_for(narrow, 5)
    assert limits.stats()["k"] == {"requests": 3, "refused": 0, "running": 2, "waiting": 0}


async def test_a_full_queue_is_refused_at_once() -> None:
    limits = Limits(1, 0, 60.0)
    await limits.enter("k")
    with pytest.raises(ApiError, match="1 answers to this API key are running"):
        await limits.enter("k")


async def test_keys_may_share_a_cache(family: Family) -> None:
    async with (
        serving(family, "Hi<|im_end|>", api_keys=KEYS, share_cache=True) as server,
        server.http() as http,
    ):
        session = (await post(http, "/v1/messages", ANN)).headers["x-ft-session"]
        assert (await http.get(f"/v1/sessions/{session}", headers=BOB)).status_code == 200
        assert (await http.get(f"/v1/sessions/{session}", headers={"x-api-key": "c"})).status_code == 401
        assert {request.namespace for request in server.worker.requests} == {""}
