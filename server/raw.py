"""Prompts that are no conversation, and answers that are nothing but text."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from anyio import to_thread

from parsers.conversation import Conversation, Text, Turn
from parsers.events import Event, TextDelta
from parsers.prompt import Prompt
from parsers.stream import FinishReason
from parsers.tokens import Tokenizer
from server.errors import ApiError
from server.state import ServerState
from sessions.digest import pack


async def raw_prompt(state: ServerState, source: str | tuple[int, ...], vocabulary: int, most: int) -> Prompt:
    """Text is encoded off the event loop, behind the start token of models that have one, and without control tokens,
    whatever it spells; what must have more than ``most`` tokens is refused before that. Raises ApiError."""
    tokenizer = state.family.tokenizer
    if isinstance(source, tuple):
        ids = source
    elif (least := tokenizer.least_tokens([source])) > most:
        raise ApiError.prompt_too_long(least, most, counted=False)
    else:
        ids = await to_thread.run_sync(tokenizer.encode_start, source, True, limiter=state.render_limiter)
    if not ids:
        raise ApiError("invalid", "prompt: it must have one token at least", param="prompt")
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ApiError("invalid", f"prompt: {wrong} is not a token id of this model", param="prompt")
    return Prompt(pack(ids), (), thinking_open=False, thinking=False)


def raw_conversation(prompt: Prompt) -> Conversation:
    """What stands for a prompt where sessions compare what was asked; it is never rendered."""
    return Conversation((Turn("user", (Text(prompt.packed.hex()),)),))


def plain_text(state: ServerState) -> PlainText:
    return PlainText(state.family.tokenizer, state.family.stop_tokens)


class PlainText:
    """Reads sampled tokens as text, control tokens spelled out. Those that end a turn end the answer, and are not
    seen. A code point split over tokens appears when it is complete."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> Sequence[Event]:
        text = "" if token in self._ends else self._decoder.decode(self._tokenizer.token_bytes(token))
        return (TextDelta(text),) if text else ()

    def finish(self, reason: FinishReason) -> Sequence[Event]:
        """Half a code point that was cut off is not text yet."""
        text = self._decoder.decode(b"", final=True) if reason == "stop" else ""
        return (TextDelta(text),) if text else ()
