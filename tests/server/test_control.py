"""Models, health, sessions, numbers; and who may ask."""

from __future__ import annotations

import asyncio
import logging
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
    assert (gone.status_code, gone.json()) == (200, {"id": session, "deleted": True, "forgotten": 0.0})
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
            ({"authorization": "Bearer three", "x-api-key": "one"}, 200),
            ({"authorization": "Bearer three", "x-api-key": "three"}, 401),
            ({"authorization": "Bearer two"}, 200),
        ]
        for headers, status in cases:
            response = await http.post("/v1/messages", json=BODY, headers=headers)
            assert response.status_code == status, headers
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/stats")).status_code == 401
        first, again, second = (request.namespace for request in server.worker.requests)
    assert response.json()["type"] == "message"
    assert first
    assert second
    assert first == again != second


async def test_sessions_belong_to_a_key(family: Family) -> None:
    one, two = {"x-api-key": "one"}, {"x-api-key": "two"}
    async with serving(family, "Hi<|im_end|>", api_keys=("one", "two")) as server, server.http() as http:
        session = (await http.post("/v1/messages", json=BODY, headers=one)).headers["x-ft-session"]
        path = f"/v1/sessions/{session}"
        assert (await http.get("/v1/sessions", headers=two)).json()["data"] == []
        assert (await http.get(path, headers=two)).status_code == 404
        assert (await http.delete(path, headers=two)).status_code == 404
        listed = await http.get("/v1/sessions", headers=one)
        shown = await http.get(path, headers=one)
        assert (await http.delete(path, headers=one)).status_code == 200
        namespace = server.worker.requests[0].namespace
    assert [entry["id"] for entry in listed.json()["data"]] == [session]
    assert shown.status_code == 200
    assert namespace
    assert namespace not in listed.text + shown.text


async def test_a_session_id_that_is_no_text_is_none(family: Family) -> None:
    body = {**BODY, "metadata": {"user_id": '{"session_id": "\\ud800x"}'}}
    async with serving(family, "Hi<|im_end|>") as server, server.http() as http:
        assert (await http.post("/v1/messages", json=body)).status_code == 200
        listed = await http.get("/v1/sessions")
    assert [entry["client_id"] for entry in listed.json()["data"]] == [""]


async def test_a_worker_without_progress_is_seen(family: Family) -> None:
    """This one never answers a ping."""
    async with serving(family, stalled_seconds=0.01) as server, server.http() as http:
        assert (await http.get("/health")).status_code == 200
        ping = asyncio.create_task(server.client.ping())
        await asyncio.sleep(0.02)
        stalled = await http.get("/health")
        ping.cancel()
    assert (stalled.status_code, stalled.json()["status"], stalled.json()["worker"]) == (503, "stalled", "stalled")


@pytest.mark.parametrize("path", ["/v1/messages/", "/v1/models/../x%0aERROR forged%1b[31m", "//v1/messages"])
async def test_paths_that_are_not_ours(family: Family, path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(family) as server, server.http() as http:
            response = await http.post(f"{server.url}{path}", json=BODY)
            refused = await http.post(f"{server.url}{path}", json=BODY, headers={"host": "evil.example"})
    assert (response.status_code, refused.status_code) == (404, 403)
    assert "error" in response.json()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("server.")]
    assert len(ours) >= 2
    assert all(message.isprintable() for message in ours)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8000"}, 403),
        ({"host": "evil.example@localhost"}, 403),
        ({"host": "evil.example\\@localhost"}, 403),
        ({"host": "localhost/evil.example"}, 403),
        ({"host": "localhost?evil.example"}, 403),
        ({"origin": "http://evil.example@localhost"}, 403),
        ({"host": "LOCALHOST"}, 200),
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
