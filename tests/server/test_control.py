"""Models, health, sessions, numbers; and who may ask."""

from __future__ import annotations

from typing import Any

import pytest

from parsers.load import Family
from tests.server.support import serving

pytestmark = pytest.mark.anyio

BODY: Any = {"model": "local-moe", "max_tokens": 90, "messages": [{"role": "user", "content": "Hi"}]}


async def test_both_sdks_list_the_models(family: Family) -> None:
    async with serving(family, model_aliases=("other",), context_length=4096) as server:
        ours = [model.id async for model in server.openai().models.list()]
        theirs = [model.id async for model in server.anthropic().models.list()]
        one = await server.openai().models.retrieve("other")
        display = await server.anthropic().models.retrieve("local-moe-small")
    assert ours == theirs == ["local-moe", "local-moe-small", "other"]
    assert one.model_dump()["context_length"] == 4096
    assert display.display_name == "local-moe-small"


async def test_aliases_are_served_under_their_own_name(family: Family) -> None:
    async with serving(family, "Hi<|im_end|>", model_aliases=("other",)) as server:
        message = await server.anthropic().messages.create(**{**BODY, "model": "other"})
    assert message.model == "other"


async def test_an_unknown_model_is_404(family: Family) -> None:
    async with serving(family) as server, server.http() as http:
        response = await http.get("/v1/models/nope")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_health_follows_the_worker(family: Family) -> None:
    async with serving(family, connect=False) as server, server.http() as http:
        before = await http.get("/health")
        await server.client.connect(server.socket)
        after = await http.get("/health")
    assert (before.status_code, before.json()["worker"]) == (503, "absent")
    assert (after.status_code, after.json()["worker"], after.json()["incarnation"]) == (200, "ready", "i1")


async def test_sessions_can_be_seen_and_forgotten(family: Family) -> None:
    async with serving(family, "Hi<|im_end|>") as server, server.http() as http:
        first = await http.post("/v1/messages", json=BODY)
        session = first.headers["x-ft-session"]
        listed = (await http.get("/v1/sessions")).json()["data"]
        shown = (await http.get(f"/v1/sessions/{session}")).json()
        gone = await http.delete(f"/v1/sessions/{session}")
        again = await http.delete(f"/v1/sessions/{session}")
        missing = await http.get(f"/v1/sessions/{session}")
    assert [entry["id"] for entry in listed] == [session]
    assert shown["requests"][0]["cause"] == "first_request"
    assert (gone.status_code, gone.json()) == (200, {"id": session, "deleted": True})
    assert (again.status_code, missing.status_code) == (404, 404)


async def test_stats_have_three_rooms(family: Family) -> None:
    async with serving(family, "Hi<|im_end|>") as server, server.http() as http:
        await http.post("/v1/messages", json=BODY)
        stats = (await http.get("/v1/stats")).json()
        await server.client.close()
        without = (await http.get("/v1/stats")).json()
    assert stats["engine"] == {"kv_bytes_used": 1.0}
    assert stats["sessions"]["misses_without_cause"] == 0
    assert (stats["server"]["requests"], stats["server"]["open_generations"]) == (1, 0)
    assert stats["server"]["output_tokens"] == 3
    assert without["engine"] is None


async def test_keys(family: Family) -> None:
    async with serving(family, "Hi<|im_end|>", api_keys=("one", "two")) as server, server.http() as http:
        cases = [
            ({}, 401),
            ({"authorization": "Bearer three"}, 401),
            ({"authorization": "Basic one"}, 401),
            ({"x-api-key": "one"}, 200),
            ({"authorization": "Bearer two"}, 200),
        ]
        for headers, status in cases:
            response = await http.post("/v1/messages", json=BODY, headers=headers)
            assert response.status_code == status, headers
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/stats")).status_code == 401
        first, second = (request.namespace for request in server.worker.requests)
    assert response.json()["type"] == "message"
    assert first
    assert second
    assert first != second


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8000"}, 403),
        ({"host": "localhost:9"}, 200),
        ({"host": "[::1]:9"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
    ],
)
async def test_foreign_names_are_refused(family: Family, headers: dict[str, str], status: int) -> None:
    async with serving(family) as server, server.http() as http:
        response = await http.get("/v1/models", headers=headers)
    assert response.status_code == status
    assert "access-control-allow-origin" not in response.headers


async def test_any_name_may_be_allowed(family: Family) -> None:
    async with serving(family, allowed_hosts=()) as server, server.http() as http:
        assert (await http.get("/v1/models", headers={"host": "box.example"})).status_code == 200
