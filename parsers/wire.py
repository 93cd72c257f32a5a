"""A format's strings against a vocabulary: which of their characters are control tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from parsers.format import Format
from parsers.tokens import Tokenizer

_FIRST_CODE = 0xD800


@dataclass(frozen=True)
class Wire:
    """Each control token inside a format's strings has a code, a lone surrogate that stands for it in the buffer."""

    by_id: Mapping[int, str]
    """Codes by the ids of their tokens."""
    special: frozenset[str]
    """Codes of tokens that never stand for visible text."""
    _codes: Mapping[str, str]
    _spelled: Mapping[int, str]
    _tokens: re.Pattern[str]

    @classmethod
    def resolve(cls, wire_format: Format, tokenizer: Tokenizer) -> Wire:
        control = tokenizer.control
        strings = set(wire_format.generated())
        names = sorted((name for name in control if any(name in text for text in strings)), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        found = dict.fromkeys(token for text in sorted(strings) for token in pattern.findall(text))
        codes = {token: chr(_FIRST_CODE + number) for number, token in enumerate(found)}
        return cls(
            by_id={control[token]: code for token, code in codes.items()},
            special=frozenset(code for token, code in codes.items() if control[token] in tokenizer.special),
            _codes=codes,
            _spelled={ord(code): token for token, code in codes.items()},
            _tokens=pattern,
        )

    def code(self, text: str) -> str:
        """``text`` of the format as it is in the buffer."""
        return self._tokens.sub(lambda match: self._codes[match[0]], text)

    def spellings(self, text: str, *aliases: str) -> tuple[str, ...]:
        """A delimiter as it is in the buffer, first as it should be; then in other ways, and in ordinary tokens."""
        every = (text, *aliases)
        return tuple(dict.fromkeys(one for one in (*map(self.code, every), *every) if one))

    def text_of(self, buffer: str) -> str:
        """Text from the buffer with its codes spelled out."""
        return buffer if buffer.isascii() else buffer.translate(self._spelled)
