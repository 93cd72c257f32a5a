"""OpenAI Chat Completions: requests in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WrapValidator

from parsers.conversation import Block, Conversation, Role, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from parsers.format import Effort
from server.bodies import news
from server.logprobs import LogprobFormat
from server.protocols.base import Inbound, Items, Wire, WireProtocol, invalid, keep_turns, no_media, turns_before
from server.protocols.chat_events import ChatWriter
from server.protocols.chat_legacy import LegacyWriter
from server.protocols.demands import (
    AnswerFormat,
    ChosenTool,
    FunctionFields,
    Grammar,
    Named,
    PlainText,
    ToolChoice,
    custom_tool,
    demand,
)
from server.protocols.sampled import SampledRequest
from sessions.tracker import RequestMeta

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_NOT_YET = ("audio", "modalities", "prediction", "web_search_options")


def _parts(value: object) -> object:
    """A string is short for one text part; null for none."""
    if value is None:
        return []
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _TextPart(Wire):
    type: Literal["text"]
    text: str


class _RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


class _MediaPart(Wire):
    type: Literal["image_url", "input_audio", "file", "video_url"]


_Part = Annotated[_TextPart | _RefusalPart | _MediaPart, Field(discriminator="type")]


class _Function(Wire):
    name: str = Field(min_length=1)
    arguments: str


class _Call(Wire):
    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: _Function

    @property
    def block(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


class _Custom(Wire):
    name: str = Field(min_length=1)
    input: str


class _CustomCall(Wire):
    id: str = Field(min_length=1)
    type: Literal["custom"]
    custom: _Custom

    @property
    def block(self) -> ToolCall:
        return ToolCall(self.id, self.custom.name, self.custom.input, freeform=True)


class _Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Items[_Part], BeforeValidator(_parts)] = Field(default_factory=list)
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Items[_Call | _CustomCall] | None = None
    tool_call_id: str | None = None
    function_call: _Function | None = None


class _Tool(Wire):
    type: Literal["function"]
    function: FunctionFields

    @property
    def tool(self) -> Tool:
        return self.function.tool


class _GrammarFormat(Wire):
    type: Literal["grammar"]
    grammar: Grammar


class _CustomFields(Wire):
    name: str = Field(min_length=1)
    description: str | None = None
    format: Annotated[PlainText | _GrammarFormat, Field(discriminator="type")] | None = None


class _CustomTool(Wire):
    type: Literal["custom"]
    custom: _CustomFields

    @cached_property
    def tool(self) -> Tool:
        custom = self.custom
        grammar = custom.format.grammar if isinstance(custom.format, _GrammarFormat) else None
        return custom_tool(custom.name, custom.description, grammar)


class _JsonSchema(Wire):
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class _ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @property
    def answer(self) -> AnswerFormat:
        inner = self.json_schema or _JsonSchema()
        return AnswerFormat(type=self.type, schema=inner.schema_, strict=inner.strict)


class _TemplateSwitches(Wire):
    """What other servers pass on to the template; the names differ between models, so either is taken."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatRequest(SampledRequest):
    model: str = Field(min_length=1)
    messages: Annotated[Items[_Message], WrapValidator(news)]
    tools: Items[Annotated[_Tool | _CustomTool, Field(discriminator="type")]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Items[FunctionFields], Field(min_length=1)] | None = None
    function_call: Literal["auto", "none"] | Named | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: _ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: _TemplateSwitches | None = None


def reader(logprobs: LogprobFormat) -> WireProtocol:
    """The protocol; ``logprobs`` writes sampled tokens as text, which takes a tokenizer."""

    def read(body: object, headers: Mapping[str, str], namespace: str) -> Inbound:
        return _read(body, headers, namespace, logprobs)

    return WireProtocol("openai", read, "messages")


def _read(body: object, headers: Mapping[str, str], namespace: str, logprobs: LogprobFormat) -> Inbound:
    request = ChatRequest.model_validate(body)
    _refuse(request, body)
    max_tokens = request.max_completion_tokens or request.max_tokens
    legacy = request.functions is not None
    tools = tuple(tool.tool for tool in request.tools or request.functions or ())
    writer = ChatWriter(
        request.model,
        n=request.n or 1,
        include_usage=request.include_usage,
        logprobs=logprobs if request.logprobs else None,
    )
    return Inbound(
        Conversation(_turns(request.messages), tools),
        replace(
            request.sampling(),
            max_tokens=max_tokens,
            thinking=_thinks(request),
            effort=request.reasoning_effort,
            demand=demand(
                _choice(request),
                request.parallel_tool_calls is not False and not legacy,
                request.response_format.answer if request.response_format is not None else None,
                {tool.name for tool in tools},
                "response_format",
            ),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        ),
        RequestMeta(
            protocol="chat",
            headers=headers,
            session_hint=request.session_hint,
            namespace=namespace,
            model=request.model,
            max_tokens=max_tokens or 0,
        ),
        bool(request.stream),
        LegacyWriter(writer) if legacy else writer,
        request=request,
    )


def _choice(request: ChatRequest) -> ToolChoice | None:
    if isinstance(request.function_call, Named):
        return ChosenTool(type="function", name=request.function_call.name)
    return request.function_call or request.tool_choice


def _thinks(request: ChatRequest) -> bool:
    switches = request.chat_template_kwargs or _TemplateSwitches()
    return request.reasoning_effort != "none" and False not in (switches.enable_thinking, switches.thinking)


def _refuse(request: ChatRequest, body: object) -> None:
    """What would change the answer and cannot be honoured is refused, not ignored."""
    if request.functions is None and request.function_call is not None:
        raise invalid("function_call needs functions", "function_call")
    if request.functions is not None and (request.tools is not None or request.tool_choice is not None):
        raise invalid("functions are what tools were called before: send one of the two", "functions")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    for name in _NOT_YET:
        if isinstance(body, dict) and body.get(name) not in (None, [], ["text"]):
            raise invalid(f"{name} is not supported", name)


def _turns(messages: list[_Message]) -> tuple[Turn, ...]:
    if not messages:
        raise invalid("messages: at least one message is required", "messages")
    begin, before = turns_before(messages)
    turns = [*before]
    called = ""
    for at, message in enumerate(messages[begin:], begin):
        if message.role == "assistant" and message.function_call is not None:
            called = f"call_{at}"
        named = message.role == "function" or message.function_call is not None  # after what came before
        turn = None if named else message.made.get("turn")
        if turn is None:
            turn = message.made["turn"] = Turn(_ROLES[message.role], _blocks(message, f"messages.{at}", called))
        turns.append(turn)
    if not called:
        keep_turns(messages[-2:][0], tuple(turns[:-2]))
    return tuple(turns)


def _blocks(message: _Message, where: str, called: str) -> tuple[Block, ...]:
    """``called``: the id of the latest function call, which has none of its own."""
    texts = tuple(_text(part, f"{where}.content.{at}") for at, part in enumerate(message.content))
    if message.role in ("tool", "function"):
        answered = message.tool_call_id if message.role == "tool" else called
        if not answered:
            lacks = "need a tool_call_id" if message.role == "tool" else "follow the call that they answer"
            raise invalid(f"{where}: {message.role} messages {lacks}", where)
        return (ToolOutput(answered, "\n".join(texts)),)
    if message.role != "assistant":
        if message.tool_calls or message.function_call:
            raise invalid(f"{where}: only assistant messages have calls", where)
        return tuple(Text(text) for text in texts)
    thinking = message.reasoning_content or message.reasoning
    return (
        *((Thinking(thinking),) if thinking else ()),
        *(Text(text) for text in texts if text),
        *(call.block for call in message.tool_calls or ()),
        *((_Call(id=called, function=message.function_call).block,) if message.function_call else ()),
    )


def _text(part: _Part, where: str) -> str:
    match part:
        case _TextPart():
            return part.text
        case _RefusalPart():
            return part.refusal
    raise no_media(part.type, where)
