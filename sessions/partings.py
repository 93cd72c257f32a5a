"""Where the openings of conversations part, learnt from what had to be computed again.

Harnesses write what changes into the middle of what does not: a snapshot of the repository between two chapters of
the system text, the date before the user's first words. A checkpoint only helps before such a place. The engine tells
where it is: what it knew of a prompt ends there, and what lies between its last checkpoint and that end was computed
again. The tokens that lead to the place are remembered, and later prompts of the harness get a checkpoint where they
find some of them, the nearest: close to the place there may be names and dates, which other projects do not have.
Of some harnesses it is known beforehand what stands before such a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from parsers.render import Span
from sessions.digest import pack

Leads = tuple[bytes, ...]
"""Packed tokens that lead to one place each, the last learnt last."""

WORTH = 256
"""Tokens: computing this many again is cheaper than one more checkpoint."""
DISTANCES = (32, 96, 224)
"""Tokens between what is looked for and the place, the first that is found counts."""
WIDTH = 16
"""Tokens that are looked for: enough to be found in one place only."""
LENGTH = DISTANCES[-1] + WIDTH
MOST = 8
"""Places of one harness."""
REACH = 1 << 15
"""Tokens of an opening that are looked at."""
_ITEM = 4
"""Bytes of a packed token."""
_NO_TOKEN = b"\xff" * _ITEM


def opening(spans: Sequence[Span]) -> int:
    """How many tokens stand before the first answer, of those that are looked at."""
    answers = ("assistant_header", "assistant", "generation_prompt")
    return min(REACH, next((span.start for span in spans if span.kind in answers), 0))


def lead(tokens: bytes, opening: int, resumed: int, replayed: int) -> bytes:
    """What leads to the place where a prompt of packed ``tokens`` left what was known; empty if that is not in its
    opening, or if little was computed again."""
    parted = resumed + replayed
    if replayed <= WORTH or not LENGTH <= parted < opening:
        return b""
    return tokens[(parted - LENGTH) * _ITEM : parted * _ITEM]


def foretold(tokens: Sequence[int]) -> bytes:
    """A lead that nobody had to learn: ``tokens`` of a text that stands before a place, but for the last one, which may
    be another where the text goes on."""
    wanted = tokens[-WIDTH - 1 : -1]
    return _NO_TOKEN * (LENGTH - DISTANCES[0] - len(wanted)) + pack(wanted) + _NO_TOKEN * DISTANCES[0]


def learnt(known: Leads, new: bytes) -> Leads:
    return (*(one for one in known if one != new), new)[-MOST:]


def split(packed: bytes) -> Leads:
    """Leads that were written one behind the other."""
    size = LENGTH * _ITEM
    return tuple(packed[at : at + size] for at in range(0, len(packed) - size + 1, size))


def places(known: Leads, tokens: bytes, opening: int) -> frozenset[int]:
    """Where a prompt of packed ``tokens`` may part from others: one position at most for each of ``known``."""
    return _places(known, tokens[: opening * _ITEM]) if known else frozenset()


@lru_cache(maxsize=32)
def _places(known: Leads, head: bytes) -> frozenset[int]:
    """Remembered, since all requests of a conversation have one opening."""
    return frozenset(place for one in known if (place := _place(one, head)))


def _place(lead: bytes, tokens: bytes) -> int:
    """Behind what was found; 0 if nothing was."""
    for distance in DISTANCES:
        begin = (LENGTH - distance - WIDTH) * _ITEM
        at = _find(lead[begin : begin + WIDTH * _ITEM], tokens)
        if at >= 0:
            return at + WIDTH
    return 0


def _find(wanted: bytes, tokens: bytes) -> int:
    """The index of the token at which ``wanted`` begins for the first time, or -1."""
    at = tokens.find(wanted)
    while at > 0 and at % _ITEM:
        at = tokens.find(wanted, at + 1)
    return at // _ITEM
