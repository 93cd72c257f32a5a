"""The server's own OpenAPI document, made from the models that read requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from server.protocols.anthropic import CountRequest, MessagesRequest
from server.protocols.chat import ChatRequest
from server.protocols.completions import CompletionsRequest
from server.protocols.responses import ResponsesRequest

_JSON, _STREAM, _LINES, _TEXT = "application/json", "text/event-stream", "application/x-ndjson", "text/plain"
_REFS = "#/components/schemas/"
_MODELS: tuple[type[BaseModel], ...] = (
    MessagesRequest,
    CountRequest,
    ResponsesRequest,
    ChatRequest,
    CompletionsRequest,
)
_PRIVATE = re.compile(r"(?:server__protocols__(\w+?)__)?_(\w+)")
"""A component's name as pydantic writes those of private classes; with the module where two modules have one."""
_ANY: JsonSchemaValue = {"type": "object"}
_COUNT = {"type": "integer", "minimum": 0}
_DIVIDE = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"experts": _COUNT, "kv": _COUNT, "states": _COUNT},
            "additionalProperties": False,
            "minProperties": 1,
        },
        {"type": "object", "properties": {"auto": {"const": True}}, "required": ["auto"]},
    ]
}
_FORGET = {"type": "object", "properties": {"all": {"const": True}}, "required": ["all"]}


@dataclass(frozen=True)
class _Operation:
    """``answers``: media types of a good answer. ``unready``: the status that says that there is no worker."""

    summary: str
    body: type[BaseModel] | JsonSchemaValue | None = None
    body_type: str = _JSON
    body_required: bool = True
    answers: tuple[str, ...] = (_JSON,)
    status: int = 200
    unready: int = 0
    parameters: Mapping[str, JsonSchemaValue] = field(default_factory=dict)
    more: JsonSchemaValue = field(default_factory=dict)
    """Fields that OpenAPI does not define."""


_ID = {"id": {"type": "string"}}
_ACTION = {"action": {"type": "string", "enum": ["verify", "gc", "forget"]}}
_SOCKET: JsonSchemaValue = {
    "x-websocket": {
        "description": "Each message is one JSON text. Requests are answered one after the other; what cannot be begun "
        "is told in an error event, and the socket goes on.",
        "client": {"$ref": _REFS + "ResponseCreate"},
        "server": {"anyOf": [{"$ref": _REFS + "ResponseEvent"}, {"$ref": _REFS + "ErrorEvent"}]},
    }
}
_OPERATIONS: dict[tuple[str, str], _Operation] = {
    ("post", "/v1/messages"): _Operation("Anthropic Messages", MessagesRequest, answers=(_JSON, _STREAM)),
    ("post", "/v1/messages/count_tokens"): _Operation("Tokens of a request, without an answer", CountRequest),
    ("get", "/v1/responses"): _Operation(
        "Upgraded to a WebSocket that speaks OpenAI Responses", status=426, more=_SOCKET
    ),
    ("post", "/v1/responses"): _Operation("OpenAI Responses", ResponsesRequest, answers=(_JSON, _STREAM)),
    ("get", "/v1/responses/{id}"): _Operation("A response that was stored", parameters=_ID),
    ("delete", "/v1/responses/{id}"): _Operation("Forget it", parameters=_ID),
    ("get", "/v1/responses/{id}/input_items"): _Operation("What led to it", parameters=_ID),
    ("post", "/v1/responses/{id}/cancel"): _Operation("Declined: there are no background responses", parameters=_ID),
    ("post", "/v1/chat/completions"): _Operation("OpenAI Chat Completions", ChatRequest, answers=(_JSON, _STREAM)),
    ("post", "/v1/completions"): _Operation("OpenAI Completions", CompletionsRequest, answers=(_JSON, _STREAM)),
    ("get", "/v1/models"): _Operation("The names of the model, its context and longest answer"),
    ("get", "/v1/models/{id}"): _Operation("One of them", parameters=_ID),
    ("get", "/v1/sessions"): _Operation("The caller's sessions"),
    ("post", "/v1/sessions/import"): _Operation("Take in an exported session", {"type": "string"}, _LINES),
    ("get", "/v1/sessions/{id}"): _Operation("What each of its requests reused, and why not more", parameters=_ID),
    ("delete", "/v1/sessions/{id}"): _Operation("Forget it, with all state that only it needs", parameters=_ID),
    ("get", "/v1/sessions/{id}/export"): _Operation("All of it, for import", answers=(_LINES,), parameters=_ID),
    ("post", "/v1/sessions/{id}/pin"): _Operation("Keep it, whatever its age", parameters=_ID),
    ("post", "/v1/sessions/{id}/unpin"): _Operation("Keep it no longer than others", parameters=_ID),
    ("get", "/v1/store"): _Operation("What is kept on disk"),
    ("post", "/v1/store/{action}"): _Operation(
        "Check it, free what nobody needs, or forget everything", _FORGET, body_required=False, parameters=_ACTION
    ),
    ("get", "/v1/cache"): _Operation("How memory is divided, and what was found there"),
    ("post", "/v1/cache"): _Operation("Divide it anew: all or nothing", _DIVIDE),
    ("get", "/v1/stats"): _Operation("Counters since the start, and gauges"),
    ("get", "/metrics"): _Operation("The same for Prometheus", answers=(_TEXT,)),
    ("get", "/health"): _Operation("Whether requests are answered; needs no key", unready=503),
    ("get", "/openapi.json"): _Operation("This document"),
}

_ERRORS: JsonSchemaValue = {
    "AnthropicError": {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
                "required": ["type", "message"],
            },
            "request_id": {"type": "string"},
        },
        "required": ["type", "error", "request_id"],
    },
    "OpenAIError": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type", "param", "code"],
            },
        },
        "required": ["error"],
    },
}

_EVENT = {"type": {"type": "string", "pattern": r"^response\."}, "sequence_number": {"type": "integer", "minimum": 0}}
_FRAMES: JsonSchemaValue = {
    "ResponseCreate": {
        "allOf": [
            {"$ref": _REFS + "ResponsesRequest"},
            {"type": "object", "properties": {"type": {"const": "response.create"}}, "required": ["type"]},
        ],
        "description": "`generate: false` only computes ahead; `previous_response_id` names what `input` continues.",
    },
    "ResponseEvent": {"type": "object", "properties": _EVENT, "required": [*_EVENT]},
    "ErrorEvent": {
        "allOf": [
            {"$ref": _REFS + "OpenAIError"},
            {
                "type": "object",
                "properties": {
                    "type": {"const": "error"},
                    "status": {"type": "integer"},
                    "headers": {"type": "object", "additionalProperties": {"type": "string"}},
                },
                "required": ["type", "status", "headers"],
            },
        ],
    },
}


class _Generate(GenerateJsonSchema):
    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        """Protocols read a value before its type is checked only where a string may stand for a list of one."""
        inner = super().function_before_schema(schema)
        return {"anyOf": [{"type": "string"}, inner]} if inner.get("type") == "array" else inner


@cache
def document() -> dict[str, Any]:
    mode: JsonSchemaMode = "validation"
    _, schemas = models_json_schema(
        [(model, mode) for model in _MODELS], ref_template=f"{_REFS}{{model}}", schema_generator=_Generate
    )
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in _OPERATIONS.items():
        paths.setdefault(path, {})[method] = _operation(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ft", "version": "1", "description": "A local server for coding agents."},
        "paths": paths,
        "components": {
            "schemas": {**_named(schemas["$defs"]), **_ERRORS, **_FRAMES},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}, {}],
    }


def _operation(path: str, operation: _Operation) -> dict[str, Any]:
    shape = "AnthropicError" if path.startswith("/v1/messages") else "OpenAIError"
    failed = {"description": "What is wrong", "content": {_JSON: {"schema": {"$ref": _REFS + shape}}}}
    good = {
        "description": operation.summary,
        "content": {kind: {"schema": _ANY if kind == _JSON else {"type": "string"}} for kind in operation.answers},
    }
    responses = {str(operation.status): good if operation.status < 400 else failed, "default": failed}
    if operation.unready:
        responses[str(operation.unready)] = good
    out: dict[str, Any] = {"summary": operation.summary, "responses": responses, **operation.more}
    if operation.body is not None:
        schema = operation.body if isinstance(operation.body, dict) else {"$ref": _REFS + operation.body.__name__}
        out["requestBody"] = {
            "required": operation.body_required,
            "content": {operation.body_type: {"schema": schema}},
        }
    if operation.parameters:
        out["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": schema}
            for name, schema in operation.parameters.items()
        ]
    if path == "/health":
        out["security"] = []
    return out


def _named(value: Any) -> Any:
    """Without the marks of private classes: ``_Text`` is Text, and anthropic's own ``_Message`` anthropic.Message.
    Titles only repeat names."""
    if isinstance(value, list):
        return [_named(item) for item in value]
    if not isinstance(value, dict):
        return _name(value) if isinstance(value, str) and value.startswith(_REFS) else value
    return {_name(key): _named(item) for key, item in value.items() if key != "title"}


def _name(text: str) -> str:
    match = _PRIVATE.fullmatch(text.removeprefix(_REFS))
    if match is None:
        return text
    plain = f"{match[1]}.{match[2]}" if match[1] else match[2]
    return _REFS + plain if text.startswith(_REFS) else plain
