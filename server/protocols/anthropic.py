"""Anthropic Messages: requests in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WrapValidator
from pydantic_core import from_json

from parsers.conversation import Block, Conversation, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from parsers.format import Effort
from parsers.grammar import Calls, Demand
from server.answers import Options
from server.bodies import news
from server.protocols.anthropic_events import AnthropicWriter
from server.protocols.base import (
    Inbound,
    Items,
    StopStrings,
    Wire,
    WireProtocol,
    invalid,
    keep_turns,
    no_media,
    turns_before,
)
from sessions.tracker import RequestMeta

_CALLS: dict[str, Calls] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_CLOSING_TEXT = "(no answer)"
"""Claude Code drops an answer of nothing but thinking and edits its history; it must see some text."""

_BUDGETS: tuple[tuple[int, Effort], ...] = ((1_024, "minimal"), (4_096, "low"), (16_384, "medium"), (32_768, "high"))
"""Up to how many tokens of thinking an effort is."""


def _blocks(value: object) -> object:
    """A string is short for one text block."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _Text(Wire):
    type: Literal["text"]
    text: str


class _Thinking(Wire):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class _Redacted(Wire):
    type: Literal["redacted_thinking"]
    data: str


class _ToolUse(Wire):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class _Media(Wire):
    type: Literal["image", "document"]


class _ToolReference(Wire):
    type: Literal["tool_reference"]
    tool_name: str


_Nested = Annotated[_Text | _Media | _ToolReference, Field(discriminator="type")]


class _ToolResult(Wire):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: Annotated[Items[_Nested], BeforeValidator(_blocks)] = Field(default_factory=list)
    is_error: bool | None = None


_SystemBlock = Annotated[_Text | _Media, Field(discriminator="type")]
_Content = Annotated[_Text | _Thinking | _Redacted | _ToolUse | _ToolResult | _Media, Field(discriminator="type")]


class _Message(Wire):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Items[_Content], BeforeValidator(_blocks)]


class _Tool(Wire):
    type: str | None = None
    name: str = Field(min_length=1)
    description: str = ""
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    strict: bool | None = None

    @cached_property
    def tool(self) -> Tool:
        """Raises ApiError."""
        if self.type not in (None, "custom"):
            raise invalid(f"tools: {self.type} is a tool of the vendor's own service and not available here", "tools")
        if self.input_schema is None:
            raise invalid(f"tools: {self.name} has no input_schema", "tools")
        return Tool(self.name, self.description, self.input_schema, strict=bool(self.strict))


class _ThinkingConfig(Wire):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)


class _ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _Format(Wire):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Wire):
    format: _Format | None = None
    effort: Effort | None = None


class _Metadata(Wire):
    user_id: str | None = None


class CountRequest(Wire):
    model: str = Field(min_length=1)
    messages: Annotated[Items[_Message], WrapValidator(news)]
    system: Annotated[Items[_SystemBlock], BeforeValidator(_blocks)] = Field(default_factory=list)
    tools: Items[_Tool] = Field(default_factory=list)
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig | None = None
    metadata: _Metadata | None = None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=0)
    """0: the prompt is computed, for what comes later."""
    stream: bool = False
    stop_sequences: StopStrings = Field(default_factory=list)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    mcp_servers: Items[dict[str, Any]] | None = None


def read(body: object, headers: Mapping[str, str], namespace: str) -> Inbound:
    request = MessagesRequest.model_validate(body)
    conversation, deferred = _conversation(request)
    thinking, effort = _thought(request)
    if request.mcp_servers:
        raise invalid("mcp_servers: this server connects to no MCP servers; the client must", "mcp_servers")
    return Inbound(
        conversation,
        Options(
            max_tokens=request.max_tokens,
            thinking=thinking,
            effort=effort,
            demand=_demand(request, {tool.name for tool in request.tools}),
            described_tools=deferred,
            stop=tuple(request.stop_sequences),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            strict_budget=True,
            closing_text=_CLOSING_TEXT,
        ),
        RequestMeta(
            protocol="anthropic",
            headers=headers,
            session_hint=_session(request.metadata),
            namespace=namespace,
            model=request.model,
            max_tokens=request.max_tokens,
            json_schema=_wants_json(request.output_config),
        ),
        request.stream,
        AnthropicWriter(request.model),
        request=request,
    )


def read_count(
    body: object, headers: Mapping[str, str], namespace: str
) -> tuple[RequestMeta, Conversation, tuple[bool, Effort | None]]:
    """For counting tokens; the last value says whether the model would think, and how much."""
    request = CountRequest.model_validate(body)
    meta = RequestMeta("anthropic", headers, _session(request.metadata), namespace, request.model)
    return meta, _conversation(request)[0], _thought(request)


def _thought(request: CountRequest) -> tuple[bool, Effort | None]:
    """An effort in words counts for more than a number of tokens."""
    config = request.thinking
    effort = request.output_config.effort if request.output_config is not None else None
    if config is None or config.type == "disabled":
        return False, effort
    if effort is None and config.budget_tokens is not None:
        effort = next((name for most, name in _BUDGETS if config.budget_tokens <= most), "max")
    return True, effort


def _demand(request: MessagesRequest, tools: set[str]) -> Demand:
    choice = request.tool_choice or _ToolChoice(type="auto")
    if choice.type == "tool" and choice.name not in tools:
        raise invalid(f"tool_choice: there is no tool {choice.name!r:.80}", "tool_choice")
    if choice.type == "any" and not tools:
        raise invalid("tool_choice: a call is demanded, but there are no tools", "tool_choice")
    answer = request.output_config.format if request.output_config is not None else None
    return Demand(
        calls=_CALLS[choice.type],
        only=(choice.name,) if choice.type == "tool" else (),
        parallel=not choice.disable_parallel_tool_use,
        answer=None if answer is None else answer.schema_,
    )


def _wants_json(config: _OutputConfig | None) -> bool:
    return config is not None and config.format is not None


def _session(metadata: _Metadata | None) -> str:
    """Claude Code puts a JSON object with its ``session_id`` into ``user_id``."""
    try:
        value = from_json(metadata.user_id or "") if metadata is not None else None
    except ValueError:
        return ""
    session = value.get("session_id") if isinstance(value, dict) else None
    return session if isinstance(session, str) else ""


def _conversation(request: CountRequest) -> tuple[Conversation, tuple[Tool, ...]]:
    """The conversation, and the tools that are described where they are referred to and not in the prompt's head."""
    if not request.messages:
        raise invalid("messages: at least one message is required", "messages")
    if request.messages[-1].role == "assistant":
        raise invalid(
            "messages: the conversation must end with a user message; prefilled answers are not supported", "messages"
        )
    deferred = tuple(tool.tool for tool in request.tools if tool.defer_loading)
    unseen = {tool.name: tool for tool in deferred}
    messages = request.messages
    begin, before = (0, ()) if deferred else turns_before(messages)  # it matters which tools were described before
    turns = [*before]
    system = tuple(_block("system", block, f"system.{at}", unseen) for at, block in enumerate(request.system))
    if system and not begin:
        turns.append(Turn("system", system))
    for at, message in enumerate(messages[begin:], begin):
        if at == len(messages) - 2 and not deferred:
            keep_turns(message, tuple(turns))
        known = None if deferred else message.made.get("turn")
        turn = known or _turn(message, f"messages.{at}", unseen)
        if not deferred:
            message.made["turn"] = turn
        if turn.blocks:
            turns.append(turn)
        elif message.role == "user":
            raise invalid(f"messages.{at}: user messages must have content", f"messages.{at}")
    tools = tuple(tool.tool for tool in request.tools if not tool.defer_loading)
    return Conversation(tuple(turns), tools), deferred


def _turn(message: _Message, where: str, unseen: dict[str, Tool]) -> Turn:
    blocks = tuple(
        _block(message.role, block, f"{where}.content.{at}", unseen) for at, block in enumerate(message.content)
    )
    blocks = tuple(block for block in blocks if block != Text(""))
    role: Literal["system", "user", "assistant", "tool"] = message.role
    if any(isinstance(block, ToolOutput) for block in blocks):
        role = "tool"
    return Turn(role, blocks)


def _block(role: str, block: _Content, where: str, unseen: dict[str, Tool]) -> Block:
    match block:
        case _Text():
            return Text(block.text)
        case _Thinking() if role == "assistant":
            return Thinking(block.thinking, block.signature)
        case _Redacted() if role == "assistant":
            return Thinking("", block.data)
        case _ToolUse() if role == "assistant":
            return ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        case _ToolResult() if role == "user":
            text = "\n".join(_nested(part, f"{where}.content.{at}", unseen) for at, part in enumerate(block.content))
            return ToolOutput(block.tool_use_id, text, bool(block.is_error))
        case _Media():
            raise no_media(block.type, where)
    raise invalid(f"{where}: {block.type} blocks are not allowed in {role} messages", where)


def _nested(part: _Nested, where: str, unseen: dict[str, Tool]) -> str:
    """A tool is described at the first reference to it, and taken out of ``unseen``."""
    match part:
        case _Text():
            return part.text
        case _ToolReference():
            tool = unseen.pop(part.tool_name, None)
            if tool is None:
                return f"Tool {part.tool_name} is available."
            description = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            return json.dumps(description, ensure_ascii=False)
    raise no_media(part.type, where)


ANTHROPIC = WireProtocol("anthropic", read, "messages")
