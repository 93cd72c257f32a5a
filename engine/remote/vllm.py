"""vLLM: ``POST /v1/completions`` (its ``CompletionRequest``), with a prompt of ids and ``return_token_ids``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from engine.api import Request, TokenLogprob
from engine.remote.api import Cached, Chunk, Error, Facts, ended_by, finite, problem

_NAME = "token_id:"
"""Before the id, where tokens are named by it."""


class _Logprobs(BaseModel):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] = []


class _Choice(BaseModel):
    index: int = 0
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Details(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens_details: _Details | None = None


class _Event(BaseModel):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Error | str | None = None


class VLLM:
    kind = "vllm"
    title = "vLLM"
    path = "/v1/completions"
    reports_first = False
    grammar_hint = "--structured-outputs-config.backend guidance, and without a --reasoning-parser"

    def variants(self, facts: Facts) -> tuple[Facts, Facts]:
        """Older versions do not know ``return_token_ids``."""
        return facts, replace(facts, token_ids=False)

    def body(self, request: Request, facts: Facts) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": facts.model,
            "request_id": request.id,
            "prompt": list(request.tokens),
            "max_tokens": max(1, sampling.max_tokens),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_tokens),
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if sampling.logprobs is not None or not facts.token_ids:
            body |= {"logprobs": sampling.logprobs or 0, "return_tokens_as_token_ids": True}
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        if sampling.constraint is not None:
            body["structured_outputs"] = {"grammar": ended_by(sampling.constraint, sampling.stop_tokens)}
        if request.session:
            body["session_id"] = request.session
        if request.namespace:
            body["cache_salt"] = hashlib.sha256(request.namespace.encode()).hexdigest()
        return body

    def chunk(self, event: str, sampled: Sequence[int], facts: Facts) -> Chunk:
        said = _Event.model_validate_json(event)
        if said.error is not None:
            return Chunk(problem=problem(said.error, 500))
        details = said.usage.prompt_tokens_details if said.usage is not None else None
        cached = None
        if details is not None and details.cached_tokens is not None:
            cached = Cached(unnamed=details.cached_tokens)
        if not said.choices:
            return Chunk(cached=cached)
        choice = said.choices[0]
        matched = choice.stop_reason if isinstance(choice.stop_reason, int) else None
        return Chunk(_tokens(choice), _scored(choice), cached, choice.finish_reason or "", matched)

    def abort(self, request_id: str) -> tuple[str, Mapping[str, Any]] | None:
        """It ends requests whose connections are closed, and has no other way."""
        return None


def _tokens(choice: _Choice) -> tuple[int, ...]:
    if choice.token_ids is not None:
        return tuple(choice.token_ids)
    if choice.logprobs is not None:
        return tuple(_token(name) for name in choice.logprobs.tokens)
    if choice.finish_reason is None:
        raise ValueError("an event without token_ids")
    return ()


def _scored(choice: _Choice) -> tuple[TokenLogprob, ...]:
    """It adds the sampled token to the alternatives where it is none of them."""
    scores = choice.logprobs
    if scores is None:
        return ()
    tops = scores.top_logprobs or [None] * len(scores.tokens)
    return tuple(
        TokenLogprob(
            _token(name),
            finite(logprob),
            tuple((_token(other), finite(value)) for other, value in (top or {}).items()),
        )
        for name, logprob, top in zip(scores.tokens, scores.token_logprobs, tops, strict=True)
    )


def _token(name: str) -> int:
    """Raises ValueError."""
    if not name.startswith(_NAME):
        raise ValueError("tokens that are not named by their ids")
    return int(name.removeprefix(_NAME))
