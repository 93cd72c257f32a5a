"""Places where text may be cut without changing its tokens.

A long text that grows is encoded in chunks, so that only its last chunk is new. That is exact only where no token can
stand across the cut and where the way text is split before byte-pair encoding sees nothing of the other side. A rule
below is used for a vocabulary that passes both tests: none of its tokens has the cut inside, and samples on either side
are encoded alike together and apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product

_WORD = r"[^\W_]"
_LETTER = r"[^\W\d_]"
_WORDS = ("[A-Za-z]", " [A-Za-z]", "[A-Za-z]", ("word", "isn't", "  y", "\n\nz", "42nd", "漢x"), (" on", " A", " i't"))
_LINES = (
    *(r"\S\n", r"[^\W_]", r"\n"),
    ("word\n", "Größe\n", "漢\n", "12\n", "x = 1;\n", "*/\n", "\n }\n"),
    ("on", "Ä", "漢", "7"),
)
_CLAUSES = (
    *(_LETTER, "[、。，！？；：]", rf"{_LETTER}|\ufffd"),
    ("word", "漢字", "한글", "é", "\n字"),
    ("。", "，漢", "！！", "：\n", "； x"),
)
"""Each rule: what stands before the cut, and behind it; what would stand before it in a token that has it inside
(U+FFFD is half a code point, which may be anything); samples of both sides."""
_SHAPES = bytes(ord("a") if chr(byte).isalpha() and byte < 128 else byte for byte in range(256))
_CHUNK = 4096
"""Characters that a chunk has at least."""

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]


class Seams:
    """The rules that hold for one vocabulary."""

    def __init__(self, tokens: Iterable[bytes], encode: Encode, local: bool) -> None:
        """``local``: what splits text looks at nothing before the place where it begins."""
        texts = "\0".join(token.decode(errors="replace") for token in tokens)
        holding = [
            rule
            for rule in (_WORDS, _LINES, _CLAUSES)
            if local and not re.search(f"(?<={rule[2]})(?={rule[1]})", texts) and _apart(encode, *rule[3:])
        ]
        self._words = _WORDS in holding
        self._seam = re.compile("|".join(f"(?<={before})(?={behind})" for before, behind, *_ in holding) or "(?!)")

    def count(self, data: bytes) -> int:
        """Some of them, quickly: most of those between words. A text has more tokens than that."""
        return data.translate(_SHAPES).count(b"a a") if self._words else 0

    def chunks(self, text: str) -> list[str]:
        """Pieces that may be encoded by themselves. Those of a text that grows stay the same, but for the last."""
        cuts = [0]
        while len(text) - cuts[-1] > _CHUNK and (seam := self._seam.search(text, cuts[-1] + _CHUNK)):
            cuts.append(seam.start())
        return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _apart(encode: Encode, lefts: Sequence[str], rights: Sequence[str]) -> bool:
    """Have texts on either side of a cut the same tokens together?"""
    pairs = list(product(lefts, rights))
    left, right, whole = (encode(texts) for texts in (*map(list, zip(*pairs, strict=True)), [a + b for a, b in pairs]))
    return all([*a, *b] == list(ab) for a, b, ab in zip(left, right, whole, strict=True))
