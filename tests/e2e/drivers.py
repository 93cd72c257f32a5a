"""How each harness is driven without a terminal, as data: its arguments, and how its tools are called."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launchers.agents import aider, claude, codex, mini, openclaw, opencode, pi, qwen
from launchers.agents.harness import Harness

Call = dict[str, Any]
"""A tool call of a script."""


def tool(name: str, args: Any) -> Call:
    return {"tool_call": {"name": name, "args": args}}


@dataclass(frozen=True)
class Tools:
    """How the harness is told to run a command, to write a file and to change one. Paths are absolute."""

    shell: Callable[[str], Call]
    write: Callable[[str, str], Call]
    edit: Callable[[str, str, str], Call]


@dataclass(frozen=True)
class Lack:
    """Why a harness has no such thing, and where it ``says`` so itself: in a ``file`` of its package."""

    why: str
    file: str
    says: str


@dataclass(frozen=True)
class Driver:
    """``folders`` are those of its programs, below ``.e2e``. ``first`` and ``again`` are the arguments of a new
    conversation and of the next message to it in a new process, PROMPT in the place of the text, ``always`` those of
    any process, which both have too. ``environment`` is what a user would have set. ``finish`` is how the model ends
    its work. ``agent``: how it starts a sub-agent, with a prompt. ``small_context``: a length of context in which the
    work of a test makes it compact, ``compact`` the arguments that make it do so where it does not by itself.
    ``flushes``: before it compacts, it asks beside the conversation what is to be remembered. ``interrupts``: an
    interrupt is worth testing, since what was said before it is kept. ``bears_broken_calls``: a call that breaks off
    does not end its run. ``loops``: it acts on what its tools said, over several requests. ``transport``: how it talks
    to the server, where that is not its usual way. ``lacks``: what it has not of the items of the report."""

    harness: Harness
    folders: tuple[str, ...]
    first: tuple[str, ...]
    again: tuple[str, ...]
    tools: Tools
    always: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    finish: Callable[[str], list[Call]] = lambda text: [{"text": text}]
    agent: Callable[[str], Call] | None = None
    small_context: int = 0
    compact: tuple[str, ...] = ()
    interrupts: bool = True
    bears_broken_calls: bool = True
    flushes: bool = False
    loops: bool = True
    transport: str = ""
    lacks: Mapping[str, Lack] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.harness.name}-{self.transport.lower()}" if self.transport else self.harness.name


NODE = ("node_modules/.bin",)
MORE = ("more/node_modules/.bin",)

SKIP = "--dangerously-skip-permissions"
CODEX_FLAGS = ("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")

CLAUDE = Driver(
    claude.HARNESS,
    NODE,
    first=("-p", "PROMPT", SKIP),
    again=("-c", "-p", "PROMPT", SKIP),
    tools=Tools(
        lambda command: tool("Bash", {"command": command, "description": "Run it"}),
        lambda path, text: tool("Write", {"file_path": path, "content": text}),
        lambda path, old, new: tool("Edit", {"file_path": path, "old_string": old, "new_string": new}),
    ),
    environment={"IS_SANDBOX": "1"},
    agent=lambda prompt: tool("Agent", {"description": "Count", "prompt": prompt, "subagent_type": "general-purpose"}),
    compact=("-c", "-p", "/compact", SKIP),
)


def codex_add(path: str, text: str) -> Call:
    lines = "".join(f"+{line}\n" for line in text.splitlines())
    return tool("apply_patch", f"*** Begin Patch\n*** Add File: {path}\n{lines}*** End Patch")


def codex_change(path: str, old: str, new: str) -> Call:
    return tool("apply_patch", f"*** Begin Patch\n*** Update File: {path}\n@@\n-{old}\n+{new}\n*** End Patch")


CODEX = Driver(
    codex.HARNESS,
    NODE,
    first=("exec", *CODEX_FLAGS, "PROMPT"),
    again=("exec", "resume", "--last", *CODEX_FLAGS, "PROMPT"),
    tools=Tools(lambda command: tool("exec_command", {"cmd": command}), codex_add, codex_change),
    small_context=7_500,
)
OVER_HTTP = ("-c", "model_providers.ft.supports_websockets=false")
CODEX_HTTP = replace(
    CODEX,
    always=OVER_HTTP,
    first=(*OVER_HTTP, *CODEX.first),
    again=(*OVER_HTTP, *CODEX.again),
    transport="HTTP",
)
OPENCODE = Driver(
    opencode.HARNESS,
    MORE,
    first=("run", "PROMPT"),
    again=("run", "-c", "PROMPT"),
    tools=Tools(
        lambda command: tool("bash", {"command": command, "description": "Run it"}),
        lambda path, text: tool("write", {"content": text, "filePath": path}),
        lambda path, old, new: tool("edit", {"filePath": path, "oldString": old, "newString": new}),
    ),
    agent=lambda prompt: tool("task", {"description": "Count", "prompt": prompt, "subagent_type": "general"}),
    small_context=14_000,
)
PI = Driver(
    pi.HARNESS,
    MORE,
    first=("-p", "PROMPT"),
    again=("-c", "-p", "PROMPT"),
    small_context=7_000,
    lacks={"side request": Lack("it starts no other agent and asks for no title", "README.md", "**No sub-agents.**")},
    tools=Tools(
        lambda command: tool("bash", {"command": command}),
        lambda path, text: tool("write", {"path": path, "content": text}),
        lambda path, old, new: tool("edit", {"path": path, "edits": [{"oldText": old, "newText": new}]}),
    ),
)
QWEN = Driver(
    qwen.HARNESS,
    MORE,
    first=("-p", "PROMPT", "--yolo"),
    again=("-c", "-p", "PROMPT", "--yolo"),
    tools=Tools(
        lambda command: tool("run_shell_command", {"command": command, "is_background": False}),
        lambda path, text: tool("write_file", {"file_path": path, "content": text}),
        lambda path, old, new: tool("edit", {"file_path": path, "old_string": old, "new_string": new}),
    ),
    agent=lambda prompt: tool("agent", {"description": "Count", "prompt": prompt, "subagent_type": "general-purpose"}),
    small_context=24_000,
)
OPENCLAW = Driver(
    openclaw.HARNESS,
    ("openclaw/node_modules/.bin",),
    first=("agent", "--local", "--session-id", "s1", "--message", "PROMPT"),
    again=("agent", "--local", "--session-id", "s1", "--message", "PROMPT"),
    tools=Tools(
        lambda command: tool("exec", {"command": command}),
        lambda path, text: tool("write", {"path": path, "content": text}),
        lambda path, old, new: tool("edit", {"path": path, "edits": [{"oldText": old, "newText": new}]}),
    ),
    # Its first loop is to fill three quarters of it: no more is left to conversations, and it looks when one goes on.
    small_context=15_200,
    bears_broken_calls=False,
    flushes=True,
)


def by_command(path: str, text: str) -> Call:
    return tool("bash", {"command": f"cat > {path} <<'END'\n{text}END"})


def changed_by_command(path: str, old: str, new: str) -> Call:
    program = f"import sys; p = sys.argv[1]; s = open(p).read(); open(p, 'w').write(s.replace({old!r}, {new!r}))"
    return tool("bash", {"command": f"python3 -c {shlex.quote(program)} {path}"})


MINI_RUN = ("-t", "PROMPT", "-y", "--exit-immediately")
MINI = Driver(
    mini.HARNESS,
    ("mini/bin",),
    first=MINI_RUN,
    again=MINI_RUN,  # it knows no second message
    tools=Tools(lambda command: tool("bash", {"command": command}), by_command, changed_by_command),
    finish=lambda text: [
        {"text": text},
        tool("bash", {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {shlex.quote(text)}"}),
    ],
    interrupts=False,
)


def block(path: str, old: str, new: str) -> Call:
    name = path.rsplit("/", 1)[-1]
    return {"text": f"{name}\n```python\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n"}


AIDER_RUN = ("--yes-always", "--message", "PROMPT")
AIDER = Driver(
    aider.HARNESS,
    ("aider/bin",),
    first=AIDER_RUN,
    again=("--restore-chat-history", *AIDER_RUN),
    tools=Tools(
        lambda command: {"text": f"```bash\n{command}\n```\n"},
        lambda path, text: block(path, "", text),
        lambda path, old, new: block(path, f"{old}\n", f"{new}\n"),
    ),
    interrupts=False,
    loops=False,
)
DRIVERS = {driver.name: driver for driver in (CLAUDE, CODEX, CODEX_HTTP, OPENCODE, PI, QWEN, OPENCLAW, MINI, AIDER)}
