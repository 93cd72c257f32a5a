"""The ten most common scenarios once more, through the whole server, over HTTP, with the official SDKs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from launchers.child_server import ChildServer
from launchers.demo_agents import anthropic_client

PAGE = 64
MODEL = "local-moe"
SYSTEM = "You are a coding agent. " + "Say what you did, and how you know. " * 40
READ = {
    "name": "read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}},
}
RULES = [
    {"when": {"kind": "side"}, "say": [{"text": "A title"}]},
    {"when": {"after_user": "step by step", "step": 9}, "say": [{"thinking": "Done now."}, {"text": "Read it all."}]},
    {
        "when": {"after_user": "step by step"},
        "say": [{"thinking": "Next file."}, {"tool_call": {"name": "read", "args": {"path": "a.py", "limit": 3}}}],
    },
    {"when": {"after_user": "at length"}, "say": [{"text": "A sentence that goes on and on. " * 30}]},
    {"when": {}, "say": [{"text": "Short."}]},
]


@dataclass
class Reuse:
    resumed: int
    replayed: int
    new: int
    cause: str

    @property
    def prompt(self) -> int:
        return self.resumed + self.replayed + self.new


@dataclass
class Served:
    """One server on one store, through restarts."""

    directory: Path
    model: Path
    lives: int = 0
    server: ChildServer = field(init=False)

    def start(self, model: Path | None = None) -> None:
        self.lives += 1
        arguments = ["--model", str(model or self.model), "--script", str(self.directory / "rules.jsonl")]
        arguments += ["--store", str(self.directory / "store"), "--chunk-tokens", "64", "--threads", "1"]
        self.server = ChildServer(arguments, self.directory / f"life{self.lives}", ready_seconds=120.0)
        self.server.__enter__()

    def stop(self) -> None:
        self.server.__exit__(None, None, None)

    @property
    def client(self) -> anthropic.Anthropic:
        return anthropic_client(self.server.url)

    def counters(self) -> dict[str, float]:
        rooms = [room for room in self.server.get("/v1/stats").values() if isinstance(room, dict)]
        return {name: value for room in rooms for name, value in room.items()}


def tiny(directory: Path, seed: int) -> Path:
    make = [sys.executable, "-P", "-m", "engine.checkpoint", "tiny", "qwen3_5_moe", str(directory), "--hidden", "32"]
    subprocess.run([*make, "--context", "65536", "--seed", str(seed)], check=True, stdout=subprocess.DEVNULL)
    return directory


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("starred")
    (directory / "rules.jsonl").write_text("".join(json.dumps(rule) + "\n" for rule in RULES))
    made = Served(directory, tiny(directory / "model", 0))
    made.start()
    yield made
    counters = made.counters()
    made.stop()
    assert counters["misses_without_cause"] == 0
    assert counters["script_misses"] == 0
    assert counters.get("restored_unused", 0) == 0


class Chat:
    """A client of the Messages API that keeps its own history."""

    def __init__(self, served: Served, name: str) -> None:
        self.served = served
        self.headers = {"x-claude-code-session-id": name, "user-agent": "claude-cli/2.1.332 (external, cli)"}
        self.system: list[Any] = [{"type": "text", "text": f"{SYSTEM}This is {name}."}]
        self.messages: list[Any] = []

    def send(self, text: str = "", **body: Any) -> Reuse:
        """One request; its answer, and outputs for its calls, are appended."""
        if text:
            self.messages.append({"role": "user", "content": text})
        raw = self.served.client.messages.with_raw_response.create(
            model=MODEL,
            max_tokens=2000,
            system=self.system,
            messages=self.messages,
            tools=[READ],  # type: ignore[list-item]
            thinking={"type": "adaptive"},
            extra_headers=self.headers,
            **body,
        )
        content = [block.model_dump(exclude_none=True) for block in raw.parse().content]
        self.messages.append({"role": "assistant", "content": content})
        calls = [block for block in content if block["type"] == "tool_use"]
        outputs = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": f"line {len(self.messages)}\n" * 30}
            for call in calls
        ]
        if outputs:
            self.messages.append({"role": "user", "content": outputs})
        return reuse(raw.headers)


def reuse(headers: Any) -> Reuse:
    parts = dict(part.strip().split("=", 1) for part in headers["x-ft-reuse"].split(","))
    return Reuse(int(parts["resumed"]), int(parts["replayed"]), int(parts["new"]), parts["cause"])


def test_01_an_edited_answer(served: Served) -> None:
    chat = Chat(served, "one")
    chat.send("First, at length.")
    before = chat.send("Second, at length.")
    block = next(block for block in chat.messages[-1]["content"] if block["type"] == "text")
    block["text"] = block["text"].rstrip()[:-6] + "other."
    after = chat.send("Third.")
    assert after.resumed >= before.prompt - PAGE


def test_02_a_head_line_that_changes(served: Served) -> None:
    chat = Chat(served, "two")
    stable = chat.system
    before: Reuse | None = None
    for number in range(3):
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.332.{number};"}
        chat.system = [line, *stable]
        now = chat.send("step by step" if before is None else "")
        assert before is None or (now.resumed >= before.prompt and now.replayed == 0)
        before = now


def test_03_thinking_dropped(served: Served) -> None:
    chat = Chat(served, "three")
    first = chat.send("Read step by step.")
    for _ in range(9):
        chat.send()
    after = chat.send("And now?")
    assert after.cause == "thinking_stripped"
    assert after.resumed >= first.prompt - PAGE - 16


def test_04_arguments_spelled_otherwise(served: Served) -> None:
    chat = Chat(served, "four")
    first = chat.send("Read step by step.")
    call = next(block for block in chat.messages[-2]["content"] if block["type"] == "tool_use")
    call["input"] = {"limit": 3.0, "path": "a.py"}
    after = chat.send()
    assert after.replayed == 0
    assert after.resumed > first.prompt
    assert after.cause == "none"


def test_05_a_growing_chat(served: Served) -> None:
    """Over Chat Completions, without any session id."""
    http = openai.DefaultHttpxClient(trust_env=False)
    client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="local", max_retries=0, http_client=http)
    messages: list[Any] = [{"role": "system", "content": f"{SYSTEM}This is five."}]
    before: Reuse | None = None
    for turn in range(5):
        messages.append({"role": "user", "content": f"Turn {turn}: " + "more of it, " * (5 + 9 * turn)})
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages)
        now = reuse(raw.headers)
        messages.append({"role": "assistant", "content": raw.parse().choices[0].message.content})
        assert before is None or now.resumed >= before.prompt - PAGE
        before = now


def test_06_a_restart(served: Served) -> None:
    chat = Chat(served, "six")
    chat.send("Read step by step.")
    before = chat.send()
    served.stop()
    served.start()
    after = chat.send()
    assert after.resumed >= before.prompt
    assert after.replayed <= PAGE


def test_07_side_requests(served: Served) -> None:
    chat = Chat(served, "seven")
    chat.send("Read step by step.")
    before = chat.send()
    for number in range(8):
        served.client.messages.create(
            model=MODEL,
            max_tokens=64,
            system="Write a title.",
            messages=[{"role": "user", "content": f"Message {number}. " * 60}],
            extra_headers=chat.headers,
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        )
    after = chat.send()
    assert after.resumed >= before.prompt
    assert after.replayed == 0


def test_08_outputs_cleared(served: Served) -> None:
    """Over Responses."""
    http = openai.DefaultHttpxClient(trust_env=False)
    client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="local", max_retries=0, http_client=http)
    tool: Any = {"type": "function", "name": "read", "parameters": READ["input_schema"], "strict": False}
    items: list[Any] = [{"role": "developer", "content": f"{SYSTEM}This is eight."}]
    items.append({"role": "user", "content": "Read step by step."})
    sizes: list[int] = []
    for step in range(6):
        raw = client.responses.with_raw_response.create(model=MODEL, input=items, tools=[tool], store=False)
        sizes.append(reuse(raw.headers).prompt)
        output = [item.model_dump(exclude_none=True) for item in raw.parse().output]
        calls = [item for item in output if item["type"] == "function_call"]
        items += output
        items += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": f"line {step}\n" * 40}
            for call in calls
        ]
    whole = json.loads(json.dumps(items))
    outputs = [item for item in items if item.get("type") == "function_call_output"]
    for output in outputs[2:4]:
        output["output"] = "[Old tool result content cleared]"
    cleared = reuse(client.responses.with_raw_response.create(model=MODEL, input=items, tools=[tool]).headers)
    assert cleared.cause == "history_edited"
    assert cleared.resumed >= sizes[2] - PAGE
    again = reuse(client.responses.with_raw_response.create(model=MODEL, input=whole, tools=[tool]).headers)
    assert again.resumed >= sizes[-1]


def test_09_hung_up_and_sent_again(served: Served) -> None:
    chat = Chat(served, "nine")
    chat.messages.append({"role": "user", "content": "At length: " + "a long question, " * 400})
    body = {"model": MODEL, "max_tokens": 2000, "system": chat.system, "messages": chat.messages, "tools": [READ]}
    body |= {"thinking": {"type": "adaptive"}, "stream": True}
    url = f"{served.server.url}/v1/messages"
    with httpx.Client(trust_env=False, timeout=60.0) as http:
        with http.stream("POST", url, json=body, headers=chat.headers) as response:
            first = reuse(response.headers)
        with http.stream("POST", url, json=body, headers=chat.headers) as response:
            for line in response.iter_lines():
                if "content_block_delta" in line:
                    break
    after = chat.send()
    assert first.resumed < PAGE * 40
    assert after.replayed + after.new <= PAGE


def test_10_other_weights(served: Served) -> None:
    chat = Chat(served, "ten")
    chat.send("Read step by step.")
    before = chat.send()
    served.stop()
    served.start(tiny(served.directory / "other", 1))
    other = chat.send()
    served.stop()
    served.start()
    chat.messages = chat.messages[:-2]
    back = chat.send()
    assert other.resumed == 0
    assert back.resumed >= before.prompt
