"""Every format over a vocabulary of bytes and its own control tokens, without a checkpoint or a template."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from engine.weights.tiktoken import bytes_to_unicode
from parsers.conversation import Block, Tool
from parsers.events import Boundary
from parsers.families.registry import FORMATS
from parsers.format import Format
from parsers.guard import Guard
from parsers.stream import FinishReason, StreamParser
from parsers.tokens import Tokenizer
from parsers.wire import Wire
from parsers.write import assistant_text
from tests.parsers.parsed import TOOLS, Parsed, parsed_by

SUFFIX = ":opensource"
_SPECIAL = re.compile(
    r"<\|[^|<>]*\|?>|<[^|<>]*\|>|<｜[^｜<>]*｜>|\[/?[A-Z_]+\]|<SPECIAL_\d+>|\[e~\[|<\|\"\|>|</s>|<eos>"
)
_TAGS = ("<think>", "</think>")
_VISIBLE = {
    "hermes": (*_TAGS, "<tool_call>", "</tool_call>"),
    "glm": (*_TAGS, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "dsml": (*_TAGS, "｜DSML｜"),
    "seed": ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>", "<seed:bos>", "<seed:eos>"),
    "hy3": tuple(
        tag.replace(">", f"{SUFFIX}>")
        for tag in (
            *(*_TAGS, "<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        )
    ),
    "m2": (*_TAGS, "<minimax:tool_call>", "</minimax:tool_call>"),
    "m3": ("<mm:think>", "</mm:think>", "]<]minimax[>["),
    "longcat": ("<longcat_think>", "</longcat_think>", "<longcat_tool_call>", "</longcat_tool_call>"),
    "text": (),
}
_KIND = {
    **dict.fromkeys(("hermes", "qwen3_xml", "qwen38", "nemotron3", "mimo", "step35", "chatml", "granite4"), "hermes"),
    **dict.fromkeys(("ernie45", "step3", "olmo3", "granite3"), "hermes"),
    **dict.fromkeys(("glm45", "glm47", "glm53"), "glm"),
    **dict.fromkeys(("deepseek_v31", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k2"), "dsml"),
    **{"seed_oss": "seed", "hy3": "hy3", "minimax_m2": "m2", "minimax_m3": "m3", "longcat": "longcat"},
}
"""Which tags are single tokens that may be seen; other families spell their tags in ordinary tokens."""


class Loose(Tokenizer):
    """A tokenizer that also has a token for whatever bytes are asked for."""

    def __init__(self, description: dict[str, Any]) -> None:
        super().__init__(description)
        self._pieces: dict[bytes, int] = {}
        self._by_piece: dict[int, bytes] = {}

    def piece(self, data: bytes) -> int:
        token = self._pieces.setdefault(data, 1_000_000 + len(self._pieces))
        self._by_piece[token] = data
        return token

    def token_bytes(self, token: int) -> bytes:
        return self._by_piece.get(token) or super().token_bytes(token)


@dataclass(frozen=True)
class Machine:
    """A format with a vocabulary."""

    format: Format
    tokenizer: Loose
    wire: Wire
    guard: Guard

    def parser(self, tools: Sequence[Tool] = TOOLS, thinking_open: bool = False) -> StreamParser:
        return StreamParser(self.format, self.wire, self.tokenizer, tools, thinking_open)

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[Tool] = TOOLS,
        *,
        thinking_open: bool = False,
        reason: FinishReason = "stop",
    ) -> Parsed:
        return parsed_by(self.parser(tools, thinking_open), ids, reason)

    def say(self, text: str, tools: Sequence[Tool] = TOOLS, thinking_open: bool = False) -> Parsed:
        """Parses the format's own text, control tokens recognised."""
        return self.parse(self.tokenizer.encode_trusted(text), tools, thinking_open=thinking_open)

    def output(self, blocks: Sequence[Block], thinking_open: bool = False) -> list[int]:
        """What a perfect model samples for a turn."""
        text = assistant_text(self.format, self.guard, blocks, "open" if thinking_open else "unopened")
        ended = text.endswith(self.format.ends)  # a call's end may be the turn's
        return self.tokenizer.encode_trusted(text if ended else text + self.format.ends[0])

    def characters_before(self, ids: Sequence[int], boundary: Boundary) -> int:
        """A boundary's position, which does not depend on how the text was cut into tokens."""
        tokens = boundary.token if boundary.exact else boundary.token + 1
        return len(self.tokenizer.decode(ids[:tokens])) - len(boundary.rest)


@cache
def machine(name: str) -> Machine:
    found = _format(name)
    tokenizer = Loose(json.loads(vocabulary(name).to_str()))
    return Machine(found, tokenizer, Wire.resolve(found, tokenizer), Guard(tokenizer.control))


def _format(name: str) -> Format:
    return next(known for known in FORMATS if known.name == name).with_suffix(SUFFIX)


def vocabulary(name: str, *more: str) -> FastTokenizer:
    """256 bytes, the format's control tokens, and ``more`` of them."""
    found = _format(name)
    turns = found.turns
    headers = [
        edge for pair in (turns.system, turns.user, turns.assistant, turns.tools) for edge in (pair.open, pair.close)
    ]
    texts = "\n".join((*found.generated(), *headers))
    special = dict.fromkeys((*_SPECIAL.findall(texts), *found.ends, *more))
    visible = [tag for tag in _VISIBLE[_KIND.get(name, "text")] if tag in texts]
    letters = bytes_to_unicode()
    fast = FastTokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens(
        [AddedToken(token, special=token not in visible, normalized=False) for token in (*visible, *special)]
    )
    return fast


NAMES = tuple(known.name for known in FORMATS)


def respelled(tokenizer: Loose, ids: Sequence[int], seed: int, sizes: Sequence[int] = (1, 1, 2, 3, 5, 9)) -> list[int]:
    """The same text in other tokens: control tokens stay, the rest is cut anywhere, letters too."""
    chance, found, run = random.Random(seed), list[int](), bytearray()
    control = set(tokenizer.control.values())

    def flush() -> None:
        while run:
            size = chance.choice(sizes)
            found.append(tokenizer.piece(bytes(run[:size])))
            del run[:size]

    for token in ids:
        if token in control:
            flush()
            found.append(token)
        else:
            run.extend(tokenizer.token_bytes(token))
    flush()
    return found
