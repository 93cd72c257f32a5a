"""Page keys: a chain of xxh3-128 over (previous key, the page's tokens), seeded by fingerprint and namespace."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_128_digest

from engine.api import PAGE

PAGE_BYTES = 4 * PAGE
"""Bytes of a page's tokens, u32 little-endian."""


def encode(tokens: Sequence[int]) -> bytes:
    """Tokens as u32 little-endian. Raises OverflowError for what is no u32."""
    packed = array("I", tokens)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def root_key(fingerprint: str, namespace: str) -> bytes:
    """The key before the first page."""
    return xxh3_128_digest(f"{len(fingerprint)}:{fingerprint}{namespace}".encode())


def page_key(previous: bytes, page: bytes) -> bytes:
    return xxh3_128_digest(previous + page)


def page_keys(root: bytes, tokens: bytes) -> list[bytes]:
    """``root`` and the key after each whole page of ``tokens``."""
    keys = [root]
    for start in range(0, len(tokens) - PAGE_BYTES + 1, PAGE_BYTES):
        root = xxh3_128_digest(root + tokens[start : start + PAGE_BYTES])
        keys.append(root)
    return keys


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two encoded sequences share."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // 4
    low, high = 0, size // 4
    while high - low > 1:
        middle = (low + high) // 2
        if a[4 * low : 4 * middle] == b[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle
    return low
