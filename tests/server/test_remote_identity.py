"""Who answers at a remote engine's address, and what it lacks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine.api import Request, Sampling
from engine.client import EngineError
from engine.remote.api import Address, RemoteError
from launchers.remote import checkpoint
from parsers.load import Family
from tests.server.remote_doubles import CONTEXT, Double, SGLangDouble, VLLMDouble, front_door
from tests.server.remote_support import BOTH, Make, ask, ask_get, hidden, said

pytestmark = pytest.mark.anyio


async def refused(double: Double, **more: Any) -> str:
    with pytest.raises(RemoteError) as caught:
        async with front_door(double, **more):
            pass
    return str(caught.value)


@BOTH
async def test_keys(family: Family, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert "wants an API key" in await refused(make(family, key="s3cret"))
    assert "refuses our API key" in await refused(make(family, key="s3cret"), key="wr0ng")
    async with front_door(make(family, "x", key="s3cret"), key="s3cret") as door:
        assert said(await ask(door)) == "x"
        shown = json.dumps([await ask_get(door, "/health"), await ask_get(door, "/v1/stats")])
    for secret in ("s3cret", "wr0ng"):
        assert secret not in caplog.text + shown + repr(Address("http://x", secret)) + "".join(door.notes)


@BOTH
async def test_another_vocabulary_is_refused(family: Family, make: Make) -> None:
    double = make(family)
    double.tokenize = lambda text: [1, 2, 3]
    assert "another vocabulary" in await refused(double)


@BOTH
async def test_a_vocabulary_that_cannot_be_asked_for_is_said_so(family: Family, make: Make) -> None:
    double = make(family, "x")
    double.tokenize = None
    async with front_door(double) as door:
        assert "/tokenize" in door.engine.lacks["vocabulary"]


async def test_something_else_is_refused(family: Family) -> None:
    class Other(Double):
        def app(self) -> Starlette:
            async def page(_: HttpRequest) -> JSONResponse:
                return JSONResponse({"hello": "world"})

            return Starlette(routes=[Route("/{path:path}", page)])

    assert "neither SGLang nor vLLM" in await refused(Other(family))


async def test_one_that_sends_no_ids_is_refused(family: Family) -> None:
    class Old(VLLMDouble):
        async def _complete(self, request: HttpRequest) -> Any:
            body = await request.json()
            return JSONResponse({"error": {"message": f"unknown field, {len(body)} known"}}, 400)

    assert "token ids" in await refused(Old(family))


@pytest.mark.parametrize(("make", "most"), [(SGLangDouble, CONTEXT - 5), (hidden, CONTEXT - 1), (VLLMDouble, CONTEXT)])
async def test_its_context_is_the_limit(family: Family, make: Make, most: int) -> None:
    """SGLang takes prompts of at most ``max_req_input_len``, and some versions no request that fills the context."""
    async with front_door(make(family, "x")) as door:
        models = await ask_get(door, "/v1/models")
        assert models["data"][0]["context_length"] == most
        answer = await ask(door, text="x" * CONTEXT)
        assert answer.status_code == 400 and "prompt is too long" in answer.text and door.double.bodies == []


# ── what it lacks ───────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
async def test_what_it_lacks_is_told(family: Family, make: Make) -> None:
    async with front_door(make(family, "x")) as door:
        await ask(door)
        health, stats = await ask_get(door, "/health"), await ask_get(door, "/v1/stats")
        assert health["engine"]["kind"] == door.double.kind and health["engine"]["model"] == "qwen"
        for lacks in (health["engine"]["lacks"], stats["lacks"]):
            assert {"checkpoints", "store", "idle_prefill", "plan", "script"} <= set(lacks)
        assert stats["engine"]["requests"] == 1 and stats["engine"]["prompt_tokens"] > 0
        async with door.http() as http:
            assert (await http.get("/metrics")).status_code == 200
            for method, path in (("GET", "/v1/store"), ("POST", "/v1/store/verify"), ("POST", "/v1/store/gc")):
                answer = await http.request(method, path)
                assert answer.status_code == 404 and "not ours" in answer.json()["error"]["message"]
            forgotten = await http.post("/v1/store/forget", json={"all": True})
            assert forgotten.json() == {"sessions": 1}
            assert (await http.get("/v1/sessions")).json()["data"] == []


@BOTH
async def test_what_only_a_worker_of_ours_does_is_refused(family: Family, make: Make) -> None:
    async with front_door(make(family, "x")) as door:
        for request in (
            Request("a", (1,), Sampling(0), background=True),
            Request("b", (1,), Sampling(5, forced=(1, 2))),
            Request("c", (1 << 30,), Sampling(5)),
            Request("d", (), Sampling(5)),
        ):
            with pytest.raises(EngineError) as caught:
                door.engine.submit(request)
            assert caught.value.kind == "invalid"
        assert door.double.bodies == [] and door.engine.open == 0


def test_a_folder_without_weights_is_enough(family: Family, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "big", "text_config": {"vocab_size": 1000, "max_position_embeddings": 4096}})
    )
    ours = checkpoint(family, tmp_path)
    assert (ours.architecture, ours.vocab_size, ours.context_length) == ("big", 1000, 4096)
    assert checkpoint(family, tmp_path / "absent").vocab_size == family.tokenizer.vocab_size
