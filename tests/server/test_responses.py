"""Responses, with the official SDK against a real socket."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from parsers.load import Family
from server.protocols.responses import ResponsesRequest, _turns
from sessions.idle import Opening
from tests.server.support import Answer, events, serving

pytestmark = pytest.mark.anyio

EXEC: Any = {
    "type": "function",
    "name": "exec_command",
    "description": "Run a command",
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
    "strict": False,
}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+\nLINE: /[^\\n]*\\n/"},
}
AGENTS: Any = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Helpers",
    "tools": [{"type": "function", "name": "spawn_agent", "parameters": {"type": "object", "properties": {}}}],
}


def call(name: str, **arguments: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


THOUGHT = "A plan.\n</think>\n\n"


async def test_text(family: Family) -> None:
    async with serving(family, Answer(f"{THOUGHT}Hello<|im_end|>", resumed=8)) as server:
        response = await server.openai().responses.create(model="local-moe", input="Hi", instructions="Be brief.")
        prompt = server.worker.requests[0].tokens
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.encrypted_content
    assert [part.text.strip() for part in reasoning.content or ()] == ["A plan."]
    assert message.type == "message"
    assert response.output_text == "Hello"
    assert response.status == "completed"
    assert response.store is True  # type: ignore[attr-defined]
    assert response.usage is not None
    assert response.usage.input_tokens == len(prompt)
    assert response.usage.input_tokens_details.cached_tokens == 8
    assert response.usage.total_tokens == len(prompt) + response.usage.output_tokens
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert "Be brief." in family.tokenizer.decode(prompt)


async def test_the_full_event_set_in_order(family: Family) -> None:
    answer = f"{THOUGHT}Look.\n\n{call('exec_command', cmd='ls')}\n{call('apply_patch', input='*** Begin')}<|im_end|>"
    async with serving(family, answer) as server:
        stream = await server.openai().responses.create(model="local-moe", input="Hi", tools=[EXEC, PATCH], stream=True)
        got: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in got] == list(range(len(got)))
    kinds = [event.type.removeprefix("response.") for event in got if not event.type.endswith(".delta")]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    deltas = {event.type for event in got if event.type.endswith(".delta")}
    assert deltas == {
        "response.reasoning_text.delta",
        "response.output_text.delta",
        "response.function_call_arguments.delta",
        "response.custom_tool_call_input.delta",
    }
    done = [event.item for event in got if event.type == "response.output_item.done"]
    added = [event.item for event in got if event.type == "response.output_item.added"]
    assert [item.id for item in added] == [item.id for item in done]
    assert [item.type for item in done] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert json.loads(done[2].arguments) == {"cmd": "ls"}
    assert done[3].input == "*** Begin"
    assert got[-1].response.output == done
    for kind, item, whole in (
        ("response.output_text.delta", done[1], done[1].content[0].text),
        ("response.function_call_arguments.delta", done[2], done[2].arguments),
        ("response.custom_tool_call_input.delta", done[3], done[3].input),
    ):
        assert "".join(event.delta for event in got if event.type == kind and event.item_id == item.id) == whole


async def test_the_sdk_accumulates_a_stream(family: Family) -> None:
    async with (
        serving(family, f"{THOUGHT}Hello<|im_end|>") as server,
        server.openai().responses.stream(model="local-moe", input="Hi") as stream,
    ):
        async for _ in stream:
            pass
        response = await stream.get_final_response()
    assert response.output_text == "Hello"


async def test_calls_of_a_namespace_come_back_with_it(family: Family) -> None:
    async with serving(family, f"</think>\n\n{call('multi_agent_v1__spawn_agent')}<|im_end|>") as server:
        response = await server.openai().responses.create(
            model="local-moe", input="Hi", tools=[AGENTS, {"type": "web_search"}, EXEC]
        )
        prompt = family.tokenizer.decode(server.worker.requests[0].tokens)
    (item,) = response.output
    assert item.type == "function_call"
    assert (item.name, item.namespace, json.loads(item.arguments)) == ("spawn_agent", "multi_agent_v1", {})
    assert "web_search" not in prompt
    assert [tool.type for tool in response.tools] == ["namespace", "function"], "what is ignored is not listed"


async def test_items_come_back_as_they_went_out(family: Family) -> None:
    answer = f"{THOUGHT}Look.\n\n{call('exec_command', cmd='ls')}\n{call('apply_patch', input='*** Begin')}<|im_end|>"
    async with serving(family, answer) as server:
        client = server.openai()
        tools = [EXEC, PATCH]
        first = await client.responses.create(model="local-moe", input="Hi", tools=tools, store=False)
        outputs: list[Any] = []
        for item in first.output:
            if item.type == "function_call":
                outputs.append({"type": "function_call_output", "call_id": item.call_id, "output": "a b"})
            if item.type == "custom_tool_call":
                part = {"type": "input_text", "text": "patched"}
                outputs.append({"type": "custom_tool_call_output", "call_id": item.call_id, "output": [part]})
        history: list[Any] = [
            {"role": "user", "content": "Hi"},
            *(item.model_dump() for item in first.output),
            *outputs,
        ]
        await client.responses.create(model="local-moe", input=history, tools=tools)
        before, after = server.worker.requests
    sampled = family.encode_raw(answer)
    assert after.tokens[: len(before.tokens) + len(sampled)] == before.tokens + sampled
    text = family.tokenizer.decode(after.tokens)
    assert text.find("a b") < text.find("patched")


async def test_an_incomplete_answer(family: Family) -> None:
    async with serving(family, f"{THOUGHT}Hello<|im_end|>") as server:
        client = server.openai()
        response = await client.responses.create(model="local-moe", input="Hi", max_output_tokens=12)
        stream = await client.responses.create(model="local-moe", input="Hi", max_output_tokens=12, stream=True)
        kinds = [event.type async for event in stream]
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert kinds[-1] == "response.incomplete"


async def test_context_errors_have_their_code(family: Family) -> None:
    async with serving(family, context_length=100) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            await server.openai().responses.create(model="local-moe", input="word " * 100)
    assert caught.value.code == "context_length_exceeded"


async def test_event_names_match_their_payloads(family: Family) -> None:
    body = {"model": "local-moe", "input": "Hi", "stream": True}
    async with serving(family, f"{THOUGHT}Hi<|im_end|>") as server, server.http() as http:
        response = await http.post("/v1/responses", json=body)
    assert "x-ft-reuse" in response.headers
    for name, data in events(response.text):
        assert json.loads(data)["type"] == name


async def test_items_of_unknown_kinds_are_named_in_the_clients_words(family: Family) -> None:
    async with serving(family) as server:
        item: Any = {"type": "image_generation_call", "id": "i", "result": "x", "status": "completed"}
        with pytest.raises(openai.BadRequestError) as caught:
            await server.openai().responses.create(model="local-moe", input=[item])
    message = caught.value.body["message"]  # type: ignore[index]
    assert message.startswith("input.0: 'image_generation_call' is not known here, but 'message', ")
    assert "_item_type" not in message


async def test_where_nothing_is_sure_to_come_again_nothing_is_computed(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.prefill.opening", lambda *_: Opening((), ()))
    async with serving(family) as server, server.http() as http:
        answer = await http.post("/v1/responses", json={"model": "local-moe", "input": "Hi", "generate": False})
        assert server.state.counters.open_generations == 0
    response = answer.json()
    assert (response["status"], response["output"], response["usage"]["input_tokens"]) == ("completed", [], 0)
    assert not server.worker.requests


def test_items_that_are_only_equal_to_those_before_are_made_turns_of_again() -> None:
    """What was made of an item holds the item itself: to compare two of them has no end."""
    body = {
        "model": "local-moe",
        "input": [{"role": role, "content": role} for role in ("assistant", "assistant", "user")],
    }
    one, other = ResponsesRequest.model_validate(body), ResponsesRequest.model_validate(body)
    mixed = one.model_copy(update={"input": [one.input[0], *other.input[1:]]})
    assert _turns(one) == _turns(other) == _turns(mixed) == _turns(mixed)
