"""Whatever becomes of a client's body, it is answered, or refused in its protocol's shape."""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

import httpx
import pytest

from parsers.load import Family
from tests.server.mutate import KINDS, Kind, mutated
from tests.server.support import events, serving
from tests.server.test_bad_input import check_shape

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(0)]

CALL = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
ANSWER = f"Look.</think>\n\nYes.\n{CALL}<|im_end|>"
LAST = {
    "/v1/messages": "message_stop",
    "/v1/responses": "response.completed",
    "/v1/chat/completions": "[DONE]",
    "/v1/completions": "[DONE]",
}
FEW, MANY = 200, 10_000
SEED = int(os.environ.get("FT_FUZZ_SEED", "1"))


def check(kind: Kind, response: httpx.Response) -> None:
    if response.status_code != 200:
        assert response.status_code in (400, 404, 413), response.text
        assert check_shape(kind.path, response.json())
    elif response.headers["content-type"].startswith("text/event-stream"):
        name, data = events(response.text)[-1]
        assert LAST[kind.path] in (name, data) or "response.incomplete" in name, response.text[-500:]
    else:
        assert isinstance(response.json(), dict)


async def fuzz(family: Family, kind: Kind, count: int) -> dict[int, int]:
    seen: dict[int, int] = {}
    rng = random.Random(f"{SEED} {kind.path} {json.dumps(kind.body)}")
    headers = {**kind.headers, "content-type": "application/json"}
    async with serving(family, ANSWER) as server, server.http() as http:
        good = await http.post(kind.path, json=kind.body, headers=headers)
        assert good.status_code == 200, good.text
        for number in range(count):
            body = mutated(kind.body, rng)
            try:
                response = await http.post(kind.path, content=body, headers=headers)
                check(kind, response)
            except (AssertionError, httpx.HTTPError, ValueError, KeyError) as error:
                raise AssertionError(f"number {number}: {body[:4000]!r}") from error
            seen[response.status_code] = seen.get(response.status_code, 0) + 1
        await asyncio.wait_for(server.idle(), 30)
    return seen


@pytest.mark.parametrize("name", KINDS)
async def test_mutated_bodies(family: Family, name: str) -> None:
    seen = await fuzz(family, KINDS[name], FEW)
    assert set(seen) >= {200, 400}, "the changes are too weak or too strong to find anything"


@pytest.mark.deep
@pytest.mark.parametrize("name", KINDS)
async def test_many_mutated_bodies(family: Family, name: str) -> None:
    await fuzz(family, KINDS[name], MANY)


@pytest.mark.parametrize(
    "header", ["authorization", "x-codex-turn-metadata", "session-id", "anthropic-beta", "user-agent"]
)
@pytest.mark.parametrize(
    "value", ["", "\xff\xfe", "{", '{"request_kind": 3}', "[" * 3000, "x" * 20_000, '{"a":"\\ud800"}']
)
async def test_odd_headers(family: Family, header: str, value: Any) -> None:
    async with serving(family, ANSWER) as server, server.http() as http:
        for kind in KINDS.values():
            headers = {**kind.headers, header: value.encode("latin-1")}
            check(kind, await http.post(kind.path, json=kind.body, headers=headers))
