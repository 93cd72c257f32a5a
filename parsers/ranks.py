"""Byte-level vocabularies: how bytes are spelled, and merges recovered from tiktoken ranks.

``tokenizers`` wants merges, tiktoken files have ranks. A merge is recovered by running BPE on each token's own bytes
with all other merges: two parts remain, and they are the pair that makes the token. Nothing else is ever merged into
it: whatever stands around its bytes, they are merged in the same order as long as none of them is merged outwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def byte_level(
    ranks: Mapping[bytes, int], pattern: str, added: Iterable[tuple[str, int, bool]], first: int = 0
) -> dict[str, Any]:
    """What ``tokenizer.json`` would say of a tiktoken vocabulary.

    ``pattern`` splits text into pieces; ``added``: (text, id, special); ``first`` is the id of rank 0."""
    letters = bytes_to_unicode()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    pairs = (merged_pair(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": token, "content": text, "special": special, "normalized": False, "single_word": False}
            | {"lstrip": False, "rstrip": False}
            for text, token, special in added
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {spelled[token]: first + rank for token, rank in ranks.items()},
            "merges": [[spelled[pair[0]], spelled[pair[1]]] for pair in pairs if pair],
            "ignore_merges": True,  # like tiktoken: a piece that is a token as a whole is taken as it is
        },
    }


def merged_pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens whose merge makes ``token``, found by merging its bytes in rank order; None if there are none.

    A part may have a higher rank than the token (a few do in some vocabularies): then it is merged late, but it is."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best: int | None = None
        at = 0
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1])
            if rank is not None and (best is None or rank < best):
                best, at = rank, i
        if best is None:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's printable letter for each byte: printable Latin-1 stands for itself, the rest moves up past U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(moved)}
