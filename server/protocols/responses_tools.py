"""OpenAI Responses: the kinds of tools, and their names as the model sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from parsers.conversation import Tool
from server.protocols.base import Items, Wire, invalid
from server.protocols.demands import FunctionFields, Grammar, PlainText, custom_tool


class _FunctionTool(FunctionFields):
    type: Literal["function"]


class _Syntax(Grammar):
    type: Literal["grammar"]


class _CustomTool(Wire):
    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: Annotated[PlainText | _Syntax, Field(discriminator="type")] | None = None

    @cached_property
    def tool(self) -> Tool:
        return custom_tool(self.name, self.description, self.format if isinstance(self.format, _Syntax) else None)


_Nested = Annotated[_FunctionTool | _CustomTool, Field(discriminator="type")]


_IgnoredType = Literal["web_search", "web_search_preview"]


class _Namespace(Wire):
    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: Items[_Nested]


class _Ignored(Wire):
    """Tools of the vendor's service that a client offers without needing them. The model is not told of them, and the
    response, which lists its tools, leaves them out."""

    type: _IgnoredType


class _LocalShell(Wire):
    type: Literal["local_shell"]


ToolItem = Annotated[_FunctionTool | _CustomTool | _Namespace | _LocalShell | _Ignored, Field(discriminator="type")]

LOCAL_SHELL = Tool(
    "local_shell",
    "Run a command on the user's machine. `command` is the program and its arguments; for a line of shell, use "
    '["bash", "-lc", "LINE"].',
    {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
            "user": {"type": "string"},
        },
        "required": ["command"],
    },
)
"""What the model sees of a tool that has no description on the wire."""


class ShellAction(Wire):
    """What a call of the local shell does, on the wire beside ``type``; for the model these are the arguments."""

    command: Items[str] = Field(min_length=1)
    env: dict[str, str] = Field(default_factory=dict)
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


@dataclass(frozen=True)
class ToolNames:
    """Tools of a namespace are known to the model as ``namespace__name``; the client wants the two apart again.
    ``shell``: calls of that name are the local shell's."""

    qualified: Mapping[str, tuple[str, str]]
    """Model's name -> (namespace, name)."""
    shell: str = ""

    def split(self, name: str) -> tuple[str, str]:
        """(namespace or "", name) of a call the model made."""
        return self.qualified.get(name, ("", name))

    @staticmethod
    def join(namespace: str | None, name: str) -> str:
        return f"{namespace}__{name}" if namespace else name


def read_tools(items: Sequence[ToolItem]) -> tuple[tuple[Tool, ...], ToolNames]:
    """The model's tools. Raises ApiError when two have the same name."""
    tools: list[Tool] = []
    qualified: dict[str, tuple[str, str]] = {}
    shell = ""
    for item in items:
        match item:
            case _Namespace():
                for nested in item.tools:
                    name = ToolNames.join(item.name, nested.name)
                    qualified[name] = (item.name, nested.name)
                    tools.append(_named(nested, name))
            case _FunctionTool() | _CustomTool():
                tools.append(item.tool)
            case _LocalShell():
                shell = LOCAL_SHELL.name
                tools.append(LOCAL_SHELL)
            case _Ignored():
                pass
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools: tool names must be unique", "tools")
    return tuple(tools), ToolNames(qualified, shell)


def told_tools(raw: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of a request's tools that the model is told of."""
    return [tool for tool in raw if tool.get("type") not in get_args(_IgnoredType)]


def _named(item: _FunctionTool | _CustomTool, name: str) -> Tool:
    """The same object each time."""
    made: Tool | None = item.made.get(name)
    if made is None:
        made = item.made[name] = replace(item.tool, name=name)
    return made
