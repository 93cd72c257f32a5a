"""Chat Completions, with the official SDK against a real socket."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from parsers.load import Family
from tests.server.support import Answer, events, serving

pytestmark = pytest.mark.anyio

LS: Any = {
    "type": "function",
    "function": {
        "name": "ls",
        "description": "List a folder",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
CALL = "<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</parameter>\n</function>\n</tool_call>"
USER: Any = {"role": "user", "content": "List the folder"}
ANSWER = f"A folder.\n</think>\n\nI look.\n\n{CALL}\n{CALL}<|im_end|>"


async def test_whole_answer(family: Family) -> None:
    async with serving(family, ANSWER) as server:
        completion = await server.openai().chat.completions.create(model="local-moe", messages=[USER], tools=[LS])
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content or "").strip() == "I look."
    assert choice.message.model_dump()["reasoning_content"].strip() == "A folder."
    calls = choice.message.tool_calls
    assert calls is not None
    first, second = calls
    assert first.type == "function"
    assert json.loads(first.function.arguments) == {"path": "/srv"}
    assert first.id != second.id
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(family.encode_raw(ANSWER))
    assert completion.usage.completion_tokens_details is not None
    assert 0 < (completion.usage.completion_tokens_details.reasoning_tokens or 0) < 20


async def test_stream(family: Family) -> None:
    async with serving(family, Answer(ANSWER, resumed=8)) as server:
        stream = await server.openai().chat.completions.create(
            model="local-moe", messages=[USER], tools=[LS], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        prompt = len(server.worker.requests[0].tokens)
    *deltas, usage = chunks
    assert deltas[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas).strip() == "I look."
    reasoning = [chunk.choices[0].delta.model_dump().get("reasoning_content") or "" for chunk in deltas]
    assert "".join(reasoning).strip() == "A folder."
    arguments = {0: "", 1: ""}
    ids = {}
    for chunk in deltas:
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            arguments[call.index] += call.function.arguments or ""
            if call.id:
                ids[call.index] = (call.id, call.function.name)
    assert [json.loads(text) for text in arguments.values()] == [{"path": "/srv"}] * 2
    assert [name for _, name in ids.values()] == ["ls", "ls"]
    assert [chunk.choices[0].finish_reason for chunk in deltas if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert usage.choices == []
    assert usage.usage is not None
    assert (usage.usage.prompt_tokens, usage.usage.total_tokens) == (prompt, prompt + usage.usage.completion_tokens)
    assert usage.usage.prompt_tokens_details is not None
    assert usage.usage.prompt_tokens_details.cached_tokens == 8


async def test_a_stream_ends_with_done_and_without_unasked_usage(family: Family) -> None:
    body = {"model": "local-moe", "messages": [USER], "stream": True}
    async with serving(family, "</think>\n\nHi<|im_end|>") as server, server.http() as http:
        frames = events((await http.post("/v1/chat/completions", json=body)).text)
    assert frames[-1] == ("", "[DONE]")
    assert all("usage" not in json.loads(data) for _, data in frames[:-1])


async def test_every_option_reaches_the_sampler(family: Family) -> None:
    async with serving(family, "</think>\n\nHi<|im_end|>") as server:
        await server.openai().chat.completions.create(
            model="local-moe-small",
            messages=[USER],
            max_completion_tokens=33,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.25,
            frequency_penalty=-0.25,
            seed=-7,
            logit_bias={"65": 5, "66": -100},
            logprobs=True,
            top_logprobs=2,
            extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1},
        )
        sampling = server.worker.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (33, 0.5, 0.9, 4)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.25, -0.25)
    assert (sampling.repetition_penalty, sampling.seed, sampling.logprobs) == (1.1, (1 << 63) - 7, 2)
    assert sorted(sampling.logit_bias) == [(65, 5.0), (66, -100.0)]


async def test_logprobs_cover_the_visible_text(family: Family) -> None:
    async with serving(family, "No.\n</think>\n\nHi!<|im_end|>") as server:
        client = server.openai()
        whole = await client.chat.completions.create(model="local-moe", messages=[USER], logprobs=True, top_logprobs=2)
        stream = await client.chat.completions.create(
            model="local-moe", messages=[USER], logprobs=True, top_logprobs=2, stream=True
        )
        streamed = [entry async for chunk in stream for entry in _entries(chunk.choices[0])]
    content = _entries(whole.choices[0])
    assert "".join(entry.token for entry in content).strip() == "Hi!"
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert [top.token for top in content[-1].top_logprobs] == ["!", '"']
    assert content[-1].bytes == [33]


def _entries(choice: Any) -> list[Any]:
    return list(choice.logprobs.content or ()) if choice.logprobs is not None else []


async def test_a_budget_beyond_the_context_is_cut(family: Family) -> None:
    async with serving(family, "</think>\n\nHi<|im_end|>", context_length=300) as server:
        await server.openai().chat.completions.create(model="local-moe", messages=[USER], max_tokens=100_000)
        request = server.worker.requests[0]
    assert request.sampling.max_tokens == 300 - len(request.tokens)


async def test_context_errors_have_their_code(family: Family) -> None:
    async with serving(family, context_length=100) as server:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 99 tokens") as caught:
            await server.openai().chat.completions.create(
                model="local-moe", messages=[{"role": "user", "content": "word " * 100}]
            )
    assert caught.value.code == "context_length_exceeded"


async def test_thinking_can_be_switched_off(family: Family) -> None:
    async with serving(family, "Hi<|im_end|>") as server:
        completion = await server.openai().chat.completions.create(
            model="local-moe", messages=[USER], extra_body={"reasoning_effort": "none"}
        )
    assert completion.choices[0].message.content == "Hi"


async def test_a_call_that_the_model_breaks_off_wants_an_answer(family: Family) -> None:
    async with serving(family, f"</think>\n\n{CALL[:-20]}<|im_end|>") as server:
        completion = await server.openai().chat.completions.create(model="local-moe", messages=[USER], tools=[LS])
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    assert choice.message.tool_calls[0].type == "function"
    with pytest.raises(ValueError, match="line 1"):
        json.loads(choice.message.tool_calls[0].function.arguments)
