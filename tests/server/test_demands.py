"""What clients demand of an answer, in each protocol: what reaches the engine, what is refused, what is repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from parsers.load import Family
from server.script import Script
from tests.server.support import Answer, serving

pytestmark = pytest.mark.anyio

MODEL = "local-moe"
USER: Any = {"role": "user", "content": "Hi"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
STRICT: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}


def chat(**body: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [USER], **body}


def responses(**body: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": "Hi", **body}


def messages(**body: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": [USER], "max_tokens": 50, **body}


def flat(tool: Any, **more: Any) -> dict[str, Any]:
    """A tool as Responses has it."""
    return {"type": "function", **tool["function"], **more}


def plain(tool: Any, **more: Any) -> dict[str, Any]:
    """A tool as Messages has it."""
    function = tool["function"]
    return {"name": function["name"], "input_schema": function["parameters"], **more}


CUSTOM = {"type": "custom", "name": "say", "format": {"type": "grammar", "syntax": "regex", "definition": "ha+"}}
CUSTOM_CHAT: Any = {
    "type": "custom",
    "custom": {"name": "say", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "ha+"}}},
}
CUSTOM_CHOSEN: Any = {"type": "custom", "custom": {"name": "say"}}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
CHOSEN = {"type": "function", "function": {"name": "clock"}}
BOTH, BOTH_FLAT, BOTH_PLAIN = [WEATHER, CLOCK], [flat(WEATHER), flat(CLOCK)], [plain(WEATHER), plain(CLOCK)]
TEXT = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}}

FREE: list[tuple[str, dict[str, Any]]] = [
    chat(tools=BOTH),
    chat(tools=[STRICT], tool_choice="none"),
    chat(tools=BOTH, parallel_tool_calls=False, response_format={"type": "text"}),
    responses(tools=[*BOTH_FLAT, {"type": "custom", "name": "say", "format": {"type": "text"}}], tool_choice="auto"),
    responses(text={"format": {"type": "text"}, "verbosity": "low"}),
    messages(tools=BOTH_PLAIN, tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
    messages(output_config={"effort": "high"}),
]
BOUND: list[tuple[tuple[str, dict[str, Any]], tuple[str, ...], tuple[str, ...]]] = [
    (chat(tools=BOTH, tool_choice="required"), ("weather", "clock"), ()),
    (chat(tools=BOTH, tool_choice=CHOSEN), ("clock",), ("weather",)),
    (chat(tools=[STRICT, CLOCK]), ("weather", "clock"), ()),
    (chat(response_format=FORMAT), ("city",), ()),
    (chat(response_format={"type": "json_object"}), ("%json",), ("city",)),
    (chat(tools=BOTH, response_format=FORMAT), ("city", "clock"), ()),
    (responses(tools=BOTH_FLAT, tool_choice="required"), ("weather", "clock"), ()),
    (responses(tools=BOTH_FLAT, tool_choice={"type": "function", "name": "clock"}), ("clock",), ("weather",)),
    (responses(tools=BOTH_FLAT, tool_choice=ALLOWED), ("clock",), ("weather",)),
    (responses(tools=BOTH_FLAT, tool_choice={**ALLOWED, "mode": "auto"}), ("clock",), ("weather",)),
    (responses(tools=[flat(STRICT)]), ("weather",), ()),
    (responses(tools=[CUSTOM]), ("say", "ha+"), ()),
    (chat(tools=[CUSTOM_CHAT, CLOCK]), ("say", "ha+", "clock"), ()),
    (chat(tools=[CUSTOM_CHAT, CLOCK], tool_choice=CUSTOM_CHOSEN), ("say", "ha+"), ("clock",)),
    (responses(text=TEXT), ("city",), ()),
    (responses(text={"format": {"type": "json_object"}}), ("%json",), ()),
    (messages(tools=BOTH_PLAIN, tool_choice={"type": "any"}), ("weather", "clock"), ()),
    (messages(tools=BOTH_PLAIN, tool_choice={"type": "tool", "name": "clock"}), ("clock",), ("weather",)),
    (messages(tools=[plain(WEATHER, strict=True)]), ("weather",), ()),
    (messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}), ("city",), ()),
]
CALL = "<tool_call>\n<function=clock>\n</function>\n</tool_call><|im_end|>"


async def test_what_is_demanded_reaches_the_engine_and_nothing_else_does(family: Family) -> None:
    async with serving(family, CALL) as server, server.http() as http:
        for path, body in FREE:
            response = await http.post(path, json={"model": MODEL, **body})
            assert response.status_code == 200, response.text
        assert [request.sampling.constraint for request in server.worker.requests] == [None] * len(FREE)
        for (path, body), inside, outside in BOUND:
            response = await http.post(path, json={"model": MODEL, **body})
            assert response.status_code == 200, (path, body, response.text)
            constraint = server.worker.requests[-1].sampling.constraint or ""
            assert all(text in constraint for text in inside), (path, body, constraint)
            assert not any(text in constraint for text in outside), (path, body, constraint)


async def test_only_one_call_is_allowed_where_calls_are_not_parallel(family: Family) -> None:
    grammars = []
    async with serving(family, CALL) as server, server.http() as http:
        for parallel in (True, False):
            path, body = chat(tools=[CLOCK], tool_choice="required", parallel_tool_calls=parallel)
            assert (await http.post(path, json={"model": MODEL, **body})).status_code == 200
            grammars.append(server.worker.requests[-1].sampling.constraint or "")
    assert [")*" in text for text in grammars] == [True, False]


REFUSED: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}, "strict": True}}]), "'f'"),
    (chat(tools=BOTH, tool_choice="always"), "tool_choice"),
    (responses(tools=[{**CUSTOM, "format": {**CUSTOM["format"], "syntax": "lark"}}]), "the tool 'say'"),
    (messages(tools=[plain(WEATHER)], tool_choice={"type": "tool", "name": "x"}), "there is no tool 'x'"),
]


async def test_what_cannot_be_enforced_is_refused_before_the_engine_sees_it(family: Family) -> None:
    async with serving(family, CALL) as server, server.http() as http:
        for (path, body), mark in REFUSED:
            response = await http.post(path, json={"model": MODEL, **body})
            assert response.status_code == 400 and mark in response.json()["error"]["message"], response.text
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert not server.worker.requests
        await server.idle()


async def test_the_engine_may_refuse_too(family: Family) -> None:
    """Its compiler knows more of schemas; a stream has not begun by then."""
    message = "the tool 'weather' cannot be enforced: no answer can be held to the keyword \"not\""
    refusal = Answer("", refuse=("invalid", message))
    async with serving(family, refusal) as server:
        with pytest.raises(openai.BadRequestError, match='keyword "not"'):
            await server.openai().chat.completions.create(
                model=MODEL, messages=[USER], tools=[STRICT], tool_choice="required", stream=True
            )
        with pytest.raises(openai.BadRequestError, match='keyword "not"'):
            await server.openai().responses.create(model=MODEL, input="Hi", text=TEXT, stream=True)  # type: ignore[call-overload]
        with pytest.raises(anthropic.BadRequestError, match='keyword "not"'):
            await server.anthropic().messages.create(
                model=MODEL,
                max_tokens=50,
                messages=[USER],
                tools=[plain(WEATHER)],  # type: ignore[list-item]
                tool_choice={"type": "any"},
                stream=True,
            )
        await server.idle()


async def test_a_response_repeats_what_was_demanded(family: Family) -> None:
    async with serving(family, f"</think>\n\n{CALL}") as server:
        answer = await server.openai().responses.create(  # type: ignore[call-overload]
            model=MODEL,
            input="Hi",
            tools=BOTH_FLAT,
            tool_choice={"type": "function", "name": "clock"},
            parallel_tool_calls=False,
            text=TEXT,
        )
    assert answer.tool_choice.type == "function" and answer.tool_choice.name == "clock"
    assert answer.parallel_tool_calls is False and answer.text.format.type == "json_schema"
    assert [item.name for item in answer.output] == ["clock"]


async def test_custom_tools_in_chat_completions(family: Family) -> None:
    """Their calls come as text, in a stream too, and go back into the conversation as what they were."""
    said = "<tool_call>\n<function=say>\n<parameter=input>\nhaaa\n</parameter>\n</function>\n</tool_call><|im_end|>"
    async with serving(family, f"</think>\n\n{said}") as server:
        client = server.openai()
        answer: Any = await client.chat.completions.create(model=MODEL, messages=[USER], tools=[CUSTOM_CHAT])
        (called,) = answer.choices[0].message.tool_calls
        assert called.type == "custom" and (called.custom.name, called.custom.input) == ("say", "haaa")
        assert answer.choices[0].finish_reason == "tool_calls"
        stream = await client.chat.completions.create(model=MODEL, messages=[USER], tools=[CUSTOM_CHAT], stream=True)
        pieces = [piece async for chunk in stream for piece in chunk.choices[0].delta.tool_calls or ()]
        inner = [piece.model_dump()["custom"] for piece in pieces]
        assert inner[0] == {"name": "say", "input": ""} and "".join(one["input"] for one in inner) == "haaa"
        output: Any = {"role": "tool", "tool_call_id": called.id, "content": "Heard."}
        turn: Any = answer.choices[0].message.model_dump(exclude_none=True)
        await client.chat.completions.create(model=MODEL, messages=[USER, turn, output], tools=[CUSTOM_CHAT])
        prompt = family.tokenizer.decode(server.worker.requests[-1].tokens)
        assert "<parameter=input>\nhaaa\n</parameter>" in prompt and "Heard." in prompt


async def test_what_only_looks_like_a_call_is_none_where_a_grammar_was_followed(family: Family) -> None:
    """Calls outside the grammar are not healed: a strict tool is never called with arguments that were not checked."""
    bare = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function><|im_end|>"
    async with serving(family, f"</think>\n\n{bare}") as server:
        client = server.openai()
        loose = await client.chat.completions.create(model=MODEL, messages=[USER], tools=[WEATHER])
        strict = await client.chat.completions.create(model=MODEL, messages=[USER], tools=[STRICT])
    assert loose.choices[0].message.tool_calls and not strict.choices[0].message.tool_calls
    assert "<function=weather>" in (strict.choices[0].message.content or "")


async def test_a_script_is_followed_instead(family: Family, tmp_path: Path) -> None:
    rules = tmp_path / "rules.jsonl"
    rules.write_text('{"when": {}, "say": [{"text": "Scripted."}]}\n')
    async with serving(family, script=Script.load(rules)) as server, server.http() as http:
        path, body = chat(tools=[CLOCK], tool_choice="required")
        response = await http.post(path, json={"model": MODEL, **body})
        assert response.json()["choices"][0]["message"]["content"] == "Scripted."
        request = server.worker.requests[-1]
    assert request.sampling.constraint is None and request.sampling.forced
