"""Anthropic Messages, with the official SDK against a real socket."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam

from engine.api import Request
from parsers.load import Family
from tests.server.support import Answer, events, serving

pytestmark = pytest.mark.anyio

LS: ToolParam = {
    "name": "ls",
    "description": "List a folder",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}},
}
CALL = (
    "<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</parameter>\n"
    "<parameter=depth>\n2\n</parameter>\n</function>\n</tool_call>"
)
USER: MessageParam = {"role": "user", "content": "List the folder"}
THINK: Any = {"type": "enabled", "budget_tokens": 1024}


async def test_text_streams_in_the_order_of_the_api(family: Family) -> None:
    async with (
        serving(family, "Hello you<|im_end|>") as server,
        server.anthropic().messages.stream(model="local-moe", max_tokens=50, messages=[USER]) as stream,
    ):
        kinds = [event.type async for event in stream if event.type != "text"]
        message = await stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [("text", "Hello you")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


async def test_thinking_text_and_a_call(family: Family) -> None:
    text = f"A folder.\n</think>\n\nI look.\n\n{CALL}<|im_end|>"
    async with serving(family, text) as server:
        client = server.anthropic()
        async with client.messages.stream(
            model="local-moe", max_tokens=500, messages=[USER], tools=[LS], thinking=THINK
        ) as stream:
            streamed = await stream.get_final_message()
        whole = await client.messages.create(
            model="local-moe", max_tokens=500, messages=[USER], tools=[LS], thinking=THINK
        )
    for message in (streamed, whole):
        thinking, said, call = message.content
        assert thinking.type == "thinking"
        assert thinking.thinking.strip() == "A folder."
        assert len(thinking.signature) > 16
        assert said.type == "text"
        assert said.text.strip() == "I look."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("ls", {"path": "/srv", "depth": 2})
        assert call.id.startswith("toolu_")
        assert message.stop_reason == "tool_use"


async def test_an_echoed_answer_is_spliced_as_it_was_sampled(family: Family) -> None:
    answer = f"A folder.\n</think>\n\n{CALL}<|im_end|>"
    async with serving(family, answer) as server:
        client = server.anthropic()
        first = await client.messages.create(
            model="local-moe", max_tokens=500, messages=[USER], tools=[LS], thinking=THINK
        )
        call = next(block for block in first.content if block.type == "tool_use")
        reordered = {"depth": 2.0, "path": "/srv"}
        echo: list[Any] = [block.model_dump() for block in first.content if block.type != "tool_use"]
        echo.append({"type": "tool_use", "id": call.id, "name": "ls", "input": reordered})
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a b"}]}
        await client.messages.create(
            model="local-moe",
            max_tokens=500,
            messages=[USER, {"role": "assistant", "content": echo}, {"role": "user", "content": [result]}],
            tools=[LS],
            thinking=THINK,
        )
        before, after = server.worker.requests
    sampled = family.encode_raw(answer)
    assert after.tokens[: len(before.tokens)] == before.tokens
    assert after.tokens[len(before.tokens) :][: len(sampled)] == sampled
    assert before.session == after.session != ""


async def test_usage_adds_up_to_the_prompt(family: Family) -> None:
    answer = Answer("Hi<|im_end|>", resumed=16, checkpoints=(16, 48))
    async with serving(family, answer) as server:
        client = server.anthropic()
        whole = await client.messages.with_raw_response.create(model="local-moe", max_tokens=50, messages=[USER])
        async with client.messages.stream(model="local-moe", max_tokens=50, messages=[USER]) as stream:
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="local-moe", messages=[USER])
        prompt = len(server.worker.requests[0].tokens)
    message = await whole.parse()
    for usage in (message.usage, streamed.usage):
        assert usage.cache_read_input_tokens == 16
        assert usage.cache_creation_input_tokens == min(48, prompt) - 16
        assert usage.input_tokens == prompt - min(48, prompt)
        assert usage.output_tokens == 3
    assert counted.input_tokens == prompt
    assert "resumed=16" in whole.headers["x-ft-reuse"]
    assert whole.headers["x-ft-session"] == server.worker.requests[0].session


async def test_counting_tokens_leaves_no_trace(family: Family) -> None:
    async with serving(family) as server:
        await server.anthropic().messages.count_tokens(
            model="local-moe", messages=[USER], tools=[LS], system="Be brief.", thinking=THINK
        )
        assert server.worker.requests == []
        assert server.state.sessions.list() == []


async def test_a_stop_sequence_ends_the_answer_and_the_engine_s_work(family: Family) -> None:
    answer = Answer("one two three four five six seven eight nine ten<|im_end|>", hold_at=30)
    async with serving(family, answer) as server:
        message = await server.anthropic().messages.create(
            model="local-moe", max_tokens=200, messages=[USER], stop_sequences=["five", "fo", "x"]
        )
        assert server.worker.aborted == [server.worker.requests[0].id]
    assert [block.text for block in message.content if block.type == "text"] == ["one two three "]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "fo")


async def test_max_tokens(family: Family) -> None:
    async with serving(family, "one two three<|im_end|>") as server:
        message = await server.anthropic().messages.create(model="local-moe", max_tokens=4, messages=[USER])
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 4


@pytest.mark.parametrize("answer", ["Only thoughts.\n</think>\n\n<|im_end|>", "<|im_end|>", "Endless thoughts"])
async def test_no_answer_is_thinking_only(family: Family, answer: str) -> None:
    async with serving(family, answer) as server:
        client = server.anthropic()
        whole = await client.messages.create(model="local-moe", max_tokens=500, messages=[USER], thinking=THINK)
        async with client.messages.stream(model="local-moe", max_tokens=500, messages=[USER], thinking=THINK) as stream:
            streamed = await stream.get_final_message()
        assert server.state.counters.empty_answers == 2
    for message in (whole, streamed):
        assert message.content[-1].type == "text"
        assert message.content[-1].text.strip()
        assert message.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(f"{CALL[:-20]}<|im_end|>"), "tool_use"),
        (Answer(CALL[:-20], reason="length"), "max_tokens"),
        (Answer("<tool_call>\n<function=ls>\n", reason="length"), "max_tokens"),
    ],
)
async def test_a_call_that_breaks_off_is_one_that_no_tool_takes(family: Family, answer: Answer, reason: str) -> None:
    """Stream and whole answer say the same."""
    body: Any = {"model": "local-moe", "max_tokens": 500, "messages": [USER], "tools": [LS]}
    async with serving(family, answer) as server, server.http() as http:
        whole = (await http.post("/v1/messages", json=body)).json()
        streamed = [
            json.loads(data)
            for _, data in events((await http.post("/v1/messages", json={**body, "stream": True})).text)
        ]
    raw = "".join(
        event["delta"].get("partial_json", "") for event in streamed if event["type"] == "content_block_delta"
    )
    with pytest.raises(ValueError, match="line 1"):
        json.loads(raw)
    assert [(block["type"], block["input"]) for block in whole["content"]] == [("tool_use", {"invalid_json": raw})]
    assert whole["stop_reason"] == streamed[-2]["delta"]["stop_reason"] == reason


async def test_thinking_that_was_cut_off_is_not_called_no_answer(family: Family) -> None:
    async with serving(family, "hm, let me see") as server:
        message = await server.anthropic().messages.create(
            model="local-moe", max_tokens=5, messages=[USER], thinking=THINK
        )
    assert [block.type for block in message.content] == ["thinking"]
    assert message.stop_reason == "max_tokens"


async def test_without_tools_nothing_is_parsed_as_a_call(family: Family) -> None:
    async with serving(family, f"{CALL}<|im_end|>") as server:
        client = server.anthropic()
        message = await client.messages.create(
            model="local-moe", max_tokens=500, messages=[USER], tools=[LS], tool_choice={"type": "none"}
        )
    assert all(block.type == "text" for block in message.content)
    assert message.stop_reason == "end_turn"


async def test_parallel_calls_can_be_refused(family: Family) -> None:
    async with serving(family, f"{CALL}\n{CALL}<|im_end|>") as server:
        client = server.anthropic()
        both = await client.messages.create(model="local-moe", max_tokens=900, messages=[USER], tools=[LS])
        one = await client.messages.create(
            model="local-moe",
            max_tokens=900,
            messages=[USER],
            tools=[LS],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
    assert [block.type for block in both.content] == ["tool_use", "tool_use"]
    assert [block.type for block in one.content] == ["tool_use"]
    assert one.stop_reason == "tool_use"


async def test_sampling_of_the_request_and_defaults_of_the_model(family: Family) -> None:
    async with serving(family, "Hi<|im_end|>", temperature=0.6, top_k=20, max_output_tokens=64) as server:
        client = server.anthropic()
        await client.messages.create(model="local-moe", max_tokens=500, messages=[USER])
        await client.messages.create(
            model="local-moe", max_tokens=5, messages=[USER], extra_body={"temperature": 0, "top_k": 3}
        )
        default, asked = (request.sampling for request in server.worker.requests)
    assert (default.temperature, default.top_k, default.max_tokens) == (0.6, 20, 64)
    assert (asked.temperature, asked.top_k, asked.max_tokens) == (0.0, 3, 5)
    assert default.seed != asked.seed
    assert set(family.stop_tokens) == set(default.stop_tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_at_all_compute_the_prompt(family: Family, stream: bool) -> None:
    """As a client asks who wants it computed before it has a question."""
    async with serving(family, Answer("", reason="length")) as server:
        client = server.anthropic()
        asked: Any = {"model": "local-moe", "max_tokens": 0, "messages": [{"role": "user", "content": "Hi"}]}
        if stream:
            async with client.messages.stream(**asked) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**asked)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert server.worker.requests[0].sampling.max_tokens == 0


async def test_errors_that_clients_recover_from(family: Family) -> None:
    async with serving(family, context_length=200) as server:
        client = server.anthropic()
        long: MessageParam = {"role": "user", "content": "word " * 100}
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: at least \d+ tokens > 199 maximum"):
            await client.messages.create(model="local-moe", max_tokens=10, messages=[long])
        with pytest.raises(
            anthropic.BadRequestError, match=r"input length and max_tokens exceed context limit: \d+ \+ 190 > 200"
        ):
            await client.messages.create(model="local-moe", max_tokens=190, messages=[USER])


async def test_a_stream_s_frames(family: Family) -> None:
    body = {"model": "local-moe", "max_tokens": 50, "messages": [USER], "stream": True}
    async with serving(family, "Hé\n<|im_end|>") as server, server.http() as http:
        response = await http.post("/v1/messages", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert ": x-ft-reuse resumed=0" in response.text
    frames = events(response.text)
    assert [name for name, _ in frames[:2]] == ["message_start", "ping"]
    for name, data in frames:
        assert json.loads(data)["type"] == name


def transcript(requests: list[Request], family: Family) -> str:
    return family.tokenizer.decode(requests[-1].tokens)


async def test_history_blocks_reach_the_prompt_in_order(family: Family) -> None:
    reference: Any = {"type": "tool_reference", "tool_name": "web_fetch"}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "ALPHA", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "BETA notice"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "GAMMA", "signature": "elsewhere"},
                {"type": "redacted_thinking", "data": "opaque"},
                {"type": "text", "text": "DELTA"},
                {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": "EPSILON"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "ZETA"}, reference],
                },
                {"type": "text", "text": "ETA"},
            ],
        },
    ]
    deferred: Any = {"name": "web_fetch", "description": "THETA", "input_schema": {}, "defer_loading": True}
    async with serving(family, "ok<|im_end|>") as server:
        await server.anthropic().messages.create(
            model="local-moe",
            max_tokens=50,
            messages=messages,
            system=[{"type": "text", "text": "IOTA"}],
            tools=[LS, deferred],
            thinking=THINK,
        )
        text = transcript(server.worker.requests, family)
    marks = ["IOTA", "ALPHA", "BETA", "DELTA", "EPSILON", "ZETA", "THETA", "\nETA\n"]
    places = [text.rfind(mark) for mark in marks]
    assert -1 not in places, text
    assert places == sorted(places), text
    assert text.count("THETA") == 1
