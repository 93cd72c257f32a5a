"""The one incremental machine: sampled token ids in, events out, whatever the family.

There is no second path for whole answers: those are fed token by token too. Policy on delimiters: a control token in
one is that id; the same characters spelled in ordinary tokens are text. The only exception are spelled call openers,
accepted (and counted) while tools are declared, outside thinking and quoted code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from parsers.calls import Calls
from parsers.conversation import Tool
from parsers.events import Event
from parsers.format import Format
from parsers.frames import Framed
from parsers.output import Output
from parsers.schema import FREEFORM_SCHEMA
from parsers.source import Source, Step
from parsers.tokens import Tokenizer
from parsers.turn import Turn
from parsers.wire import Wire

__all__ = ["FREEFORM_SCHEMA", "FinishReason", "StreamParser", "Wire"]
FinishReason = Literal["stop", "length", "abort"]


class StreamParser:
    """Parses one assistant turn. ``feed`` takes one sampled id; ``finish`` says why there are no more."""

    def __init__(
        self, wire_format: Format, wire: Wire, tokenizer: Tokenizer, tools: Sequence[Tool], thinking_open: bool
    ) -> None:
        self._wire = wire
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._source = Source()
        self._output = Output(self._source, wire)
        schemas = {tool.name: FREEFORM_SCHEMA if tool.freeform else tool.parameters for tool in tools}
        calls = Calls(wire_format, wire, schemas, self._source, self._output)
        if wire_format.frames:
            turn: Turn | Framed = Framed(wire_format, wire_format.frames, wire, self._source, self._output, calls)
        else:
            turn = Turn(wire_format, wire, self._source, self._output, calls)
        self._machine: Step[None] | None = turn.run(thinking_open)
        self._run()

    def feed(self, token: int) -> list[Event]:
        """The events of one more sampled id."""
        if self._machine is None:
            return self._output.drain()
        code = self._wire.by_id.get(token)
        if code is not None:
            self._source.append(self._detokenizer.flush())
            self._source.push(code)
        elif token in self._tokenizer.special:
            self._source.append(self._detokenizer.flush())
            self._source.push("")
            self._output.tolerate("stray_control_token")
        else:
            self._source.push(self._detokenizer.push(token), self._detokenizer.unfinished)
        self._run()
        return self._output.drain()

    def finish(self, reason: FinishReason) -> list[Event]:
        """The remaining events. Only after "stop" may missing closers be forgiven."""
        if self._machine is not None:
            if reason == "stop":  # half a code point that was cut off is not text yet
                self._source.append(self._detokenizer.flush())
            self._source.end(natural=reason == "stop")
            self._run()
        return self._output.drain()

    def _run(self) -> None:
        if self._machine is not None and next(self._machine, self) is self:
            self._machine = None
