"""One request from conversation to events: the only place that talks to sessions, family and engine."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar
from uuid import uuid4

from anyio import to_thread

from engine.api import Anchor, Done, Failed, ModelInfo, Request, Reuse, Sampling, Tokens, Watch
from engine.client import EngineError, EngineStream
from parsers.conversation import Conversation, Text, Tool, ToolCall
from parsers.format import Effort
from parsers.grammar import Demand, GrammarError
from parsers.load import RenderError, StreamParser
from parsers.render import Prompt
from server.blocks import Assembler, BlockEvent
from server.errors import ApiError
from server.script import position
from server.settings import ServerSettings
from server.state import ServerState
from sessions.tracker import AnchorPoint, RequestMeta, ReuseReport, Visit

_log = logging.getLogger(__name__)

_Number = TypeVar("_Number", int, float)
Reason = Literal["stop", "length", "tool_calls", "stop_sequence"]


@dataclass(frozen=True)
class Options:
    """What a request asks for besides its conversation. None: the model's default.

    ``demand``: what the answer must be. ``described_tools`` may be called too, though the prompt's head does not list
    them. ``strict_budget``: a ``max_tokens`` that does not fit the context is an error, else it is cut.
    ``closing_text`` is said when the model ends without any text or call.
    """

    max_tokens: int | None = None
    thinking: bool = True
    effort: Effort | None = None
    demand: Demand = field(default_factory=Demand)
    described_tools: tuple[Tool, ...] = ()
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    strict_budget: bool = False
    closing_text: str = ""


@dataclass(frozen=True)
class Usage:
    """Tokens. ``cached`` prompt tokens were restored, ``written`` more are covered by checkpoints now; the rest of
    ``prompt`` was computed and is not kept. ``reasoning`` are those of ``output`` that were thinking."""

    prompt: int
    cached: int = 0
    written: int = 0
    output: int = 0
    reasoning: int = 0


@dataclass(frozen=True)
class Progress:
    """Nothing to say yet; the connection wants a sign of life."""


@dataclass(frozen=True)
class Finished:
    reason: Reason
    stop_string: str
    usage: Usage
    session: str = ""


GenerationEvent = BlockEvent | Progress | Finished


class Answering(Protocol):
    """What is being made for a request: see ``Generation``."""

    usage: Usage

    @property
    def report(self) -> ReuseReport | None: ...

    @property
    def session_id(self) -> str: ...

    @property
    def headers(self) -> dict[str, str]: ...

    def __aiter__(self) -> AsyncIterator[list[GenerationEvent]]: ...

    async def close(self) -> None: ...


async def start(state: ServerState, meta: RequestMeta, conversation: Conversation, options: Options) -> Generation:
    """Validate, render and submit a request, and wait for the engine's plan, for at most ``admission_seconds``. When
    the worker is lost before it began with the request, the next one gets it, once.

    Raises ApiError. The caller must ``close`` what it gets.
    """
    info = await worker(state)
    try:
        return await _start(state, info, meta, conversation, options)
    except ApiError as error:
        if error.kind != "unavailable":
            raise
    return await _start(state, await worker(state), meta, conversation, options)


async def _start(
    state: ServerState, info: ModelInfo, meta: RequestMeta, conversation: Conversation, options: Options
) -> Generation:
    visit = state.sessions.begin(meta, conversation, info.incarnation, info.fingerprint)
    state.idle.interrupt(visit.session_id)
    prompt = await render(state, visit.conversation, options.thinking, options.effort)
    calls = options.demand.calls != "none" and bool(conversation.tools or options.described_tools)
    tools = (*visit.conversation.tools, *options.described_tools) if calls else ()
    forced = _forced(state, visit, prompt)
    constraint = await constrain(state, prompt, tools, options.demand) if forced is None else None
    max_tokens = _budget(len(prompt.ids), options, state.settings, context_limit(state, info))
    request = Request(
        id=uuid4().hex,
        tokens=prompt.ids,
        sampling=replace(_sampling(options, state, max_tokens, info.vocab_size), forced=forced, constraint=constraint),
        anchors=engine_anchors(visit.anchors(prompt)),
        watches=tuple(Watch(w.tokens, w.kind, w.priority) for w in visit.watches()),
        session=visit.session_id,
        namespace=meta.namespace,
        side=visit.side,
    )
    stream = submit(state, request)
    parser = state.family.parser(prompt, tools, exact=constraint is not None)
    generation = Generation(state, visit, prompt, stream, options, tools, request.anchors, parser)
    try:
        await generation.admission()
    except BaseException:
        await generation.close()
        raise
    return generation


def submit(state: ServerState, request: Request) -> EngineStream:
    """Raises ApiError."""
    try:
        return state.engine.submit(request)
    except EngineError as error:
        raise _from_engine(error, len(request.tokens)) from error


def engine_anchors(points: Iterable[AnchorPoint]) -> tuple[Anchor, ...]:
    return tuple(Anchor(point.position, point.kind, point.priority, point.pinned) for point in points)


async def worker(state: ServerState) -> ModelInfo:
    """What the worker serves; waits for one that is being started. Raises ApiError."""
    try:
        return state.engine.info or await state.engine.ready(state.settings.worker_seconds)
    except EngineError as error:
        raise _from_engine(error, 0) from error


async def render(
    state: ServerState, conversation: Conversation, thinking: bool, effort: Effort | None = None
) -> Prompt:
    """The prompt, rendered off the event loop. What cannot fit the context is refused before it is tokenized. Raises
    ApiError."""
    info = state.engine.info
    most = sys.maxsize if info is None else context_limit(state, info) - 1

    def work() -> Prompt:
        least = state.family.least_tokens(conversation)
        if least > most:
            raise ApiError.prompt_too_long(least, most)
        return state.family.render(conversation, thinking=thinking, effort=effort)

    try:
        return await to_thread.run_sync(work, limiter=state.render_limiter)
    except RenderError as error:
        raise ApiError("invalid", f"the model's chat template refuses this conversation: {error}") from error


async def constrain(state: ServerState, prompt: Prompt, tools: Sequence[Tool], demand: Demand) -> str | None:
    """The grammar that the answer must follow, if there is one, written off the event loop. Raises ApiError."""
    if not demand.binds(tools):
        return None
    try:
        return await to_thread.run_sync(state.family.constraint, prompt, tools, demand, limiter=state.render_limiter)
    except GrammarError as error:
        raise ApiError("invalid", str(error)) from error


def context_limit(state: ServerState, info: ModelInfo) -> int:
    """Tokens that prompt and answer may have together."""
    return min(state.settings.context_length or info.context_length, info.context_length)


class Generation:
    """One answer as it is made. Iterating yields batches of events, as they become due together.

    Raises ApiError while iterating when the engine fails. ``close`` must be called, however it ends: it stops the
    engine within one step and keeps what was sampled.
    """

    def __init__(
        self,
        state: ServerState,
        visit: Visit,
        prompt: Prompt,
        stream: EngineStream,
        options: Options,
        tools: Sequence[Tool],
        anchors: Sequence[Anchor],
        parser: StreamParser,
    ) -> None:
        self.prompt = prompt
        self.report: ReuseReport | None = None
        """Planned reuse after admission, then what happened."""
        self.usage = Usage(len(prompt.ids))
        self._state = state
        self._visit = visit
        self._stream = stream
        self._options = options
        self._checkpoints = tuple(anchor.position for anchor in anchors)
        self._parser = parser
        self._assembler = Assembler(
            new_call_id=visit.new_call_id,
            new_ticket=visit.new_ticket,
            stops=options.stop,
            freeform=frozenset(tool.name for tool in tools if tool.freeform),
            parallel_calls=options.demand.parallel,
        )
        self._sampled: list[int] = []
        self._engine_done = False
        self._recorded = False
        self._closed = False
        state.counters.open_generations += 1

    @property
    def session_id(self) -> str:
        return self._visit.session_id

    @property
    def headers(self) -> dict[str, str]:
        reuse = "pending" if self.report is None else self.report.header()
        return {"x-ft-session": self.session_id, "x-ft-reuse": reuse}

    async def admission(self) -> None:
        """Wait for the engine's plan, or give up waiting. Raises ApiError."""
        try:
            admitted = await self._stream.admitted(self._state.settings.admission_seconds)
        except EngineError as error:
            raise _from_engine(error, len(self.prompt.ids)) from error
        if admitted is not None:
            self._account(admitted.reuse)

    async def __aiter__(self) -> AsyncIterator[list[GenerationEvent]]:
        loop = asyncio.get_running_loop()
        keepalive = self._state.settings.keepalive_seconds
        due = loop.time() + keepalive
        done: Done | None = None
        while done is None:
            events: list[GenerationEvent] = []
            match reply := await self._stream.next(due):
                case Tokens():
                    events.extend(self._tokens(reply))
                    if self._assembler.stopped:
                        await self._stream.abort()
                case Done():
                    done = reply
                case Failed():
                    self._engine_done = True
                    _log.warning("request %s failed: %s: %r", reply.id, reply.kind, reply.message)
                    raise ApiError.from_engine(reply.kind, reply.message)
            if not events and loop.time() >= due:
                events.append(Progress())
            if events:
                yield events
                due = loop.time() + keepalive
        yield self._finish(done)

    async def close(self) -> None:
        """Idempotent. Before the end of the answer it aborts the engine's request."""
        if self._closed:
            return
        self._closed = True
        self._state.counters.open_generations -= 1
        if not self._engine_done:
            await self._stream.abort()
        if not self._recorded:
            self._assembler.close(complete=False)
            self._record(complete=False)

    def _tokens(self, reply: Tokens) -> list[BlockEvent]:
        """Feed one reply, up to the token at which a stop string or a second call ends the answer."""
        out: list[BlockEvent] = []
        for at, token in enumerate(reply.tokens):
            if self._assembler.stopped:
                break
            self._sampled.append(token)
            logprob = reply.logprobs[at] if reply.logprobs else None
            out.extend(self._assembler.feed(self._parser.feed(token), logprob))
        return out

    def _finish(self, done: Done) -> list[GenerationEvent]:
        self._engine_done = True
        assembler = self._assembler
        if done.reason in ("error", "abort") and not assembler.stopped:
            raise ApiError("internal", f"the engine ended the request: {done.reason}")
        events: list[GenerationEvent] = []
        if not assembler.stopped:
            ending: Literal["stop", "length"] = "length" if done.reason == "length" else "stop"
            events.extend(assembler.feed(self._parser.finish(ending)))
        events.extend(assembler.close(complete=done.reason != "length"))
        said = any(isinstance(block, Text | ToolCall) for block in assembler.blocks)
        if self._options.closing_text and done.reason != "length" and not said:
            self._state.counters.empty_answers += 1
            events.extend(assembler.say(self._options.closing_text))
        self._checkpoints = done.checkpoints
        self._account(done.reuse)
        self._record(complete=done.reason == "stop")
        finished = Finished(self._reason(done), assembler.stop_string, self.usage, self.session_id)
        _log.info(
            "session=%s kind=%s prompt=%d %s output=%d end=%s",
            self.session_id,
            self._visit.kind,
            self.usage.prompt,
            "" if self.report is None else self.report.header(),
            self.usage.output,
            finished.reason,
        )
        return [*events, finished]

    def _reason(self, done: Done) -> Reason:
        if self._assembler.stopped == "stop_sequence":
            return "stop_sequence"
        if done.reason == "length":
            return "length"
        return "tool_calls" if self._assembler.calls else "stop"

    def _account(self, reuse: Reuse) -> None:
        """Usage and report from the engine's plan, or from what happened in the end."""
        size = len(self.prompt.ids)
        kept = min(size, max(self._checkpoints, default=0))
        self.usage = Usage(
            size, reuse.resumed, max(0, kept - reuse.resumed), len(self._sampled), self._reasoning_tokens()
        )
        self.report = self._visit.report(
            self.prompt,
            resumed=reuse.resumed,
            replayed=reuse.replayed,
            new=reuse.new,
            worker_cause=reuse.cause,
            host=reuse.host,
            disk=reuse.disk,
        )

    def _reasoning_tokens(self) -> int:
        total = 0
        begin = 0 if self.prompt.thinking_open else None
        for boundary in self._assembler.boundaries:
            if boundary.kind == "thinking_start":
                begin = boundary.token
            elif boundary.kind == "thinking_end" and begin is not None:
                total += boundary.token - begin
                begin = None
        return total + (0 if begin is None else len(self._sampled) - begin)

    def _delivered(self) -> list[int]:
        """The sampled tokens that stand for what the client got. A stop string may end in the middle of a token; such
        an answer has no exact tokens. A call too many is cut off where it began."""
        match self._assembler.stopped:
            case "stop_sequence":
                return []
            case "one_call":
                starts = [b.token for b in self._assembler.boundaries if b.kind == "tool_call_start"]
                return self._sampled[: starts[-1]] if starts else []
            case _:
                return self._sampled

    def _record(self, complete: bool) -> None:
        """Tell the session what was sampled; an answer that never began leaves no trace."""
        self._recorded = True
        counters = self._state.counters
        counters.tolerated += self._assembler.tolerated.total()
        self._state.tolerated.update(self._assembler.tolerated)
        counters.output_tokens += len(self._sampled)
        if self.report is None:
            return
        counters.prompt_tokens += self.report.prompt
        counters.resumed_tokens += self.report.resumed
        counters.host_tokens += self.report.host
        counters.disk_tokens += self.report.disk
        counters.replayed_tokens += self.report.replayed
        self._visit.finish(
            self.prompt,
            self._delivered(),
            self._assembler.blocks,
            self._assembler.boundaries,
            self.report,
            complete,
        )
        if self._visit.followup is not None:
            self._state.idle.offer(self._visit.followup)


def _budget(prompt: int, options: Options, settings: ServerSettings, limit: int) -> int:
    """Tokens the answer may have. Raises ApiError; one token at least must be left for the answer."""
    if prompt > limit - 1:
        raise ApiError.prompt_too_long(prompt, limit - 1)
    wanted = options.max_tokens or settings.default_output_tokens or limit - prompt
    if settings.max_output_tokens:
        wanted = min(wanted, settings.max_output_tokens)
    if prompt + wanted > limit and options.strict_budget:
        raise ApiError.budget_too_large(prompt, wanted, limit)
    return min(wanted, limit - prompt)


def _forced(state: ServerState, visit: Visit, prompt: Prompt) -> tuple[int, ...] | None:
    """The script's tokens for this request. Raises ApiError when the script has none."""
    if state.script is None:
        return None
    say = state.script.say(visit.kind, visit.conversation)
    if say is None:
        state.counters.script_misses += 1
        text, step = position(visit.conversation)
        raise ApiError("internal", f"no script rule matches: kind {visit.kind}, step {step}, after user {text[:200]!r}")
    return state.script.tokens(state.family, prompt, say)


def _sampling(options: Options, state: ServerState, max_tokens: int, vocab_size: int) -> Sampling:
    settings = state.settings
    unknown = [token for token, _ in options.logit_bias if not 0 <= token < vocab_size]
    if unknown:
        raise ApiError("invalid", f"logit_bias: {unknown[0]} is not a token id of this model", param="logit_bias")
    return Sampling(
        max_tokens=max_tokens,
        temperature=_default(options.temperature, settings.temperature),
        top_k=min(_default(options.top_k, settings.top_k), vocab_size),
        top_p=_default(options.top_p, settings.top_p),
        min_p=_default(options.min_p, settings.min_p),
        presence_penalty=_default(options.presence_penalty, settings.presence_penalty),
        frequency_penalty=_default(options.frequency_penalty, settings.frequency_penalty),
        repetition_penalty=_default(options.repetition_penalty, settings.repetition_penalty),
        seed=secrets.randbits(63) if options.seed is None else options.seed % (1 << 63),
        logprobs=options.logprobs,
        logit_bias=options.logit_bias,
        stop_tokens=state.family.stop_tokens,
    )


def _default(asked: _Number | None, otherwise: _Number) -> _Number:
    return otherwise if asked is None else asked


def _from_engine(error: EngineError, prompt: int) -> ApiError:
    if error.kind == "context_length" and error.limit:
        return ApiError.prompt_too_long(prompt, error.limit)
    return ApiError.from_engine(error.kind, error.message)
