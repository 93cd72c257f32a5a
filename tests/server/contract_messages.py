"""The features of Anthropic Messages, in the words of the issue or nearly, each with a case or more."""

from __future__ import annotations

import json
from typing import Any

from tests.server.contract import Case
from tests.server.contract_common import END, HELLO, MORE, SCHEMA, THOUGHT, USER, WEATHER, cached, constrained

FEATURES = (
    "text",
    "thinking with signature",
    "redacted_thinking",
    "tool_use",
    "tool_result with nested blocks",
    "image, document",
    "tool_reference, defer_loading",
    "server tools",
    "system in mid-conversation",
    "tool_choice",
    "output_config",
    "thinking budgets, effort",
    "context_management",
    "cache_control",
    "stop sequences",
    "count_tokens",
    "errors",
    "models",
    "beta headers",
)
"""In the words of the issue, or nearly."""

PLAIN = {"name": "weather", "description": "Tells", "input_schema": SCHEMA}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 2000}}


def kinds(*names: str) -> Any:
    return lambda made: [block.type for block in made.content] == list(names)


def text_of(made: Any) -> str:
    return "".join(block.text for block in made.content if block.type == "text")


def said_back(*content: Any, tools: Any = None) -> Any:
    """The answer goes back as it came, and a question after it."""

    def step(client: Any, made: Any) -> Any:
        turn = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in made.content]}
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": list(content)}
            for block in made.content
            if block.type == "tool_use"
        ]
        after = {"role": "user", "content": results} if results else MORE
        asked = {"tools": tools} if tools else {}
        return client.messages.create(model="local-moe", max_tokens=500, messages=[USER, turn, after], **THINK, **asked)

    return step


CASES = [
    Case("messages", "text", holds=lambda made: (text_of(made), made.stop_reason) == ("Hello", "end_turn")),
    Case(
        "messages",
        "thinking with signature",
        THINK,
        HELLO,
        holds=lambda made: made.content[0].thinking.strip() == "A plan." and len(made.content[0].signature) > 16,
    ),
    Case(
        "messages",
        "thinking with signature",
        THINK,
        HELLO,
        then=(said_back(),),
        prompt=("Hi", "Hello", "More"),
        absent=("A plan.",),
    ),
    Case(
        "messages",
        "redacted_thinking",
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "redacted_thinking", "data": "OPAQUE"}, {"type": "text", "text": "ALPHA"}],
                },
                MORE,
            ]
        },
        prompt=("Hi", "ALPHA", "More"),
        absent=("OPAQUE",),
    ),
    Case(
        "messages",
        "tool_use",
        {"tools": [PLAIN]},
        f"{WEATHER}{END}",
        holds=lambda made: (made.content[0].input, made.stop_reason) == ({"city": "Rome"}, "tool_use"),
    ),
    Case(
        "messages",
        "tool_result with nested blocks",
        {"tools": [PLAIN], **THINK},
        f"{THOUGHT}{WEATHER}{END}",
        then=(said_back({"type": "text", "text": "ALPHA"}, {"type": "text", "text": "BETA"}, tools=[PLAIN]),),
        prompt=("Rome", "ALPHA", "BETA"),
        spliced=True,
    ),
    *(
        Case("messages", "image, document", {"messages": [{"role": "user", "content": content}]}, refused=kind)
        for kind, media in (
            ("image", {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}}),
            ("document", {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}),
        )
        for content in (
            [media],
            [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [media]}] if kind == "image" else [media],
        )
    ),
    Case(
        "messages",
        "tool_reference, defer_loading",
        {
            "tools": [PLAIN, {**PLAIN, "name": "fetch", "description": "BETA", "defer_loading": True}],
            "messages": [
                {"role": "user", "content": "ALPHA"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "find", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": [{"type": "tool_reference", "tool_name": "fetch"}],
                        }
                    ],
                },
            ],
        },
        prompt=("weather", "ALPHA", "BETA"),
    ),
    Case(
        "messages",
        "server tools",
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        refused="web_search_20250305 is a tool of the vendor's own service",
    ),
    Case("messages", "server tools", {"extra_body": {"mcp_servers": [{"type": "url"}]}}, refused="MCP servers"),
    Case(
        "messages",
        "system in mid-conversation",
        {"system": "ALPHA", "messages": [USER, {"role": "system", "content": "BETA"}, MORE]},
        prompt=("ALPHA", "Hi", "BETA", "More"),
    ),
    *(
        Case("messages", "tool_choice", {"tools": [PLAIN], "tool_choice": choice}, f"{WEATHER}{END}", sampled=wanted)
        for choice, wanted in (
            ({"type": "any"}, constrained("weather")),
            ({"type": "tool", "name": "weather"}, constrained("weather")),
            ({"type": "auto"}, lambda request: request.sampling.constraint is None),
        )
    ),
    Case(
        "messages",
        "tool_choice",
        {"tools": [PLAIN], "tool_choice": {"type": "none"}},
        f"{WEATHER}{END}",
        holds=kinds("text"),
    ),
    Case(
        "messages",
        "output_config",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        '{"city": "Rome"}<|im_end|>',
        holds=lambda made: json.loads(text_of(made)) == {"city": "Rome"},
        sampled=constrained("city"),
    ),
    Case("messages", "thinking budgets, effort", THINK, HELLO, holds=kinds("thinking", "text")),
    Case("messages", "thinking budgets, effort", {"thinking": {"type": "disabled"}}, holds=kinds("text")),
    Case(
        "messages",
        "thinking budgets, effort",
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
        HELLO,
        holds=kinds("thinking", "text"),
    ),
    Case(
        "messages",
        "context_management",
        {"extra_body": {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}},
    ),
    Case(
        "messages",
        "cache_control",
        {
            "system": [{"type": "text", "text": "ALPHA", "cache_control": {"type": "ephemeral"}}],
            "tools": [{**PLAIN, "cache_control": {"type": "ephemeral"}}],
            **THINK,
        },
        cached,
        holds=lambda made: (
            made.usage.cache_read_input_tokens == 16
            and made.usage.input_tokens == 2
            and made.usage.cache_creation_input_tokens > 16
        ),
    ),
    Case(
        "messages",
        "stop sequences",
        {"stop_sequences": ["four", "two"]},
        f"one two three{END}",
        holds=lambda made: (text_of(made), made.stop_reason, made.stop_sequence) == ("one ", "stop_sequence", "two"),
    ),
    Case(
        "messages",
        "count_tokens",
        then=(
            lambda client, made: client.messages.count_tokens(
                model="local-moe", messages=[USER], tools=[PLAIN], system="Be brief."
            ),
        ),
        holds=lambda counted: counted.input_tokens > 50,
    ),
    Case(
        "messages",
        "errors",
        {"messages": [{"role": "user", "content": "word " * 9000}]},
        refused=r"prompt is too long: .* tokens > \d+ maximum",
    ),
    Case(
        "messages", "errors", {"max_tokens": 9000}, refused=r"input length and max_tokens exceed context limit: \d+ \+"
    ),
    Case("messages", "errors", {"model": "claude-9"}, refused="claude-9"),
    Case(
        "messages",
        "models",
        then=(
            lambda client, made: client.models.list(),
            lambda client, page: client.models.retrieve(page.data[0].id),
        ),
        holds=lambda model: (model.id, model.type) == ("local-moe", "model"),
    ),
    Case("messages", "beta headers", headers={"anthropic-beta": "context-management-2025-06-27,never-heard-of-2099"}),
]
