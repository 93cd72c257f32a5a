"""Requests as Claude Code and Codex send them, through a tool step, a side request and a compaction."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.api import Request
from parsers.load import Family
from tests.server.support import Answer, serving
from tests.server.test_responses import call

pytestmark = pytest.mark.anyio

PATCH = r"""
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Delete File: " /(.+)/ LF
    | "*** Add File: " /(.+)/ LF ("+" /(.*)/ LF -> line)+

%import common.LF
"""
CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "authorization": "Bearer local",
    "x-claude-code-session-id": "11111111-2222-3333-4444-555555555555",
    "user-agent": "claude-cli/2.1.332 (external, sdk-cli)",
}
CLAUDE: dict[str, Any] = {
    "model": "local-moe",
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.a1f; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are a coding agent.", **CACHED},
        {"type": "text", "text": "Work in the project folder.", **CACHED},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
                "required": ["command"],
                "additionalProperties": False,
            },
        }
    ],
    "metadata": {
        "user_id": json.dumps({"device_id": "d", "session_id": "11111111-2222-3333-4444-555555555555"}),
    },
    "max_tokens": 3000,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "safeguards": {"mode": "plan"},
    "stream": True,
}
REMINDER = {"type": "text", "text": "<system-reminder>\nCLAUDE.md\n</system-reminder>"}
CLAUDE_FIRST: list[dict[str, Any]] = [
    {"role": "user", "content": [REMINDER, {"type": "text", "text": "List the files", **CACHED}]},
    {"role": "system", "content": "Environment: Linux. Agents: none."},
]

CODEX_HEADERS = {
    "authorization": "Bearer local",
    "session-id": "aaaa1111",
    "thread-id": "aaaa1111",
    "x-client-request-id": "aaaa1111",
    "x-codex-window-id": "aaaa1111:0",
    "x-codex-turn-metadata": json.dumps({"request_kind": "turn", "thread_source": "user"}),
    "user-agent": "codex_exec/0.169.0",
}
SPAWN = {
    "type": "function",
    "name": "spawn_agent",
    "description": "",
    "strict": False,
    "parameters": {"type": "object"},
}
CODEX: dict[str, Any] = {
    "model": "local-moe",
    "stream": True,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "aaaa1111",
    "client_metadata": {"x-codex-installation-id": "i"},
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
                "required": ["cmd"],
                "additionalProperties": False,
            },
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files",
            "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
        },
        {"type": "namespace", "name": "multi_agent_v1", "description": "Agents", "tools": [SPAWN]},
        {"type": "web_search", "external_web_access": False},
    ],
}


def message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


CODEX_FIRST = [
    message("developer", "You are a coding agent."),
    message("developer", "<skills>none</skills>", "<permissions>all</permissions>"),
    message("user", "<environment_context><cwd>/srv</cwd></environment_context>"),
    message("user", "List the files"),
]


def by_request(*texts: str) -> Any:
    """Answers in the order of the requests."""
    order = iter(texts)
    return lambda request: Answer(next(order))


def shared(before: Request, after: Request) -> int:
    """Tokens that two prompts have in common."""
    pairs = zip(before.tokens, after.tokens, strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other), min(len(before.tokens), len(after.tokens))
    )


async def test_claude_code(family: Family) -> None:
    step = f"See what is here.\n</think>\n\nLooking.\n\n{call('Bash', command='ls', timeout='5000.0')}<|im_end|>"
    answers = by_request(step, "Title.<|im_end|>", "</think>\n\nDone.<|im_end|>")
    async with serving(family, answers) as server, server.http(headers=CLAUDE_HEADERS) as http:
        counted = await http.post(
            "/v1/messages/count_tokens?beta=true",
            json={key: CLAUDE[key] for key in ("model", "system", "tools")} | {"messages": CLAUDE_FIRST[:1]},
        )
        assert counted.json()["input_tokens"] > 100
        first = await http.post("/v1/messages?beta=true", json={**CLAUDE, "messages": CLAUDE_FIRST})
        assert first.status_code == 200, first.text
        blocks = streamed_blocks(first.text)
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
        title = {
            **{key: CLAUDE[key] for key in ("model", "metadata", "stream")},
            "max_tokens": 3000,
            "system": [{"type": "text", "text": "Write a title."}],
            "messages": [{"role": "user", "content": "List the files"}],
            "tools": [],
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        }
        assert (await http.post("/v1/messages?beta=true", json=title)).status_code == 200
        blocks[2]["input"] = {"timeout": 5000, "command": "ls"}
        result = {"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": "a.py", "is_error": False, **CACHED}
        history = [
            {"role": "user", "content": [REMINDER, {"type": "text", "text": "List the files"}]},
            CLAUDE_FIRST[1],
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result]},
        ]
        second = await http.post("/v1/messages?beta=true", json={**CLAUDE, "messages": history})
        main, side, after = server.worker.requests
        stats = server.state.sessions.stats()
    assert streamed_blocks(second.text)[0]["text"] == "Done."
    prompt = family.tokenizer.decode(main.tokens)
    assert "billing" not in prompt
    assert prompt.index("Work in the project") < prompt.index("CLAUDE.md") < prompt.index("Environment: Linux")
    assert (main.side, side.side, after.side) == (False, True, False)
    assert main.session == after.session
    assert shared(main, after) == len(main.tokens)
    sampled = family.encode_raw(step)
    assert after.tokens[len(main.tokens) :][: len(sampled)] == sampled
    assert stats["misses_without_cause"] == 0


def streamed_blocks(body: str) -> list[dict[str, Any]]:
    """Content blocks put together from a stream, as Claude Code does."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    for line in body.splitlines():
        data = json.loads(line[6:]) if line.startswith("data: ") else {}
        match data.get("type"):
            case "content_block_start":
                blocks.append(data["content_block"])
            case "content_block_delta":
                block, delta = blocks[data["index"]], data["delta"]
                kind = delta.pop("type")
                if kind == "input_json_delta":
                    arguments[data["index"]] = arguments.get(data["index"], "") + delta["partial_json"]
                else:
                    ((key, text),) = delta.items()
                    block[key] += text
    for index, text in arguments.items():
        blocks[index]["input"] = json.loads(text)
    return blocks


async def test_codex(family: Family) -> None:
    step = f"See what is here.\n</think>\n\n{call('exec_command', cmd='ls')}<|im_end|>"
    summary = f"</think>\n\nA summary with {call('exec_command', cmd='rm')} in it.<|im_end|>"
    answers = by_request(step, "</think>\n\nTitle.<|im_end|>", "</think>\n\nDone.<|im_end|>", summary)
    async with serving(family, answers) as server, server.http(headers=CODEX_HEADERS) as http:
        first = await http.post("/v1/responses", json={**CODEX, "input": CODEX_FIRST})
        assert first.status_code == 200, first.text
        items = done_items(first.text)
        assert [item["type"] for item in items] == ["reasoning", "function_call"]
        title = {**CODEX, "tools": [], "prompt_cache_key": "bbbb", "input": [message("user", "Write a title")]}
        title["text"] = {"format": {"type": "json_schema", "name": "title", "schema": {}, "strict": True}}
        source = {
            "session-id": "bbbb",
            "thread-id": "bbbb",
            "x-codex-turn-metadata": '{"thread_source": "thread_title"}',
        }
        assert (await http.post("/v1/responses", json=title, headers=source)).status_code == 200
        output = {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "a.py\n"}
        history = [*CODEX_FIRST, *items, output]
        second = await http.post("/v1/responses", json={**CODEX, "input": history})
        history += [*done_items(second.text), message("user", "Summarise the work")]
        compact = {**CODEX, "tools": [], "parallel_tool_calls": False, "input": history}
        kind = {"x-codex-turn-metadata": json.dumps({"request_kind": "compaction", "thread_source": "user"})}
        third = await http.post("/v1/responses", json=compact, headers=kind)
        main, side, after, compaction = server.worker.requests
        stats = server.state.sessions.stats()
    assert (main.side, side.side, after.side, compaction.side) == (False, True, False, False)
    assert main.session == after.session == compaction.session
    prompt = family.tokenizer.decode(main.tokens)
    for mark in ("exec_command", "*** Begin Patch", "multi_agent_v1__spawn_agent", "<skills>"):
        assert mark in prompt
    assert after.tokens[: len(main.tokens)] == main.tokens
    tools_end = prompt.index("</tools>")
    assert family.tokenizer.decode(compaction.tokens)[:tools_end] == prompt[:tools_end]
    (summarised,) = done_items(third.text)
    assert summarised["type"] == "message"
    assert "rm" in summarised["content"][0]["text"]
    assert stats["misses_without_cause"] == 0


def done_items(body: str) -> list[dict[str, Any]]:
    """Output items of a stream, as Codex keeps them."""
    payloads = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
    return [payload["item"] for payload in payloads if payload["type"] == "response.output_item.done"]
