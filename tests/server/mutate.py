"""Bodies as the real clients send them, and what may become of them on the way."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.server.test_harness_shapes import CLAUDE, CLAUDE_FIRST, CLAUDE_HEADERS, CODEX, CODEX_FIRST, CODEX_HEADERS

CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
CHAT_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command",
            "strict": False,
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


def chat(system: str, thought: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model": "local-moe",
        "messages": [
            {"role": system, "content": "You are a coding agent."},
            {"role": "user", "content": [{"type": "text", "text": "List the files"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], **thought},
            {"role": "tool", "tool_call_id": "call_1", "content": "a.py\nb.py"},
            {"role": "user", "content": "And the sizes?"},
        ],
        "tools": CHAT_TOOLS,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


@dataclass(frozen=True)
class Kind:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


CLAUDE_STEP = [
    *CLAUDE_FIRST,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Look.", "signature": "s"},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "is_error": False,
                "content": [{"type": "text", "text": "a.py"}],
            },
            {"type": "text", "text": "<system-reminder>Go on.</system-reminder>"},
        ],
    },
]
CODEX_STEP = [
    *CODEX_FIRST,
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "ticket"},
    {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "call_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
    {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch", "call_id": "call_2"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "Done"}]},
]
KINDS = {
    "claude": Kind("/v1/messages", CLAUDE_HEADERS, {**CLAUDE, "messages": CLAUDE_STEP}),
    "claude-count": Kind(
        "/v1/messages/count_tokens",
        CLAUDE_HEADERS,
        {name: CLAUDE[name] for name in ("model", "system", "tools", "metadata", "thinking")}
        | {"messages": CLAUDE_STEP},
    ),
    "codex": Kind("/v1/responses", CODEX_HEADERS, {**CODEX, "input": CODEX_STEP}),
    "opencode": Kind(
        "/v1/chat/completions",
        {"user-agent": "opencode/1.18.33 ai-sdk/openai-compatible", "x-session-affinity": "ses_1"},
        chat("system", {"reasoning_content": "Look."}, max_tokens=512, temperature=0.55, top_p=1, tool_choice="auto"),
    ),
    "pi": Kind(
        "/v1/chat/completions",
        {"user-agent": "pi/0.81.0"},
        chat(
            "developer",
            {"reasoning_content": "Look."},
            max_completion_tokens=512,
            reasoning_effort="medium",
            store=False,
            prompt_cache_key="pi-1",
        ),
    ),
    "qwen": Kind(
        "/v1/chat/completions",
        {"user-agent": "QwenCode/0.16.0 (linux; x64)"},
        chat("system", {"reasoning": "Look."}, max_tokens=512, metadata={"sessionId": "q", "promptId": "q########0"}),
    ),
    "completions": Kind(
        "/v1/completions",
        {"user-agent": "OpenAI/Python 2.9.0"},
        {
            "model": "local-moe",
            "prompt": ["def f(x):", [100, 101, 102, 32]],
            "n": 2,
            "max_tokens": 64,
            "echo": False,
            "logprobs": 2,
            "stop": ["\n\n\n"],
            "temperature": 0.2,
            "top_p": 0.95,
            "seed": 7,
            "logit_bias": {"65": -5},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
}

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 1e308, -0.0, 1 << 31, 1 << 63, 1 << 70, "", " ", "\0", "x" * 5000, "\ud800",
    "<|im_end|>", "<|im_start|>assistant\n", "<tool_call>", "</think>", "{{ messages }}", "{% raw %}", "٣", "\u2028",
    "none", "auto", "required", "text", "tool", "user", "assistant", "system", [], {}, [[]], [None], {"": None},
    {"type": "text"}, {"type": "text", "text": "Hi"}, {"role": "user", "content": "Hi"}, [{"type": "text", "text": ""}],
)  # fmt: skip


def _places(value: Any, owner: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """Every container and key or index in it, at any depth."""
    if owner is not None:
        yield owner, key
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from _places(item, value, name)


def _remove(rng: random.Random, owner: Any, key: Any) -> None:
    del owner[key]


def _replace(rng: random.Random, owner: Any, key: Any) -> None:
    owner[key] = copy.deepcopy(rng.choice(ODD))


def _wrap(rng: random.Random, owner: Any, key: Any) -> None:
    for _ in range(rng.choice((1, 1, 1, 3, 200))):
        owner[key] = [owner[key]] if rng.random() < 0.5 else {rng.choice(("type", "content", "x")): owner[key]}


def _repeat(rng: random.Random, owner: Any, key: Any) -> None:
    if isinstance(owner, list):
        owner[key:key] = [copy.deepcopy(owner[key]) for _ in range(rng.choice((1, 2, 50)))]
    else:
        owner[rng.choice(("x", "type", "content", "text", "role", "id", "name"))] = copy.deepcopy(owner[key])


def _rename(rng: random.Random, owner: Any, key: Any) -> None:
    if isinstance(owner, dict):
        owner[key[:-1] if rng.random() < 0.5 else key.upper()] = owner.pop(key)
    else:
        rng.shuffle(owner)


def _transplant(rng: random.Random, owner: Any, key: Any) -> None:
    """One of the values somewhere in the neighbourhood."""
    _, value = rng.choice([(k, o[k]) for o, k in _places(owner)])
    owner[key] = copy.deepcopy(value)


def _spoil(rng: random.Random, owner: Any, key: Any) -> None:
    text = owner[key]
    if isinstance(text, str):
        at = rng.randrange(len(text) + 1)
        odd = rng.choice([one for one in ODD if isinstance(one, str)])
        owner[key] = text[:at] + odd + text[at + rng.randrange(3) :]
    else:
        _replace(rng, owner, key)


_CHANGES: tuple[Callable[[random.Random, Any, Any], None], ...] = (
    _remove, _replace, _replace, _wrap, _repeat, _rename, _transplant, _spoil,
)  # fmt: skip


def mutated(body: dict[str, Any], rng: random.Random) -> bytes:
    """One to four changes, and now and then one of the bytes themselves."""
    out = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 4))):
        places = list(_places(out))
        if places:
            rng.choice(_CHANGES)(rng, *rng.choice(places))
    data = bytearray(json.dumps(out, ensure_ascii=rng.random() < 0.7).encode(errors="surrogatepass"))
    if rng.random() < 0.1:
        for _ in range(rng.choice((1, 3, 30))):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.02 else data)
