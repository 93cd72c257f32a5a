"""Arguments in a language's own literals: Gemma's unquoted keys and quote tokens, and Python's calls.

One scanner turns both into JSON as they arrive. Nothing is evaluated, nesting is bounded, and the scanner keeps its
place in a list: no depth of input is a depth of calls.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from parsers.codecs.call import NAME_LIMIT, Call, Fence, Malformed, Single, declared
from parsers.codecs.json_text import JsonCallReader
from parsers.codecs.strings import Strings
from parsers.format import JsonCall, Literals, PythonCalls
from parsers.schema import NESTING, is_json, json_of, quoted
from parsers.source import Cut, Emit, Source, Step, Stops

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD_END = re.compile(r"[,:=(){}\[\]\s\"']|[\ud800-\udfff]")
_NAME = re.compile(r"[A-Za-z_][\w.\-]*", re.ASCII)
"""What names a tool or an argument even where it is not declared."""
_NAME_START = re.compile(r"[^\s<>()\[\]{},;\ud800-\udfff]")
_PYTHON_NUMBER = re.compile(
    r"-?(0[xXoObB][\da-fA-F_]{1,64}|[\d_]{0,4096}\.?[\d_]{0,4096}([eE][-+]?\d{1,9})?)", re.ASCII
)
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_GO_ON = (",", "}", "]", ")", ":")


@dataclass
class _Frame:
    """A container that is being read. ``seen`` are the keys of an object, None in a list."""

    closer: str
    seen: set[str] | None
    assign: str = ":"
    count: int = 0


@dataclass
class _Output:
    """Where JSON goes; nowhere while the value of a key that was there already is read."""

    emit: Emit
    muted_at: int | None = None
    stack: list[_Frame] = field(default_factory=list)
    types: frozenset[str] | None = None
    """What the schema allows for the argument that is being read; None inside of it."""

    def put(self, text: str) -> None:
        if self.muted_at is None:
            self.emit(text)

    def value_ended(self) -> None:
        if self.muted_at == len(self.stack):
            self.muted_at = None


class LiteralValues:
    """Reads values. ``strings`` are its quotes, longest first; ``bare`` says whether text without quotes is text."""

    def __init__(self, fence: Fence, strings: Mapping[str, Strings], plain: frozenset[str], bare: bool) -> None:
        self._strings, self._bare = strings, bare
        self._plain = plain
        """Quotes that are a deviation."""
        self._keys = {assign: Stops(assign, *fence.outer) for assign in (":", "=")}
        self._text = Stops(",", "}", "]", ")", *fence.outer)
        self._value_starts = (*strings, *_WORDS, "[", "{", "(", "-", *"0123456789")

    def members(self, source: Source, call: Call, closer: str, assign: str) -> Step[None]:
        """The members of the argument object, behind its opener."""
        output = _Output(call.arguments)
        output.put("{")
        output.stack.append(_Frame(closer, set(), assign))
        opened = True
        while (yield from self._next(source, call, output, opened)):
            yield from source.space()
            character = yield from source.peek()
            opened = character in _CLOSERS
            if opened:
                source.advance(1)
                if len(output.stack) >= NESTING:
                    raise Malformed
                output.put("{" if character == "{" else "[")
                output.stack.append(_Frame(_CLOSERS[character], set() if character == "{" else None))
            else:
                yield from self._scalar(source, call, output)
                output.value_ended()

    def _next(self, source: Source, call: Call, output: _Output, opened: bool) -> Step[bool]:
        """From behind a value (or an opener) to the next: closes containers, reads keys. False at the end of all."""
        while output.stack:
            frame = output.stack[-1]
            yield from source.space()
            character = yield from source.peek()
            if character == "," and not opened:
                source.advance(1)
                yield from source.space()
                character = yield from source.peek()
            elif character != frame.closer and not opened:
                raise Malformed if character else Cut
            if character != frame.closer:
                yield from self._lead(source, call, output)
                return True
            source.advance(1)
            output.stack.pop()
            output.put("]" if frame.seen is None else "}")
            output.value_ended()
            opened = False
        return False

    def _lead(self, source: Source, call: Call, output: _Output) -> Step[None]:
        frame = output.stack[-1]
        lead = ", " if frame.count else ""
        output.types = None
        if frame.seen is not None:
            key = yield from self._key(source, call, frame)
            output.types = call.types(key) if len(output.stack) == 1 else None
            if key in frame.seen:
                call.tolerate("duplicate_parameter")
                if output.muted_at is None:
                    output.muted_at = len(output.stack)
                return
            frame.seen.add(key)
            lead += quoted(key) + ": "
        frame.count += 1
        output.put(lead)

    # ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _key(self, source: Source, call: Call, frame: _Frame) -> Step[str]:
        quote = yield from self._quote(source)
        if quote:
            key = yield from self._strings[quote].decoded(source, call)
            yield from source.space()
            if not (yield from source.literal(frame.assign)):
                raise Malformed
            return key
        key, stop = yield from source.take(self._keys[frame.assign], NAME_LIMIT)
        while stop == ":" and self._bare and not (yield from self._value_follows(source)):
            more, stop = yield from source.take(self._keys[frame.assign], NAME_LIMIT)
            key += ":" + more
        named = frame.assign == ":" or _NAME.fullmatch(key.strip()) or call.types(key.strip()) is not None
        if stop != frame.assign or not named:
            raise Malformed
        return call.text_of(key.strip())

    def _value_follows(self, source: Source) -> Step[bool]:
        """Whether a colon ended the key: a value begins behind it, or no other colon comes before the value ends."""
        if (yield from source.follows((self._value_starts,))):
            return True
        while not (match := re.search("[:,}\\]\ud800-\udfff]", source.buffer)):
            if source.ended:
                raise Cut
            if len(source.buffer) > NAME_LIMIT:
                return True
            yield
        return match[0] != ":"

    def _quote(self, source: Source) -> Step[str]:
        """The quote that comes next, consumed; "" if none does."""
        for quote in self._strings:
            if (yield from source.peek()) == quote[0] and (yield from source.literal(quote)):
                return quote
        return ""

    # ── scalars ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _scalar(self, source: Source, call: Call, output: _Output) -> Step[None]:
        quote = yield from self._quote(source)
        if not quote:
            output.put((yield from self._word(source, call)))
            return
        if quote in self._plain:
            call.tolerate("plain_quotes")
        types = output.types
        if self._bare or not types or "string" in types:
            yield from self._strings[quote].read(source, call, output.put)
            return
        text = yield from self._strings[quote].decoded(source, call)
        call.tolerate("quoted_value")
        output.put(json_of(text, types)[0])

    def _word(self, source: Source, call: Call) -> Step[str]:
        """A number or a constant as JSON; other text where that is a string."""
        parts: list[str] = []
        while not (match := _WORD_END.search(source.buffer)):
            parts.append(source.advance(len(source.buffer)))
            if source.ended:
                raise Cut
            yield
        word = "".join(parts) + source.advance(match.start())
        if word in _WORDS:
            return _WORDS[word]
        if word[:1] in "-.0123456789" and (number := _number(word)) is not None:
            return number
        text, stop = yield from source.upto(self._text, NAME_LIMIT if self._bare else 0)
        if stop is None or not self._bare or not word + text:
            raise Malformed
        call.tolerate("bare_string")
        return quoted(call.text_of(word + text).strip())


def _number(word: str) -> str | None:
    """A number as JSON; Python's other spellings are read."""
    if is_json(word):
        return word
    if not _PYTHON_NUMBER.fullmatch(word):
        return None
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    text = json.dumps(value) if isinstance(value, int | float) else ""
    return text if is_json(text) else None


class LiteralsReader(Single):
    """Reads ``Literals`` arguments. ``spelled`` is the quote in ordinary characters."""

    def __init__(self, codec: Literals, fence: Fence, spelled: str) -> None:
        strings = {codec.quote: Strings(codec.quote, fence.ends, "")}
        for quote in (spelled, '"', "'"):
            escapes: Literal["python", ""] = "" if quote == spelled else "python"
            strings.setdefault(quote, Strings(quote, fence.ends, escapes, before=(*_GO_ON, *fence.outer)))
        self._values = LiteralValues(fence, strings, frozenset(strings) - {codec.quote}, bare=True)
        self._behind = fence.outer

    def read(self, source: Source, call: Call) -> Step[str]:
        yield from source.space()
        opener = yield from source.peek()
        if opener in ("{", "("):
            source.advance(1)
            if opener == "(":
                call.tolerate("parentheses")
            yield from self._values.members(source, call, _CLOSERS[opener], ":" if opener == "{" else "=")
        elif not (yield from source.follows((self._behind,))):
            raise Malformed
        return ""


class PythonReader:
    """Reads ``PythonCalls``. Checkpoints that also write JSON calls are understood."""

    def __init__(self, codec: PythonCalls, fence: Fence) -> None:
        self._many = codec.many
        before = tuple(text for text in (*_GO_ON, *fence.closes) if text)
        strings = {quote: Strings(quote, fence.ends, "python", before) for quote in ('"""', "'''", '"', "'")}
        self._values = LiteralValues(fence, strings, frozenset(), bare=False)
        self._json = JsonCallReader(JsonCall(many=True), fence)
        self._name = Stops("(", "\n", ")", ",", "]", *fence.outer)

    def begin(self, source: Source) -> Step[None]:
        yield from self._json.begin(source)

    def more(self, source: Source) -> Step[bool]:
        if (yield from self._json.more(source)):
            return True
        return not self._many and bool(_NAME_START.match((yield from source.peek())))

    def read(self, source: Source, call: Call) -> Step[str]:
        yield from source.space()
        odd = {f"{name}(".lstrip(): name for name in call.tools if not _NAME.fullmatch(name)}
        if known := (yield from declared(source, odd)):
            name = odd[known]
        elif (yield from source.peek()) == "{":
            call.tolerate("json_call")
            return (yield from self._json.read(source, call))
        else:
            text, stop = yield from source.take(self._name, NAME_LIMIT)
            name = text.strip()
            if stop != "(" or not (_NAME.fullmatch(name) or name in call.tools):
                raise Malformed
        call.announce(name)
        yield from self._values.members(source, call, ")", "=")
        return ""
