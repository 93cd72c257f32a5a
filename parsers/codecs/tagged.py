"""Arguments as elements, one per parameter: ``<parameter=key>value</parameter>`` and its relatives.

The text of a value may contain anything, so a delimiter in ordinary characters only counts where what follows (or the
line it stands on) says that the value really ends there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from parsers.codecs.call import NAME_LIMIT, Call, Fence, Single
from parsers.codecs.json_text import JsonReader
from parsers.codecs.parameters import Parameters, Value
from parsers.format import Tagged
from parsers.source import SPACE_LIMIT, Cut, Path, Source, Step, Stops, certain, compared

_TAG_EDGE = re.compile(r"\s+|(?<=[>\ud800-\udfff])(?=[<\ud800-\udfff])")
_CLOSE_VARIANTS = ("/>", "1>", " >")
"""What models write in place of a closer's last bracket."""
_STRING_REST = re.compile(r'(?:[^"\\\n\ud800-\udfff]|\\[^\n\ud800-\udfff])*')
_STRING_LIMIT = 1 << 16
_LATER_LIMIT = 4096
"""How far the text behind a doubtful end is searched for a better one."""


@dataclass(frozen=True)
class _Opener:
    """How an opener goes on behind its stem, for one way to quote the key."""

    stops: Stops
    typed: str
    """The stop behind which the type stands; "" if there is none."""
    opened: str
    """The stop behind which the value stands, but for the rest of the opener."""


class TaggedReader(Single):
    """Reads ``Tagged`` arguments. Values that are certainly strings stream; others are written when they close.

    ``spelled``: delimiters in ordinary characters that also exist in control tokens.
    """

    def __init__(self, codec: Tagged, fence: Fence, spelled: frozenset[str]) -> None:
        self._codec = codec
        self._tail, self._head = fence.tail, fence.head
        self._ends = fence.ends
        first, *self._opener_rest = [piece for piece in _TAG_EDGE.split(codec.open_end) if piece]
        self._stem = codec.open.removesuffix('"')
        outer = fence.outer
        quotes = ('"', "'", "") if codec.open.endswith('"') else ("",)
        self._openers = {quote: _opener(codec, first, quote, outer) for quote in quotes}
        self._type_stops = Stops(first, "\n", *outer)
        self._first = first
        self._whole = codec.whole.open if codec.whole else None
        self._whole_close = codec.whole.close if codec.whole else ""
        self._json = JsonReader(fence)
        self._closes = (codec.close, *_variants(codec.close))
        self._between = Stops(self._stem, self._whole or "", self._tail, *outer)
        self._value = Stops(*self._closes, self._stem, self._tail, *outer)
        self._spelled = spelled
        self._fence_opens = frozenset(fence.opens)
        self._opens_or_ends = tuple(text for text in (*fence.opens, *fence.ends) if text and text not in spelled)
        self._after = tuple(text for text in outer if text not in spelled)
        self._after_spelled = outer
        self._later = Stops(codec.close, *self._after)

    def read(self, source: Source, call: Call) -> Step[str]:
        """Ends behind the delimiter that ended the parameters, and returns it."""
        parameters = Parameters(call)
        stop = yield from self._until_next(source, parameters)
        while stop is not None and stop in (self._stem, self._whole):
            if stop == self._whole:
                stop = yield from self._whole_object(source, call, parameters)
            else:
                stop = yield from self._parameter(source, call, parameters)
        if stop is None and not source.natural:
            raise Cut
        parameters.close(stop or "")
        if self._tail and stop != self._tail:
            call.tolerate("missing_tail")
        return stop or ""

    def _until_next(self, source: Source, parameters: Parameters) -> Step[str | None]:
        noise: list[str] = []
        stop = yield from source.until(self._between, noise.append, hold_at_end=True)
        if "".join(noise).strip():
            parameters.unreadable("text_in_call")
        return stop

    def _whole_object(self, source: Source, call: Call, parameters: Parameters) -> Step[str | None]:
        """All arguments as one object, instead of elements."""
        parameters.written_whole()
        yield from self._json.read(source, call)
        yield from source.space()
        yield from source.literal(self._whole_close)
        return (yield from self._until_next(source, parameters))

    # ── one parameter ─────────────────────────────────────────────────────────────────────────────────────────────

    def _parameter(self, source: Source, call: Call, parameters: Parameters) -> Step[str | None]:
        """From behind the stem of its opener to the next stop."""
        key, kind, instead = yield from self._key(source, call)
        if instead:
            parameters.unreadable("malformed_parameter")
            return instead
        value = parameters.value(key, kind, self._codec.typed, trims=self._codec.trim == "newline")
        while True:
            stop = yield from source.inside(self._value, value.put, self._ends)
            if (yield from self._really_ends(source, stop, call, value)):
                break
            value.put(stop)
        if stop in self._closes:
            value.close()
            if stop != self._codec.close:
                call.tolerate("misspelled_close")
            return (yield from self._until_next(source, parameters))
        value.close(drop_newline=True)
        call.tolerate("missing_parameter_close")
        return stop

    def _key(self, source: Source, call: Call) -> Step[tuple[str, str, str]]:
        """(key, type, a delimiter that came instead of a value) of an opener behind its stem; key "" is malformed."""
        quote = yield from self._quote(source, call)
        opener = self._openers[quote]
        key, stop = yield from source.take(opener.stops, NAME_LIMIT)
        kind = ""
        if stop and stop == opener.typed:
            kind, stop = yield from source.take(self._type_stops, NAME_LIMIT)
            if stop == self._first:
                stop = opener.opened
        elif stop == opener.opened and self._codec.key_end:
            call.tolerate("missing_type")
        if stop != opener.opened:
            return "", "", stop if stop in self._after_spelled else ""
        for piece in self._opener_rest:
            yield from source.space()
            if not (yield from source.literal(piece)):
                call.tolerate("missing_value_open")
        return "" if certain(key) else self._clean(key), kind, ""

    def _quote(self, source: Source, call: Call) -> Step[str]:
        character = yield from source.peek()
        quote = character if character in self._openers else ""
        source.advance(len(quote))
        if len(self._openers) > 1 and quote != '"':
            call.tolerate("quoted_key")
        return quote

    def _clean(self, key: str) -> str:
        if self._codec.escapes:
            return key.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        return key.strip().strip("\"'")

    # ── where a value ends ────────────────────────────────────────────────────────────────────────────────────────

    def _really_ends(self, source: Source, stop: str, call: Call, value: Value) -> Step[bool]:
        """Whether a delimiter inside a value ends it. One with a control token in it does."""
        if certain(stop):
            return True
        if value.in_string and (yield from _string_goes_on(source, value)):
            return False
        at_line = value.line_start or not self._codec.between
        after = self._after_spelled if call.guarded else self._after
        # A call that came without its opener may go on without its closer.
        behind_tail = () if call.guarded else (after,)
        if stop in self._closes:
            behind: tuple[Path, ...] = ()
            if self._tail:
                behind = (((self._tail,), *behind_tail), ((self._tail,), self._heads(call)))
            return (yield from source.follows(((self._stem,),), (after,), *behind)) or (
                yield from self._never_ends_later(source, call, value)
            )
        if stop == self._stem:
            return at_line and (yield from self._declared_key(source, call))
        if stop == self._tail:
            return at_line and (yield from source.follows(behind_tail))
        if stop in self._fence_opens:
            return value.line_start and (call.guarded or stop not in self._spelled)
        doubted = stop in self._spelled and not call.guarded
        return (yield from source.follows((self._opens_or_ends if doubted else after,)))

    def _heads(self, call: Call) -> tuple[str, ...]:
        """How calls of the tools begin, behind their opener."""
        return tuple(self._head + name for name in call.tools)

    def _never_ends_later(self, source: Source, call: Call, value: Value) -> Step[bool]:
        """Behind a closer: do the tail and text follow, and no better end of the value before the next call or the end
        of all, so that only the call's own closer was forgotten? Consumes nothing."""
        if self._tail and not compared(source.buffer, ((self._tail,),)):
            return False
        at, by_line = max(0, value.doubted - source.position), False
        while True:
            match, held = self._later.pattern.search(source.buffer, at), self._later.held(source.buffer)
            begins = match.start() if match else held
            if begins > _LATER_LIMIT:
                return False
            if match and (begins < held or source.ended):
                if match[0] == self._codec.close:
                    decided = self._better(source, match.end())
                    if decided:
                        return False
                else:
                    decided = self._beyond(source, call, match)
                    if decided:
                        return True
                    by_line = by_line or match[0] in self._fence_opens
                if decided is False:
                    at = match.end()
                    value.doubted = value.doubted if by_line else source.position + at
                    continue
            elif source.ended:
                if not source.natural:
                    raise Cut
                return True
            at = begins
            yield

    def _beyond(self, source: Source, call: Call, match: re.Match[str]) -> bool | None:
        """Whether a delimiter that is no value's closer is beyond all values: certainly, or by what follows it, or by
        the line that it begins. None while more text may decide."""
        stop, behind = match[0], source.buffer[match.end() :]
        if self._tail or certain(stop):
            return True
        if stop not in self._fence_opens:
            found = compared(behind, (self._after,))
            if found is None and source.ended and not source.natural:
                raise Cut
            return True if found is None and source.ended else found
        if source.buffer[: match.start()].rstrip(" ")[-1:] not in ("", "\n"):
            return False
        verdicts = [compared(behind, (self._heads(call),)), compared(behind, (tuple(self._fence_opens),))]
        return True if True in verdicts else None if None in verdicts and not source.ended else False

    def _better(self, source: Source, at: int) -> bool | None:
        """Whether a value properly ends at the closer in front of ``at``; None while more text may decide."""
        text = source.buffer[at : at + 4 * SPACE_LIMIT]
        paths = (((self._stem,),), (self._after,), ((self._tail,), self._after))
        verdicts = [compared(text, path) for path in paths]
        if True in verdicts or None not in verdicts:
            return True in verdicts
        if source.ended and not source.natural:
            raise Cut
        return text.strip() in ("", self._tail) if source.ended else None

    def _declared_key(self, source: Source, call: Call) -> Step[bool]:
        """Does the opener of a parameter that the tool has come next, behind its stem? Consumes nothing."""
        while True:
            quote = source.buffer[:1] if source.buffer[:1] in self._openers else ""
            rest = source.buffer[len(quote) : 2 * NAME_LIMIT]
            stops = self._openers[quote].stops
            match, held = stops.pattern.search(rest), stops.held(rest)
            if (match and match.start() < held) or held > NAME_LIMIT or source.ended:
                break
            yield
        properties = call.parameters.get("properties")
        if match is None or match[0] not in (self._openers[quote].typed, self._openers[quote].opened):
            return False
        return not properties or self._clean(rest[: match.start()]) in properties


def _string_goes_on(source: Source, value: Value) -> Step[bool]:
    """Inside a string of JSON: does it end in this line, as strings do? Consumes nothing. What is found holds up to the
    string's end (``value.string``), so that no text is searched twice."""
    at, until, goes_on = 0, *value.string
    while source.position >= until:
        match = _STRING_REST.match(source.buffer, at)
        at = match.end() if match else at
        mark, behind = source.buffer[at : at + 1], source.buffer[at + 1 : at + SPACE_LIMIT].lstrip(" \t\r\n")
        undecided = (mark in ("", '"') and not behind) or source.buffer[at:] == "\\"
        if source.ended and undecided and not source.natural:
            raise Cut
        if not undecided or source.ended or at > _STRING_LIMIT or len(source.buffer) > at + SPACE_LIMIT:
            goes_on = mark == '"' and behind[:1] in (*",:}]",) and at <= _STRING_LIMIT
            until = source.position + min(at, _STRING_LIMIT) + 1
            value.string = until, goes_on
        else:
            yield
    return goes_on


def _opener(codec: Tagged, first: str, quote: str, outer: tuple[str, ...]) -> _Opener:
    """Without a quote in the format the key stands bare; with one, each way to quote it closes as it opened."""
    opened, typed = first, codec.key_end
    if codec.open.endswith('"'):
        opened, typed = (quote + text.removeprefix('"') if text else "" for text in (opened, typed))
    spelled = () if certain(opened) else ("\n", "<")
    return _Opener(Stops(typed, opened, *spelled, *outer), typed, opened)


def _variants(close: str) -> tuple[str, ...]:
    plain = close.startswith("</") and close.endswith(">") and not certain(close)
    return tuple(close[:-1] + end for end in _CLOSE_VARIANTS) if plain else ()
