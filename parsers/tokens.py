"""The tokenizer: plain and trusted encoding, incremental decoding, and a memo of encoded pieces.

Two encoders share one vocabulary. The plain one does not know control tokens at all, so no text whatever can produce
one. The trusted one splits text at control tokens first and encodes what lies between them plainly; since pieces are
independent of each other, remembered pieces are exact, and only the tail of a growing prompt is encoded anew.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

_MEMO_BYTES = 64 << 20
_SURROGATES = re.compile("[\ud800-\udfff]")
"""The renderer's marks: no text has them, since the guard replaces lone surrogates that a client sends."""


class TokenizerError(Exception):
    """The tokenizer files are missing, damaged, or of a kind that is not supported."""


class Tokenizer:
    """A byte-level tokenizer of a checkpoint (``tokenizer.json``)."""

    def __init__(self, description: dict[str, Any], memo_bytes: int = _MEMO_BYTES) -> None:
        """Raises TokenizerError."""
        kinds = _decoder_kinds(description.get("decoder"))
        if "ByteLevel" not in kinds:
            raise TokenizerError(f"tokenizer.json decodes with {sorted(kinds)}, only ByteLevel is supported")
        model = description.get("model")
        if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
            raise TokenizerError("tokenizer.json has no vocabulary of byte pairs")
        added = {str(token["content"]): token for token in description.get("added_tokens") or ()}
        # Added tokens of white space or of one character are ordinary text; they stay in the plain vocabulary.
        control = {text: token for text, token in added.items() if len(text) > 1 and text.strip()}
        self.control: dict[str, int] = {text: int(token["id"]) for text, token in control.items()}
        """Control tokens by their text."""
        self.special = frozenset(int(token["id"]) for token in control.values() if token.get("special"))
        """Control tokens that never stand for visible text."""
        vocabulary = {k: v for k, v in model["vocab"].items() if k not in control}
        plain = description | {
            "added_tokens": [token for text, token in added.items() if text not in control],
            "model": model | {"vocab": vocabulary},
            "post_processor": None,
        }
        try:
            text = json.dumps(plain)
            self._plain = FastTokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for everything
            raise TokenizerError(f"tokenizer.json is not usable: {error}") from error
        self.identity = hashlib.blake2b(text.encode() + repr(sorted(self.control.items())).encode()).digest()
        """The same for tokenizers that give the same ids."""
        texts = (text for text in added if text not in control)
        self.longest = max(map(len, (*vocabulary, *map(str.encode, texts))))
        """Bytes of the longest token of plain text."""
        self.vocab_size = 1 + max((*self.control.values(), *vocabulary.values()))
        self._control_texts = {token: text for text, token in self.control.items()}
        names = sorted(self.control, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")" if names else "((?!))")
        self._bytes: dict[int, bytes] = {}
        self._letters = _letters()
        self._memo: OrderedDict[str, array[int]] = OrderedDict()
        self._memo_size, self._memo_limit = 0, memo_bytes
        self._lock = Lock()

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Raises TokenizerError."""
        path = directory / "tokenizer.json"
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise TokenizerError(f"{path} does not exist; the checkpoint needs a fast tokenizer") from error
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
            raise TokenizerError(f"{path} is not a tokenizer description")
        return cls(description)

    def token_id(self, text: str) -> int | None:
        """The id of a control token, None if there is no such token."""
        return self.control.get(text)

    def encode(self, text: str, remember: bool = False) -> tuple[int, ...]:
        """Plain text to ids; control tokens spelled in it are ordinary text."""
        return tuple(self._encode(text, remember))

    def encode_trusted(self, text: str, remember: bool = False) -> list[int]:
        """Text to ids, with control tokens recognised. Marks (lone surrogates) are removed after splitting."""
        ids: list[int] = []
        for number, piece in enumerate(self._split.split(text)):
            if number % 2:
                ids.append(self.control[piece])
            elif piece:
                ids.extend(self._encode(_SURROGATES.sub("", piece), remember))
        return ids

    def _encode(self, text: str, remember: bool) -> Sequence[int]:
        if remember:
            with self._lock:
                known = self._memo.get(text)
                if known is not None:
                    self._memo.move_to_end(text)
                    return known
        clean = _SURROGATES.sub("\ufffd", text)
        # Only the batch calls let other threads run meanwhile, and this one does not compute offsets.
        ids = self._plain.encode_batch_fast([clean], add_special_tokens=False)[0].ids
        if remember:
            self._remember(text, array("I", ids))
        return ids

    def _remember(self, text: str, ids: array[int]) -> None:
        """Texts that would displace much of what is remembered are not: they are too rare to come again."""
        size = _size(text, ids)
        if size > self._memo_limit // 4:
            return
        with self._lock:
            if text not in self._memo:
                self._memo_size += size
            self._memo[text] = ids
            while self._memo_size > self._memo_limit:
                self._memo_size -= _size(*self._memo.popitem(last=False))

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for an id without a token."""
        known = self._bytes.get(token)
        if known is None:
            control = self._control_texts.get(token)
            text = self._plain.id_to_token(token) if control is None else None
            if control is not None:
                known = control.encode()
            elif text is None:
                known = b""
            elif all(letter in self._letters for letter in text):
                known = bytes(self._letters[letter] for letter in text)
            else:
                known = text.encode()  # an added token that is ordinary text
            self._bytes[token] = known
        return known

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, control tokens spelled out."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)


class Detokenizer:
    """Decodes ids one by one. A code point split over tokens appears when it is complete, never as U+FFFD before."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What an unfinished code point is worth when something else follows it."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _size(text: str, ids: array[int]) -> int:
    """Bytes that a remembered piece takes up."""
    return sys.getsizeof(text) + sys.getsizeof(ids)


def _decoder_kinds(decoder: object) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    nested = decoder.get("decoders")
    inner = set().union(*map(_decoder_kinds, nested)) if isinstance(nested, list) else set()
    return {str(decoder.get("type"))} | inner


def _letters() -> dict[str, int]:
    """Byte-level vocabularies spell each byte as a printable letter: printable Latin-1 as itself, the rest moved up."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + n): byte for n, byte in enumerate(moved)}
