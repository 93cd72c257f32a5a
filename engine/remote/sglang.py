"""SGLang: ``POST /generate`` (its ``GenerateReqInput`` and ``SamplingParams``), ids in and ids out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from engine.api import Request, TokenLogprob
from engine.remote.api import Cached, Chunk, Error, Facts, Problem, ended_by, finite, problem

_Scored = tuple[float | None, int, Any]
"""Log probability, token id, text or null."""


class _Finish(BaseModel):
    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(BaseModel):
    finish_reason: _Finish | None = None
    cached_tokens: int | None = None
    cached_tokens_details: dict[str, Any] | None = None
    output_token_logprobs: list[_Scored] | None = None
    output_top_logprobs: list[list[_Scored] | None] | None = None


class _Event(BaseModel):
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: Error | str | None = None


class SGLang:
    kind = "sglang"
    title = "SGLang"
    path = "/generate"
    reports_first = True
    grammar_hint = "--grammar-backend llguidance"

    def variants(self, facts: Facts) -> tuple[Facts, Facts]:
        """What stands before it may hide how it was started."""
        return facts, replace(facts, repeats=not facts.repeats)

    def body(self, request: Request, facts: Facts) -> dict[str, Any]:
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": max(1, sampling.max_tokens),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_tokens),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if facts.seeds:
            params["sampling_seed"] = sampling.seed
        if sampling.logit_bias:
            params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        if sampling.constraint is not None:
            params["ebnf"] = ended_by(sampling.constraint, sampling.stop_tokens)  # in its llguidance, Lark as well
        body: dict[str, Any] = {
            "rid": request.id,
            "input_ids": list(request.tokens),
            "sampling_params": params,
            "stream": True,
        }
        if sampling.logprobs is not None:
            body |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": sampling.logprobs}
        if request.session:
            body |= {"session_id": request.session, "routing_key": request.session}
        if request.namespace:
            body["extra_key"] = hashlib.sha256(request.namespace.encode()).hexdigest()
        return body

    def chunk(self, event: str, sampled: Sequence[int], facts: Facts) -> Chunk:
        said = _Event.model_validate_json(event)
        if said.error is not None:
            return Chunk(problem=problem(said.error, 400))
        if said.output_ids is None or said.meta_info is None:
            raise ValueError("an event without output_ids or meta_info")
        ids, meta = said.output_ids, said.meta_info
        if facts.repeats:
            if ids[: len(sampled)] != list(sampled):
                raise ValueError("an event that does not begin with the answer so far")
            ids = ids[len(sampled) :]
        finish = meta.finish_reason
        if finish is not None and finish.type == "abort":
            return Chunk(problem=Problem(finish.status_code or 500, finish.message or "it aborted the request"))
        return Chunk(
            tuple(ids),
            _logprobs(ids, meta),
            _cached(meta),
            "" if finish is None else finish.type,
            finish.matched if finish is not None and isinstance(finish.matched, int) else None,
        )

    def abort(self, request_id: str) -> tuple[str, Mapping[str, Any]] | None:
        return "/abort_request", {"rid": request_id}


def _cached(meta: _Meta) -> Cached | None:
    """With a hierarchical cache it tells the tiers: device, host and storage."""
    if meta.cached_tokens is None:
        return None
    tiers = [(meta.cached_tokens_details or {}).get(name) for name in ("device", "host", "storage")]
    device, host, disk = (count if isinstance(count, int) else 0 for count in tiers)
    if device + host + disk == meta.cached_tokens:
        return Cached(device, host, disk)
    return Cached(unnamed=meta.cached_tokens)


def _logprobs(ids: Sequence[int], meta: _Meta) -> tuple[TokenLogprob, ...]:
    """Of the new ids: the last ones, whether the event repeats those before or not."""
    if meta.output_token_logprobs is None or not ids:
        return ()
    scored = meta.output_token_logprobs[-len(ids) :]
    tops = (meta.output_top_logprobs or [])[-len(ids) :] or [None] * len(ids)
    if [token for _, token, _ in scored] != list(ids) or len(tops) != len(ids):
        raise ValueError("log probabilities of other tokens than its output_ids")
    return tuple(
        TokenLogprob(token, finite(logprob), tuple((other, finite(value)) for value, other, _ in top or ()))
        for (logprob, token, _), top in zip(scored, tops, strict=True)
    )
