"""Answers as they are made, from the engine's tokens to the events that protocols write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property
from typing import Literal, Protocol

from engine.api import Anchor, Done, Failed, Tokens
from engine.api import Reuse as EngineReuse
from engine.client import EngineError, EngineStream
from parsers.conversation import Text, ToolCall
from parsers.events import Event
from parsers.render import Prompt
from parsers.stream import FinishReason
from server.answers import Finished, GenerationEvent, Options, Progress, Reason, Usage
from server.blocks import Assembler, BlockDelta, BlockEvent
from server.errors import ApiError
from server.state import ServerState
from sessions.tracker import Reuse, ReuseReport, Visit

_log = logging.getLogger(__name__)

PACE = 1 / 60
"""Seconds between two events of an answer, at least: one frame of a display. Nobody sees more, and each event costs a
write here and a read there. The first event and the end are not delayed."""


class Parser(Protocol):
    """Reads sampled tokens: see ``parsers.stream.StreamParser``."""

    def feed(self, token: int) -> Sequence[Event]: ...

    def finish(self, reason: FinishReason) -> Sequence[Event]: ...


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
        anchors: Sequence[Anchor],
        parser: Callable[[], Parser],
        assembler: Assembler,
    ) -> None:
        self.prompt = prompt
        self.report: ReuseReport | None = None
        """Planned reuse after admission, then what happened."""
        self.usage = Usage(len(prompt))
        self._state = state
        self._visit = visit
        self._stream = stream
        self._options = options
        self._checkpoints = tuple(anchor.position for anchor in anchors)
        self._make_parser = parser
        self._assembler = assembler
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

    @cached_property
    def _parser(self) -> Parser:
        """Made when the answer begins: while the engine reads the prompt there is time."""
        return self._make_parser()

    async def admission(self, seconds: float) -> None:
        """Wait for the engine's plan, or give up waiting. Raises ApiError."""
        try:
            admitted = await self._stream.admitted(seconds)
        except EngineError as error:
            _log.warning("request %s was not begun: %s: %r", self._stream.id, error.kind, error.message)
            raise ApiError.from_engine_error(error, len(self.prompt)) from error
        if admitted is not None:
            self._account(admitted.reuse)

    async def __aiter__(self) -> AsyncIterator[list[GenerationEvent]]:
        loop = asyncio.get_running_loop()
        keepalive = self._state.settings.keepalive_seconds
        told, events = loop.time(), list[GenerationEvent]()
        soon = told
        while True:
            for reply in await self._stream.some(soon, told + keepalive):
                match reply:
                    case Tokens():
                        events.extend(self._tokens(reply))
                        if self._assembler.stopped:
                            await self._stream.abort()
                    case Done():
                        yield [*_joined(events), *self._finish(reply)]
                        return
                    case Failed():
                        self._engine_done = True
                        if events:
                            yield _joined(events)
                        _log.warning("request %s failed: %s: %r", reply.id, reply.kind, reply.message)
                        raise ApiError.from_engine(reply.kind, reply.message)
            if events or loop.time() >= told + keepalive:
                yield _joined(events) or [Progress(self._assembler.choice)]
                told, events = loop.time(), []
            soon = loop.time() + PACE

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
        finished = Finished(self._reason(done), assembler.stop_string, self.usage, self.session_id, assembler.choice)
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

    def _account(self, reuse: EngineReuse) -> None:
        """Usage and report from the engine's plan, or from what happened in the end."""
        self.usage = Usage.of(
            len(self.prompt),
            reuse.resumed,
            self._checkpoints,
            output=len(self._sampled),
            reasoning=self._reasoning_tokens(),
        )
        self.report = self._visit.report(self.prompt, by_origin(reuse), reuse.cause)

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
        counters.count(self.report)
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


def by_origin(reuse: EngineReuse) -> Reuse:
    """The engine's numbers as sessions count them."""
    return Reuse(reuse.resumed, reuse.replayed, reuse.new, reuse.host, reuse.disk, reuse.remote)


def _joined(events: Sequence[GenerationEvent]) -> list[GenerationEvent]:
    """With one delta in place of several that follow each other."""
    out: list[GenerationEvent] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, BlockDelta) and isinstance(last, BlockDelta) and event.index == last.index:
            text, logprobs = last.text + event.text, last.logprobs + event.logprobs
            out[-1] = BlockDelta(event.index, event.kind, text, logprobs, event.choice)
        else:
            out.append(event)
    return out


class Choices:
    """Several answers to one request, each event as soon as it is there. The first that fails ends them all."""

    def __init__(self, answers: Sequence[Generation]) -> None:
        self._answers = answers

    @property
    def usage(self) -> Usage:
        return self._answers[0].usage

    @property
    def report(self) -> ReuseReport | None:
        return self._answers[0].report

    @property
    def session_id(self) -> str:
        return self._answers[0].session_id

    @property
    def headers(self) -> dict[str, str]:
        return self._answers[0].headers

    async def __aiter__(self) -> AsyncIterator[list[GenerationEvent]]:
        waiting = {asyncio.ensure_future(anext(one)): one for one in map(aiter, self._answers)}
        try:
            while waiting:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in waiting if task.done()]:
                    events = waiting.pop(task)
                    try:
                        batch = task.result()
                    except StopAsyncIteration:
                        continue
                    waiting[asyncio.ensure_future(anext(events))] = events
                    yield batch
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def close(self) -> None:
        for answer in self._answers:
            await answer.close()
