"""Which sampled tokens a visible text is made of, and how OpenAI's protocols write them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from engine.api import TokenLogprob

LogprobFormat = Callable[[Sequence[TokenLogprob]], list[dict[str, Any]]]


class Visible:
    """Finds the tokens of one text. A format swallows some tokens (delimiters, white space beside them), a code point
    may need several, and a stop string holds text back. So tokens are matched with text by counting bytes.

    ``size``: bytes of text that a token stands for.
    """

    def __init__(self, size: Callable[[int], int]) -> None:
        self._size = size
        self._sampled: list[TokenLogprob] = []
        self._placed: deque[tuple[int, TokenLogprob]] = deque()
        """With the byte at which each of them begins."""
        self._known = self._shown = 0
        """Bytes of the text so far, and of what was shown of it."""

    def sampled(self, entry: TokenLogprob) -> None:
        self._sampled.append(entry)

    def became(self, text: str) -> None:
        """Text that the last sampled tokens stand for; what was sampled before them is not part of it."""
        missing = size = len(text.encode())
        tokens: list[TokenLogprob] = []
        while self._sampled and missing > 0:
            tokens.append(self._sampled.pop())
            missing -= self._size(tokens[-1].token)
        self._sampled.clear()
        begin = self._known + max(missing, 0)
        for entry in reversed(tokens):
            self._placed.append((begin, entry))
            begin += self._size(entry.token)
        self._known += size

    def shown(self, text: str) -> tuple[TokenLogprob, ...]:
        """The tokens that begin in the next piece of the text that is shown."""
        self._shown += len(text.encode())
        out = []
        while self._placed and self._placed[0][0] < self._shown:
            out.append(self._placed.popleft()[1])
        return tuple(out)

    def end(self) -> None:
        """The text ended; what was sampled last may belong to the next one."""
        self._placed.clear()
        self._known = self._shown = 0

    def skip(self) -> None:
        """What was sampled belongs to no text."""
        self._sampled.clear()


def logprob_format(token_bytes: Callable[[int], bytes]) -> LogprobFormat:
    """Writes sampled tokens and their alternatives as Chat Completions and Responses do. A token that is no whole text
    is told by its ``bytes``; its ``token`` has escapes for them."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token_id)
        return {"token": data.decode(errors="backslashreplace"), "logprob": logprob, "bytes": list(data)}

    def write(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            {
                **token(entry.token, entry.logprob),
                "top_logprobs": [token(other, logprob) for other, logprob in entry.top],
            }
            for entry in entries
        ]

    return write
