"""One answer of a remote engine, as the replies that an engine of our own gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.api import Admitted, Done, ErrorKind, Failed, FinishReason, Request, Reuse, TokenLogprob, Tokens
from engine.remote.api import Cached, Chunk, Problem

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_KINDS: dict[int, ErrorKind] = {
    400: "invalid",
    413: "invalid",
    422: "invalid",
    429: "overloaded",
    502: "worker_lost",
    503: "worker_lost",
    504: "worker_lost",
}
"""Of statuses; all others are nothing that a client could do anything about."""


class Answer:
    """``title``: what the remote is called. ``silence``: what it means when it does not say what was cached; None where
    that is not known (some versions leave a 0 out). Of a request that only prefills (``max_tokens`` 0) the one token
    that has to be sampled is dropped."""

    def __init__(self, request: Request, title: str, vocab_size: int, silence: Cached | None = None) -> None:
        self.sampled: list[int] = []
        self.cached: Cached | None = None
        self.prompt = len(request.tokens)
        self._request = request
        self._title = title
        self._vocab_size = vocab_size
        self._silence = silence
        self._reason = ""

    @property
    def reuse(self) -> Reuse:
        """What was cached, as far as that is known by now. What was computed twice only the session can tell."""
        size, cached = self.prompt, self.cached
        if cached is None:
            return Reuse(0, 0, 0, 0, size, "unreported")
        if cached.total > size:
            return Reuse(0, 0, 0, 0, 0, remote=size)
        return Reuse(cached.device, cached.host, cached.disk, 0, size - cached.total, remote=cached.unnamed)

    def take(self, chunk: Chunk) -> Iterator[Admitted | Tokens | Failed]:
        if chunk.problem is not None:
            yield self.failed(chunk.problem)
            return
        if chunk.cached is not None and self.cached is None:
            self.cached = chunk.cached
            if not self._reason:
                yield Admitted(self._request.id, self.reuse)
        self._reason = chunk.reason or self._reason
        yield from self._tokens(chunk.tokens, chunk.logprobs)
        # Some servers leave out the token that ended the answer, and tell which one it was.
        if chunk.reason == "stop" and chunk.matched is not None and self.sampled[-1:] != [chunk.matched]:
            yield from self._tokens((chunk.matched,), ())

    def end(self) -> Done | Failed:
        """Its events are over."""
        if not self._reason:
            return self.lost("ended the answer in the midst of it")
        self.cached = self.cached or self._silence
        if self._request.sampling.max_tokens == 0:
            return Done(self._request.id, "length", self.reuse)
        reason = _REASONS.get(self._reason)
        if reason is None:
            return Failed(self._request.id, "internal", f"{self._title} ended the answer: {self._reason[:100]!r}")
        return Done(self._request.id, reason, self.reuse)

    def failed(self, problem: Problem) -> Failed:
        kind = _KINDS.get(problem.status, "internal")
        if problem.status in (401, 403):
            return Failed(self._request.id, kind, f"{self._title} refuses our API key")
        message = " ".join(problem.message.split())[:500]
        verb = {"invalid": "refuses the request", "overloaded": "has too much to do"}.get(kind, "failed")
        return Failed(self._request.id, kind, f"{self._title} {verb}: {message}")

    def nonsense(self, what: str) -> Failed:
        return Failed(self._request.id, "internal", f"{self._title} sent {what}")

    def lost(self, what: str) -> Failed:
        return Failed(self._request.id, "worker_lost", f"{self._title} {what}; try again")

    def _tokens(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> Iterator[Tokens | Failed]:
        if any(not 0 <= token < self._vocab_size for token in tokens):
            yield self.nonsense("a token that the vocabulary does not have")
        elif logprobs and len(logprobs) != len(tokens):
            yield self.nonsense("log probabilities of other tokens")
        elif tokens:
            self.sampled += tokens
            sampling = self._request.sampling
            if sampling.max_tokens > 0:
                yield Tokens(self._request.id, tokens, _best(logprobs, sampling.logprobs))


def _best(logprobs: tuple[TokenLogprob, ...], count: int | None) -> tuple[TokenLogprob, ...]:
    """So many alternatives as were asked for, the likeliest first; None: no log probabilities at all."""
    if count is None:
        return ()
    return tuple(replace(one, top=tuple(sorted(one.top, key=lambda top: -top[1])[:count])) for one in logprobs)
