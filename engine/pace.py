"""How fast this machine reads and prefills, as far as was seen; whether a forward hides a restore.

To read layer by layer costs bandwidth, for the pieces are smaller: a restore that is longer than the forward beside it
can end later than one that is read whole before. Where the forward takes at least as long as reading whole, the gain
is larger than that loss, even if reading in pieces took half as long again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BYTES_PER_SECOND = 1e9
SECONDS_PER_TOKEN = 1e-3
"""What is assumed until something was seen: a plain SSD, and the prefill of a small model. A large one is slower, and
hides more."""
HELD = 0.25
"""Seconds that one forward may hold up sequences that answer, ..."""
LEAST, _WORTH = 64, 4.0
"""... or so many times what one of the least tokens takes: where few tokens take about as long as many (experts that
come over a link), a prompt in small pieces is later, and nobody gains."""
_SHARE = 1 / 3
"""Of the time of prompts, what sequences that answer have to themselves."""
_MANY = 512
_LEAST_READ = 8 << 20
"""Fewer bytes say more of the delay than of the rate."""


@dataclass
class Pace:
    """``always``: for measurements, the answer whatever the rates, and prompts are not held back."""

    always: bool | None = None
    _bytes_per_second: list[float] = field(default_factory=list)
    _forwards: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """(tokens, seconds) of the last two forwards of about as many tokens. Two, as one may have been held up."""
    _last: tuple[int, float] = (1, SECONDS_PER_TOKEN)
    """The same of the last one with tokens of prompts: those before it had less history to look at."""
    _owed: float = 0.0
    """Seconds, to sequences that answer."""

    def read(self, size: int, seconds: float) -> None:
        """So much was read from the disk, whole, with nothing computed beside it."""
        if size >= _LEAST_READ and seconds > 0:
            self._bytes_per_second = [*self._bytes_per_second[-1:], size / seconds]

    def fed(self, tokens: int, seconds: float, answers: int = 0) -> None:
        """A forward of so many tokens, ``answers`` of them of sequences that answer, with nothing read beside it."""
        size = tokens.bit_length()
        self._forwards[size] = [*self._forwards.get(size, ())[-1:], (tokens, seconds)]
        if tokens > answers:
            self._last = tokens, seconds
        if answers:
            self._owed = self._owed + _SHARE * seconds if tokens > answers else max(0.0, self._owed - seconds)

    def beside(self, most: int) -> int:
        """How many tokens of prompts go into the next forward of sequences that answer; 0: it is theirs alone."""
        if self.always is not None:
            return most
        if self._owed > 0:
            return 0
        (tokens, seconds), count = self._last, most
        least = min((took for _, took in self._forwards.get(LEAST.bit_length(), ())), default=0.0)
        longest = max(HELD, _WORTH * (min(least, seconds) if tokens >= LEAST else least))
        while count > LEAST and seconds * count / tokens > longest:
            count //= 2
        return count

    def hides(self, size: int, tokens: int) -> bool:
        """Whether a forward of so many tokens takes at least as long as reading so many bytes whole."""
        if self.always is not None:
            return self.always
        return self.forward_seconds(tokens) >= size / min(self._bytes_per_second, default=BYTES_PER_SECOND)

    def token_seconds(self) -> float:
        """Of one more token of a prompt, among many."""
        return self.forward_seconds(_MANY) / _MANY

    def forward_seconds(self, tokens: int) -> float:
        """At least: a forward of more tokens takes longer, but less so than there are more of them."""
        least = (
            min(seconds * min(1.0, tokens / seen) for seen, seconds in forwards) for forwards in self._forwards.values()
        )
        return max(least, default=tokens * SECONDS_PER_TOKEN)
