"""What the cases of several protocols share."""

from __future__ import annotations

from typing import Any

from engine.api import Request
from tests.server.support import Answer

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = {"role": "user", "content": "Hi"}
MORE = {"role": "user", "content": "More"}
GRAMMAR = {"syntax": "regex", "definition": "ha+"}
END = "<|im_end|>"
THOUGHT = "A plan.\n</think>\n\n"
HELLO = f"{THOUGHT}Hello{END}"


def call(name: str, **arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


WEATHER = call("weather", city="Rome")
ROME = f"{THOUGHT}{WEATHER}{END}"


def constrained(*words: str) -> Any:
    return lambda request: all(word in (request.sampling.constraint or "") for word in words)


def cached(request: Request) -> Answer:
    return Answer(f"{THOUGHT}Hello{END}", resumed=16, checkpoints=(16, len(request.tokens) - 2))
