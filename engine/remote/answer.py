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
    """Never more than was asked for: it ends with its first stop token or has ``max_tokens``, whatever the remote does.

    ``title``: what the remote is called. ``silence``: what it means when it does not say what was cached; None where
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
    def over(self) -> bool:
        """Whether its last token has come; what was reused may still be told."""
        return bool(self._reason)

    @property
    def reuse(self) -> Reuse:
        """What was cached, as far as that is known by now. What was computed twice only the session can tell."""
        size, cached = self.prompt, self.cached
        if cached is None:
            return Reuse(0, 0, 0, 0, size, "unreported")
        if cached.total > size:
            return Reuse(0, 0, 0, 0, 0, remote=size)
        return Reuse(cached.device, cached.host, cached.disk, 0, size - cached.total, remote=cached.unnamed)

    def take(self, chunk: Chunk) -> Iterator[Admitted | Tokens | Done | Failed]:
        if chunk.problem is not None:
            yield self.failed(chunk.problem)
            return
        if chunk.cached is not None and chunk.cached.believable and self.cached is None:
            self.cached = chunk.cached
            if not self._reason:
                yield Admitted(self._request.id, self.reuse)
        wrong = self._wrong(chunk)
        if wrong:
            yield self.nonsense(wrong)
            return
        self._reason = chunk.reason or self._reason
        yield from self._tokens(chunk.tokens, chunk.logprobs)
        # Some servers leave out the token that ended the answer, and tell which one it was.
        if chunk.reason == "stop" and chunk.matched is not None and self.sampled[-1:] != [chunk.matched]:
            yield from self._tokens((chunk.matched,), ())  # which has no log probability then

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
        return Failed(self._request.id, kind, f"{self._title} {verb}: {message or 'it does not say why'}")

    def nonsense(self, what: str) -> Failed:
        return Failed(self._request.id, "internal", f"{self._title} sent {what}")

    def lost(self, what: str) -> Failed:
        return Failed(self._request.id, "worker_lost", f"{self._title} {what}; try again")

    def _wrong(self, chunk: Chunk) -> str:
        """What makes no sense in it; "" for nothing."""
        ids = [*chunk.tokens, *(() if chunk.matched is None else (chunk.matched,))]
        ids += [token for one in chunk.logprobs for token in (one.token, *(other for other, _ in one.top))]
        if any(not 0 <= token < self._vocab_size for token in ids):
            return "a token that the vocabulary does not have"
        if chunk.tokens and self._reason:
            return "tokens behind the end of the answer"
        wanted = self._request.sampling.logprobs is not None
        if (wanted or chunk.logprobs) and [one.token for one in chunk.logprobs] != list(chunk.tokens):
            return "other log probabilities than those of its tokens"
        return ""

    def _tokens(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> Iterator[Tokens | Done | Failed]:
        if not tokens:
            return
        sampling = self._request.sampling
        kept, ended = 0, self._full()
        while kept < len(tokens) and not ended:
            self.sampled.append(tokens[kept])
            kept, ended = kept + 1, self._full()
        if kept and sampling.max_tokens > 0:
            yield Tokens(self._request.id, tokens[:kept], _best(logprobs[:kept], sampling.logprobs))
        if kept < len(tokens):
            self._reason = ended
            yield self.end()

    def _full(self) -> str:
        """Why there may be no more tokens; "" where there may be."""
        if self.sampled and self.sampled[-1] in self._request.sampling.stop_tokens:
            return "stop"
        return "length" if len(self.sampled) >= max(1, self._request.sampling.max_tokens) else ""


def _best(logprobs: tuple[TokenLogprob, ...], count: int | None) -> tuple[TokenLogprob, ...]:
    """So many alternatives as were asked for, the likeliest first; None: no log probabilities at all."""
    if count is None:
        return ()
    return tuple(replace(one, top=tuple(sorted(one.top, key=lambda top: -top[1])[:count])) for one in logprobs)
