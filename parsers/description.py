"""What a tokenizer description says about bytes, spaces and control tokens."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from parsers.ranks import bytes_to_unicode
from parsers.vocabulary import TokenizerError

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_MARKUP = re.compile(
    "</?(?:a|b|big|blockquote|br|caption|cite|code|col|dd|del|dl|dt|em|h[1-6]|hr|i|img|ins|kbd|li|ol|p|pre|q|s|small|"
    "span|strike|strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|tt|u|ul|var)>"
)


BECOME_SIGNS = ("\u037e", "\u1fef")
"""Code points outside ASCII that composing turns into signs of ASCII."""


def is_ordinary(text: str, special: bool) -> bool:
    """Is an added token ordinary text? White space, single characters and HTML (some vocabularies have a token for each
    tag) stand for themselves; everything else is control."""
    return len(text) == 1 or not text.strip(" \t\n\r▁") or (not special and _MARKUP.fullmatch(text) is not None)


def lengths_after(normalizer: object) -> Literal["same", "composed", "unknown"]:
    """What a normalizer does to the length of text. A sign that replaces the space counts as one."""
    kinds = set()
    for step in _flat(normalizer, "normalizers"):
        spaces = step.get("type") == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == "▁"
        kinds.add("Spaces" if spaces else step.get("type"))
    if kinds <= {"Prepend", "Spaces"}:
        return "same"
    return "composed" if kinds <= {"Prepend", "Spaces", "NFC"} else "unknown"


class Spelling:
    """How tokens of the vocabulary spell bytes. ``strips``: decoded text loses the space that it begins with."""

    def __init__(self, description: dict[str, Any]) -> None:
        """Raises TokenizerError for what cannot spell every text."""
        decoders = _flat(description.get("decoder"), "decoders")
        kinds = {str(decoder.get("type")) for decoder in decoders}
        model = description.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(model, dict) or not isinstance(vocabulary, dict) or not vocabulary:
            raise TokenizerError("tokenizer.json has no vocabulary of byte pairs")
        if model.get("type", "BPE") != "BPE":
            raise TokenizerError(f"tokenizer.json has a model of type {model['type']}, only BPE is supported")
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level:
            if "ByteFallback" not in kinds or not model.get("byte_fallback"):
                raise TokenizerError(
                    f"tokenizer.json decodes with {sorted(kinds)}; only ByteLevel and ByteFallback are supported"
                )
            if missing := [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]:
                raise TokenizerError(f"the vocabulary has no token for the byte {missing[0]:#04x}")
        self.strips = any(
            (decoder.get("type") == "Strip" and decoder.get("content") == " " and decoder.get("start"))
            or (decoder.get("type") == "Metaspace" and _scheme(decoder) != "never")
            for decoder in decoders
        )
        letters = bytes_to_unicode()
        foreign = {code: "\uffff" for code in range(0x200)}
        self._letters = foreign | {ord(letter): chr(byte) for byte, letter in letters.items()}

    def bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return token.translate(self._letters).encode("latin-1")
            except UnicodeEncodeError:  # text that was added to the vocabulary as it is
                return token.encode()
        return bytes([int(token[3:5], 16)]) if self.is_byte(token) else self.added_bytes(token)

    def added_bytes(self, text: str) -> bytes:
        """The bytes of an added token, or of text as it comes back."""
        return (text if self._byte_level else text.replace("▁", " ")).encode()

    def is_byte(self, token: str) -> bool:
        return not self._byte_level and _BYTE_TOKEN.fullmatch(token) is not None


@dataclass(frozen=True)
class Lead:
    """What is put before text: at the start of the prompt, or behind every control token (``segment``)."""

    text: str
    where: Literal["start", "segment"]
    unless_space: bool
    """Not where the text begins with a space."""

    def before(self, text: str) -> str:
        return text if self.unless_space and text[:1] in (" ", "▁") else self.text + text


def take_lead(description: dict[str, Any]) -> tuple[dict[str, Any], Lead | None]:
    """The description without it, since the library would put it before every piece that is encoded."""
    normalizers = _flat(description.get("normalizer"), "normalizers")
    if normalizers and normalizers[0].get("type") == "Prepend":
        rest = {"type": "Sequence", "normalizers": normalizers[1:]}
        return description | {"normalizer": rest}, Lead(str(normalizers[0]["prepend"]), "segment", False)
    splitter = description.get("pre_tokenizer")
    splitters = _flat(splitter, "pretokenizers")
    kinds = [part.get("type") for part in splitters]
    if "Metaspace" in kinds and (scheme := _scheme(part := splitters[kinds.index("Metaspace")])) != "never":
        plain = {key: value for key, value in part.items() if key != "add_prefix_space"} | {"prepend_scheme": "never"}
        parts = [plain if other is part else other for other in splitters]
        lead = Lead(str(part.get("replacement", "▁")), "start" if scheme == "first" else "segment", True)
        return description | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}, lead
    if kinds == ["ByteLevel"] and splitters[0].get("add_prefix_space"):
        return description | {"pre_tokenizer": splitters[0] | {"add_prefix_space": False}}, Lead(" ", "segment", True)
    return description, None


def plain_model(model: dict[str, Any], control: Container[str], ordinary: Mapping[str, int]) -> dict[str, Any]:
    """A model without control tokens: no text becomes one. The library takes an added token's id from the model, or
    else it would give it one of its own."""
    vocabulary = {text: token for text, token in model["vocab"].items() if text not in control}
    plain = model | {"vocab": {**vocabulary, **ordinary}}
    if len(vocabulary) < len(model["vocab"]):
        merges = [merge for merge in model.get("merges", ()) if "".join(_parts(merge)) not in control]
        plain["merges"] = [merge for merge in merges if not any(part in control for part in _parts(merge))]
    if plain.get("unk_token") in control:
        plain["unk_token"] = None  # never needed: every byte has a token
    return plain


def _parts(merge: Any) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _scheme(part: dict[str, Any]) -> str:
    """When a Metaspace puts its sign before text; older descriptions only say whether."""
    return str(part.get("prepend_scheme") or ("always" if part.get("add_prefix_space", True) else "never"))


def _flat(part: Any, nested: str) -> list[dict[str, Any]]:
    """A step, or those of a sequence."""
    if not isinstance(part, dict):
        return []
    inner = part.get(nested)
    return [step for one in inner for step in _flat(one, nested)] if isinstance(inner, list) else [part]
