"""The tokenizer: plain and trusted encoding, incremental decoding, and a memo of encoded pieces.

Two encoders share one vocabulary. The plain one does not know control tokens at all, so no text whatever can produce
one. The trusted one splits text at control tokens first and encodes what lies between them plainly; since pieces are
independent of each other, remembered pieces are exact, and only the tail of a growing prompt is encoded anew. A long
piece is remembered in chunks, cut where that changes nothing (``seams``).

Two ways to spell bytes are known: letters that stand for bytes (byte-level), and text with a sign for the space and a
token for each byte that has no other (sentencepiece).
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as FastTokenizer

from parsers.alternatives import alternatives
from parsers.description import BECOME_SIGNS, Spelling, is_ordinary, lengths_after, plain_model, take_lead
from parsers.memory import Memory
from parsers.seams import Seams
from parsers.vocabulary import TokenizerError, read_description

__all__ = ["Detokenizer", "Tokenizer", "TokenizerError"]

_MEMO_BYTES = 64 << 20
_SURROGATES = re.compile("[\ud800-\udfff]")
"""The renderer's marks: no text has them, since the guard replaces lone surrogates that a client sends."""
_SPACE = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_SIGNS = bytes(byte for byte in range(128) if not chr(byte).isalnum())


class Tokenizer:
    """A checkpoint's tokenizer, from a description as ``tokenizer.json`` has it."""

    def __init__(self, description: dict[str, Any], memo_bytes: int = _MEMO_BYTES) -> None:
        """Raises TokenizerError."""
        self._spelling = Spelling(description)
        added = {str(token["content"]): token for token in description.get("added_tokens") or ()}
        added = {text: token for text, token in added.items() if not self._spelling.is_byte(text)}
        control = {text: token for text, token in added.items() if not is_ordinary(text, bool(token.get("special")))}
        self.control: dict[str, int] = {text: int(token["id"]) for text, token in control.items()}
        """Control tokens by their text."""
        self.special = frozenset(int(token["id"]) for token in control.values() if token.get("special"))
        """Control tokens that never stand for visible text."""
        ordinary = {text: int(token["id"]) for text, token in added.items() if text not in control}
        description, self._lead = take_lead(description)
        plain = description | {
            "added_tokens": [added[text] for text in ordinary],
            "model": plain_model(description["model"], control, ordinary),
            "post_processor": None,
        }
        text = json.dumps(plain)
        try:
            self._plain = FastTokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for everything
            raise TokenizerError(f"tokenizer.json is not usable: {error}") from error
        rest = repr(sorted(self.control.items())) + (repr(self._lead) if self._lead else "")
        self.identity = hashlib.blake2b(text.encode() + rest.encode()).digest()
        """The same for tokenizers that give the same ids."""
        vocabulary: dict[str, int] = plain["model"]["vocab"]
        self.vocab_size = 1 + max((*self.control.values(), *vocabulary.values()))
        self.controls = {token: text for text, token in self.control.items()}
        """Their texts by id."""
        self.strips: Literal["nowhere", "start", "segment"] = "nowhere"
        """Where a space that decoded text begins with is not part of it: at the start, or behind control tokens too."""
        if self._spelling.strips:
            self.strips = self._lead.where if self._lead else "start"
        self.start = _start(description.get("post_processor"))
        """What a prompt of plain text begins with, where the tokenizer puts anything there."""
        self._split = _splitter(control)
        self._ordinary = {token: self._spelling.added_bytes(text) for text, token in ordinary.items()}
        tokens = [*map(self._spelling.bytes_of, vocabulary), *self._ordinary.values()]
        self.longest = max(map(len, tokens))
        """Bytes of the longest token of plain text."""
        self._wordiest = max(map(_wordy, tokens))
        self._lengths = lengths_after(description.get("normalizer"))
        self._seams = Seams(tokens, self._batch, "(?<" not in json.dumps(plain.get("pre_tokenizer")))
        self._bytes: dict[int, bytes] = {}
        self._memo: Memory[str, array[int]] = Memory(
            memo_bytes, lambda text, ids: sys.getsizeof(text) + sys.getsizeof(ids)
        )

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Raises TokenizerError."""
        return cls(read_description(directory))

    def forget(self) -> None:
        self._memo.forget()

    def token_id(self, text: str) -> int | None:
        """The id of a control token, None if there is no such token."""
        return self.control.get(text)

    def encode(self, text: str, remember: bool = False) -> tuple[int, ...]:
        """Plain text, from the midst of other text, to ids; control tokens spelled in it are ordinary text."""
        return tuple(self._encode(_without_marks(text, "\ufffd"), remember))

    def encode_start(self, text: str, remember: bool = False) -> tuple[int, ...]:
        """Plain text that is a whole prompt, or the beginning of one."""
        text = _without_marks(text, "\ufffd")
        return (*self.start, *self._encode(self._lead.before(text) if text and self._lead else text, remember))

    def encode_trusted(self, text: str, remember: bool = False, after: int | None = None) -> list[int]:
        """Text to ids, with control tokens recognised. Marks (lone surrogates) are removed after splitting. ``after``
        is the token before it, None at the start of a prompt."""
        ids: list[int] = []
        end = 0
        for match in self._split.finditer(text):
            ids.extend(self._between(text[end : match.start()], remember, ids[-1] if ids else after))
            ids.append(self.control[match[match.lastindex or 0]])
            end = match.end()
        ids.extend(self._between(text[end:], remember, ids[-1] if ids else after))
        return ids

    def _between(self, text: str, remember: bool, after: int | None) -> Sequence[int]:
        text = _without_marks(text, "")
        if text and self._lead and (after is None or (self._lead.where == "segment" and after in self.controls)):
            text = self._lead.before(text)
        return self._encode(text, remember) if text else ()

    def _encode(self, text: str, remember: bool) -> Sequence[int]:
        if remember and (ids := self._memo.get(text)) is not None:
            return ids
        chunks = self._seams.chunks(text)
        if not remember or sys.getsizeof(text) > self._memo.limit // 4:
            return [token for ids in self._batch(chunks) for token in ids]
        known = {chunk: ids for chunk in chunks if (ids := self._memo.get(chunk)) is not None}
        new = [chunk for chunk in dict.fromkeys(chunks) if chunk not in known]
        for chunk, tokens in zip(new, self._batch(new), strict=True):
            known[chunk] = array("I", tokens)
            self._memo.put(chunk, known[chunk])
        return known[text] if len(chunks) == 1 else [token for chunk in chunks for token in known[chunk]]

    def _batch(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        # Only the batch calls let other threads run meanwhile, and this one does not compute offsets.
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def least_tokens(self, texts: Iterable[str]) -> int:
        """A number of tokens that no prompt with these texts can have fewer than, told without encoding them.

        A token has few letters, however long the longest runs of spaces or dashes are; and words are tokens apart."""
        if self._lengths == "unknown":
            return 0
        size = words = seams = 0
        for text in texts:
            data = self._spelling.added_bytes(_without_marks(text, "?"))
            signs = len(data) - _wordy(data) + sum(map(text.count, BECOME_SIGNS))
            if self._lengths == "composed" and len(data) != len(text):  # at most four code points become three bytes
                size += len(text) * 3 // 4
                words += (len(text) - signs) * 3 // 4
            else:
                size += len(data)
                words += len(data) - signs
            seams += self._seams.count(data)
        return max(-(-size // self.longest), -(-words // self._wordiest), seams)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for an id without a token."""
        known = self._bytes.get(token)
        if known is None:
            control, ordinary = self.controls.get(token), self._ordinary.get(token)
            spelled = self._plain.id_to_token(token) if control is None and ordinary is None else None
            known = control.encode() if control else ordinary or (self._spelling.bytes_of(spelled) if spelled else b"")
            self._bytes[token] = known
        return known

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, control tokens spelled out."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def detokenizer(self) -> Detokenizer:
        """For a turn, from its first token on."""
        return Detokenizer(self)


class Detokenizer:
    """Decodes ids one by one. A code point split over tokens appears when it is complete, never as U+FFFD before."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips != "nowhere"

    def push(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        if self._strip:
            data = data.removeprefix(b" ")
        self._strip = self._tokenizer.strips == "segment" and token in self._tokenizer.controls
        return self._decoder.decode(data)

    @property
    def unfinished(self) -> bool:
        """Has half a code point come?"""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """What an unfinished code point is worth when a control token follows it."""
        self._strip = self._tokenizer.strips == "segment"
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _without_marks(text: str, instead: str) -> str:
    return text if text.isascii() else _SURROGATES.sub(instead, text)


def _start(post_processor: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The ids that a template of the description has before the first text; other kinds of processors put none there
    that a decoder wants. ``add_bos_token`` of a ``tokenizer_config.json`` does not count: who wrote the description has
    heeded it, and transformers drops it too."""
    known = post_processor or {}
    ids: list[int] = []
    for part in (known, *(known.get("processors") or ())):
        if part.get("type") != "TemplateProcessing":
            continue
        for piece in part.get("single") or ():
            if "SpecialToken" not in piece:
                break
            ids += part["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return tuple(ids)


def _wordy(data: bytes) -> int:
    """Bytes that are no ASCII signs."""
    return len(data.translate(None, _SIGNS))


def _splitter(control: Mapping[str, Mapping[str, Any]]) -> re.Pattern[str]:
    """Finds control tokens, one group for each kind: some take the white space beside them, some must be words."""
    kinds: dict[tuple[bool, ...], list[str]] = {}
    for text, token in control.items():
        kinds.setdefault(tuple(bool(token.get(flag)) for flag in ("lstrip", "rstrip", "single_word")), []).append(text)
    patterns = []
    for (left, right, word), texts in kinds.items():
        pattern = f"({alternatives(texts)})"
        if word:
            pattern = rf"(?<!\w){pattern}(?!\w)"
        if left:  # only from where white space begins: else each of its characters would be a start
            pattern = f"(?:(?<!{_SPACE}){_SPACE}+)?{pattern}"
        patterns.append(pattern + (f"{_SPACE}*" if right else ""))
    return re.compile("|".join(patterns) or "(?!)")
