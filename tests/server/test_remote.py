"""Remote engines, before doubles of the two documented APIs: what is asked of them, and whatever they may do."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from engine.api import Done, Request, Sampling
from parsers.load import Family
from tests.server.remote_doubles import FrontDoor, Say, SGLangDouble, VLLMDouble, front_door
from tests.server.remote_support import BOTH, EVERY, Make, ask, ask_get, asked, prompt, said
from tests.server.support import events

pytestmark = pytest.mark.anyio


# ── what is asked ───────────────────────────────────────────────────────────────────────────────────────────────────


@EVERY
@pytest.mark.parametrize("step", [1, 5, 100])
async def test_ids_in_and_ids_out(family: Family, make: Make, step: int) -> None:
    async with front_door(make(family, Say("grüße, 漢字", step=step))) as door:
        answer = await ask(door)
        assert said(answer) == "grüße, 漢字" and answer.json()["stop_reason"] == "end_turn"
        rendered = family.tokenizer.decode(prompt(door.double.bodies[0]))
        assert rendered.startswith("<|im_start|>") and "hi<|im_end|>" in rendered
        cut = await ask(door, max_tokens=3)
        assert cut.json()["stop_reason"] == "max_tokens" and cut.json()["usage"]["output_tokens"] == 3
        await door.idle()


SAMPLING = {
    "temperature": 0.3, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 7,
    "logit_bias": {"65": 2.0}, "max_tokens": 9,
}  # fmt: skip


async def test_sampling_as_sglang_knows_it(family: Family) -> None:
    async with front_door(SGLangDouble(family, "x"), top_k=20, min_p=0.1, repetition_penalty=1.1) as door:
        assert (await ask(door, "/v1/chat/completions", **SAMPLING)).status_code == 200
        assert door.double.bodies[0]["sampling_params"] == {
            "max_new_tokens": 9, "temperature": 0.3, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "presence_penalty": 0.5,
            "frequency_penalty": -0.5, "repetition_penalty": 1.1, "sampling_seed": 7, "logit_bias": {"65": 2.0},
            "stop_token_ids": list(family.stop_tokens), "skip_special_tokens": False, "no_stop_trim": True,
        }  # fmt: skip


async def test_sampling_as_vllm_knows_it(family: Family) -> None:
    async with front_door(VLLMDouble(family, "x"), top_k=20, min_p=0.1, repetition_penalty=1.1) as door:
        assert (await ask(door, "/v1/chat/completions", **SAMPLING)).status_code == 200
        body = {name: value for name, value in door.double.bodies[0].items() if name not in ("prompt", "request_id")}
        assert body.pop("session_id")
        assert body == {
            "model": "qwen", "max_tokens": 9, "temperature": 0.3, "top_p": 0.9, "top_k": 20, "min_p": 0.1,
            "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "seed": 7,
            "logit_bias": {"65": 2.0}, "stop_token_ids": list(family.stop_tokens), "skip_special_tokens": False,
            "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip


async def test_seeds_are_only_sent_to_whoever_obeys_them(family: Family) -> None:
    double = SGLangDouble(family, "x")
    double.deterministic = False
    async with front_door(double) as door:
        await ask(door)
        assert "sampling_seed" not in double.bodies[0]["sampling_params"]
        assert "deterministic" in door.engine.lacks["seeds"]


@BOTH
async def test_a_session_goes_where_it_was_before(family: Family, make: Make) -> None:
    """By the fields that the two know, and by headers for a gateway before them."""
    async with front_door(make(family, "x")) as door:
        session = (await ask(door)).headers["x-ft-session"]
        body, headers = door.double.bodies[0], door.double.headers[0]
        assert body["session_id"] == session and body.get("routing_key", session) == session
        assert headers["x-session-id"] == headers["x-smg-routing-key"] == session


@pytest.mark.parametrize(("make", "field"), [(SGLangDouble, "extra_key"), (VLLMDouble, "cache_salt")])
async def test_api_keys_have_caches_of_their_own(family: Family, make: Make, field: str) -> None:
    async with front_door(make(family, "x")) as door:
        for namespace in ("", "a", "b"):
            request = Request(f"r{namespace}", (1, 2), Sampling(5), namespace=namespace)
            async for _ in door.engine.submit(request):
                pass
        none, *both = (body.get(field) for body in door.double.bodies)
        assert none is None and len(set(both)) == 2 and not {"a", "b"} & set(both)


@EVERY
async def test_log_probabilities(family: Family, make: Make) -> None:
    async with front_door(make(family, Say("abc", step=2))) as door:
        answer = await ask(door, "/v1/chat/completions", logprobs=True, top_logprobs=2, reasoning_effort="none")
        content = answer.json()["choices"][0]["logprobs"]["content"]
        assert [one["token"] for one in content] == ["a", "b", "c"]
        assert all(one["logprob"] == -0.5 for one in content)
        assert [[top["token"] for top in one["top_logprobs"]] for one in content] == [
            ["a", "b"],
            ["b", "c"],
            ["c", "d"],
        ]
        assert "logprobs" not in (await ask(door)).text


@BOTH
async def test_computing_a_prompt_alone(family: Family, make: Make) -> None:
    """The one token that has to be sampled is nobody's."""
    async with front_door(make(family, "x")) as door:
        stream = door.engine.submit(Request("r", (1, 2, 3), Sampling(0)))
        assert [type(reply) for reply in [reply async for reply in stream]] == [Done]


# ── grammars ────────────────────────────────────────────────────────────────────────────────────────────────────────

TOOL = {
    "name": "ls",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
CALL = "<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</parameter>\n</function>\n</tool_call>"
MUST = {"tools": [TOOL], "tool_choice": {"type": "any"}, "thinking": {"type": "disabled"}}


@BOTH
async def test_answers_held_to_a_grammar(family: Family, make: Make) -> None:
    """The double asserts with the library of the real ones that the answer follows it, end of turn included."""
    async with front_door(make(family, CALL)) as door:
        assert "grammars" not in door.engine.lacks
        answer = await ask(door, **MUST)
        assert answer.status_code == 200, answer.text
        assert answer.json()["content"][0]["input"] == {"path": "/srv"}


@BOTH
async def test_without_grammars_such_requests_are_refused_before_any_work(family: Family, make: Make) -> None:
    double = make(family, "x")
    double.grammars = False
    async with front_door(double) as door:
        assert "started with" in door.engine.lacks["grammars"]
        answer = await ask(door, **MUST)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
        assert "grammar" in answer.json()["error"]["message"] and double.bodies == []
        chat = await ask(door, "/v1/chat/completions", response_format={"type": "json_object"})
        assert chat.status_code == 400 and chat.json()["error"]["type"] == "invalid_request_error"
        assert double.bodies == [] and said(await ask(door)) == "x"


# ── what was reused ─────────────────────────────────────────────────────────────────────────────────────────────────


async def twice(door: FrontDoor) -> tuple[httpx.Response, int]:
    """The second of two equal requests, and how many tokens of it the double had."""
    await ask(door)
    second = await ask(door)
    return second, len(prompt(door.double.bodies[1])) - 1


@BOTH
async def test_a_tier_that_is_not_named_is_told_as_such(family: Family, make: Make) -> None:
    async with front_door(make(family, "x")) as door:
        second, cached = await twice(door)
        reuse = f"resumed={cached}, device=0, host=0, disk=0, remote={cached}, replayed=0, new=1, cause=none"
        assert second.headers.get("x-ft-reuse") in (reuse, "pending")
        usage = second.json()["usage"]
        assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (cached, 1)
        assert usage["cache_creation_input_tokens"] == 0
        detail = (await ask_get(door, f"/v1/sessions/{second.headers['x-ft-session']}"))["requests"][-1]
        assert detail["remote"] == detail["resumed"] == cached and detail["device"] == 0


async def test_tiers_that_are_named(family: Family) -> None:
    double = SGLangDouble(family, "x")
    double.tiers = True
    async with front_door(double) as door:
        await ask(door)
        double.host = 5
        second = await ask(door)
        cached = len(prompt(double.bodies[1])) - 1
        assert second.headers["x-ft-reuse"].startswith(
            f"resumed={cached}, device={cached - 5}, host=5, disk=0, replayed=0"
        )


async def test_what_is_not_told_is_not_made_up(family: Family) -> None:
    double = VLLMDouble(family, "x")
    double.details = False
    async with front_door(double) as door:
        second, _ = await twice(door)
        assert second.headers["x-ft-reuse"].endswith("cause=unreported") or second.headers["x-ft-reuse"] == "pending"
        assert second.json()["usage"]["cache_read_input_tokens"] == 0
        record = (await ask_get(door, f"/v1/sessions/{second.headers['x-ft-session']}"))["requests"][-1]
        assert (record["cause"], record["resumed"], record["replayed"]) == ("unreported", 0, 0)
        assert "--enable-prompt-tokens-details" in door.engine.lacks["reuse"]


# ── ends ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
async def test_who_leaves_ends_the_work(family: Family, make: Make) -> None:
    double = make(family, Say("a long answer", hold_at=3))
    async with front_door(double) as door:
        async with door.http() as http, http.stream("POST", "/v1/messages", json=asked(stream=True)) as answer:
            async for line in answer.aiter_lines():
                if "text_delta" in line:
                    break
        await asyncio.wait_for(double.seen_gone.wait(), 30)
        await door.idle()
        assert len(double.gone) == 1
        if isinstance(double, SGLangDouble):
            while not double.aborted:
                await asyncio.sleep(0.005)
            assert double.aborted == double.gone
        stats = await ask_get(door, "/v1/stats")
        assert stats["engine"]["aborted"] == 1 and stats["engine"]["running"] == 0


@BOTH
async def test_a_stop_string_ends_the_work(family: Family, make: Make) -> None:
    double = make(family, Say("one STOP two three", hold_at=12))
    async with front_door(double) as door:
        answer = await ask(door, stop_sequences=["STOP"])
        assert said(answer) == "one " and answer.json()["stop_reason"] == "stop_sequence"
        await asyncio.wait_for(double.seen_gone.wait(), 30)


@EVERY
async def test_a_first_token_that_takes_its_time(family: Family, make: Make) -> None:
    """The stream begins without it, and shows signs of life."""
    say = Say("late", hold_at=0)
    async with front_door(make(family, say), keepalive_seconds=0.02, admission_seconds=0.02) as door:
        lines = []
        async with door.http() as http, http.stream("POST", "/v1/messages", json=asked(stream=True)) as answer:
            assert answer.headers["x-ft-reuse"] == "pending"
            async for line in answer.aiter_lines():
                lines.append(line)
                if line == "event: ping":
                    say.release.set()
        assert "event: ping" in lines and "event: message_stop" in lines


@EVERY
async def test_the_token_that_ended_the_answer_belongs_to_it(family: Family, make: Make) -> None:
    async with front_door(make(family, Say("bye", trimmed=True))) as door:
        answer = await ask(door)
        assert said(answer) == "bye" and answer.json()["usage"]["output_tokens"] == 4


@EVERY
async def test_an_end_that_nobody_knows_is_an_error(
    family: Family, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with front_door(make(family, Say("x", reason="eclipse"))) as door:
        answer = await ask(door)
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "api_error"
        assert "eclipse" in caplog.text


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────

STATUSES = [
    (400, 400, 400, "invalid_request_error"),
    (422, 400, 400, "invalid_request_error"),
    (429, 429, 429, "rate_limit_error"),
    (503, 529, 503, "overloaded_error"),
    (500, 500, 500, "api_error"),
    (401, 500, 500, "api_error"),
    (404, 500, 500, "api_error"),
]


@BOTH
@pytest.mark.parametrize(("theirs", "anthropic", "openai", "kind"), STATUSES)
async def test_refusals(family: Family, make: Make, theirs: int, anthropic: int, openai: int, kind: str) -> None:
    async with front_door(make(family, Say("", status=theirs, problem="no such luck"))) as door:
        for stream in (False, True):
            answer = await ask(door, stream=stream)
            assert (answer.status_code, answer.json()["error"]["type"]) == (anthropic, kind)
            assert ("no such luck" in answer.text) == (theirs in (400, 422, 429, 503))
            assert (await ask(door, "/v1/chat/completions", stream=stream)).status_code == openai
        await door.idle()


async def test_sglang_refuses_in_its_first_event(family: Family) -> None:
    async with front_door(SGLangDouble(family, Say("x", problem="too long", problem_at=0, code=0))) as door:
        answer = await ask(door, stream=True)
        assert answer.status_code == 400 and "too long" in answer.json()["error"]["message"]


@EVERY
async def test_an_error_in_the_midst(family: Family, make: Make) -> None:
    async with front_door(make(family, Say("abcdef", problem="out of luck", problem_at=3))) as door:
        answer = await ask(door, stream=True)
        *_, (name, data) = events(answer.text)
        assert name == "error" and json.loads(data)["error"]["type"] == "api_error"
        assert "out of luck" not in answer.text  # what goes wrong inside is for the log


@EVERY
async def test_a_connection_that_breaks_in_the_midst(family: Family, make: Make) -> None:
    double = make(family, Say("abcdef", die_at=3))
    async with front_door(double) as door:
        answer = await ask(door, stream=True)
        assert "abc" in "".join(
            json.loads(data)["delta"].get("text", "")
            for name, data in events(answer.text)
            if name == "content_block_delta"
        )
        *_, (name, data) = events(answer.text)
        assert name == "error" and json.loads(data)["error"]["type"] == "overloaded_error"
        double.say = "again"
        assert said(await ask(door)) == "again" and door.engine.lost == 0


@BOTH
async def test_what_makes_no_sense(family: Family, make: Make) -> None:
    async with front_door(make(family, Say("", ids=(65, 99_999, 66)))) as door:
        assert (await ask(door)).status_code == 500
        door.double.say = Say("abc", die_at=-1, ids=(65,))
        assert (await ask(door)).status_code == 200


@BOTH
async def test_a_remote_that_goes_and_comes_back(family: Family, make: Make) -> None:
    double = make(family, Say("abcdef", hold_at=3))
    async with front_door(double, worker_seconds=0.05) as door:
        before = await ask_get(door, "/health")
        lines = []
        async with door.http() as http, http.stream("POST", "/v1/messages", json=asked(stream=True)) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if "text_delta" in line and len(door.double.bodies) == 1:
                    stopping = asyncio.create_task(door.remote.stop())
        assert "event: error" in lines, lines
        await stopping
        while door.engine.info is not None:
            await asyncio.sleep(0.005)
        async with door.http() as http:
            health = await http.get("/health")
        assert health.status_code == 503 and health.json()["workers_lost"] == 1
        assert (await ask(door)).status_code == 529
        double.say = "back"
        await door.remote.start()
        await door.engine.ready(30)
        assert said(await ask(door)) == "back"
        after = await ask_get(door, "/health")
        assert after["status"] == "ok" and after["incarnation"] != before["incarnation"]
        assert "is gone" in door.notes[0] and door.notes[-1] == "back"


@BOTH
async def test_one_that_comes_back_as_another_is_not_used(family: Family, make: Make) -> None:
    double = make(family, "x")
    async with front_door(double, worker_seconds=0.05) as door:
        await door.remote.stop()
        assert (await ask(door)).status_code == 529
        double.tokenize = lambda text: [1, 2, 3]
        await door.remote.start()
        while not any("another vocabulary" in note for note in door.notes):
            await asyncio.sleep(0.01)
        answer = await ask(door)
        assert answer.status_code == 529 and door.remote.url not in answer.text


@BOTH
async def test_one_that_is_unwell_for_long_is_given_up(
    family: Family, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.remote.client.WATCH_SECONDS", 0.01)
    double = make(family, Say("x", hold_at=0))
    async with front_door(double, admission_seconds=0.01) as door:
        request = asyncio.create_task(ask(door, stream=True))
        while not double.bodies:
            await asyncio.sleep(0.005)
        double.well = False
        answer = await request
        assert events(answer.text)[-1][0] == "error" and door.engine.lost == 1
        double.well = True
        double.say = "fine"
        await door.engine.ready(30)
        assert said(await ask(door)) == "fine"


# ── who answers there ───────────────────────────────────────────────────────────────────────────────────────────────
