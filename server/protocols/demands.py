"""What OpenAI's protocols demand of an answer: which tools are called, and what its text must look like."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from parsers.conversation import Tool
from parsers.grammar import Calls, Demand
from server.protocols.base import Items, Wire, invalid


class Named(Wire):
    name: str


class ChosenTool(Wire):
    """A tool by its name; Chat Completions puts that into an object of its own."""

    type: Literal["function", "custom"]
    name: str = ""
    function: Named | None = None
    custom: Named | None = None

    @property
    def called(self) -> str:
        inner = self.function or self.custom
        return self.name or (inner.name if inner else "")


class _AllowedFields(Wire):
    mode: Literal["auto", "required"]
    tools: Items[ChosenTool]


class AllowedTools(Wire):
    """Some of the tools; Chat Completions puts these fields into an object of their own."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Items[ChosenTool] = Field(default_factory=list)
    allowed_tools: _AllowedFields | None = None


ToolChoice = Literal["auto", "required", "none"] | ChosenTool | AllowedTools


class FunctionFields(Wire):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @cached_property
    def tool(self) -> Tool:
        parameters = self.parameters or {"type": "object", "properties": {}}
        return Tool(self.name, self.description or "", parameters, strict=bool(self.strict))


class PlainText(Wire):
    type: Literal["text"]


class Grammar(Wire):
    """What a custom tool's input looks like."""

    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1)


def custom_tool(name: str, description: str | None, grammar: Grammar | None) -> Tool:
    """A tool that takes text; the model is told what that text must look like."""
    if grammar is None:
        return Tool(name, description or "", freeform=True)
    told = f"{description or ''}\n\nThe input follows this {grammar.syntax} grammar:\n{grammar.definition}"
    return Tool(name, told.strip(), freeform=True, grammar=(grammar.syntax, grammar.definition))


class AnswerFormat(Wire):
    """``text``, ``json_object`` or ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


def demand(
    choice: ToolChoice | None, parallel: bool, answer: AnswerFormat | None, tools: Collection[str], where: str
) -> Demand:
    """``where`` is the field that ``answer`` stood in. Raises ApiError."""
    schema, exact = _schema(answer, where)
    mode: Calls
    only: tuple[str, ...]
    match choice:
        case ChosenTool():
            mode, only = "required", _known([choice], tools)
        case AllowedTools():
            inner = choice.allowed_tools or choice
            mode, only = inner.mode, _known(inner.tools, tools)
            if not only:
                raise invalid("tool_choice: allowed_tools names no tools", "tool_choice")
        case _:
            mode, only = choice or "auto", ()
    if mode == "required" and not tools:
        raise invalid("tool_choice demands a call, but there are no tools", "tool_choice")
    return Demand(mode, only, parallel, schema, exact)


def _known(chosen: Sequence[ChosenTool], tools: Collection[str]) -> tuple[str, ...]:
    names = tuple(tool.called for tool in chosen)
    for name in names:
        if name not in tools:
            raise invalid(f"tool_choice: there is no tool {name!r:.80}", "tool_choice")
    return names


def _schema(answer: AnswerFormat | None, where: str) -> tuple[Mapping[str, Any] | None, bool]:
    """The schema, and whether all of it is to be enforced."""
    if answer is None or answer.type == "text":
        return None, True
    if answer.type == "json_object":
        return {"type": "object"}, True
    if answer.schema_ is None:
        raise invalid(f"{where}: json_schema needs a schema", where)
    return answer.schema_, answer.strict is True
