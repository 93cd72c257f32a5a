"""OpenAI Responses: requests in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import is_
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field, WrapValidator

from parsers.conversation import Block, Conversation, Role, Text, Thinking, ToolCall, ToolOutput, Turn
from parsers.format import Effort
from server.answers import Options
from server.bodies import Body, news, raw_body
from server.errors import ApiError
from server.logprobs import LogprobFormat
from server.protocols.base import Inbound, Items, Wire, WireProtocol, invalid, keep_turns, no_media, turns_before
from server.protocols.demands import AnswerFormat, ToolChoice, demand
from server.protocols.responses_events import ResponsesWriter
from server.protocols.responses_tools import LOCAL_SHELL, ShellAction, ToolItem, ToolNames, read_tools, told_tools
from sessions.tracker import RequestMeta

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_LOGPROBS = "message.output_text.logprobs"
"""What a request includes that wants logprobs."""


def _input(value: object) -> object:
    """A string is short for one user message."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


def _parts(value: object) -> object:
    """A string is short for one text part."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _typed(value: object) -> object:
    """A message may leave out its type."""
    items = _input(value)
    if not isinstance(items, list):
        return items
    return [
        {**one, "type": "message"} if isinstance(one, dict) and "role" in one and not one.get("type") else one
        for one in items
    ]


class _TextPart(Wire):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


class _MediaPart(Wire):
    type: Literal["input_image", "input_file", "input_audio"]


_Part = Annotated[_TextPart | _RefusalPart | _MediaPart, Field(discriminator="type")]
_Parts = Annotated[Items[_Part], BeforeValidator(_parts)]


class _Message(Wire):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: _Parts


class _Piece(Wire):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class _Reasoning(Wire):
    type: Literal["reasoning"]
    summary: Items[_Piece] = Field(default_factory=list)
    content: Items[_Piece] | None = None
    encrypted_content: str | None = None


class _FunctionCall(Wire):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str
    namespace: str | None = None


class _CustomCall(Wire):
    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: str
    namespace: str | None = None


class _Output(Wire):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = Field(min_length=1)
    output: _Parts


class _ShellExec(ShellAction):
    type: Literal["exec"]


class _ShellCall(Wire):
    type: Literal["local_shell_call"]
    call_id: str = Field(min_length=1)
    action: _ShellExec


class _ShellOutput(Wire):
    """Its ``id`` is the call's."""

    type: Literal["local_shell_call_output"]
    id: str = Field(min_length=1)
    output: str


_Item = Annotated[
    _Message | _Reasoning | _FunctionCall | _CustomCall | _Output | _ShellCall | _ShellOutput,
    Field(discriminator="type"),
]


class _ReasoningConfig(Wire):
    effort: Effort | None = None


class _TextConfig(Wire):
    format: AnswerFormat | None = None


class ResponsesRequest(Wire):
    model: str = Field(min_length=1)
    input: Annotated[Items[_Item], BeforeValidator(_typed), WrapValidator(news)]
    instructions: str | None = None
    tools: Items[ToolItem] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: Items[str] | None = None
    reasoning: _ReasoningConfig | None = None
    text: _TextConfig | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    generate: bool | None = None


class History(Protocol):
    """Responses that a request may continue; each namespace has its own."""

    def find(self, namespace: str, id: str) -> list[Any] | None:
        """The items that led to a response, and its own; None when it is not known."""
        ...

    def keep(self, namespace: str, session: str, response: dict[str, Any], items: list[Any]) -> None:
        """``items`` led to a finished ``response``, which says itself whether it is to be stored."""
        ...


def reader(history: History, logprobs: LogprobFormat) -> WireProtocol:
    """The protocol; ``history`` has the responses that ``previous_response_id`` may name, ``logprobs`` writes sampled
    tokens as text."""

    def read(body: object, headers: Mapping[str, str], namespace: str) -> Inbound:
        return _read(_continued(body, history, namespace), headers, namespace, history, logprobs)

    return WireProtocol("openai", read, "input")


def _continued(body: object, history: History, namespace: str) -> object:
    """The request with all its input, where it names what came before. Raises ApiError."""
    previous = body.get("previous_response_id") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(previous, str):
        return body
    before = history.find(namespace, previous)
    if before is None:
        message = f"Previous response with id {previous[:80]!r} not found: send the whole input without it."
        raise ApiError("previous", message, param="previous_response_id")
    raw: dict[str, Any] = body.raw if isinstance(body, Body) else body
    new = _input(raw.get("input", []))
    return {**raw, "input": [*before, *new]} if isinstance(new, list) else raw


def _read(
    body: object, headers: Mapping[str, str], namespace: str, history: History, logprobs: LogprobFormat
) -> Inbound:
    request = ResponsesRequest.model_validate(body)
    body = raw_body(body)
    items = _input(body.get("input")) if isinstance(body, dict) else []

    def keep(response: dict[str, Any], session: str) -> None:
        if isinstance(items, list):
            history.keep(namespace, session, response, items)

    _refuse(request)
    effort = request.reasoning.effort if request.reasoning is not None else None
    tools, names = read_tools(request.tools or [])
    turns = _turns(request)
    return Inbound(
        Conversation(turns, tools),
        Options(
            max_tokens=request.max_output_tokens,
            thinking=effort != "none",
            effort=effort,
            demand=demand(
                request.tool_choice,
                request.parallel_tool_calls is not False,
                request.text.format if request.text is not None else None,
                {tool.name for tool in tools},
                "text.format",
            ),
            temperature=request.temperature,
            top_p=request.top_p,
            logprobs=(request.top_logprobs or 0) if _wants_logprobs(request) else None,
        ),
        RequestMeta(
            protocol="responses",
            headers=headers,
            session_hint=request.prompt_cache_key or request.session_id or "",
            namespace=namespace,
            model=request.model,
            max_tokens=request.max_output_tokens or 0,
            json_schema=_wants_json(request.text),
        ),
        bool(request.stream),
        ResponsesWriter(_echo(request, body), names, keep, logprobs),
        answered=request.generate is not False,
        request=request,
    )


def _refuse(request: ResponsesRequest) -> None:
    """What would change the answer and cannot be honoured is refused, not ignored."""
    if request.conversation is not None:
        raise invalid("conversation: conversations are not stored; send the whole input", "conversation")
    if request.background:
        raise invalid("background: only foreground responses are supported", "background")


def _wants_logprobs(request: ResponsesRequest) -> bool:
    return bool(request.top_logprobs) or _LOGPROBS in (request.include or ())


def _wants_json(text: _TextConfig | None) -> bool:
    return text is not None and text.format is not None and text.format.type == "json_schema"


def _echo(request: ResponsesRequest, body: object) -> dict[str, Any]:
    """What a response object repeats of its request. What is to be generated is stored, unless it is not to be."""
    raw = body if isinstance(body, dict) else {}
    return {
        "model": request.model,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": raw.get("reasoning"),
        "store": request.store is not False and request.generate is not False,
        "temperature": request.temperature,
        "text": raw.get("text") or {"format": {"type": "text"}},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": told_tools(raw.get("tools") or []),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
    }


def _turns(request: ResponsesRequest) -> tuple[Turn, ...]:
    """Items to turns: the items of one assistant turn, and of one round of outputs, follow each other."""
    if not request.input and request.generate is not False:
        raise invalid("input: at least one item is required", "input")
    items = request.input
    at, before = turns_before(items)
    turns = [*before]
    if request.instructions and not at:
        turns.append(Turn("system", (Text(request.instructions),)))
    kept, count = at, len(turns)
    while at < len(items):
        if at < len(items) - 1:
            kept, count = at, len(turns)
        run: _Run | None = items[at].made.get("run")
        if run is None or not run.at(items, at):
            run = items[at].made["run"] = _run(items, at, run)
        turns += run.turns
        at += run.size
    if kept:
        keep_turns(items[kept], tuple(turns[:count]))
    if not turns and request.generate is not False:
        raise invalid("input: at least one item must have content", "input")
    return tuple(turns)


@dataclass(frozen=True)
class _Run:
    """The turn, or none, that ``size`` items make. ``items``: those, and the one behind them that is none of them."""

    turns: tuple[Turn, ...]
    size: int
    items: list[_Item]

    def at(self, items: list[_Item], begin: int) -> bool:
        """Are these very items there from that place on, and no more than these? Equal ones would have to be compared
        with all that was made of them."""
        end = begin + len(self.items)
        if end > len(items) or not all(map(is_, items[begin:end], self.items)):
            return False
        return len(self.items) > self.size or end == len(items)


def _run(items: list[_Item], begin: int, before: _Run | None) -> _Run:
    """What begins at a place, where ``before`` began. Items that say nothing are part of any turn."""
    role, blocks = _item(items[begin], f"input.{begin}")
    end = begin + 1
    while end < len(items):
        other, more = _item(items[end], f"input.{end}")
        if blocks and more and (other != role or role not in ("assistant", "tool")):
            break
        role, blocks, end = other if more else role, blocks + more, end + 1
    turns = (Turn(role, blocks),) if blocks else ()
    if before is not None and before.turns == turns:  # the very same, which is soon compared
        turns = before.turns
    return _Run(turns, end - begin, items[begin : end + 1])


def _item(item: _Item, where: str) -> tuple[Role, tuple[Block, ...]]:
    match item:
        case _Message():
            texts = _texts(item.content, f"{where}.content")
            return _ROLES[item.role], tuple(Text(text) for text in texts if text or item.role != "assistant")
        case _Reasoning():
            text = "".join(piece.text for piece in item.content or item.summary)
            ticket = item.encrypted_content or ""
            return "assistant", (Thinking(text, ticket),) if text or ticket else ()
        case _FunctionCall():
            return "assistant", (ToolCall(item.call_id, ToolNames.join(item.namespace, item.name), item.arguments),)
        case _CustomCall():
            name = ToolNames.join(item.namespace, item.name)
            return "assistant", (ToolCall(item.call_id, name, item.input, freeform=True),)
        case _Output():
            return "tool", (ToolOutput(item.call_id, "\n".join(_texts(item.output, f"{where}.output"))),)
        case _ShellCall():
            return "assistant", (ToolCall(item.call_id, LOCAL_SHELL.name, _arguments(item.action)),)
        case _ShellOutput():
            return "tool", (ToolOutput(item.id, item.output),)


def _arguments(action: _ShellExec) -> str:
    """As the model gave them: what it left out is not there."""
    given = action.model_dump(exclude={"type"}, exclude_none=True)
    return json.dumps({key: value for key, value in given.items() if value != {}}, ensure_ascii=False)


def _texts(parts: list[_Part], where: str) -> list[str]:
    out = []
    for at, part in enumerate(parts):
        match part:
            case _TextPart():
                out.append(part.text)
            case _RefusalPart():
                out.append(part.refusal)
            case _MediaPart():
                raise no_media(part.type, f"{where}.{at}")
    return out


class _Nothing:
    """Knows no responses."""

    def find(self, namespace: str, id: str) -> list[Any] | None:
        return None

    def keep(self, namespace: str, session: str, response: dict[str, Any], items: list[Any]) -> None:
        pass


PLAIN = reader(_Nothing(), lambda _: [])
"""For requests that bring all their input, and want no logprobs."""
