"""A remote engine as the server sees it: requests out over HTTP, one stream of replies back per request."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
from pydantic_core import from_json

from engine.api import AdminAction, AdminReply, Admitted, Done, Failed, ModelInfo, Request, Stats, Tokens
from engine.client import EngineError, EngineStream, Inbox, QueueFull, WorkerUnavailable
from engine.refusal import refuse
from engine.remote.answer import Answer
from engine.remote.api import SILENCE_SECONDS, Address, Cached, Checkpoint, Dialect, Facts, Problem, RemoteError
from engine.remote.identify import identify
from engine.remote.sse import events

_log = logging.getLogger(__name__)

WATCH_SECONDS = 5.0
HEALTH_SECONDS = 10.0
END_SECONDS = 10.0
"""From the last token of an answer to the end of its stream, where some say what they reused."""
MISSES = 3
"""So many looks at its health must fail, one after the other; one is enough where nothing listens any more."""
MAX_BACKOFF_SECONDS = 8.0
_MOST_WORDS = 64 << 10
"""Bytes of an error that are read."""
_TIMEOUT = httpx.Timeout(connect=5.0, read=None, write=60.0, pool=None)
"""A first token may take as long as it takes: whether the engine lives is told by its health."""

_GONE = "the remote engine is gone, or not as it was; it is looked for"
"""For clients; where it is, and what is wrong with it, is for whoever runs this server."""
_LACKS = {
    "checkpoints": "what is kept for later, and where, is the remote engine's choice",
    "store": "what it computed is not ours to keep, verify or forget; sessions and their exact tokens are kept here",
    "idle_prefill": "computing ahead would take the place of other requests there",
    "plan": "what can be reused is not told before it is",
    "script": "it samples by itself",
}


@dataclass
class _Open:
    inbox: Inbox
    answer: Answer
    task: asyncio.Task[None] | None = None


class RemoteClient:
    """Of one address. Everything happens on one event loop. ``max_open``: requests that may be open at once.
    ``silence``: an answer that has begun and says nothing for so many seconds is given up.

    A remote that is gone ends every open request with ``worker_lost`` and is looked for until it is back, if need be
    with another incarnation of the same model.
    """

    def __init__(
        self,
        address: Address,
        checkpoint: Checkpoint,
        max_open: int,
        note: Callable[[str], None] = lambda _: None,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self.lost = 0
        self._silence = silence
        self._address, self._checkpoint, self.max_open, self._note = address, checkpoint, max_open, note
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if address.key:
            headers["authorization"] = f"Bearer {address.key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._http = httpx.AsyncClient(
            base_url=address.url, headers=headers, timeout=_TIMEOUT, limits=limits, trust_env=False
        )
        self._spoken: tuple[Dialect, Facts] | None = None
        self._info: ModelInfo | None = None
        self._connected = asyncio.Event()
        self._doubt = asyncio.Event()
        self._closed = False
        self._why = _GONE
        self._open: dict[str, _Open] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter(requests=0, aborted=0, failed=0, prompt_tokens=0, cached_tokens=0)
        self._counts["unreported"] = 0
        self._heard, self._misses, self._asking = time.monotonic(), 0, False

    @property
    def info(self) -> ModelInfo | None:
        return self._info

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def stalled_seconds(self) -> float:
        """For how long it has not answered whether it is well; 0.0 while no answer is due."""
        due = self._info is not None and (self._asking or self._misses > 0)
        return time.monotonic() - self._heard if due else 0.0

    @property
    def about(self) -> Mapping[str, str]:
        if self._spoken is None:
            return {"kind": "remote", "url": self._address.url}
        dialect, facts = self._spoken
        return {"kind": dialect.kind, "url": self._address.url, "version": facts.version, "model": facts.model}

    @property
    def lacks(self) -> Mapping[str, str]:
        lacks = dict(_LACKS)
        if self._spoken is None:
            return lacks
        dialect, facts = self._spoken
        if not facts.grammars:
            lacks["grammars"] = f"it follows them when it is started with {dialect.grammar_hint}"
        if not facts.seeds:
            lacks["seeds"] = "equal seeds give equal answers when it is started with --enable-deterministic-inference"
        if self._counts["unreported"] and not self._counts["reported"]:
            lacks["reuse"] = "it tells what it reused when it is started with --enable-prompt-tokens-details"
        if facts.repeats:
            lacks["increments"] = (
                "each event has the whole answer, unless it is started with --incremental-streaming-output"
            )
        if not facts.same_vocabulary:
            lacks["vocabulary"] = "it cannot be asked whether its tokens are ours: it has no /tokenize"
        return lacks

    @property
    def title(self) -> str:
        """For people."""
        dialect, facts = self._spoken or (None, None)
        name = f"{dialect.title} {facts.version}".rstrip() if dialect and facts else "the remote engine"
        return f"{name} at {self._address.url}"

    async def connect(self) -> ModelInfo:
        """Raises RemoteError."""
        dialect, facts = self._spoken = await identify(self._http, self._address, self._checkpoint)
        ours = self._checkpoint
        identity = "\n".join((dialect.kind, self._address.url, facts.model, facts.weights))
        self._info = ModelInfo(
            path=facts.model,
            architecture=ours.architecture,
            fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
            vocab_size=ours.vocab_size,
            context_length=facts.context_length,
            recurrent=False,
            max_sequences=self.max_open,
            instruction_set="",
            dtype=f"computed by {self.title}",
            incarnation=uuid4().hex,
        )
        self._heard, self._misses = time.monotonic(), 0
        self._doubt.clear()
        self._connected.set()
        return self._info

    async def run(self, ready: Callable[[ModelInfo], None]) -> None:
        """Watches the remote until cancelled. ``ready`` is called each time that it is back."""
        while True:
            while self._info is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._doubt.wait(), WATCH_SECONDS)
                self._doubt.clear()
                await self._check()
            ready(await self._found())

    async def ready(self, timeout: float) -> ModelInfo:
        try:
            async with asyncio.timeout(timeout):
                await self._connected.wait()
        except TimeoutError as error:
            raise WorkerUnavailable(self._why) from error
        if self._info is None:
            raise WorkerUnavailable("the server is shutting down" if self._closed else self._why)
        return self._info

    def submit(self, request: Request) -> EngineStream:
        """Raises WorkerUnavailable, QueueFull, or EngineError for what the remote cannot do: before it hears of it."""
        if self._info is None or self._spoken is None:
            raise WorkerUnavailable(self._why)
        if len(self._open) >= self.max_open:
            raise QueueFull(self.max_open)
        dialect, facts = self._spoken
        self._refuse(request, self._info, dialect, facts)
        silence = Cached() if self._counts["reported"] else None
        entry = _Open(Inbox(), Answer(request, dialect.title, self._checkpoint.vocab_size, silence))
        self._open[request.id] = entry
        self._counts["requests"] += 1
        entry.task = asyncio.create_task(self._ask(request, entry, dialect, facts), name=f"remote {request.id}")
        return EngineStream(self, request.id, entry.inbox)

    def abort(self, request_id: str) -> None:
        entry = self._open.get(request_id)
        if entry is None:
            return
        self._counts["aborted"] += 1
        self._put(request_id, entry, Done(request_id, "abort", entry.answer.reuse))
        if entry.task is not None:
            entry.task.cancel()  # closes its connection
        self._drop(request_id)

    def abandon(self, request_id: str) -> None:
        entry = self._open.get(request_id)
        if entry is not None:
            entry.inbox.abandoned = True
            entry.inbox.items.clear()
            self.abort(request_id)

    async def stats(self) -> Stats:
        """Counted here; ``unreported``: answers of which the remote did not tell what it reused."""
        if self._info is None:
            raise WorkerUnavailable(self._why)
        counts = {name: float(count) for name, count in self._counts.items() if name != "reported"}
        return Stats({"running": float(len(self._open)), **counts})

    async def admin(self, action: AdminAction, **arguments: str) -> AdminReply:
        return AdminReply(uuid4().hex, False, message=_LACKS["store"])

    async def close(self) -> None:
        """Fails every open stream, and lets nobody wait for another."""
        self._closed = True
        self._end("the server is shutting down")
        self._connected.set()
        for task in self._aborts:
            task.cancel()
        await self._http.aclose()

    # ── one request ───────────────────────────────────────────────────────────────────────────────────────────────

    def _refuse(self, request: Request, info: ModelInfo, dialect: Dialect, facts: Facts) -> None:
        """Raises EngineError."""
        if request.background or request.sampling.forced is not None:
            raise EngineError("invalid", f"{dialect.title} only answers: {_LACKS['idle_prefill']}")
        if request.sampling.constraint is not None and not facts.grammars:
            message = (
                f"{dialect.title} does not hold answers to our grammars as it is set up, and this request needs one (a "
                "tool that is strict or has a grammar, a forced tool_choice, an answer with a schema). It does when it "
                f"is started with {dialect.grammar_hint}"
            )
            raise EngineError("invalid", message)
        refused = refuse(request, info, 0, 1, grammars=True)
        if refused is not None:
            raise EngineError(refused.kind, refused.message, refused.limit)

    async def _ask(self, request: Request, entry: _Open, dialect: Dialect, facts: Facts) -> None:
        answer = entry.answer
        try:
            await self._events(request, entry, dialect, facts)
        except httpx.RequestError as error:
            _log.warning("request %s: %s: %s", request.id, type(error).__name__, error)
            if not entry.inbox.decided.is_set():
                await self._check()  # whoever asks again asks an engine that is there
            self._doubt.set()
            self._put(request.id, entry, answer.lost("broke the connection"))
        except ValueError as error:
            _log.warning("request %s: %s", request.id, error)
        finally:
            self._put(request.id, entry, answer.nonsense("what cannot be read"))  # whatever happened, it has ended

    async def _events(self, request: Request, entry: _Open, dialect: Dialect, facts: Facts) -> None:
        """Raises httpx.RequestError, ValueError."""
        answer, body = entry.answer, json.dumps(dialect.body(request, facts)).encode()
        # For what stands between: a gateway that sends a session's requests to one of several engines.
        keys = {"x-session-id": request.session, "x-smg-routing-key": request.session} if request.session else {}
        async with self._http.stream("POST", dialect.path, content=body, headers=keys) as response:
            if response.status_code != 200:
                self._put(request.id, entry, answer.failed(Problem(response.status_code, await _message(response))))
                return
            if not dialect.reports_first:
                entry.inbox.decided.set()
            ending = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as patience:
                    async for data in events(response):
                        self._heard = time.monotonic()
                        for reply in answer.take(dialect.chunk(data, answer.sampled, facts)):
                            self._put(request.id, entry, reply)
                        if entry.inbox.ended:
                            self._drop(request.id)
                            return
                        if not ending:
                            ending = answer.over
                            now = asyncio.get_running_loop().time()
                            patience.reschedule(now + (END_SECONDS if ending else self._silence))
            if patience.expired() and not ending:
                _log.warning("request %s: no event for %g seconds", request.id, self._silence)
                self._put(request.id, entry, answer.lost("fell silent in the midst of the answer"))
                self._drop(request.id)
                return
        self._put(request.id, entry, answer.end())

    def _put(self, request_id: str, entry: _Open, reply: Admitted | Tokens | Done | Failed) -> None:
        """Nothing comes after the end."""
        if entry.inbox.ended:
            return
        entry.inbox.put(reply)
        if isinstance(reply, Admitted | Tokens):
            return
        del self._open[request_id]
        self._counts["failed"] += isinstance(reply, Failed)
        if isinstance(reply, Done) and reply.reason != "abort":
            self._counts["prompt_tokens"] += entry.answer.prompt
            self._counts["cached_tokens"] += reply.reuse.resumed
            self._counts["unreported" if entry.answer.cached is None else "reported"] += 1

    def _drop(self, request_id: str) -> None:
        """Nobody wants more of it."""
        asked = self._spoken[0].abort(request_id) if self._spoken else None
        if asked is not None:
            task = asyncio.create_task(self._tell(*asked), name="remote abort")
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _tell(self, path: str, body: Mapping[str, Any]) -> None:
        """That a request has ended; its connection is closed already."""
        with contextlib.suppress(httpx.RequestError):
            await self._http.post(path, content=json.dumps(body).encode(), timeout=HEALTH_SECONDS)

    # ── whether it lives ──────────────────────────────────────────────────────────────────────────────────────────

    async def _check(self) -> None:
        self._asking = True
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                well = (await self._http.get("/health")).status_code < 500
        except httpx.ConnectError:
            self._misses, well = MISSES, False
        except (httpx.RequestError, TimeoutError):
            well = False
        finally:
            self._asking = False
        if well:
            self._heard, self._misses = time.monotonic(), 0
            return
        self._misses += 1
        if self._misses >= MISSES and self._info is not None:
            self.lost += 1
            self._note(f"{self.title} is gone; looking for it")
            self._end(_GONE)

    def _end(self, why: str) -> None:
        """No engine any more."""
        self._info, self._why = None, why
        self._connected.clear()
        for request_id, entry in list(self._open.items()):
            self._put(request_id, entry, Failed(request_id, "worker_lost", why))
            if entry.task is not None and entry.task is not asyncio.current_task():
                entry.task.cancel()

    async def _found(self) -> ModelInfo:
        """The remote, once it is back and serves our model."""
        delay, told = 0.5, ""
        while True:
            try:
                return await self.connect()
            except RemoteError as error:
                if str(error) != told:
                    told = str(error)
                    self._note(told)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_BACKOFF_SECONDS)


async def _message(response: httpx.Response) -> str:
    """What an error's body says, whoever's it is. Raises httpx.RequestError."""
    data = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEALTH_SECONDS):
            async for part in response.aiter_bytes():
                data += part
                if len(data) > _MOST_WORDS:
                    break
    try:
        body = from_json(data)
    except ValueError:
        body = None
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and name in body:
            said = body[name]
            return str(said.get("message", said)) if isinstance(said, dict) else str(said)
    return data.decode(errors="replace")
