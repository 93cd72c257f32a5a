"""Whole agent sessions in every family's format, over HTTP, with the official SDKs: nothing is read twice.

Each session has a loop of three steps (one of them with parallel calls), a second message of the user with another
loop, a restart of the server in between, and a client that spells what it sends back in its own way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import anthropic
import openai
import pytest

from engine.checkpoint import write_tiny
from launchers.child_server import ChildServer
from launchers.demo_agents import anthropic_client
from parsers.families.registry import FORMATS
from parsers.format import Format
from parsers.probe import examine
from tests.parsers.families_page import encoder_of
from tests.parsers.wire_support import SUFFIX, machine, vocabulary

PAGE = 64
MODEL = "local-moe"
SYSTEM = "You are a coding agent. " + "Say what you did, and how you know. " * 20
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}}
DESCRIPTION = "Reads a file."
OTHERS = ("<|im_end|>", "<|endoftext|>")
LIGHT = ("hermes", "kimi_k2", "harmony", "mistral_v11")


def _call(path: str, limit: int) -> dict[str, Any]:
    return {"tool_call": {"name": "read", "args": {"path": path, "limit": limit}}}


RULES: Sequence[dict[str, Any]] = (
    {
        "when": {"after_user": "first", "step": 0},
        "say": [{"thinking": "Look at a."}, {"text": "I look."}, _call("a.py", 3)],
    },
    {
        "when": {"after_user": "first", "step": 1},
        "say": [{"thinking": "Now two."}, _call("b.py", 4), _call("c/<tool_call>.py", 5)],
    },
    {"when": {"after_user": "first", "step": 2}, "say": [_call("d.py", 6)]},
    {"when": {"after_user": "first"}, "say": [{"thinking": "That is all."}, {"text": "Read it all."}]},
    {"when": {"after_user": "second", "step": 0}, "say": [{"thinking": "Once more."}, _call("e.py", 7)]},
    {"when": {"after_user": "second"}, "say": [{"text": "Done."}]},
)


@dataclass(frozen=True)
class Step:
    """One request and its answer. ``calls``: how many there were."""

    resumed: int
    replayed: int
    new: int
    cause: str
    output: int
    calls: int

    @property
    def prompt(self) -> int:
        return self.resumed + self.replayed + self.new

    @property
    def computed(self) -> int:
        """Of the prompt and its answer; the last sampled token was never fed."""
        return self.prompt + self.output - 1


def step(headers: Any, output: int, calls: int) -> Step:
    parts = dict(part.strip().split("=", 1) for part in headers["x-ft-reuse"].split(","))
    return Step(int(parts["resumed"]), int(parts["replayed"]), int(parts["new"]), parts["cause"], output, calls)


def respelled(arguments: str) -> str:
    """Keys the other way round, as after a trip through a client's own map."""
    return json.dumps(dict(reversed(json.loads(arguments).items())))


class Agent(Protocol):
    """A client that keeps its own history."""

    def user(self, text: str) -> None: ...

    def send(self, url: str) -> Step: ...


class Messages:
    def __init__(self) -> None:
        self._messages: list[Any] = []

    def user(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def send(self, url: str) -> Step:
        raw = anthropic_client(url).messages.with_raw_response.create(
            model=MODEL,
            max_tokens=2000,
            system=SYSTEM,
            messages=self._messages,
            tools=[{"name": "read", "description": DESCRIPTION, "input_schema": SCHEMA}],
            thinking={"type": "adaptive"},
            extra_headers={"x-claude-code-session-id": "one", "user-agent": "claude-cli/2.1.332 (external, cli)"},
        )
        message: anthropic.types.Message = raw.parse()
        content = [block.model_dump(exclude_none=True) for block in message.content]
        calls = [block for block in content if block["type"] == "tool_use"]
        for call in calls:
            call["input"] = dict(reversed(call["input"].items()))
        self._messages.append({"role": "assistant", "content": content})
        outputs: list[Any] = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": f"Contents of {call['input']['path']}."}
            for call in reversed(calls)
        ]
        if outputs:
            reminder = {"type": "text", "text": "<system-reminder>Mind the time.</system-reminder>"}
            self._messages.append({"role": "user", "content": [*outputs, reminder]})
        return step(raw.headers, message.usage.output_tokens, len(calls))


def _openai(url: str) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="local", max_retries=0, http_client=http)


class Chat:
    """Sends no thinking back."""

    def __init__(self) -> None:
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    def user(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def send(self, url: str) -> Step:
        tool: Any = {"type": "function", "function": {"name": "read", "description": DESCRIPTION, "parameters": SCHEMA}}
        raw = _openai(url).chat.completions.with_raw_response.create(
            model=MODEL, messages=self._messages, tools=[tool], max_tokens=2000, reasoning_effort="medium"
        )
        answer = raw.parse()
        message = answer.choices[0].message
        calls = [call.model_dump() for call in message.tool_calls or ()]
        for call in calls:
            call["function"]["arguments"] = respelled(call["function"]["arguments"])
        echo: dict[str, Any] = {"role": "assistant", "content": message.content}
        self._messages.append({**echo, "tool_calls": calls} if calls else echo)
        for call in calls:
            path = json.loads(call["function"]["arguments"])["path"]
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"Contents of {path}."})
        return step(raw.headers, answer.usage.completion_tokens, len(calls))  # type: ignore[union-attr]


class Responses:
    def __init__(self) -> None:
        self._items: list[Any] = [{"role": "developer", "content": SYSTEM}]

    def user(self, text: str) -> None:
        self._items.append({"role": "user", "content": text})

    def send(self, url: str) -> Step:
        tool: Any = {"type": "function", "name": "read", "description": DESCRIPTION, "parameters": SCHEMA}
        raw = _openai(url).responses.with_raw_response.create(
            model=MODEL, input=self._items, tools=[{**tool, "strict": False}], store=False, prompt_cache_key="one"
        )
        answer = raw.parse()
        output = [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in output if item["type"] == "function_call"]
        for call in calls:
            call["arguments"] = respelled(call["arguments"])
        self._items += output
        for call in calls:
            path = json.loads(call["arguments"])["path"]
            text = f"Contents of {path}."
            self._items.append({"type": "function_call_output", "call_id": call["call_id"], "output": text})
        return step(raw.headers, answer.usage.output_tokens, len(calls))  # type: ignore[union-attr]


AGENTS: tuple[type[Agent], ...] = (Messages, Chat, Responses)


def model(directory: Path, known: Format) -> Path:
    """A tiny checkpoint that speaks the family's format over bytes."""
    tokens = directory / "tokens"
    tokens.mkdir()
    vocabulary(known.name, *OTHERS).save(str(tokens / "tokenizer.json"))
    (tokens / "tokenizer_config.json").write_text("{}")
    made = write_tiny("qwen3_5_moe", directory / "model", hidden=32, context=65536, tokenizer=str(tokens))
    (made / "chat_template.jinja").unlink()
    if not known.encoder:
        (made / "chat_template.jinja").write_text(encoder_of(known).source, encoding="utf-8")
    return made


def counters(server: ChildServer) -> dict[str, float]:
    rooms = [room for room in server.get("/v1/stats").values() if isinstance(room, dict)]
    return {name: value for room in rooms for name, value in room.items()}


def nothing_wrong(server: ChildServer) -> None:
    found = counters(server)
    wrong = ("misses_without_cause", "script_misses", "restored_unused", "echo_edited", "echo_unknown", "tolerated")
    assert {name: found.get(name, 0) for name in wrong} == dict.fromkeys(wrong, 0)


def continues(before: Step, after: Step) -> None:
    """Only what was added is new: no sampled token is read again, and hardly any is computed again."""
    assert after.new <= after.prompt - before.computed + 1, (before, after)
    assert after.replayed <= PAGE, (before, after)


NAMES = [known.name for known in FORMATS]


@pytest.mark.parametrize(
    ("name", "agent"),
    [
        pytest.param(
            name,
            AGENTS[number % 3],
            marks=[] if name in LIGHT else [pytest.mark.deep],
            id=f"{name}-{AGENTS[number % 3].__name__}",
        )
        for number, name in enumerate(NAMES)
    ],
)
def test_a_session(name: str, agent: type[Agent], tmp_path: Path) -> None:
    known = next(one for one in FORMATS if one.name == name)
    (tmp_path / "rules.jsonl").write_text("".join(json.dumps(rule) + "\n" for rule in RULES))
    arguments = ["--model", str(model(tmp_path, known)), "--family", name, "--script", str(tmp_path / "rules.jsonl")]
    client = agent()
    with ChildServer([*arguments, "--threads", "1"], tmp_path / "life", ready_seconds=120.0) as server:
        client.user("The first task.")
        steps = [client.send(server.url), client.send(server.url)]
        nothing_wrong(server)
        server.wait_until_stored()
        server.restart()
        steps += [client.send(server.url), client.send(server.url)]
        client.user("The second task.")
        later = [client.send(server.url), client.send(server.url)]
        nothing_wrong(server)
    assert [one.calls for one in (*steps, *later)] == [1, 2, 1, 0, 1, 0]
    probe = examine(known.with_suffix(SUFFIX), machine(name).tokenizer, encoder_of(known)).probe
    drops = known.think is not None and not probe.thinking_in_loop
    for before, after in (*pairwise(steps), *pairwise(later)):
        if drops and after.cause == "thinking_stripped":
            continue
        continues(before, after)
    if probe.thinking_survives or (probe.turn_end_survives and known.think is None):
        continues(steps[-1], later[0])
        assert later[0].cause == "none"
