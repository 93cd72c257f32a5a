"""OpenAI Completions: requests in.

This is the raw protocol: no template is applied, and none of a prompt's text becomes a control token, whatever it
spells; whoever wants control tokens sends token ids. Nothing is put in front of them; text begins with the start token
where the model's tokenizer puts one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from parsers.conversation import Conversation
from server.answers import Raw
from server.protocols.base import MOST_CHOICES, Inbound, WireProtocol, invalid
from server.protocols.completions_events import CompletionsWriter, TokenBytes
from server.protocols.sampled import SampledRequest
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


class CompletionsRequest(SampledRequest):
    model: str = Field(min_length=1)
    prompt: Annotated[Prompts, PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    """0: the prompt is computed, for what comes later."""
    logprobs: int | None = Field(default=None, ge=0, le=20)


def reader(token_bytes: TokenBytes) -> WireProtocol:
    """The protocol; ``token_bytes`` says what a token stands for."""

    def read(body: object, headers: Mapping[str, str], namespace: str) -> Inbound:
        return _read(CompletionsRequest.model_validate(body), headers, namespace, token_bytes)

    return WireProtocol("openai", read)


def _read(request: CompletionsRequest, headers: Mapping[str, str], namespace: str, token_bytes: TokenBytes) -> Inbound:
    _refuse(request)
    n = request.n or 1
    max_tokens = _DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    return Inbound(
        Conversation(()),
        replace(
            request.sampling(),
            max_tokens=max_tokens,
            thinking=False,
            logprobs=request.logprobs,
        ),
        RequestMeta(
            protocol="completions",
            headers=headers,
            session_hint=request.session_hint,
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
            include_usage=request.include_usage,
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
