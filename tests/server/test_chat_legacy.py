"""Chat Completions with functions instead of tools, with the official SDK."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from parsers.load import Family
from tests.server.support import serving
from tests.server.test_responses import THOUGHT, call

pytestmark = pytest.mark.anyio

FUNCTIONS: Any = [
    {"name": "ls", "description": "Lists", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
]
ASK: dict[str, Any] = {"model": "local-moe", "functions": FUNCTIONS}
HI: list[Any] = [{"role": "user", "content": "Hi"}]
ANSWER = f"{THOUGHT}{call('ls', path='/')}\n{call('ls', path='/a')}<|im_end|>"


async def test_one_function_is_called_and_answered(family: Family) -> None:
    async with serving(family, ANSWER) as server:
        create = server.openai().chat.completions.create
        first = await create(messages=HI, **ASK)
        choice = first.choices[0]
        function = choice.message.function_call
        assert function is not None
        output = {"role": "function", "name": "ls", "content": "a b"}
        said = {"role": "assistant", "content": None, "function_call": function.model_dump()}
        await create(messages=[*HI, said, output], **ASK)
        second = family.tokenizer.decode(server.worker.requests[1].tokens)
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert (function.name, function.arguments) == ("ls", '{"path": "/"}')
    assert second.index("<function=ls>") < second.index("a b")


async def test_a_stream(family: Family) -> None:
    async with serving(family, ANSWER) as server:
        stream = await server.openai().chat.completions.create(messages=HI, stream=True, **ASK)
        chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call]
    assert pieces[0].name == "ls"
    assert "".join(piece.arguments or "" for piece in pieces) == '{"path": "/"}'
    assert chunks[-1].choices[0].finish_reason == "function_call"
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)


async def test_a_function_is_demanded_or_none(family: Family) -> None:
    async with serving(family, ANSWER) as server:
        create = server.openai().chat.completions.create
        none = await create(messages=HI, function_call="none", **ASK)
        await create(messages=HI, function_call={"name": "ls"}, **ASK)
        assert server.worker.requests[1].sampling.constraint
        with pytest.raises(openai.BadRequestError, match="there is no tool 'rm'"):
            await create(messages=HI, function_call={"name": "rm"}, **ASK)
    assert none.choices[0].message.function_call is None
