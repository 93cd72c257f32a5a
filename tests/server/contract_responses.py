"""The features of OpenAI Responses, each with a case or more."""

from __future__ import annotations

import json
from typing import Any

from tests.server.contract import Case
from tests.server.contract_common import END, GRAMMAR, HELLO, MORE, ROME, SCHEMA, THOUGHT, USER, call, constrained
from tests.server.support import Answer

FEATURES = (
    "text",
    "prewarm",
    "previous_response_id",
    "function",
    "custom with grammar",
    "namespace",
    "local_shell",
    "web_search",
    "reasoning with encrypted_content",
    "store, retrieval",
    "deletion",
    "input_items",
    "cancel",
    "compaction",
    "text.format",
    "logprobs",
    "max_output_tokens",
    "errors",
)
"""In the words of the issue, or nearly."""

FLAT = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
SAY = {"type": "custom", "name": "say", "format": {"type": "grammar", **GRAMMAR}}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Helpers",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}],
}


def goes_on(**fields: Any) -> Any:
    """By the name of the response."""
    return lambda client, made: client.responses.create(
        model="local-moe", previous_response_id=made.id, **{"input": "More", **fields}
    )


def sent_back(output: Any, **fields: Any) -> Any:
    """All items, as they came."""
    return lambda client, made: client.responses.create(
        model="local-moe",
        input=[USER, *(item.model_dump(exclude_none=True) for item in made.output), output(made)],
        **fields,
    )


def output_of(kind: str) -> Any:
    return lambda made: {"type": kind, "call_id": made.output[-1].call_id, "output": "ALPHA"}


SHELL = call("local_shell", command='["ls", "-l"]', timeout_ms="5000")
FORMAT = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}}
CODEX = {
    "session-id": "s",
    "thread-id": "t",
    "user-agent": "codex_exec/0.169.0",
}
COMPACTION = json.dumps({"request_kind": "compaction", "thread_source": "user"})

CASES = [
    Case(
        "responses",
        "text",
        {"instructions": "ALPHA"},
        HELLO,
        lambda made: made.output_text == "Hello",
        prompt=("ALPHA", "Hi"),
    ),
    Case(
        "responses",
        "prewarm",
        {"input": [{"role": "developer", "content": "ALPHA"}], "tools": [FLAT], "generate": False},
        Answer("", reason="length"),
        holds=lambda made: made.output == [] and made.usage.output_tokens == 0,
        prompt=("weather", "ALPHA"),
        only=("socket",),
    ),
    Case(
        "responses",
        "prewarm",
        {"input": [{"role": "developer", "content": "ALPHA"}], "extra_body": {"generate": False}},
        Answer("", reason="length"),
        holds=lambda made: made.output == [] and made.usage.output_tokens == 0,
        prompt=("ALPHA",),
        only=("whole", "stream"),
    ),
    Case(
        "responses",
        "previous_response_id",
        {},
        HELLO,
        then=(goes_on(),),
        holds=lambda made: made.previous_response_id,
        prompt=("Hi", "Hello", "More"),
    ),
    Case("responses", "previous_response_id", {"previous_response_id": "resp_x"}, refused="resp_x.* not found"),
    Case(
        "responses",
        "function",
        {"tools": [FLAT]},
        ROME,
        holds=lambda made: json.loads(made.output[-1].arguments) == {"city": "Rome"},
    ),
    Case(
        "responses",
        "function",
        {"tools": [FLAT]},
        ROME,
        then=(sent_back(output_of("function_call_output"), tools=[FLAT]),),
        prompt=("Rome", "ALPHA"),
        spliced=True,
    ),
    Case(
        "responses",
        "custom with grammar",
        {"tools": [SAY]},
        f"{THOUGHT}{call('say', input='haa')}{END}",
        holds=lambda made: (made.output[-1].type, made.output[-1].input) == ("custom_tool_call", "haa"),
        sampled=constrained("ha+"),
    ),
    Case(
        "responses",
        "custom with grammar",
        {"tools": [SAY]},
        f"{THOUGHT}{call('say', input='haa')}{END}",
        then=(sent_back(output_of("custom_tool_call_output"), tools=[SAY]),),
        prompt=("haa", "ALPHA"),
        spliced=True,
    ),
    Case(
        "responses",
        "namespace",
        {"tools": [AGENTS]},
        f"{THOUGHT}{call('agents__spawn')}{END}",
        holds=lambda made: (made.output[-1].namespace, made.output[-1].name) == ("agents", "spawn"),
    ),
    Case(
        "responses",
        "namespace",
        {"tools": [AGENTS]},
        f"{THOUGHT}{call('agents__spawn')}{END}",
        then=(sent_back(output_of("function_call_output"), tools=[AGENTS]),),
        spliced=True,
    ),
    Case(
        "responses",
        "local_shell",
        {"tools": [{"type": "local_shell"}]},
        f"{THOUGHT}{SHELL}{END}",
        holds=lambda made: (
            made.output[-1].type == "local_shell_call"
            and (made.output[-1].action.command, made.output[-1].action.timeout_ms) == (["ls", "-l"], 5000)
        ),
        prompt=('"local_shell"', "Hi"),
    ),
    *(
        Case(
            "responses",
            "local_shell",
            {"tools": [{"type": "local_shell"}]},
            f"{THOUGHT}{SHELL}{END}",
            then=(sent_back(output, tools=[{"type": "local_shell"}]),),
            prompt=("ALPHA",),
            spliced=True,
        )
        for output in (
            output_of("function_call_output"),
            lambda made: {"type": "local_shell_call_output", "id": made.output[-1].call_id, "output": "ALPHA"},
        )
    ),
    Case(
        "responses",
        "local_shell",
        {"tools": [{"type": "local_shell"}]},
        f"{THOUGHT}{call('local_shell', command='ls')}{END}",
        holds=lambda made: (made.output[-1].type, made.output[-1].name) == ("function_call", "local_shell"),
    ),
    Case(
        "responses",
        "web_search",
        {"tools": [{"type": "web_search"}, FLAT]},
        HELLO,
        holds=lambda made: [tool.type for tool in made.tools] == ["function"],
        absent=("web_search",),
    ),
    Case(
        "responses",
        "reasoning with encrypted_content",
        {"include": ["reasoning.encrypted_content"], "store": False},
        HELLO,
        then=(sent_back(lambda made: MORE),),
        prompt=("Hi", "Hello", "More"),
    ),
    Case(
        "responses",
        "store, retrieval",
        {},
        HELLO,
        then=(lambda client, made: client.responses.retrieve(made.id),),
        holds=lambda made: (made.output_text, made.status, made.store) == ("Hello", "completed", True),
    ),
    Case(
        "responses",
        "store, retrieval",
        {"store": False},
        HELLO,
        then=(lambda client, made: client.responses.retrieve(made.id),),
        refused="resp_",
    ),
    Case(
        "responses",
        "deletion",
        {},
        HELLO,
        then=(
            lambda client, made: after(client.responses.delete(made.id), made),
            lambda client, made: client.responses.retrieve(made.id),
        ),
        refused="resp_",
    ),
    Case(
        "responses",
        "input_items",
        {"input": [USER, MORE]},
        HELLO,
        then=(lambda client, made: client.responses.input_items.list(made.id, order="asc"),),
        holds=lambda page: [item.content[0].text for item in page.data] == ["Hi", "More"],
    ),
    Case(
        "responses",
        "cancel",
        {},
        HELLO,
        then=(lambda client, made: client.responses.cancel(made.id),),
        refused="background",
    ),
    Case(
        "responses",
        "compaction",
        {"tools": [FLAT], "prompt_cache_key": "s"},
        HELLO,
        then=(
            lambda client, made: client.responses.create(
                model="local-moe",
                input=[USER, *(item.model_dump(exclude_none=True) for item in made.output), MORE],
                prompt_cache_key="s",
                extra_headers={**CODEX, "x-codex-turn-metadata": COMPACTION},
            ),
        ),
        prompt=("weather", "Hi", "Hello", "More"),
        headers=CODEX,
    ),
    Case(
        "responses",
        "text.format",
        {"text": FORMAT},
        f'{THOUGHT}{{"city": "Rome"}}{END}',
        holds=lambda made: json.loads(made.output_text) == {"city": "Rome"} and made.text.format.type == "json_schema",
        sampled=constrained("city"),
    ),
    Case(
        "responses",
        "logprobs",
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        HELLO,
        holds=lambda made: "".join(one.token for one in made.output[-1].content[0].logprobs).strip() == "Hello",
    ),
    Case(
        "responses",
        "max_output_tokens",
        {"max_output_tokens": 9},
        HELLO,
        holds=lambda made: (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens"),
    ),
    Case("responses", "errors", {"input": "word " * 9000}, refused="maximum context length"),
    Case("responses", "errors", {"background": True}, refused="background"),
    Case("responses", "errors", {"model": "gpt-9"}, refused="gpt-9"),
]


def after(done: Any, value: Any) -> Any:
    """``value``, when a call is done whose own answer does not matter."""
    if not hasattr(done, "__await__"):
        return value

    async def waited() -> Any:
        await done
        return value

    return waited()
