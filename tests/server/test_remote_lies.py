"""Remote engines that lie, send garbage or do not end: each request ends, and only what makes sense reaches clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from engine.remote.api import RemoteError
from engine.remote.sse import events
from parsers.load import Family
from tests.server.remote_doubles import JSON, FrontDoor, Say, SGLangDouble, VLLMDouble, front_door

pytestmark = pytest.mark.anyio


class Liar(SGLangDouble):
    """``sends``: what it answers to all but the probes; "" stands for an event that never comes."""

    sends: list[JSON | str] | Response = []  # noqa: RUF012

    def __init__(self, family: Family) -> None:
        super().__init__(family, "x")
        self.repeats = False

    async def _generate(self, request: Request) -> Response:
        if tuple((await request.json())["input_ids"]) == self._ours.prompt:
            return await super()._generate(request)
        sends = self.sends
        if isinstance(sends, Response):
            return sends

        async def sent() -> Any:
            for one in sends:
                if one == "":
                    await asyncio.Event().wait()
                yield f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n"

        return StreamingResponse(sent(), media_type="text/event-stream")


def event(ids: list[int], reason: str = "", **meta: Any) -> JSON:
    return {"output_ids": ids, "meta_info": {"finish_reason": {"type": reason} if reason else None, **meta}}


def scored(logprob: Any, other: int = 72) -> JSON:
    return event([72], "stop", output_token_logprobs=[[logprob, 72, None]], output_top_logprobs=[[[-1.0, other, None]]])


async def ask(door: FrontDoor, sends: list[JSON | str] | Response, **body: Any) -> tuple[int, JSON]:
    assert isinstance(door.double, Liar)
    door.double.sends = sends
    async with door.http() as http:
        answer = await http.post("/v1/completions", json={"model": "local-moe", "prompt": "hi", **body})
    await asyncio.wait_for(door.idle(), 30)
    read: JSON = json.loads(answer.text, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    return answer.status_code, read


async def test_no_more_than_was_asked_for(family: Family) -> None:
    """A remote that goes on is left behind, and told to stop."""
    end = family.stop_tokens[0]
    async with front_door(Liar(family)) as door:
        for sends in ([event([65] * 1000), event([66])], [event([65]), event([65, 65, 65, 65]), ""]):
            _, said = await ask(door, [*sends], max_tokens=4)
            assert (said["choices"][0]["text"], said["choices"][0]["finish_reason"]) == ("AAAA", "length")
            assert said["usage"]["completion_tokens"] == 4
        for sends in ([event([65, end, 66, 67])], [event([65, end]), event([66]), ""]):
            _, said = await ask(door, [*sends], max_tokens=4)
            assert (said["choices"][0]["text"], said["choices"][0]["finish_reason"]) == ("A", "stop")
            assert said["usage"]["completion_tokens"] == 2
        while len(door.double.aborted) < 4:
            await asyncio.sleep(0.005)


async def test_an_answer_whose_stream_does_not_end(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.remote.client.END_SECONDS", 0.01)
    async with front_door(Liar(family)) as door:
        _, said = await ask(door, [event([65], "stop"), ""])
    assert (said["choices"][0]["text"], said["choices"][0]["finish_reason"]) == ("A", "stop")


async def test_an_answer_that_falls_silent_is_given_up(family: Family) -> None:
    """The first token may take longer than that."""
    async with front_door(Liar(family), silence=0.2) as door:
        status, said = await ask(door, [event([65]), ""], max_tokens=4)
        assert status == 503 and "fell silent in the midst of the answer" in said["error"]["message"], said
        while not door.double.aborted:
            await asyncio.sleep(0.005)
        assert door.state.engine.info is not None
        late = StreamingResponse(after(0.6, event([65], "stop")), media_type="text/event-stream")
        status, said = await ask(door, late, max_tokens=4)
        assert (status, said["choices"][0]["text"]) == (200, "A")


async def after(seconds: float, one: JSON) -> AsyncIterator[str]:
    await asyncio.sleep(seconds)
    yield f"data: {json.dumps(one)}\n\n"


NONSENSE: list[list[JSON | str]] = [
    ["{]"],
    ["[" * 100_000],
    [event([65], "stop"), event([66])],
    [event([1 << 70], "stop")],
    [{"output_ids": [65], "meta_info": {"finish_reason": {"type": "stop", "matched": 99_999}}}],
    [event([72], "stop")],
    [scored(-1.0, 99_999)],
    [scored(-1.0, -3)],
    [scored(-1.0, 1 << 70)],
]


@pytest.mark.parametrize("sends", NONSENSE, ids=range(len(NONSENSE)))
async def test_nonsense_is_an_error_that_the_log_names(
    family: Family, sends: list[JSON | str], caplog: pytest.LogCaptureFixture
) -> None:
    async with front_door(Liar(family)) as door:
        status, said = await ask(door, sends, logprobs=1)
        assert (status, said["error"]["type"]) == (500, "server_error")
    assert "SGLang sent" in caplog.text


@pytest.mark.parametrize(
    ("logprob", "told"), [("NaN", -9999.0), ("null", -9999.0), ("-1e999", -9999.0), ("1e999", 0.0)]
)
async def test_numbers_that_json_has_not(family: Family, logprob: str, told: float) -> None:
    async with front_door(Liar(family)) as door:
        _, said = await ask(door, [json.dumps(scored("LOGPROB")).replace('"LOGPROB"', logprob)], logprobs=1)
    assert said["choices"][0]["logprobs"]["token_logprobs"] == [told]


@pytest.mark.parametrize(
    "meta", [{"cached_tokens": -5}, {"cached_tokens": 2, "cached_tokens_details": {"device": -1, "host": 3}}]
)
async def test_counts_below_nothing_are_not_believed(family: Family, meta: Any) -> None:
    async with front_door(Liar(family)) as door:
        _, said = await ask(door, [event([65], "stop", **meta)])
        assert said["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
        assert (await door.engine.stats()).values["unreported"] == 1


@pytest.mark.parametrize(
    ("refusal", "mark"),
    [
        (Response("[" * 100_000, 400), "[[["),
        (Response(b"\xff" * (1 << 20), 400), "\ufffd"),
        (Response("", 400), "it does not say why"),
        (JSONResponse([1], 400), "[1]"),
        ([{"error": {"message": "bad luck", "code": "BadRequest"}}], "bad luck"),
        ([{"error": "bad luck"}], "bad luck"),
    ],
    ids=range(6),
)
async def test_refusals_of_any_form(family: Family, refusal: Any, mark: str) -> None:
    async with front_door(Liar(family)) as door:
        status, said = await ask(door, refusal)
    message = said["error"]["message"]
    assert status == 400 and message.startswith("SGLang refuses the request: ") and mark in message
    assert len(message) < 600


@pytest.mark.parametrize("status", [204, 302])
async def test_what_is_no_answer_is_told_to_the_log(
    family: Family, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with front_door(Liar(family)) as door:
        assert (await ask(door, Response("", status)))[0] == 500
    assert "SGLang failed" in caplog.text


@pytest.mark.parametrize("make", [SGLangDouble, VLLMDouble])
async def test_who_answers_the_probe_with_other_tokens_is_refused(family: Family, make: Any) -> None:
    double = make(family, "x")
    double.answer = lambda *_: (Say("", "length"), [99_999])
    with pytest.raises(RemoteError, match="the vocabulary does not have"):
        async with front_door(double):
            pass


async def test_descriptions_that_cannot_be_read_are_none(family: Family) -> None:
    class Deep(Liar):
        async def _model(self, _: Request) -> Response:
            return Response("[" * 100_000)

    with pytest.raises(RemoteError, match="neither SGLang nor vLLM"):
        async with front_door(Deep(family)):
            pass


async def test_an_event_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.remote.sse._LONGEST", 100)

    class Endless:
        async def aiter_bytes(self) -> Any:
            while True:
                yield b"data: xxxx"

    with pytest.raises(ValueError, match="does not end"):
        async for _ in events(Endless()):  # type: ignore[arg-type]
            pass
