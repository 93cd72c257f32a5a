"""OpenAI Completions: requests in.

This is the raw protocol: no template is applied, and none of a prompt's text becomes a control token, whatever it
spells; whoever wants control tokens sends token ids. Nothing is put in front of them; text begins with the start token
where the model's tokenizer puts one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from parsers.conversation import Conversation
from server.answers import Options, Raw
from server.protocols.base import MOST_CHOICES, Inbound, StopStrings, Wire, WireProtocol, invalid
from server.protocols.chat import StreamOptions, biases, few, strings
from server.protocols.completions_events import CompletionsWriter, TokenBytes
from sessions.tracker import RequestMeta

_DEFAULT_TOKENS = 16
"""What this protocol has always had."""

Prompts = tuple[str | tuple[int, ...], ...]


def _prompts(value: object) -> Prompts:
    """Text, token ids, or a list of such."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("a text, token ids, or a list of texts or of token ids is required")
    if _is_id(value[0]):
        return (_ids(value),)
    if len(value) > MOST_CHOICES:
        raise ValueError(f"at most {MOST_CHOICES} prompts at once")
    return tuple(one if isinstance(one, str) else _ids(one) for one in value)


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(_is_id, value)):
        raise ValueError("a prompt is a text or a list of token ids")
    return tuple(value)


def _is_id(value: object) -> bool:
    return type(value) is int


_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_SOME: dict[str, Any] = {"type": "array", "minItems": 1, "maxItems": MOST_CHOICES}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "string"}, _IDS, {**_SOME, "items": {"type": "string"}}, {**_SOME, "items": _IDS}]
}


class CompletionsRequest(Wire):
    model: str = Field(min_length=1)
    prompt: Annotated[Prompts, PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[StopStrings, BeforeValidator(strings)] = Field(default_factory=list)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    seed: int | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(few)] | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None


def reader(token_bytes: TokenBytes) -> WireProtocol:
    """The protocol; ``token_bytes`` says what a token stands for."""

    def read(body: object, headers: Mapping[str, str], namespace: str) -> Inbound:
        return _read(CompletionsRequest.model_validate(body), headers, namespace, token_bytes)

    return WireProtocol("openai", read)


def _read(request: CompletionsRequest, headers: Mapping[str, str], namespace: str, token_bytes: TokenBytes) -> Inbound:
    _refuse(request)
    n, max_tokens = request.n or 1, request.max_tokens or _DEFAULT_TOKENS
    return Inbound(
        Conversation(()),
        Options(
            max_tokens=max_tokens,
            thinking=False,
            stop=tuple(request.stop),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            seed=request.seed,
            logprobs=request.logprobs,
            logit_bias=biases(request.logit_bias or {}),
            n=n,
        ),
        RequestMeta(
            protocol="completions",
            headers=headers,
            session_hint=request.prompt_cache_key or request.session_id or "",
            namespace=namespace,
            model=request.model,
            max_tokens=max_tokens,
        ),
        bool(request.stream),
        CompletionsWriter(
            request.model,
            request.prompt,
            n=n,
            echo=bool(request.echo),
            include_usage=request.stream_options is not None and request.stream_options.include_usage,
            logprobs=request.logprobs is not None,
            token_bytes=token_bytes,
        ),
        raw=Raw(request.prompt),
    )


def _refuse(request: CompletionsRequest) -> None:
    """What would change the answer and cannot be honoured is refused, not ignored."""
    n = request.n or 1
    if request.suffix:
        message = "no text is filled in before one; send the model's own tokens for that, in a prompt of token ids"
        raise invalid(f"suffix: {message}", "suffix")
    if request.best_of not in (None, n):
        raise invalid("best_of: every answer that is made is returned, so it must be n", "best_of")
    if request.echo and request.logprobs is not None:
        raise invalid("echo: a prompt's own logprobs are not computed; ask for one of the two", "echo")
    if len(request.prompt) * n > MOST_CHOICES:
        raise invalid(f"n: at most {MOST_CHOICES} answers at once, to all prompts together", "n")
