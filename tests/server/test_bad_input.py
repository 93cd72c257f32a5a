"""Bad input: the right status, in the caller's shape, saying what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from parsers.conversation import ToolOutput
from parsers.load import Family
from server.protocols import anthropic, chat, completions, responses
from tests.server.support import serving

pytestmark = pytest.mark.anyio

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
RAW = "/v1/completions"
USER: Any = {"role": "user", "content": "Hi"}
GOOD: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": "local-moe", "max_tokens": 9, "messages": [USER]},
    RESPONSES: {"model": "local-moe", "input": "Hi"},
    CHAT: {"model": "local-moe", "messages": [USER]},
    RAW: {"model": "local-moe", "prompt": "Hi"},
}
IMAGE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
PICTURE, TEXT = {"type": "image", "source": IMAGE}, {"type": "text", "text": "x"}
MEDIA = "messages.0.content.0.content.0: 'video' is not known"


def messages(*contents: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(contents)}]}


BAD: list[tuple[str, dict[str, Any], str]] = [
    # Anthropic Messages
    (MESSAGES, {"max_tokens": None}, "max_tokens"),
    (MESSAGES, {"max_tokens": "9"}, "max_tokens"),
    (MESSAGES, {"max_tokens": -1}, "max_tokens"),
    (MESSAGES, {"messages": []}, "at least one message"),
    (MESSAGES, {"messages": "Hi"}, "messages"),
    (MESSAGES, {"messages": [{"role": "robot", "content": "Hi"}]}, "role"),
    (MESSAGES, {"messages": [{"role": "user"}]}, "content"),
    (MESSAGES, {"messages": [{"role": "user", "content": ""}]}, "must have content"),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": "So"}]}, "must end with a user message"),
    (MESSAGES, messages({"type": "poem", "text": "x"}), "poem"),
    (MESSAGES, messages({"type": "text", "text": 3}), "text"),
    (MESSAGES, messages({"type": "image", "source": IMAGE}), "messages.0.content.0: image is not supported"),
    (MESSAGES, {"system": [{"type": "document", "source": IMAGE}]}, "system.0: document is not supported"),
    (MESSAGES, messages({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "video"}]}), MEDIA),
    (
        MESSAGES,
        messages({"type": "search_result", "content": []}),
        "messages.0.content.0: 'search_result' is not known",
    ),
    (MESSAGES, messages({"type": "tool_use", "id": "a", "name": "b", "input": {}}), "not allowed in user"),
    (MESSAGES, messages({"type": "tool_result", "tool_use_id": ""}), "tool_use_id"),
    (
        MESSAGES,
        messages(
            {"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "a", "content": [TEXT, PICTURE]}
        ),
        "messages.0.content.1.content.1: image is not supported",
    ),
    (MESSAGES, {"system": 3}, "system"),
    (MESSAGES, {"tools": [{"name": "x"}]}, "input_schema"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "not available here"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "there are no tools"),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "f"}}, "there is no tool 'f'"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (MESSAGES, {"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
    (MESSAGES, {"tool_choice": {"type": "sometimes"}}, "tool_choice"),
    (MESSAGES, {"thinking": {"type": "loud"}}, "thinking"),
    (MESSAGES, {"temperature": 9}, "temperature"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
    # Responses
    (RESPONSES, {"input": []}, "at least one item"),
    (RESPONSES, {"input": 3}, "input"),
    (RESPONSES, {"input": [{"type": "message", "role": "robot", "content": "Hi"}]}, "role"),
    (RESPONSES, {"input": [{"type": "local_shell_call", "id": "x"}]}, "input.0.call_id"),
    (RESPONSES, {"input": ["Hi"]}, "input.0"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
        "input.0.content.0: input_image is not supported",
    ),
    (RESPONSES, {"tools": [{"type": "function", "name": "a"}] * 2}, "unique"),
    (RESPONSES, {"tool_choice": "required"}, "there are no tools"),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "f"}}, "there is no tool 'f'"),
    (RESPONSES, {"tool_choice": {"type": "image_generation"}}, "tool_choice"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format: json_schema needs a schema"),
    (
        RESPONSES,
        {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "bnf", "definition": "x"}}]},
        "syntax",
    ),
    (RESPONSES, {"previous_response_id": "resp_1"}, "send the whole input"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"max_output_tokens": -1}, "max_output_tokens"),
    # Chat Completions
    (CHAT, {"messages": []}, "at least one message"),
    (CHAT, {"messages": [{"role": "robot", "content": "Hi"}]}, "role"),
    (CHAT, {"messages": [{"role": "tool", "content": "Hi"}]}, "tool_call_id"),
    (
        CHAT,
        {"messages": [USER, {"role": "tool", "tool_call_id": "a", "content": [TEXT, {"type": "image_url"}]}]},
        "messages.1.content.1: image_url is not supported",
    ),
    (
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_file"}]}]},
        "input.0.output.0: input_file is not supported",
    ),
    (RESPONSES, {"top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"n": 17}, "less than or equal to 16"),
    (CHAT, {"n": 0}, "greater than or equal to 1"),
    (CHAT, {"response_format": {"type": "json"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format: json_schema needs a schema"),
    (CHAT, {"tool_choice": "required"}, "there are no tools"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "there is no tool 'f'"),
    (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "no tools"),
    (CHAT, {"functions": []}, "functions: List should have at least 1 item"),
    (CHAT, {"function_call": "auto"}, "function_call needs functions"),
    (CHAT, {"functions": [{"name": "x"}], "tools": []}, "send one of the two"),
    (CHAT, {"messages": [{"role": "function", "name": "x", "content": "1"}]}, "follow the call"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"99999999": 1}}, "not a token id"),
    (CHAT, {"logit_bias": {"9" * 5000: 1}}, "maps token ids"),
    (CHAT, {"logit_bias": {"\u0663": 1}}, "maps token ids"),
    (CHAT, {"logit_bias": dict.fromkeys(map(str, range(2000)), "x")}, "at most 1024"),
    (CHAT, {"stop": ["x" * 300]}, "at most 256 characters"),
    (CHAT, {"stop": ["x"] * 33}, "at most 32 items"),
    (MESSAGES, {"stop_sequences": ["x"] * 33}, "at most 32 items"),
    (CHAT, {"top_logprobs": 2}, "needs logprobs"),
    (CHAT, {"stop": [3]}, "stop"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    # Completions
    (RAW, {"prompt": None}, "prompt: a text, token ids"),
    (RAW, {"prompt": []}, "prompt: a text, token ids"),
    (RAW, {"prompt": ""}, "one token at least"),
    (RAW, {"prompt": ["Hi", ""]}, "one token at least"),
    (RAW, {"prompt": [[1, 2], []]}, "one token at least"),
    (RAW, {"prompt": [1, "x"]}, "a text or a list of token ids"),
    (RAW, {"prompt": [True]}, "a text or a list of token ids"),
    (RAW, {"prompt": [1, 1 << 70]}, "is not a token id"),
    (RAW, {"prompt": [-1]}, "-1 is not a token id"),
    (RAW, {"prompt": ["x"] * 17}, "at most 16 prompts"),
    (RAW, {"prompt": ["x"] * 4, "n": 5}, "n: at most 16 answers"),
    (RAW, {"suffix": "x"}, "suffix: no text is filled in"),
    (RAW, {"best_of": 2}, "best_of"),
    (RAW, {"echo": True, "logprobs": 0}, "echo: a prompt's own logprobs"),
    (RAW, {"max_tokens": -1}, "max_tokens"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RAW, {"logprobs": 21}, "logprobs"),
    (RAW, {"logit_bias": {"99999999": 1}}, "not a token id"),
]


def check_shape(path: str, body: dict[str, Any]) -> str:
    """The message of an error in the shape of the path's protocol."""
    if path.startswith(MESSAGES):
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        assert body["request_id"].startswith("req_")
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


async def test_each_bad_body_is_a_400_that_names_the_fault(family: Family) -> None:
    async with serving(family) as server, server.http() as http:
        for path, change, mark in BAD:
            response = await http.post(path, json={**GOOD[path], **change})
            assert response.status_code == 400, (path, change, response.text)
            assert mark in check_shape(path, response.json()), (path, change, response.text)
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert server.worker.requests == []
        assert server.state.counters.open_generations == 0
        assert server.state.counters.errors == len(BAD)


@pytest.mark.parametrize("path", [*GOOD, f"{MESSAGES}/count_tokens"])
async def test_bodies_that_are_no_json_object(family: Family, path: str) -> None:
    bad = [b"", b"{", b'{"a": NaN}', b"[]", b"null", b'"x"', b"\xff", b"[" * 400, b'{"model": "\\ud800"}']
    async with serving(family) as server, server.http() as http:
        for data in bad:
            response = await http.post(path, content=data)
            assert response.status_code == 400, (data, response.text)
            check_shape(path, response.json())
        response = await http.post(path, content=b"x", headers={"content-encoding": "zstd"})
        assert response.status_code == 400


@pytest.mark.parametrize("path", [*GOOD, f"{MESSAGES}/count_tokens"])
async def test_unknown_models(family: Family, path: str) -> None:
    body = {**GOOD.get(path, GOOD[MESSAGES]), "model": "gpt-9"}
    async with serving(family) as server, server.http() as http:
        response = await http.post(path, json=body)
    assert response.status_code == 404
    assert "'gpt-9' does not exist; this server has local-moe" in check_shape(path, response.json())


async def test_unknown_paths_and_methods(family: Family) -> None:
    async with serving(family) as server, server.http() as http:
        for path in (MESSAGES, "/v1/nothing", "/"):
            response = await http.get(path)
            assert response.status_code == (405 if path == MESSAGES else 404)
            assert "GET /openapi.json" in check_shape(path, response.json())
        response = await http.get("/v1/nothing", headers={"anthropic-version": "2023-06-01"})
        check_shape(MESSAGES, response.json())


@pytest.mark.parametrize("path", list(GOOD))
async def test_bodies_that_are_too_large(family: Family, path: str) -> None:
    async def endless() -> Any:
        for _ in range(64):
            yield b" " * 1024

    async with serving(family, max_body_bytes=4096) as server, server.http() as http:
        declared = await http.post(path, content=b" " * 5000)
        chunked = await http.post(path, content=endless())
    for response in (declared, chunked):
        assert response.status_code == 413
        assert "4096 bytes" in check_shape(path, response.json())


@pytest.mark.parametrize("path", list(GOOD))
async def test_what_clients_add_is_ignored(family: Family, path: str) -> None:
    extra = {
        "safeguards": {"mode": "plan"},
        "context_management": {"edits": []},
        "service_tier": "auto",
        "client_metadata": {"a": 1},
        "include": ["reasoning.encrypted_content"],
    }
    async with serving(family, "</think>\n\nHi<|im_end|>") as server, server.http() as http:
        response = await http.post(f"{path}?beta=true", json={**GOOD[path], **extra})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (MESSAGES, {"messages": [[]] * 1000}),
        (MESSAGES, messages(*[{"type": "poem"}] * 1000)),
        (MESSAGES, {"stop_sequences": [0] * 1000}),
        (MESSAGES, {"mcp_servers": [0] * 1000}),
        (RESPONSES, {"input": [[]] * 1000}),
        (RESPONSES, {"tools": [{"type": "namespace", "name": "n", "tools": [0] * 1000}]}),
        (CHAT, {"messages": [[]] * 1000}),
        (CHAT, {"messages": [{"role": "user", "content": [0] * 1000}]}),
        (CHAT, {"stop": [0] * 1000}),
        (CHAT, {"logit_bias": dict.fromkeys(map(str, range(2000)), "x")}),
        (RAW, {"prompt": [1] + ["x"] * 1000}),
    ],
)
def test_reading_stops_at_the_first_fault(path: str, change: dict[str, Any]) -> None:
    """Each fault that is reported takes a thousand times the memory of what caused it."""
    chats, raw = chat.reader(lambda _: []), completions.reader(lambda _: b"")
    reader = {MESSAGES: anthropic.read, RESPONSES: responses.PLAIN.read, CHAT: chats.read, RAW: raw.read}[path]
    with pytest.raises(ValidationError) as caught:
        reader({**GOOD[path], **change}, {}, "")
    assert caught.value.error_count() <= 2


async def test_more_candidates_than_tokens_are_all_of_them(family: Family) -> None:
    async with serving(family, "</think>\n\nHi<|im_end|>") as server, server.http() as http:
        response = await http.post(CHAT, json={**GOOD[CHAT], "top_k": 1 << 70})
        vocabulary = server.client.info.vocab_size if server.client.info else 0
    assert response.status_code == 200, response.text
    assert server.worker.requests[0].sampling.top_k == vocabulary


def test_a_deferred_tool_is_described_once() -> None:
    tool = {"name": "t", "description": "long", "input_schema": {"type": "object"}, "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "t"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [reference] * 50}
    body = {**GOOD[MESSAGES], "tools": [tool], "messages": [{"role": "user", "content": [result, result]}] * 50}
    turns = anthropic.read(body, {}, "").conversation.turns
    texts = [block.text for turn in turns for block in turn.blocks if isinstance(block, ToolOutput)]
    assert [text.count("long") for text in texts] == [1] + [0] * 99
    assert texts[0].count("Tool t is available.") == 49
