"""A coding agent in one file, over Anthropic's public SDK and a local server.

    ft serve --model DIR                            # a model that calls tools; the embedded one does not
    python examples/agent_loop/agent.py "Which file here is the longest?"

It runs the model's commands in the current directory without asking: use it where you would let a stranger type. After
each request it says, on stderr, how much of the conversation the server had to read again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import anthropic
from anthropic.types import ToolParam

SYSTEM = "You are a careful coding agent in the user's current directory. Look before you change anything."
BASH: ToolParam = {
    "name": "bash",
    "description": "Run a command with bash; returns its output and exit code.",
    "input_schema": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
COMMAND_SECONDS = 120
MAX_STEPS = 50


def run(command: str) -> str:
    """What a command printed, and its exit code."""
    try:
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {COMMAND_SECONDS} seconds"
    return f"{done.stdout}{done.stderr}\n(exit code {done.returncode})"


def agent(client: anthropic.Anthropic, model: str, task: str) -> None:
    """Ask, run what is called, and ask again, until the model calls nothing."""
    messages: list[Any] = [{"role": "user", "content": task}]
    for _ in range(MAX_STEPS):
        with client.messages.stream(
            model=model, max_tokens=4096, system=SYSTEM, tools=[BASH], messages=messages
        ) as stream:
            for text in stream.text_stream:
                print(text, end="", flush=True)
            answer = stream.get_final_message()
            print(f"\n[{stream.response.headers.get('x-ft-reuse')}]", file=sys.stderr)
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": run(str(block.input.get("command", "")))}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if not results:
            return
        messages.append({"role": "user", "content": results})
    print(f"stopped after {MAX_STEPS} requests", file=sys.stderr)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="A coding agent against a local server.")
    options.add_argument("task")
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--model", default="local-moe")
    given = options.parse_args()
    agent(anthropic.Anthropic(base_url=given.url, api_key="ft-local"), given.model, given.task)
