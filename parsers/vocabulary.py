"""A checkpoint's tokenizer files as one description, in the terms of ``tokenizer.json``.

Some checkpoints ship none: Mistral's have ``tekken.json``, Kimi's ``tiktoken.model`` with the names of the control
tokens in ``tokenizer_config.json``. Both are byte-level vocabularies with tiktoken ranks.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from parsers.ranks import byte_level


class TokenizerError(Exception):
    """The tokenizer files are missing, damaged, or of a kind that is not supported."""


_TEKKEN_NAMES = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Control tokens of tekken files that do not list them (up to version 7), in id order."""

_KIMI_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
_KIMI_SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        *(_KIMI_WORD % counts + r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for counts in (("*", "+"), ("+", "*"))),
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
"""How Kimi's own tokenizer class splits text; it is not in the checkpoint's data files."""
_KIMI_RESERVED = 256


def read_description(directory: Path) -> dict[str, Any]:
    """The content of ``tokenizer.json``, or what it would be. Raises TokenizerError."""
    for name, read in (("tokenizer.json", _fast), ("tekken.json", _tekken), ("tiktoken.model", _tiktoken)):
        path = directory / name
        if not path.is_file():
            continue
        try:
            return read(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise TokenizerError(f"{path} cannot be read: {error!r}") from error
    raise TokenizerError(
        f"{directory / 'tokenizer.json'} does not exist, and neither does tekken.json or tiktoken.model; "
        "the checkpoint needs a fast tokenizer"
    )


def _fast(path: Path) -> dict[str, Any]:
    description = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
        raise TokenizerError(f"{path} is not a tokenizer description")
    return description


def _tekken(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text(encoding="utf-8"))
    config = data["config"]
    reserved = int(config["default_num_special_tokens"])
    listed = data.get("special_tokens") or [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(_TEKKEN_NAMES)
    ]
    added = [(str(token["token_str"]), int(token["rank"]), bool(token["is_control"])) for token in listed]
    added += [(f"<SPECIAL_{rank}>", rank, True) for rank in range(len(added), reserved)]
    size = int(config["default_vocab_size"]) - reserved
    ranks = {base64.b64decode(token["token_bytes"]): int(token["rank"]) for token in data["vocab"][:size]}
    return byte_level(ranks, str(config["pattern"]), added, first=reserved)


def _tiktoken(path: Path) -> dict[str, Any]:
    config = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
    if config.get("tokenizer_class") != "TikTokenTokenizer":
        raise TokenizerError(
            f"{path} is for the tokenizer class {config.get('tokenizer_class')}, which is not known; "
            "convert it to tokenizer.json"
        )
    lines = (line.split() for line in path.read_bytes().splitlines() if line.strip())
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    known = {int(token): entry for token, entry in config.get("added_tokens_decoder", {}).items()}
    added = [
        (str(known[token]["content"]), token, bool(known[token].get("special")))
        if token in known
        else (f"<|reserved_token_{token}|>", token, True)
        for token in range(len(ranks), len(ranks) + _KIMI_RESERVED)
    ]
    return byte_level(ranks, _KIMI_SPLIT, added)
