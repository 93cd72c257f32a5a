"""Which requests cannot be served, whatever the machine is doing."""

from __future__ import annotations

from engine.api import Failed, ModelInfo, Request


def refuse(request: Request, info: ModelInfo, waiting: int, queue: int, *, grammars: bool) -> Failed | None:
    """``waiting``: requests of its kind that wait already, of ``queue`` that may. ``grammars``: whether answers can
    be held to one."""
    count, sampling = len(request.tokens), request.sampling
    tokens = (*request.tokens, *(sampling.forced or ()), *(token for token, _ in sampling.logit_bias))
    limit = info.context_length
    if not request.tokens:
        return Failed(request.id, "invalid", "the prompt is empty")
    if min(tokens) < 0 or max(tokens) >= info.vocab_size:
        message = f"token ids must be in [0, {info.vocab_size})"
        return Failed(request.id, "invalid", message, info.vocab_size)
    if sampling.constraint is not None and not grammars:
        return Failed(request.id, "invalid", "this engine has no vocabulary to follow a grammar with")
    if sampling.max_tokens < 0:
        return Failed(request.id, "invalid", "max_tokens is negative")
    if count >= limit:
        message = f"the prompt has {count} tokens, the context is {limit} with at least one to generate"
        return Failed(request.id, "context_length", message, limit)
    if waiting >= queue:
        return Failed(request.id, "overloaded", f"{waiting} requests are waiting already", queue)
    return None
