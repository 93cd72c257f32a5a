"""Agent loops over the official SDKs, as harnesses run them, with a record of what each request reused.

Needs the packages of the ``demo`` extra.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anthropic
import openai

from launchers.demo_project import SYSTEM, TOOLS, Workspace, schema

MODEL = "local-moe"
KEY = "ft-local"
MAX_TOKENS = 512
GREEDY = {"temperature": 0.0}
SOURCES = ("device", "host", "disk", "replayed", "new")
SDK_ERRORS = (anthropic.AnthropicError, openai.OpenAIError)


@dataclass(frozen=True)
class Row:
    """One request: its prompt's tokens by where they came from (``stored``: memory of the store, or disk), and the
    seconds to the first token of its answer."""

    protocol: str
    name: str
    device: int
    stored: int
    replayed: int
    new: int
    cause: str
    ttft: float

    @property
    def prompt(self) -> int:
        return self.device + self.stored + self.replayed + self.new


Record = Callable[[Row], None]


class Stopwatch:
    """Records a request when its answer begins; started before the request is sent."""

    def __init__(self, protocol: str, name: str, record: Record) -> None:
        self._protocol = protocol
        self._name = name
        self._record = record
        self._start = time.monotonic()
        self._begun = False

    def token(self, headers: Mapping[str, str]) -> None:
        """Something of the answer arrived, under these response headers."""
        if self._begun:
            return
        self._begun = True
        seconds = time.monotonic() - self._start
        reuse = dict(part.strip().split("=", 1) for part in headers["x-ft-reuse"].split(","))
        device, host, disk, replayed, new = (int(reuse[name]) for name in SOURCES)
        self._record(Row(self._protocol, self._name, device, host + disk, replayed, new, reuse["cause"], seconds))


def anthropic_client(url: str) -> anthropic.Anthropic:
    """Without retries, and without a proxy between two programs of one machine."""
    http = anthropic.DefaultHttpxClient(trust_env=False)
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, http_client=http)


def chat(url: str, question: str, show: Callable[[str], None]) -> None:
    """One question, answered greedily; ``show`` gets the text as it comes."""
    messages: Any = [{"role": "user", "content": question}]
    client = anthropic_client(url)
    with client.messages.stream(model=MODEL, max_tokens=80, messages=messages, extra_body=GREEDY) as stream:
        for text in stream.text_stream:
            show(text)


class MessagesAgent:
    """An agent over Anthropic Messages."""

    def __init__(self, url: str, workspace: Workspace, record: Record) -> None:
        self._client = anthropic_client(url)
        self._workspace = workspace
        self._record = record
        self._messages: list[dict[str, Any]] = []

    def user(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def step(self, name: str, on_delta: Callable[[], None] = lambda: None) -> None:
        """One request, and the tools that its answer calls."""
        tools = [{"name": n, "description": d, "input_schema": schema(p)} for n, (d, p) in TOOLS.items()]
        body = {"system": SYSTEM, "tools": tools, "messages": self._messages, "max_tokens": MAX_TOKENS}
        content = self._request(name, on_delta, **body)
        self._messages.append({"role": "assistant", "content": content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": self._workspace.call(block["name"], block["input"]),
            }
            for block in content
            if block["type"] == "tool_use"
        ]
        if results:
            self._messages.append({"role": "user", "content": results})

    def title(self, name: str) -> None:
        """What harnesses ask on the side: a short title, without tools, in a fixed JSON shape."""
        self._request(
            name,
            lambda: None,
            system="Write a title of at most five words for the conversation that begins with the given message.",
            messages=self._messages[:1],
            max_tokens=32,
            output_config={"format": {"type": "json_schema", "schema": schema({"title": {"type": "string"}})}},
        )

    def drop_thinking(self) -> None:
        """Leave the last thinking block out of the history from now on."""
        for message in reversed([message for message in self._messages if message["role"] == "assistant"]):
            blocks = [block for block in message["content"] if block["type"] != "thinking"]
            if len(blocks) < len(message["content"]):
                message["content"] = blocks
                return

    def clear_outputs(self, keep: int) -> None:
        """Replace the tool outputs after the first ``keep`` by a constant, as harnesses do to save context."""
        lists = [message["content"] for message in self._messages if isinstance(message["content"], list)]
        outputs = [block for blocks in lists for block in blocks if block["type"] == "tool_result"]
        for output in outputs[keep:]:
            output["content"] = "[Old tool result content cleared]"

    def _request(self, name: str, on_delta: Callable[[], None], **body: Any) -> list[dict[str, Any]]:
        """The content blocks of the answer, as the next request sends them back."""
        watch = Stopwatch("Messages", name, self._record)
        with self._client.messages.stream(model=MODEL, **body) as stream:
            for event in stream:
                if event.type == "content_block_delta":
                    watch.token(stream.response.headers)
                    on_delta()
            message = stream.get_final_message()
        return [block.model_dump(exclude_none=True) for block in message.content]


class OpenAIAgent:
    """Agents over OpenAI Responses and Chat Completions."""

    def __init__(self, url: str, workspace: Workspace, record: Record) -> None:
        http = openai.DefaultHttpxClient(trust_env=False)
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, http_client=http)
        self._workspace = workspace
        self._record = record

    def responses(self, text: str, names: list[str]) -> None:
        """A conversation over Responses: one request for each of ``names``."""
        items: list[Any] = [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": text}]
        for name in names:
            output = self._response(name, items)
            items += output
            for item in output:
                if item["type"] == "function_call":
                    result = self._workspace.call(item["name"], json.loads(item["arguments"]))
                    items.append({"type": "function_call_output", "call_id": item["call_id"], "output": result})

    def chat(self, text: str, names: list[str]) -> None:
        """A conversation over Chat Completions: one request for each of ``names``."""
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        for name in names:
            message = self._completion(name, messages)
            messages.append(message)
            for call in message.get("tool_calls", ()):
                result = self._workspace.call(call["function"]["name"], json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def _response(self, name: str, items: list[Any]) -> list[dict[str, Any]]:
        tools: list[Any] = [
            {"type": "function", "name": n, "description": d, "parameters": schema(p), "strict": False}
            for n, (d, p) in TOOLS.items()
        ]
        output: list[dict[str, Any]] = []
        watch = Stopwatch("Responses", name, self._record)
        create = self._client.responses.with_streaming_response.create
        with create(model=MODEL, input=items, tools=tools, store=False, stream=True) as raw:
            for event in raw.parse():
                if event.type.endswith(".delta"):
                    watch.token(raw.headers)
                elif event.type == "response.completed":
                    output = [item.model_dump(exclude_none=True) for item in event.response.output]
        return output

    def _completion(self, name: str, messages: list[Any]) -> dict[str, Any]:
        tools: list[Any] = [
            {"type": "function", "function": {"name": n, "description": d, "parameters": schema(p)}}
            for n, (d, p) in TOOLS.items()
        ]
        text, calls = "", list[dict[str, Any]]()
        watch = Stopwatch("Chat Completions", name, self._record)
        create = self._client.chat.completions.with_streaming_response.create
        with create(model=MODEL, messages=messages, tools=tools, stream=True) as raw:
            for chunk in raw.parse():
                for choice in chunk.choices:
                    if choice.delta.content or choice.delta.tool_calls:
                        watch.token(raw.headers)
                    text += choice.delta.content or ""
                    for part in choice.delta.tool_calls or ():
                        if part.id and part.function:
                            calls.append({"id": part.id, "type": "function", "function": part.function.model_dump()})
                        elif part.function:
                            calls[part.index]["function"]["arguments"] += part.function.arguments or ""
        return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
