"""Real vocabularies from packages for development, and small ones of every other kind."""

from __future__ import annotations

import base64
import json
import shutil
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding

from parsers.ranks import byte_level

_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
)
O200K_SPLIT = "|".join((*_WORD, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))
_O200K_CONTROL = range(199_998, 201_088)
MARKS = ("<s>", "</s>", "[INST]", "[/INST]")


def tekken_file() -> Path:
    """131,072 tokens."""
    return Path(str(resources.files("mistral_common").joinpath("data/tekken_240911.json")))


def tekken_directory(directory: Path) -> Path:
    directory.mkdir(parents=True)
    shutil.copy(tekken_file(), directory / "tekken.json")
    return directory


def tekken_ranks(count: int) -> dict[bytes, int]:
    entries = json.loads(tekken_file().read_text(encoding="utf-8"))["vocab"][:count]
    return {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}


@cache
def harmony() -> HarmonyEncoding:
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def o200k_description() -> dict[str, Any]:
    """gpt-oss's vocabulary (200k and its control tokens), as its tokenizer.json has it."""
    inner = harmony()._inner
    ranks = {inner.decode_bytes([token]): token for token in range(_O200K_CONTROL.start)}
    return byte_level(
        ranks, O200K_SPLIT, [(inner.decode_bytes([token]).decode(), token, True) for token in _O200K_CONTROL]
    )


def kimi_directory(directory: Path, ranks: dict[bytes, int], named: dict[int, str]) -> Path:
    """What Kimi's checkpoints have instead of tokenizer.json."""
    directory.mkdir(parents=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (directory / "tiktoken.model").write_text("".join(lines))
    added = {str(token): {"content": text, "special": True} for token, text in named.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def sentencepiece(kind: str) -> dict[str, Any]:
    """A small vocabulary with byte fallback; "llama" puts a space before every text, "mistral" before the first."""
    texts = ["<unk>", *MARKS, *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += sorted({*"▁abcdefghijklmnopqrstuvwxyz.,<>/[]IST\n0x"})
    merges: list[list[str]] = []
    for word in ("▁the", "▁hello", "▁table", "world", "ing", "▁▁▁▁", "<x", "a,", "ab"):
        for end in range(2, len(word) + 1):
            pair = [word[: end - 1], word[end - 1]]
            if pair not in merges:
                merges.append(pair)
                texts.append(word[:end])
    added = [_added(text, texts.index(text), True) for text in ("<unk>", *MARKS)]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer: dict[str, Any] | None = None
    splitter: dict[str, Any] | None = None
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if kind == "gemma":
        texts += ["\n\n", "<table>"]
        added += [_added(text, texts.index(text), False) for text in ("\n\n", "▁▁", "<table>", "<0x41>")]
        normalizer, splitter = space, {"type": "Split", "pattern": {"String": " "}}
        splitter |= {"behavior": "MergedWithPrevious", "invert": False}
    elif kind == "llama":
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
    else:
        splitter = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    if kind != "gemma":
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": splitter,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": {text: token for token, text in enumerate(texts)},
            "merges": merges,
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _added(text: str, token: int, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token, "content": text, "special": special} | flags
