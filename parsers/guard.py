"""Untrusted text: control tokens spelled in it must never become control tokens.

Every string that comes from a client is broken up by a mark inside each control token it spells, and at an end that
might complete one together with the template's own text. The marks are lone surrogates: no text contains them, they
do not disturb the template, and the tokenizer removes them once the rendered text is split at intact control tokens,
so that the pieces are encoded exactly as if they had never been there.

Other marks are set around the contents of messages and say afterwards where each of them ended up.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

from parsers.alternatives import alternatives
from parsers.memory import Memory

BREAK = "\udfff"
SYSTEM, USER, OUTPUT, THOUGHT = "\udffe", "\udffd", "\udffc", "\udffb"
"""Set on both sides of a content of that kind."""
CONTINUED = "\udffa"
"""Set behind the text of an answer that is to go on."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_MEMORY = 32 << 20


class Fixed(list[Any]):
    """A list that no template may change, because it is handed to others too (``template``)."""


class Guard:
    """Knows every string that must only come from the template."""

    def __init__(self, trusted: Iterable[str]) -> None:
        names = sorted({name for name in trusted if len(name) > 1}, key=len, reverse=True)
        self._pattern = re.compile(alternatives(names))
        self._longest = len(names[0]) if names else 0
        self._prefixes = frozenset(name[:n] for name in names for n in range(1, len(name)))
        self._suffixes = frozenset(name[n:] for name in names for n in range(1, len(name)))
        self._known: Memory[str, str] = Memory(_MEMORY, lambda text, made: sys.getsizeof(text) + sys.getsizeof(made))

    def forget(self) -> None:
        self._known.forget()

    def text(self, text: str) -> str:
        """``text``, harmless; remembered."""
        return self._known.of(text, lambda: self._text(text))

    def _text(self, text: str) -> str:
        text = _SURROGATES.sub("\ufffd", text)
        count = 1
        while count:  # again, because tokens may overlap
            text, count = self._pattern.subn(_broken, text)
        core = text.strip()
        if not core:
            return text
        sizes = range(1, min(self._longest, len(core)) + 1)
        head = BREAK if any(core[:n] in self._suffixes for n in sizes) else ""
        tail = BREAK if any(core[-n:] in self._prefixes for n in sizes) else ""
        return around(text, head, tail) if head or tail else text

    def value(self, value: object) -> object:
        """A JSON value with every string and key in it harmless."""
        match value:
            case str():
                return self.text(value)
            case dict():
                return {self.text(str(key)): self.value(item) for key, item in value.items()}
            case list() | tuple():
                return Fixed(self.value(item) for item in value)
        return value


def around(text: str, head: str, tail: str) -> str:
    """``text`` with strings put around its visible part, so that templates can still trim it."""
    core = text.strip()
    start = text.index(core)
    return f"{text[:start]}{head}{core}{tail}{text[start + len(core) :]}"


def visible(text: str) -> str:
    """``text`` without any marks."""
    return _SURROGATES.sub("", text)


def _broken(match: re.Match[str]) -> str:
    return match[0][0] + BREAK + match[0][1:]
