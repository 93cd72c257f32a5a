"""What the template wrote: its text cut into turns and their parts.

Control tokens in rendered text can only be the template's own (``guard``), so turns are found exactly by their headers,
and parts of an assistant turn by the format's delimiters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from parsers.alternatives import alternatives
from parsers.format import Format, Frames, PythonCalls
from parsers.guard import visible


@dataclass(frozen=True)
class Block:
    """A turn as rendered. ``text`` includes the header, which is "" behind texts that stand for one."""

    text: str
    header: str
    assistant: bool

    @property
    def body(self) -> str:
        return self.text[len(self.header) :]


class Finder:
    """Finds the turns in rendered text."""

    def __init__(self, wire_format: Format, control: Collection[str]) -> None:
        turns = wire_format.turns
        headers = (turns.system.open, turns.user.open, turns.tools.open, *turns.others)
        self._headers = {header: False for header in headers if header}
        if turns.assistant.open:
            self._headers[turns.assistant.open] = True
        self._header = re.compile(alternatives(self._headers))
        self._longest = max(map(len, (*self._headers, *turns.headless)), default=0) + len(turns.assistant.close)
        self._any = re.compile(alternatives((*self._headers, *turns.headless)))
        self._headless = frozenset(turns.headless)
        self._asking = (turns.user.open, turns.tools.open)
        # Instructions to the model may spell a header that has no control token; a real one follows an end of turn.
        spelled = not any(name in turns.tools.open for name in control)
        self._spelled = turns.tools.open if spelled and turns.assistant.close else ""
        self._close = turns.assistant.close
        self.look_back = len(self._close) + 8
        """Characters before a block that say whether it is one."""
        end = alternatives((*wire_format.ends, *(wire_format.frames.ends if wire_format.frames else ())))
        self._end = re.compile(rf"({end})(?:{re.escape(turns.tail)})?\s*\Z")

    def steady(self, blocks: Sequence[Block]) -> int | None:
        """How many characters before the end of these blocks the last one begins that is found again there, whatever
        comes behind them; None without one."""
        size = 0
        for block in reversed(blocks):
            size += len(block.text)
            if block.header and size > 2 * self._longest:
                return size
        return None

    def blocks(self, text: str, begin: int | None = None) -> list[Block]:
        """The first block is what stands before any header, the last one (of the assistant) the generation prompt.
        ``begin``: where a block begins that was found before; those from there on."""
        starts = [(0, "", False)] if begin is None else []
        for match in self._any.finditer(text, begin or 0):
            header, begin = match[0], match.start()
            if header == self._spelled and not text[max(0, begin - self.look_back) : begin].rstrip().endswith(
                self._close
            ):
                continue
            if header in self._headers:
                starts.append((begin, header, self._headers[header]))
            if (
                header in self._headless
                and starts
                and starts[-1][1] in self._asking
                and not self._continues(text, match.end())
            ):
                starts.append((match.end(), "", True))
        ends = [start for start, _, _ in starts[1:]] + [len(text)]
        return [
            Block(text[start:end], header, assistant)
            for (start, header, assistant), end in zip(starts, ends, strict=True)
        ]

    def _continues(self, text: str, position: int) -> bool:
        """Is there no turn at all, because the next one has begun, or because this one ends at once?"""
        if self._close and text.startswith(self._close, position):
            return True
        return bool(self._header.match(text, position))

    def end(self, body: str) -> tuple[int, str]:
        """(where the end of turn begins in ``body``, the end of turn); (length, "") if it has none."""
        match = self._end.search(body)
        return (match.start(), match[1]) if match else (len(body), "")


@dataclass(frozen=True)
class Part:
    start: int
    end: int
    kind: Literal["thinking", "text", "tool_call"]


class Parts:
    """Finds thinking, text and calls inside an assistant turn."""

    def __init__(self, wire_format: Format) -> None:
        self._format = wire_format
        call = wire_format.call
        section = call.section
        self._opens = [opener for opener in (call.open, section.open if section else "") if opener]
        self._open = re.compile(alternatives(self._opens))
        self._bare = ("[" if isinstance(call.codec, PythonCalls) else "{") if call.bare else ""
        self._section_close = section.close if section else ""
        self._close = call.close or self._section_close

    def of(self, text: str, thinking_open: bool) -> list[Part]:
        """``thinking_open``: the opener of the thinking stands before ``text``. Ends of turn are no part."""
        if self._format.frames:
            return list(_messages(self._format.frames, text))
        begin = self._thinking(text, thinking_open)
        parts = [Part(0, begin, "thinking")] if begin else []
        if self._bare and visible(text[begin:]).lstrip().startswith(self._bare):
            return [*parts, Part(begin, len(text), "tool_call")]
        return parts + list(self._rest(text, begin, len(text)))

    def _thinking(self, text: str, thinking_open: bool) -> int:
        """Where thinking ends, with the layout behind it; 0 without thinking."""
        think = self._format.think
        if think is None or not (thinking_open or text.lstrip().startswith(think.open)):
            return 0
        at = text.find(think.close)
        if at < 0:
            return len(text) if thinking_open else 0
        end = at + len(think.close)
        return end + len(text[end:]) - len(text[end:].lstrip("\n"))

    def _rest(self, text: str, begin: int, end: int) -> Iterator[Part]:
        while begin < end:
            match = self._open.search(text, begin, end)
            start = match.start() if match else end
            between = text[begin:start].replace(self._section_close, "") if self._section_close else text[begin:start]
            if visible(between).strip():
                yield Part(begin, start, "text")
            if match is None:
                return
            close = text.find(self._close, match.end(), end) if self._close else -1
            begin = close + len(self._close) if close >= 0 else end
            yield Part(start, begin, "tool_call")


def common(one: str, other: str) -> str:
    """What both texts begin with."""
    size = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def _messages(frames: Frames, text: str) -> Iterator[Part]:
    cuts = [0, *(match.start() for match in re.finditer(re.escape(frames.start), text)), len(text)]
    for begin, end in pairwise(cuts):
        header, found, _ = text[begin:end].removeprefix(frames.start).partition(frames.message)
        if found:
            kinds = [route.kind for route in frames.routes if re.search(route.pattern, header, re.DOTALL)] or ["text"]
            yield Part(begin, end, "tool_call" if kinds[0] == "call" else kinds[0])
