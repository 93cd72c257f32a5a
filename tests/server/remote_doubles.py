"""SGLang and vLLM as their documentation has them: HTTP servers in this process that say what they are told.

They cache prompts as the real ones do (the longest prefix of anything they computed), follow a grammar with the library
that the real ones use, and fail where a test wants it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import uvicorn
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.remote.api import SILENCE_SECONDS, Address, RemoteError
from engine.remote.client import RemoteClient
from launchers.remote import checkpoint
from parsers.load import Family
from server.app import create_app
from server.front import FrontConfig, Patience
from server.settings import ServerSettings
from server.state import ServerState
from sessions.tracker import Sessions
from tests.server.support import _Uvicorn

CONTEXT = 8192
JSON = dict[str, Any]
ODD = "\u2028\x85\u2029é"
"""Stands unescaped in the events, as text does in the real ones."""


@dataclass
class Say:
    """An answer. ``text`` is the family's own. ``step``: tokens in an event. ``hold_at``: tokens before which it waits
    for ``release``. ``die_at``: tokens after which the connection breaks. ``status`` and ``problem``: refuses instead;
    with ``problem_at``, after so many tokens, with the ``code`` (0: none is told). ``trimmed``: leaves out the token
    that ended it."""

    text: str
    reason: str = "stop"
    step: int = 1
    hold_at: int = -1
    release: asyncio.Event = field(default_factory=asyncio.Event)
    die_at: int = -1
    status: int = 200
    problem: str = ""
    problem_at: int = -1
    code: int = 500
    trimmed: bool = False
    ids: tuple[int, ...] | None = None


class Died(Exception):
    """Ends a connection as the end of a process does."""


class Double:
    """``say``: what is answered to a prompt. ``bodies`` and ``headers`` are those of requests, but for the probes that
    are answered as by a model that has nothing to say. ``grammars``: it follows them. ``tokenize``: how it reads text;
    None: it has no such path. ``well``: what it says of its health."""

    def __init__(self, family: Family, say: Callable[[str], Say | str] | Say | str = "", *, key: str = "") -> None:
        self.family = family
        self.say = say
        self.key = key
        self.kind = ""
        self.grammars = True
        self.tokenize: Callable[[str], Sequence[int]] | None = family.tokenizer.encode_trusted
        self.well = True
        self.bodies: list[JSON] = []
        self.headers: list[dict[str, str]] = []
        self.probes = 0
        self.gone: list[str] = []
        """Requests whose connection was closed before their end."""
        self.seen_gone = asyncio.Event()
        self.aborted: list[str] = []
        self.computed: list[list[int]] = []
        self.reported: list[int] = []
        """Cached tokens of each request."""
        self._ours = checkpoint(family, Path("absent"))
        self._words = LLTokenizer(TokenizerWrapper(_Words(family)), n_vocab=family.tokenizer.vocab_size)

    # ── the work ──────────────────────────────────────────────────────────────────────────────────────────────────

    def answer(
        self, request: Request, body: JSON, prompt: list[int], grammar: str | None, most: int
    ) -> tuple[Say, list[int]]:
        if tuple(prompt) == self._ours.prompt:
            self.probes += 1
            ids = self._led(grammar) if grammar and self.grammars else list(self.family.tokenizer.encode("nothing"))
            return Say("", "stop" if grammar and self.grammars else "length"), ids[:most]
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.reported.append(self.cached(prompt))
        text = self.family.tokenizer.decode(prompt)
        said = self.say(text) if callable(self.say) else self.say
        say = Say(said) if isinstance(said, str) else said
        ids = list(self.family.encode_raw(say.text) if say.ids is None else say.ids)
        if say.reason == "stop" and say.ids is None:
            ids.append(self.family.stop_tokens[0])
        if grammar is not None:
            self._follows(grammar, ids)
        if len(ids) > most:
            say.reason = "length" if say.reason == "stop" else say.reason
        return say, ids[:most]

    def cached(self, prompt: list[int]) -> int:
        return max((_common(prompt[:-1], one) for one in self.computed), default=0)

    def _matcher(self, grammar: str) -> Any:
        matcher = LLMatcher(self._words, grammar_from("ebnf", grammar))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def _led(self, grammar: str) -> list[int]:
        """The first token that the grammar allows, until it has ended."""
        matcher, ids = self._matcher(grammar), []
        while not matcher.is_stopped():
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            ids.append((mask & -mask).bit_length() - 1)
            assert matcher.consume_token(ids[-1])
        return ids

    def _follows(self, grammar: str, ids: Sequence[int]) -> None:
        matcher = self._matcher(grammar)
        for token in ids:
            assert matcher.consume_token(token), (self.family.tokenizer.decode([token]), matcher.get_error())
        assert matcher.is_stopped()

    # ── HTTP ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def app(self) -> Starlette:
        return Starlette(
            routes=[Route(path, self._guarded(handle), methods=["GET", "POST"]) for path, handle in self.routes()]
        )

    def routes(self) -> list[tuple[str, Callable[[Request], Any]]]:
        return [("/health", self._health), ("/v1/models", self._models), ("/tokenize", self._tokenize)]

    def _guarded(self, handle: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def guarded(request: Request) -> Response:
            if (
                self.key
                and request.url.path != "/health"
                and request.headers.get("authorization") != f"Bearer {self.key}"
            ):
                return JSONResponse({"error": "Unauthorized"}, 401)
            response: Response = await handle(request)
            return response

        return guarded

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self.well else 503)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "qwen", "object": "model", "max_model_len": CONTEXT}]})

    async def _tokenize(self, request: Request) -> Response:
        if self.tokenize is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        tokens = list(self.tokenize((await request.json())["prompt"]))
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": CONTEXT})

    def _streamed(
        self,
        request_id: str,
        prompt: list[int],
        say: Say,
        ids: list[int],
        event: Callable[[int, int, bool], JSON],
        last: JSON | None,
        problem: JSON,
    ) -> Response:
        """``event(begin, end, done)``: what is told of these tokens."""

        async def events() -> AsyncIterator[str]:
            done = False
            try:
                for begin in range(0, max(len(ids), 1), say.step):
                    end = min(begin + say.step, len(ids))
                    if begin <= say.hold_at < end or (say.hold_at == 0 == begin):
                        await say.release.wait()
                    if 0 <= say.problem_at < end:
                        yield _event(problem)
                        break
                    yield _event(event(begin, end, end == len(ids)))
                    if 0 <= say.die_at <= end:
                        done = True
                        raise Died
                    await asyncio.sleep(0)
                else:
                    if last is not None:
                        yield _event(last)
                yield "data: [DONE]\n\n"
                done = True
            finally:
                self.computed.append(prompt + ids[:-1])
                if not done:
                    self.gone.append(request_id)
                    self.seen_gone.set()

        return StreamingResponse(events(), media_type="text/event-stream")


class SGLangDouble(Double):
    """``repeats``: each event has the whole answer, as without ``--incremental-streaming-output``. ``tiers``: it has a
    hierarchical cache, whose host has ``host`` tokens of what is cached. ``hidden``: it does not tell how it was
    started."""

    def __init__(self, family: Family, say: Callable[[str], Say | str] | Say | str = "", **more: Any) -> None:
        super().__init__(family, say, **more)
        self.kind = "sglang"
        self.repeats, self.tiers, self.host, self.deterministic, self.hidden = True, False, 0, True, False

    def routes(self) -> list[tuple[str, Callable[[Request], Any]]]:
        own = [("/get_model_info", self._model), ("/get_server_info", self._server), ("/generate", self._generate)]
        return [*super().routes(), *own, ("/abort_request", self._abort)]

    async def _model(self, _: Request) -> Response:
        return JSONResponse(
            {"model_path": "org/qwen", "tokenizer_path": "org/qwen", "is_generation": True, "weight_version": "default"}
        )

    async def _server(self, _: Request) -> Response:
        if self.hidden:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse(
            {
                "version": "0.5.9",
                "context_length": None,
                "max_req_input_len": CONTEXT - 6,
                "stream_output": not self.repeats,
                "enable_deterministic_inference": self.deterministic,
            }
        )

    async def _abort(self, request: Request) -> Response:
        self.aborted.append((await request.json())["rid"])
        return Response()

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        prompt, params = body["input_ids"], body["sampling_params"]
        say, ids = self.answer(request, body, prompt, params.get("ebnf"), params["max_new_tokens"])
        if say.status != 200:
            return JSONResponse({"error": {"message": say.problem}}, say.status)
        cached, stop = self.cached(prompt), ids[-1] if ids else 0
        shown = ids[:-1] if say.trimmed else ids

        def event(begin: int, end: int, done: bool) -> JSON:
            span = slice(0 if self.repeats else begin, end)
            meta: JSON = {
                "id": body["rid"], "finish_reason": None, "prompt_tokens": len(prompt), "completion_tokens": end,
                "cached_tokens": cached, "weight_version": "default",
            }  # fmt: skip
            if done:
                meta["finish_reason"] = (
                    {"type": say.reason, "matched": stop}
                    if say.reason == "stop"
                    else {"type": say.reason, "length": end}
                )
            if self.tiers:
                meta["cached_tokens_details"] = {"device": cached - self.host, "host": self.host}
            if body.get("return_logprob"):
                meta["output_token_logprobs"] = [[-0.5, token, None] for token in shown[span]]
                others = range(body["top_logprobs_num"])
                meta["output_top_logprobs"] = [[[-0.5 - n, token + n, None] for n in others] for token in shown[span]]
            return {"text": ODD, "output_ids": shown[span], "meta_info": meta}

        problem: JSON = {"message": say.problem, **({"code": say.code} if say.code else {})}
        return self._streamed(body["rid"], prompt, say, ids, event, None, {"error": problem})


class VLLMDouble(Double):
    """``details``: it was started with ``--enable-prompt-tokens-details``. ``token_ids``: it knows
    ``return_token_ids``."""

    def __init__(self, family: Family, say: Callable[[str], Say | str] | Say | str = "", **more: Any) -> None:
        super().__init__(family, say, **more)
        self.kind = "vllm"
        self.details, self.token_ids = True, True

    def routes(self) -> list[tuple[str, Callable[[Request], Any]]]:
        return [*super().routes(), ("/version", self._version), ("/v1/completions", self._complete)]

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": "0.28.0"})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        prompt, grammar = body["prompt"], (body.get("structured_outputs") or {}).get("grammar")
        assert body["model"] == "qwen" and body["stream"] and body["max_tokens"] > 0
        say, ids = self.answer(request, body, prompt, grammar, body["max_tokens"])
        if say.status != 200:
            error = {"message": say.problem, "type": "BadRequestError", "param": None, "code": say.status}
            return JSONResponse({"error": error}, say.status)
        usage: JSON = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt) + len(ids),
        }
        if self.details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached(prompt)}
        shown = ids[:-1] if say.trimmed else ids

        def event(begin: int, end: int, done: bool) -> JSON:
            tokens = shown[begin:end]
            choice: JSON = {"index": 0, "text": ODD, "finish_reason": None, "stop_reason": None}
            if self.token_ids and body.get("return_token_ids"):
                choice["token_ids"] = tokens
                if begin == 0:
                    choice["prompt_token_ids"] = prompt
            if body.get("logprobs") is not None and body.get("return_tokens_as_token_ids"):
                others = range(body["logprobs"] + 1)  # the sampled one is added to the best
                choice["logprobs"] = {
                    "text_offset": [0] * len(tokens),
                    "tokens": [f"token_id:{token}" for token in tokens],
                    "token_logprobs": [-0.5] * len(tokens),
                    "top_logprobs": [{f"token_id:{token + n}": -0.5 - n for n in others} for token in tokens],
                }
            if done:
                choice |= {
                    "finish_reason": say.reason,
                    "stop_reason": ids[-1] if say.reason == "stop" and ids else None,
                }
            return {"id": body["request_id"], "object": "text_completion", "model": "qwen", "choices": [choice]}

        problem = {"error": {"message": say.problem, "type": "InternalServerError", "param": None, "code": say.code}}
        last = {"id": body["request_id"], "choices": [], "usage": usage}
        return self._streamed(body["request_id"], prompt, say, ids, event, last, problem)


class _Words:
    bos_token_id = None

    def __init__(self, family: Family) -> None:
        tokenizer = family.tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control.values())
        self.eos_token_id = family.stop_tokens[0]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _event(body: JSON) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


class Listening:
    """A double on a port that stays its own over ``stop`` and ``start``."""

    def __init__(self, double: Double) -> None:
        self.double = double
        self.port = 0
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        config = uvicorn.Config(self.double.app(), port=self.port, log_level="critical", lifespan="off")
        self._server = _Uvicorn(config)
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """At once, as a process that is killed."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            for listener in self._server.servers:
                listener.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await self._task
            self._server = self._task = None


@asynccontextmanager
async def double_at(double: Double) -> AsyncIterator[Listening]:
    listening = Listening(double)
    await listening.start()
    try:
        yield listening
    finally:
        await listening.stop()


@dataclass
class FrontDoor:
    """A server of ours before a double."""

    url: str
    state: ServerState
    engine: RemoteClient
    remote: Listening
    notes: list[str]

    @property
    def double(self) -> Double:
        return self.remote.double

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key="local", max_retries=0)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="local", max_retries=0)

    async def idle(self) -> None:
        """Waits until no generation is open, here or there."""
        while self.state.counters.open_generations or self.engine.open:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def front_door(
    double: Double, *, key: str = "", silence: float = SILENCE_SECONDS, **settings: Any
) -> AsyncIterator[FrontDoor]:
    """Our server before the double. Raises RemoteError where the two do not fit."""
    notes: list[str] = []
    async with double_at(double) as remote:
        ours = checkpoint(double.family, Path("absent"))
        engine = RemoteClient(Address(remote.url, key), ours, 8, notes.append, silence)
        try:
            await engine.connect()
        except RemoteError:
            await engine.close()
            raise
        watching = asyncio.create_task(engine.run(lambda _: notes.append("back")))
        family = double.family
        state = ServerState(
            engine,
            family,
            Sessions(family),
            ServerSettings(**{"idle_prefill": False, "worker_seconds": 2.0, **settings}),
        )
        server = _Uvicorn(FrontConfig(create_app(state), Patience(), None, port=0, lifespan="on"))
        task = asyncio.create_task(server.serve())
        try:
            while not server.started:
                await asyncio.sleep(0.005)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield FrontDoor(f"http://127.0.0.1:{port}", state, engine, remote, notes)
        finally:
            watching.cancel()
            server.should_exit = True
            await engine.close()
            await task
