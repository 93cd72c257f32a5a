"""Agents over a remote engine with the official SDKs: a call, its output, the next turn; exact tokens throughout."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parsers.load import Family
from tests.server.remote_doubles import Double, FrontDoor, SGLangDouble, VLLMDouble, front_door

pytestmark = pytest.mark.anyio

BOTH = pytest.mark.parametrize("make", [SGLangDouble, VLLMDouble])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "required": ["command"],
}
SAYS = [
    # No renderer writes a call like this: what comes back must be the sampled tokens.
    "I look.</think>\n\nLet me see.\n\n\n<tool_call>\n<function=run>\n<parameter=timeout>\n5.0\n</parameter>\n"
    "<parameter=command>\nls  -l\n</parameter>\n</function>\n</tool_call>",
    "Enough.</think>\n\nOne file.",
    "Well.</think>\n\nYou are welcome.",
]


def say(text: str) -> str:
    """By how many answers the prompt holds."""
    return SAYS[text.count("<|im_start|>assistant") - 1]


def prompts(door: FrontDoor) -> list[list[int]]:
    return [body.get("input_ids") or body["prompt"] for body in door.double.bodies]


def reused(door: FrontDoor) -> list[int]:
    """What the double said to have reused of each request but the first. That which brings the call's output has all of
    the one before and its answer; that which brings a new query is written without the thinking before it, and with the
    call as it was sampled."""
    family, (first, second, third) = door.double.family, prompts(door)
    whole = [*first, *family.encode_raw(SAYS[0]), family.stop_tokens[0]]
    assert second[: len(whole)] == whole, family.tokenizer.decode(second)
    assert door.double.reported[1] == len(whole) - 1  # the last sampled token was never fed
    assert SAYS[0].partition("</think>")[2].strip() in family.tokenizer.decode(third)
    assert len(first) - len("<think>\n") < door.double.reported[2] < len(whole)
    return door.double.reported[1:]


@BOTH
async def test_anthropic(family: Family, make: type[Double]) -> None:
    async with front_door(make(family, say)) as door, door.anthropic() as client:
        tools: Any = [{"name": "run", "description": "Runs a command", "input_schema": SCHEMA}]
        messages: list[Any] = [{"role": "user", "content": "What is here?"}]
        used = []
        for output in ("a.txt", "", ""):
            async with client.messages.stream(
                model="local-moe", max_tokens=500, tools=tools, messages=messages,
                thinking={"type": "enabled", "budget_tokens": 1024},
            ) as stream:  # fmt: skip
                message = await stream.get_final_message()
            used.append(message.usage)
            messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
            calls = [block for block in message.content if block.type == "tool_use"]
            if calls:
                assert message.stop_reason == "tool_use" and calls[0].input == {"command": "ls  -l", "timeout": 5.0}
                # As clients echo it: in the order of the schema, numbers respelled.
                messages[-1]["content"][-1]["input"] = {"command": "ls  -l", "timeout": 5}
                messages.append(
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": calls[0].id, "content": output}],
                    }
                )
            else:
                assert message.stop_reason == "end_turn"
                messages.append({"role": "user", "content": "Thanks"})
        assert [one.cache_read_input_tokens for one in used[1:]] == reused(door)
        sizes = [len(ids) for ids in prompts(door)]
        assert [one.input_tokens + (one.cache_read_input_tokens or 0) for one in used] == sizes
        assert all(one.cache_creation_input_tokens == 0 for one in used)
        await told(door)


@BOTH
async def test_chat(family: Family, make: type[Double]) -> None:
    async with front_door(make(family, say)) as door, door.openai() as client:
        tools: Any = [{"type": "function", "function": {"name": "run", "parameters": SCHEMA}}]
        messages: list[Any] = [{"role": "user", "content": "What is here?"}]
        cached = []
        for _ in SAYS:
            stream = await client.chat.completions.create(
                model="local-moe", tools=tools, messages=messages, stream=True, stream_options={"include_usage": True}
            )
            content, thinking, calls, reason = "", "", [], None
            async for chunk in stream:
                if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                    cached.append(chunk.usage.prompt_tokens_details.cached_tokens)
                for choice in chunk.choices:
                    content += choice.delta.content or ""
                    thinking += getattr(choice.delta, "reasoning_content", None) or ""
                    reason = choice.finish_reason or reason
                    for call in choice.delta.tool_calls or ():
                        if call.id:
                            calls.append([call.id, ""])
                        calls[-1][1] += (call.function and call.function.arguments) or ""
            answer: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": thinking}
            messages.append(answer)
            if calls:
                assert reason == "tool_calls" and json.loads(calls[0][1]) == {"command": "ls  -l", "timeout": 5.0}
                call_id, arguments = calls[0]
                compact = json.dumps(json.loads(arguments), separators=(",", ":"), sort_keys=True)
                answer["tool_calls"] = [
                    {"id": call_id, "type": "function", "function": {"name": "run", "arguments": compact}}
                ]
                messages.append({"role": "tool", "tool_call_id": call_id, "content": "a.txt"})
            else:
                assert reason == "stop"
                messages.append({"role": "user", "content": "Thanks"})
        assert cached[1:] == reused(door)
        await told(door)


@BOTH
async def test_responses(family: Family, make: type[Double]) -> None:
    async with front_door(make(family, say)) as door, door.openai() as client:
        tools: Any = [{"type": "function", "name": "run", "parameters": SCHEMA, "strict": False}]
        items: list[Any] = [{"role": "user", "content": "What is here?"}]
        cached = []
        for _ in SAYS:
            response = await client.responses.create(
                model="local-moe", tools=tools, input=items, store=False, include=["reasoning.encrypted_content"]
            )
            assert response.usage is not None
            cached.append(response.usage.input_tokens_details.cached_tokens)
            items += [item.to_dict() for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if calls:
                items.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": "a.txt"})
            else:
                items.append({"role": "user", "content": "Thanks"})
        assert cached[1:] == reused(door)
        await told(door)


async def told(door: FrontDoor) -> None:
    """The session's timeline has the remote's numbers, and no miss without a cause."""
    async with door.http() as http:
        (session,) = (await http.get("/v1/sessions")).json()["data"]
        records = (await http.get(f"/v1/sessions/{session['id']}")).json()["requests"]
        stats = (await http.get("/v1/stats")).json()
    assert [(one["remote"], one["device"]) for one in records] == [(count, 0) for count in door.double.reported]
    assert [one["cause"] for one in records] == ["first_request", "none", "thinking_stripped"]
    assert stats["sessions"]["misses_without_cause"] == 0
