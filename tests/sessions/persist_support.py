"""What tests of kept sessions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parsers.conversation import Thinking, ToolCall
from sessions.persist import Persist

Open = Callable[..., Persist]


def call(command: str = "ls") -> ToolCall:
    return ToolCall("", "Bash", f'{{"command": "{command}"}}')


def loop(agent: Any, steps: int = 3) -> None:
    """Ends with a call whose output is to come."""
    agent.user("Fix it.")
    for step in range(steps):
        agent.say(Thinking(f"thought {step}"), call(f"step {step}"))
        if step < steps - 1:
            agent.outputs("ok")


def restarted(worlds: Any, world: Any, agent: Any, persist: Persist, **changes: Any) -> Any:
    again = worlds(family=world.family, persist=persist, engine=world.engine, **changes)
    agent.sessions = again.sessions
    return again
