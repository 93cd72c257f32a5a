"""One request from conversation to events: the only place that talks to sessions, family and engine."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TypeVar

from anyio import to_thread

from engine.api import Anchor, ModelInfo, Request, Sampling
from engine.client import EngineError, EngineStream
from parsers.conversation import Conversation, Tool
from parsers.format import Effort
from parsers.grammar import Demand, GrammarError
from parsers.load import RenderError
from parsers.render import Prompt
from server.answers import Answering, Options, Raw
from server.blocks import Assembler
from server.errors import ApiError
from server.generation import Choices, Generation
from server.raw import plain_text, raw_conversation, raw_prompt
from server.script import position
from server.settings import ServerSettings
from server.state import ServerState
from sessions.tracker import AnchorPoint, RequestMeta, Visit

_Number = TypeVar("_Number", int, float)
_T = TypeVar("_T")
_SEEDS = 1 << 63


async def start(state: ServerState, meta: RequestMeta, asked: Conversation | Raw, options: Options) -> Answering:
    """Validate, render and submit a request, and wait for the engine's plan, for at most ``admission_seconds``. When
    the worker is lost before it began with the request, the next one gets it, once.

    Raises ApiError. The caller must ``close`` what it gets.
    """
    info = await worker(state)
    try:
        return await _start(state, info, meta, asked, options)
    except ApiError as error:
        if error.kind != "unavailable":
            raise
    return await _start(state, await worker(state), meta, asked, options)


async def _start(
    state: ServerState, info: ModelInfo, meta: RequestMeta, asked: Conversation | Raw, options: Options
) -> Answering:
    sources: list[Conversation | Prompt] = []
    if isinstance(asked, Conversation):
        sources.append(asked)
    else:
        most = context_limit(state, info) - 1
        sources += [await raw_prompt(state, text, info.vocab_size, most) for text in asked.prompts]
    wanted, most = len(sources) * options.n, state.engine.max_open
    if wanted > most:
        raise ApiError("invalid", f"{wanted} answers at once: this server may have {most} open", param="n")
    answers: list[Generation] = []
    try:
        for one in sources:
            await _submit_all(answers, state, info, meta, one, options)
        end = asyncio.get_running_loop().time() + state.settings.admission_seconds
        for answer in answers:
            await answer.admission(max(0.0, end - asyncio.get_running_loop().time()))
    except BaseException:
        for answer in answers:
            await answer.close()
        raise
    return answers[0] if len(answers) == 1 else Choices(answers)


async def _submit_all(
    answers: list[Generation],
    state: ServerState,
    info: ModelInfo,
    meta: RequestMeta,
    source: Conversation | Prompt,
    options: Options,
) -> None:
    """Adds the answers to one prompt. What they have in common is computed once. Raises ApiError."""
    raw = source if isinstance(source, Prompt) else None
    conversation = raw_conversation(source) if isinstance(source, Prompt) else source
    visit = state.sessions.begin(meta, conversation, info.incarnation, info.fingerprint)
    state.idle.interrupt(visit.session_id)
    prompt = raw or await render(state, visit.conversation, options.thinking, options.effort)
    calls = options.demand.calls != "none" and bool(conversation.tools or options.described_tools)
    tools = (*visit.conversation.tools, *options.described_tools) if calls else ()
    forced = _forced(state, visit, prompt)
    constraint = await constrain(state, prompt, tools, options.demand) if forced is None else None
    exact = constraint is not None
    max_tokens = _budget(len(prompt), options, state.settings, context_limit(state, info))
    sampling = _sampling(options, state, max_tokens, info.vocab_size, forced, constraint)
    anchors = () if "checkpoints" in state.engine.lacks else engine_anchors(visit.anchors(prompt))
    parser = partial(plain_text, state) if raw else partial(state.family.parser, prompt, tools, exact=exact)
    for number in range(options.n):
        request = Request(
            id=secrets.token_hex(16),
            tokens=memoryview(prompt.packed).cast("I"),
            sampling=replace(sampling, seed=(sampling.seed + number) % _SEEDS) if number else sampling,
            anchors=anchors,
            watches=state.watches,
            session=visit.session_id,
            namespace=meta.namespace,
            side=visit.side,
        )
        stream = submit(state, request)
        assembler = Assembler(
            new_call_id=visit.new_call_id,
            new_ticket=visit.new_ticket,
            stops=options.stop,
            freeform=frozenset(tool.name for tool in tools if tool.freeform),
            parallel_calls=options.demand.parallel,
            verbatim=raw is not None,
            token_size=None if options.logprobs is None else _token_size(state),
            choice=len(answers),
        )
        own = visit if number == options.n - 1 else copy(visit)
        answers.append(Generation(state, own, prompt, stream, options, anchors, parser, assembler))


def _token_size(state: ServerState) -> Callable[[int], int]:
    token_bytes = state.family.tokenizer.token_bytes
    return lambda token: len(token_bytes(token))


def submit(state: ServerState, request: Request) -> EngineStream:
    """Raises ApiError."""
    try:
        return state.engine.submit(request)
    except EngineError as error:
        raise ApiError.from_engine_error(error, len(request.tokens)) from error


def engine_anchors(points: Iterable[AnchorPoint]) -> tuple[Anchor, ...]:
    return tuple([tuple.__new__(Anchor, point) for point in points])  # as _make does it, with less around it


async def worker(state: ServerState) -> ModelInfo:
    """What the worker serves; waits for one that is being started. Raises ApiError."""
    try:
        return state.engine.info or await state.engine.ready(state.settings.worker_seconds)
    except EngineError as error:
        raise ApiError.from_engine_error(error, 0) from error


async def render(
    state: ServerState, conversation: Conversation, thinking: bool, effort: Effort | None = None
) -> Prompt:
    """The prompt, rendered off the event loop unless that takes longer than the rendering. Raises ApiError."""
    family = state.family
    if not state.render_limiter.borrowed_tokens:
        try:
            prompt = family.render_on(conversation, thinking=thinking, effort=effort)
        except RenderError as error:
            raise ApiError("invalid", str(error)) from error
        if prompt is not None:
            return prompt
    return await rendered(state, conversation, partial(family.render, conversation, thinking=thinking, effort=effort))


async def rendered(state: ServerState, conversation: Conversation, work: Callable[[], _T]) -> _T:
    """What ``work`` makes of a conversation, off the event loop. What cannot fit the context is refused before it is
    tokenized. Raises ApiError."""
    info = state.engine.info
    most = sys.maxsize if info is None else context_limit(state, info) - 1

    def checked() -> _T:
        least = state.family.least_tokens(conversation)
        if least > most:
            raise ApiError.prompt_too_long(least, most, counted=False)
        return work()

    try:
        return await to_thread.run_sync(checked, limiter=state.render_limiter)
    except RenderError as error:
        raise ApiError("invalid", str(error)) from error


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


def _budget(prompt: int, options: Options, settings: ServerSettings, limit: int) -> int:
    """Tokens the answer may have. Raises ApiError; one token at least must be left for the answer."""
    if prompt > limit - 1:
        raise ApiError.prompt_too_long(prompt, limit - 1)
    wanted = settings.default_output_tokens or limit - prompt if options.max_tokens is None else options.max_tokens
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


def _sampling(
    options: Options,
    state: ServerState,
    max_tokens: int,
    vocab_size: int,
    forced: tuple[int, ...] | None,
    constraint: str | None,
) -> Sampling:
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
        seed=secrets.randbits(63) if options.seed is None else options.seed % _SEEDS,
        logprobs=options.logprobs,
        logit_bias=options.logit_bias,
        stop_tokens=state.family.stop_tokens,
        forced=forced,
        constraint=constraint,
    )


def _default(asked: _Number | None, otherwise: _Number) -> _Number:
    return otherwise if asked is None else asked
