"""What the demonstration's agent works on: a small project with a failing test, and tools that act on it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

COMMAND_SECONDS = 30

SYSTEM = """\
You are a coding agent that works in one directory of a user's machine, through the tools you are given.

How to work
- Look before you change anything: run the failing command, then read the code it points at, then decide.
- Make the smallest change that solves the problem at its cause. Do not rename, reformat or move what you were not
  asked to touch, and do not add options, layers or dependencies for needs nobody has yet.
- After every change, run what showed the problem. Say that something works only when you have seen it work.
- When a command fails, read its whole output before the next step; the first error usually explains the others.
- Prefer the standard library. Before you write a helper, search whether the project has one already.
- Files are UTF-8 with a newline at the end. Keep the style of the file you are in, whatever you would prefer.
- Never run a command that deletes or uploads anything outside the working directory. Never use sudo. Do not install
  packages without being asked to. Do not read files that hold credentials.
- Long outputs cost the reader time: use head, tail, grep and line ranges, and quote only what matters.

How to answer
- Say what was wrong, what you changed and how you know that it works now, in that order and in a few sentences.
- If you could not finish, say exactly what is missing, and what you tried. A clear failure is better than a vague
  success. Do not apologise and do not praise.
- Name files by their path from the working directory. Put code in fenced blocks with the language named.
- When the user asks a question, answer it first; explain afterwards, if an explanation is needed at all.

About this project
- It is a small library of statistics in plain Python, with one module, stats.py, and one test, test_stats.py.
- The test is a script: it prints nothing when all is well, and a traceback otherwise.
- Functions take any sequence of numbers, do not change it, and return a float. An empty sequence is an error.
"""

TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Run a command with bash in the working directory and return what it printed, standard output and standard"
        " error together, followed by the exit code if it is not 0. Each command starts in a fresh shell. Commands that"
        f" run longer than {COMMAND_SECONDS} seconds are stopped.",
        {"command": {"type": "string", "description": "The command line, as you would type it."}},
    ),
    "write_file": (
        "Write a file in the working directory, replacing what was there. Folders on the way must exist. Use it for new"
        " files and for small files that change as a whole.",
        {
            "path": {"type": "string", "description": "Where, from the working directory."},
            "content": {"type": "string", "description": "The whole text of the file."},
        },
    ),
}

FILES = {
    "stats.py": '"""Small statistics."""\n\n\ndef mean(values):\n    return sum(values) / (len(values) - 1)\n',
    "test_stats.py": "from stats import mean\n\nassert mean([1, 2, 3]) == 2, mean([1, 2, 3])\n",
}


class WorkspaceError(RuntimeError):
    """The tools did not have the effect that they should have had."""


class Workspace:
    """A small project with a failing test, and the tools that act on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name, content in FILES.items():
            (directory / name).write_text(content, encoding="utf-8")

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        if name == "write_file":
            (self.directory / arguments["path"]).write_text(arguments["content"], encoding="utf-8")
            return f"wrote {arguments['path']}"
        done = subprocess.run(
            ["bash", "-c", arguments["command"]],
            cwd=self.directory,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        status = f"\n(exit code {done.returncode})" if done.returncode else ""
        return (done.stdout + done.stderr).rstrip("\n") + status

    def check(self) -> None:
        """Raises WorkspaceError unless the files are as the session should have left them."""
        result = self.call("bash", {"command": "python3 test_stats.py && grep -c 'def ' stats.py"})
        if result != "2":
            raise WorkspaceError(f"the session left a stats.py that fails its test or lacks a function: {result}")


def schema(properties: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, all of them required."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
