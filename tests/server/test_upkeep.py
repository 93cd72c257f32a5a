"""Pins, archives, forgetting, and the store behind them."""

from __future__ import annotations

import gc
from array import array
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import httpx
import pytest

from parsers.load import Family
from server.state import ServerState
from tests.server.support import serving

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {
    "model": "local-moe",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "Hello"}],
}
STORE = Path("/nowhere/store")
KEYS = ({"x-api-key": "one"}, {"x-api-key": "two"})


async def begin(http: httpx.AsyncClient, **headers: str) -> str:
    answer = await http.post("/v1/messages", json=BODY, headers=headers)
    return f"/v1/sessions/{answer.headers['x-ft-session']}"


async def test_a_session_is_forgotten_with_its_state(family: Family) -> None:
    async with serving(family, "Hi<|im_end|>", store=STORE) as server, server.http() as http:
        path = await begin(http)
        gone = await http.delete(path)
        assert (await http.get(path)).status_code == 404
        commands = server.worker.commands
    session = path.rsplit("/", 1)[1]
    assert (gone.status_code, gone.json()) == (200, {"id": session, "deleted": True, "forgotten": 3.0})
    assert commands == [("store_forget", {"session": session})]


@pytest.mark.parametrize("everything", [False, True])
async def test_no_words_stay_of_what_is_forgotten(family: Family, everything: bool) -> None:
    """Neither as text nor as tokens, in what is remembered so that it need not be read or rendered again."""
    words = "xylophone quartz"
    tool = {"name": "look", "description": f"Looks at a {words}.", "input_schema": {"type": "object"}}
    said = [
        {"type": "text", "text": f"A {words}."},
        {"type": "tool_use", "id": "c", "name": "look", "input": {"a": words}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": f"The {words}"}
    messages = [{"role": "user", "content": f"Where is the {words}?"}, {"role": "assistant", "content": said}]
    messages.append({"role": "user", "content": [result]})
    async with serving(family, "Hi<|im_end|>", store=STORE) as server, server.http() as http:
        for _ in range(2):
            answer = await http.post("/v1/messages", json={**BODY, "tools": [tool], "messages": messages})
            assert answer.status_code == 200, answer.text
            messages += [{"role": "assistant", "content": f"Hi {words}"}, {"role": "user", "content": f"More {words}."}]
        server.worker.requests.clear()
        assert found(server.state, words, family)
        if everything:
            gone = await http.post("/v1/store/forget", json={"all": True})
        else:
            gone = await http.delete(f"/v1/sessions/{answer.headers['x-ft-session']}")
        assert gone.status_code == 200, gone.text
        assert not found(server.state, words, family)


def found(state: ServerState, words: str, family: Family) -> list[object]:
    """Where they are in what the state refers to, directly or not."""
    packed = (words.encode(), array("I", family.tokenizer.encode(" " + words)).tobytes())
    ahead: list[object] = [state.bodies, state.family, state.sessions, state.idle, state.history]
    seen, hits = {id(one) for one in ahead}, list[object]()
    while ahead:
        thing = ahead.pop()
        data = thing.encode("utf-8", "replace") if isinstance(thing, str) else thing
        if isinstance(data, bytes | array) and any(one in bytes(data) for one in packed):
            hits.append(thing)
        elif not isinstance(thing, type | ModuleType | FunctionType):
            new = [one for one in gc.get_referents(thing) if id(one) not in seen]
            seen.update(map(id, new))
            ahead += new
    return hits


async def test_nothing_is_forgotten_by_halves(family: Family) -> None:
    """Without a worker its part would stay."""
    async with serving(family, "Hi<|im_end|>", store=STORE) as server, server.http() as http:
        path = await begin(http)
        await server.client.close()
        assert (await http.delete(path)).status_code in (503, 529)
        assert (await http.get(path)).status_code == 200


async def test_pins(family: Family) -> None:
    async with serving(family, "Hi<|im_end|>", store=STORE) as server, server.http() as http:
        path = await begin(http)
        session = path.rsplit("/", 1)[1]
        pinned = (await http.post(f"{path}/pin")).json()
        assert (await http.get(path)).json()["summary"]["pinned"] is True
        unpinned = (await http.post(f"{path}/unpin")).json()
        assert (await http.get(path)).json()["summary"]["pinned"] is False
        commands = server.worker.commands
        assert (await http.post("/v1/sessions/none/pin")).status_code == 404
        assert (await http.get(f"{path}/pin")).status_code == 405
    assert pinned == {"id": session, "pinned": True, "checkpoints": 2.0}
    assert unpinned == {"id": session, "pinned": False, "checkpoints": 2.0}
    assert commands == [("store_pin", {"session": session}), ("store_unpin", {"session": session})]


async def test_a_session_moves_by_its_archive(family: Family) -> None:
    async with serving(family, "Hi<|im_end|>") as server, server.http() as http:
        path = await begin(http)
        shown = (await http.get(path)).json()
        archive = (await http.get(f"{path}/export")).content
        await http.delete(path)
        taken = await http.post("/v1/sessions/import", content=archive)
        again = (await http.get(path)).json()
        damaged = await http.post("/v1/sessions/import", content=archive.replace(b"generic", b"another"))
        no_text = await http.post("/v1/sessions/import", content=b"\xff\xfe")
        assert server.worker.commands == []
    assert (taken.status_code, taken.json()) == (200, {"id": path.rsplit("/", 1)[1]})
    assert again["requests"] == shown["requests"] and again["branches"] == shown["branches"]
    assert damaged.status_code == no_text.status_code == 400
    assert "checksum" in damaged.text


async def test_other_keys_have_no_part_in_it(family: Family) -> None:
    one, two = KEYS
    async with serving(family, "Hi<|im_end|>", store=STORE, api_keys=("one", "two")) as server, server.http() as http:
        path = await begin(http, **one)
        archive = (await http.get(f"{path}/export", headers=one)).content
        for method, what in (("DELETE", ""), ("POST", "/pin"), ("POST", "/unpin"), ("GET", "/export")):
            assert (await http.request(method, path + what, headers=two)).status_code == 404
        stolen = await http.post("/v1/sessions/import", content=archive, headers=two)
        everything = await http.post("/v1/store/forget", json={"all": True}, headers=one)
        assert (await http.get(path, headers=one)).status_code == 200
        assert server.worker.commands == []
    assert (stolen.status_code, everything.status_code) == (400, 403)
    assert "another API key" in stolen.text and "one by one" in everything.text


async def test_the_store(family: Family) -> None:
    async with serving(family, "Hi<|im_end|>", store=STORE) as server, server.http() as http:
        path = await begin(http)
        stat = (await http.get("/v1/store")).json()
        assert (stat["directory"], stat["extents"]) == (str(STORE), 7.0)
        for action in ("verify", "gc"):
            assert (await http.post(f"/v1/store/{action}")).json()["ok"] is True
        for body in ({}, {"all": False}, {"all": True, "session": "x"}, []):
            assert (await http.post("/v1/store/forget", json=body)).status_code == 400
        gone = await http.post("/v1/store/forget", json={"all": True})
        assert (await http.get(path)).status_code == 404
        unknown = await http.post("/v1/store/burn")
        names = [name for name, _ in server.worker.commands]
        await server.client.close()
        assert (await http.get("/v1/store")).status_code == 503
    assert (gone.json()["sessions"], gone.json()["forgotten"]) == (1, 3.0)
    assert names == ["store_stat", "store_verify", "store_gc", "store_forget", "store_gc"]
    assert unknown.status_code == 404 and "verify, gc and forget" in unknown.text


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/store"), ("POST", "/v1/store/verify")])
async def test_no_store(family: Family, method: str, path: str) -> None:
    async with serving(family) as server, server.http() as http:
        answer = await http.request(method, path)
    assert answer.status_code == 404 and "--no-store" in answer.text
