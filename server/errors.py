"""Everything that can go wrong with a request, and how each wire protocol says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from pydantic import ValidationError

from engine.api import ErrorKind as EngineErrorKind
from engine.client import EngineError
from server.dump import Json

Shape = Literal["anthropic", "openai"]
ErrorKind = Literal[
    "invalid",
    "previous",
    "context",
    "unauthorized",
    "forbidden",
    "not_found",
    "model",
    "method",
    "slow",
    "too_large",
    "upgrade",
    "busy",
    "unavailable",
    "internal",
]


@dataclass(frozen=True)
class _Row:
    """How one kind of error looks: status and type for Anthropic, then status, type and code for OpenAI."""

    anthropic_status: int
    anthropic_type: str
    openai_status: int
    openai_type: str
    openai_code: str | None = None


_ROWS: dict[ErrorKind, _Row] = {
    "invalid": _Row(400, "invalid_request_error", 400, "invalid_request_error"),
    "previous": _Row(400, "invalid_request_error", 400, "invalid_request_error", "previous_response_not_found"),
    "context": _Row(400, "invalid_request_error", 400, "invalid_request_error", "context_length_exceeded"),
    "unauthorized": _Row(401, "authentication_error", 401, "invalid_request_error", "invalid_api_key"),
    "forbidden": _Row(403, "permission_error", 403, "invalid_request_error", "forbidden"),
    "not_found": _Row(404, "not_found_error", 404, "invalid_request_error", "not_found"),
    "model": _Row(404, "not_found_error", 404, "invalid_request_error", "model_not_found"),
    "method": _Row(405, "invalid_request_error", 405, "invalid_request_error", "method_not_allowed"),
    "slow": _Row(408, "timeout_error", 408, "invalid_request_error", "request_timeout"),
    "too_large": _Row(413, "request_too_large", 413, "invalid_request_error", "request_too_large"),
    "upgrade": _Row(426, "invalid_request_error", 426, "invalid_request_error", "upgrade_required"),
    "busy": _Row(429, "rate_limit_error", 429, "rate_limit_error", "rate_limit_exceeded"),
    "unavailable": _Row(529, "overloaded_error", 503, "server_error", "server_error"),
    "internal": _Row(500, "api_error", 500, "server_error", "server_error"),
}

_FROM_ENGINE: dict[EngineErrorKind, ErrorKind] = {
    "context_length": "context",
    "invalid": "invalid",
    "overloaded": "busy",
    "worker_lost": "unavailable",
    "internal": "internal",
}


INTERNAL_MESSAGE = "internal error; the server's log has the details"


class ApiError(Exception):
    """A request's error in no protocol's shape yet. ``openai_message`` replaces ``message`` where OpenAI's clients
    look for another text. ``retry_after`` is in seconds, 0 for no advice."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        openai_message: str = "",
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.message = message
        self.param = param
        self.openai_message = openai_message or message
        self.retry_after = retry_after

    @classmethod
    def from_engine(cls, kind: EngineErrorKind, message: str) -> ApiError:
        """A ``Failed`` of the engine. What went wrong inside it is for the log, not for the client."""
        ours = _FROM_ENGINE[kind]
        if kind == "internal":
            message = INTERNAL_MESSAGE
        return cls(ours, message, retry_after=1 if ours in ("busy", "unavailable") else 0)

    @classmethod
    def from_engine_error(cls, error: EngineError, prompt: int) -> ApiError:
        """``prompt``: its tokens."""
        if error.kind == "context_length" and error.limit:
            return cls.prompt_too_long(prompt, error.limit)
        return cls.from_engine(error.kind, error.message)

    @classmethod
    def prompt_too_long(cls, prompt: int, limit: int, *, counted: bool = True) -> ApiError:
        """Counts in tokens. The first text starts Claude Code's own recovery, the second that of OpenAI's clients.
        ``counted`` False: the prompt has that many at least, nobody counted them all."""
        length = f"{prompt} tokens" if counted else f"at least {prompt} tokens"
        return cls(
            "context",
            f"prompt is too long: {length} > {limit} maximum",
            openai_message=f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{length}. Please reduce the length of the messages.",
        )

    @classmethod
    def budget_too_large(cls, prompt: int, max_tokens: int, limit: int) -> ApiError:
        """Counts in tokens; Claude Code retries with a smaller ``max_tokens``."""
        return cls("context", f"input length and max_tokens exceed context limit: {prompt} + {max_tokens} > {limit}")

    @classmethod
    def from_validation(cls, error: ValidationError, body: object) -> ApiError:
        """The first complaint of pydantic, with the path of the field in the request's ``body``."""
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(_path(first["loc"], body, missing=first["type"] == "missing"))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "union_tag_invalid":  # pydantic names its own ways of looking for it
            message = f"{first['ctx']['tag']!r} is not known here, but {first['ctx']['expected_tags']}"
        return cls("invalid", f"{where}: {message}" if where else message, param=where or None)


def _path(places: Sequence[int | str], body: object, *, missing: bool) -> list[str]:
    """The path in the body, without the names that pydantic adds for the members of a union."""
    out: list[str] = []
    for at, place in enumerate(places):
        match body, place:
            case dict(), str() if place in body:
                body = body[place]
            case list(), int() if place < len(body):
                body = body[place]
            case _ if not (missing and at == len(places) - 1):
                continue
        out.append(str(place))
    return out


def status(error: ApiError, shape: Shape) -> int:
    row = _ROWS[error.kind]
    return row.anthropic_status if shape == "anthropic" else row.openai_status


def body(error: ApiError, shape: Shape, request_id: str | None = None) -> dict[str, Any]:
    """The error object of a protocol, in an HTTP body or in an ``error`` event."""
    row = _ROWS[error.kind]
    if shape == "anthropic":
        detail = {"type": row.anthropic_type, "message": error.message}
        return {"type": "error", "error": detail, "request_id": request_id}
    return {
        "error": {
            "message": error.openai_message,
            "type": row.openai_type,
            "param": error.param,
            "code": row.openai_code,
        }
    }


def response(error: ApiError, shape: Shape) -> Json:
    request_id = new_request_id()
    headers = request_id_headers(request_id)
    if error.retry_after:
        headers["retry-after"] = str(error.retry_after)
    return Json(body(error, shape, request_id), status_code=status(error, shape), headers=headers)


def shape_of(path: str, headers: Mapping[str, str]) -> Shape:
    """Which protocol a caller speaks: by path, and where the path is nobody's, by Anthropic's version header."""
    if path.startswith("/v1/messages") or "anthropic-version" in headers:
        return "anthropic"
    return "openai"


def new_request_id() -> str:
    return f"req_{uuid4().hex}"


def request_id_headers(request_id: str) -> dict[str, str]:
    """Under the names the two SDKs look for."""
    return {"request-id": request_id, "x-request-id": request_id}
