"""Where a parser's events gather, and what it takes to tell text from layout."""

from __future__ import annotations

from parsers.events import Boundary, BoundaryKind, Event, TextDelta, ThinkingDelta, Tolerated, ToolArgsDelta
from parsers.source import Emit, Source, certain
from parsers.wire import Wire


class Output:
    """Events in order; deltas of one kind that come together are one."""

    def __init__(self, source: Source, wire: Wire) -> None:
        self._source, self._wire = source, wire
        self._events: list[Event] = []
        self._kept: list[Event] | None = None
        self.calls = 0
        """Calls of this turn so far."""
        self.orphans = 0
        """Malformed calls given back as text whose closers are still to come."""
        self.text = Trimmed(lambda text: self.emit(TextDelta(text)))
        self.quotes = Quotes()

    def emit(self, event: Event) -> None:
        events = self._events if self._kept is None else self._kept
        match events[-1] if events else None, event:
            case _, TextDelta("") | ThinkingDelta(""):
                return
            case TextDelta(before), TextDelta(text):
                events[-1] = TextDelta(before + text)
            case ThinkingDelta(before), ThinkingDelta(text):
                events[-1] = ThinkingDelta(before + text)
            case ToolArgsDelta(index, before), ToolArgsDelta(same, text) if index == same:
                events[-1] = ToolArgsDelta(index, before + text)
            case _:
                events.append(event)

    def drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def keep(self) -> None:
        """Events wait until ``release``."""
        self._kept = []

    def release(self, wanted: bool) -> None:
        kept, self._kept = self._kept or [], None
        for event in kept if wanted else ():
            self.emit(event)

    def tolerate(self, rule: str) -> None:
        self.emit(Tolerated(rule))

    def boundary(self, kind: BoundaryKind, position: int) -> Boundary:
        token, exact, rest = self._source.token_at(position)
        return Boundary(kind, token, exact, self._wire.text_of(rest))

    def put_text(self, text: str) -> None:
        text = self.visible(text)
        self.quotes.feed(text)
        self.text.put(text)

    def visible(self, text: str) -> str:
        """Text without control tokens, but for those that may stand for visible text."""
        if text.isascii() or not certain(text):
            return text
        if any(code in self._wire.special for code in text):
            self.tolerate("stray_control_token")
            text = "".join(letter for letter in text if letter not in self._wire.special)
        return self._wire.text_of(text)

    def end_text(self) -> None:
        """White space between and behind calls is layout."""
        if self.text.begun or not self.calls:
            self.text.flush()


class Trimmed:
    """Holds back trailing layout (and drops leading layout if ``lead``), so that it can still turn out to be none."""

    def __init__(self, emit: Emit, layout: str = " \t\r\n", lead: bool = False) -> None:
        self._emit, self._layout, self._lead = emit, layout, lead
        self._held: list[str] = []
        self.begun = False
        """Anything was emitted since the last ``drop``."""

    def put(self, text: str) -> None:
        if self._lead:
            text = text.lstrip(self._layout)
            self._lead = not text
        body = text.rstrip(self._layout) if self._layout else text
        if body:
            self._held.append(body)
            self.flush()
            self.begun = True
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def drop(self) -> None:
        self._held.clear()
        self.begun = False

    def shorten(self, layout: str) -> None:
        """Drops ``layout`` from the end of what is held back."""
        self._held = ["".join(self._held).removesuffix(layout)]

    def flush(self) -> None:
        text = "".join(self._held)
        self._held.clear()
        if text:
            self._emit(text)


class Quotes:
    """Is the end of the text so far inside a code fence or an inline code span?"""

    def __init__(self) -> None:
        self._fence = ""
        self._head = ""  # the first visible characters of the current line
        self._ticks = 0

    def feed(self, text: str) -> None:
        for number, part in enumerate(text.split("\n")):
            if number:
                mark = self._head if self._head in ("```", "~~~") else ""
                self._fence = ("" if mark == self._fence else self._fence) if self._fence else mark
                self._head, self._ticks = "", 0
            if len(self._head) < 3:
                self._head = (self._head + part).lstrip()[:3]
            self._ticks += part.count("`")

    @property
    def inside(self) -> bool:
        return bool(self._fence) or self._ticks % 2 == 1 or self._head in ("```", "~~~")
