"""From a parser's events to the blocks of an answer, as they are delivered to the client.

Wire protocols see blocks with ids, never text that might be a stop string, and never blocks of white space only
(clients drop those from their history, which then no longer matches what was sampled).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic_core import from_json

from engine.api import TokenLogprob
from parsers.conversation import Block, Text, Thinking, ToolCall
from parsers.events import (
    Boundary,
    Event,
    TextDelta,
    ThinkingDelta,
    Tolerated,
    ToolArgsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from server.logprobs import Visible
from server.stops import StopMatcher

BlockKind = Literal["text", "thinking", "tool_call"]


@dataclass(frozen=True)
class BlockStart:
    """``index`` counts the blocks of an answer from 0. ``id`` is the call id of a tool call, the ticket of thinking.
    ``choice`` counts the answers to one request."""

    index: int
    kind: BlockKind
    id: str = ""
    name: str = ""
    freeform: bool = False
    choice: int = 0


@dataclass(frozen=True)
class BlockDelta:
    """``logprobs``, where they are wanted, are those of the tokens that begin in ``text``."""

    index: int
    kind: BlockKind
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0


@dataclass(frozen=True)
class BlockEnd:
    """``text`` is the whole of the block: text, thinking, or arguments. ``complete`` is False when the output ended
    inside it."""

    index: int
    kind: BlockKind
    text: str
    id: str = ""
    name: str = ""
    freeform: bool = False
    complete: bool = True
    choice: int = 0


BlockEvent = BlockStart | BlockDelta | BlockEnd
StopCause = Literal["", "stop_sequence", "one_call"]

_BROKEN = "{"
"""Arguments of a call that ended before it had any. Clients would take an empty text for no arguments, and run it."""


class Assembler:
    """Turns parser events into block events. ``stopped`` says that nothing more is wanted, and why.

    ``verbatim``: white space is kept, also where there is nothing else. ``token_size``: bytes of text that a token
    stands for, to tell which logprobs go with which text; None where none are wanted. ``choice`` is in all events.
    """

    def __init__(
        self,
        *,
        new_call_id: Callable[[], str],
        new_ticket: Callable[[], str],
        stops: Sequence[str] = (),
        freeform: frozenset[str] = frozenset(),
        parallel_calls: bool = True,
        verbatim: bool = False,
        token_size: Callable[[int], int] | None = None,
        choice: int = 0,
    ) -> None:
        self.blocks: list[Block] = []
        """Finished blocks, as delivered."""
        self.boundaries: list[Boundary] = []
        self.tolerated: Counter[str] = Counter()
        """By rule: how often the parser let something pass."""
        self.stopped: StopCause = ""
        self.stop_string = ""
        self.calls = 0
        """Tool calls that ended, whole or not: once announced, each of them wants an answer."""
        self._new_call_id = new_call_id
        self._new_ticket = new_ticket
        self._stops = StopMatcher(stops)
        self._freeform = freeform
        self._parallel_calls = parallel_calls
        self._verbatim = verbatim
        self._visible = None if token_size is None else Visible(token_size)
        self.choice = choice
        self._kind: BlockKind | None = None
        self._start: BlockStart | None = None
        self._started = 0
        self._blank = ""
        self._parts: list[str] = []
        self._out: list[BlockEvent] = []

    def feed(self, events: Sequence[Event], logprob: TokenLogprob | None = None) -> list[BlockEvent]:
        """The events of one sampled token."""
        visible = self._visible
        if visible is not None and logprob is not None:
            visible.sampled(logprob)
        for event in events:
            if self.stopped:
                break
            match event:
                case TextDelta(text):
                    self._enter("text")
                    if visible is not None:
                        visible.became(text)
                    text, self.stop_string = self._stops.feed(text)
                    self._emit(text)
                    self.stopped = "stop_sequence" if self.stop_string else ""
                case ThinkingDelta(text):
                    self._enter("thinking")
                    self._emit(text)
                case ToolCallStart(_, name):
                    if self.calls and not self._parallel_calls:
                        self.stopped = "one_call"
                        break
                    self._enter("tool_call")
                    self._begin(self._new_call_id(), name)
                case ToolArgsDelta(_, fragment):
                    self._emit(fragment)
                case ToolCallEnd(_, complete):
                    if not complete and not self._parts:
                        self._emit(_BROKEN)
                    self._close(complete)
                case Boundary():
                    self.boundaries.append(event)
                case Tolerated(rule):
                    self.tolerated[rule] += 1
        if visible is not None and self._kind not in ("text", None):
            visible.skip()
        return self._drain()

    def close(self, complete: bool) -> list[BlockEvent]:
        """The end of the output; ``complete`` is False when it was cut off. A call still open is never complete."""
        if self._kind == "text" and not self.stopped:
            self._emit(self._stops.flush())
        self._close(complete and self._kind != "tool_call")
        return self._drain()

    def say(self, text: str) -> list[BlockEvent]:
        """Adds a text block that no token stands for."""
        self._enter("text")
        self._emit(text)
        self._close(True)
        return self._drain()

    def _enter(self, kind: BlockKind) -> None:
        """Text and thinking have no start event of their own: the first delta of another kind ends a block. Each tool
        call is a block of its own."""
        if self._kind == kind != "tool_call":
            return
        if self._kind == "text":
            self._emit(self._stops.flush())
        self._close(True)
        self._kind = kind

    def _emit(self, text: str) -> None:
        """A piece of the current block. White space at a block's start waits for something to follow it."""
        if self._start is None:
            self._blank += text
            if not (self._blank if self._verbatim else self._blank.strip()):
                return
            text = self._blank
            self._begin(self._new_ticket() if self._kind == "thinking" else "")
        if not text or self._start is None:
            return
        self._parts.append(text)
        if self._start.freeform:
            return
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._visible is not None and self._start.kind == "text":
            logprobs = self._visible.shown(text)
        self._out.append(BlockDelta(self._start.index, self._start.kind, text, logprobs, self.choice))

    def _begin(self, block_id: str, name: str = "") -> None:
        freeform = name in self._freeform
        self._start = BlockStart(self._started, self._kind or "text", block_id, name, freeform, self.choice)
        self._started += 1
        self._out.append(self._start)

    def _close(self, complete: bool) -> None:
        start, text = self._start, "".join(self._parts)
        self._kind, self._start, self._blank, self._parts = None, None, "", []
        if self._visible is not None:
            self._visible.end()
        if start is None:
            return
        if start.freeform:
            text = freeform_input(text)
            self._out.append(BlockDelta(start.index, start.kind, text, choice=self.choice))
        match start.kind:
            case "text":
                self.blocks.append(Text(text))
            case "thinking":
                self.blocks.append(Thinking(text, start.id))
            case "tool_call":
                self.calls += 1
                self.blocks.append(ToolCall(start.id, start.name, text, start.freeform))
        self._out.append(
            BlockEnd(start.index, start.kind, text, start.id, start.name, start.freeform, complete, self.choice)
        )

    def _drain(self) -> list[BlockEvent]:
        out, self._out = self._out, []
        return out


def freeform_input(arguments: str) -> str:
    """A free-form tool's raw input: formats that know only JSON arguments carry it as the one string ``input``."""
    try:
        value = from_json(arguments)
    except ValueError:
        return arguments
    if isinstance(value, dict) and len(value) == 1 and isinstance(text := value.get("input"), str):
        return text
    return arguments
