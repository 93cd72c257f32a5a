"""Encryption at rest: AES-256-GCM, a fresh key per extent. `cryptography` is imported only when there is a key.

The user's key is stretched to a root key by a keyed hash; every extent and every index record is sealed with a key
derived from the root and 16 random bytes, so that nonces can be plain counters. What still shows: how many extents
there are, their sizes, when they were written, and the namespace (a hash of the fingerprint). Tokens, chain keys,
positions, session names and payload do not.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from sessions.store.config import StoreError, StoreKeyError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SALT = 16
TAG = 16


class Unreadable(Exception):
    """Bytes that are not what was written: damaged, torn, or sealed with another key."""


class Sealer:
    """Seals the pieces of one extent. A piece's number is its nonce, so each is used once."""

    def __init__(self, aead: AESGCM) -> None:
        self._aead = aead

    def seal(self, piece: int, plain: bytes | memoryview, context: bytes = b"") -> bytes:
        """Ciphertext and tag."""
        return self._aead.encrypt(piece.to_bytes(12, "little"), plain, context)

    def open(self, piece: int, sealed: bytes | memoryview, into: memoryview, context: bytes = b"") -> None:
        """Raises Unreadable."""
        from cryptography.exceptions import InvalidTag

        try:
            self._aead.decrypt_into(piece.to_bytes(12, "little"), sealed, context, into)
        except InvalidTag as error:
            raise Unreadable("sealed with another key, or damaged") from error


class Cipher:
    """Raises StoreKeyError for a key of less than 16 bytes, StoreError without the `cryptography` package."""

    def __init__(self, key: bytes) -> None:
        if len(key) < 16:
            raise StoreKeyError("the store's key must have at least 16 bytes")
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise StoreError("an encrypted store needs the `cryptography` package") from error
        self._aead = AESGCM
        self._root = hashlib.blake2b(hashlib.blake2b(key).digest(), digest_size=32, person=b"store root key").digest()

    def sealer(self, salt: bytes) -> Sealer:
        """What was sealed with these 16 random bytes."""
        return Sealer(self._aead(self._derived(salt, b"extent")))

    def seal(self, plain: bytes) -> bytes:
        """A small record with its own salt."""
        salt = os.urandom(SALT)
        return salt + self.sealer(salt).seal(0, plain)

    def open(self, sealed: bytes) -> bytes:
        """Raises Unreadable."""
        plain = bytearray(len(sealed) - SALT - TAG if len(sealed) >= SALT + TAG else 0)
        self.sealer(sealed[:SALT]).open(0, sealed[SALT:], memoryview(plain))
        return bytes(plain)

    def check(self, salt: bytes) -> bytes:
        """Bytes that only this key gives."""
        return self._derived(salt, b"check")

    def _derived(self, salt: bytes, purpose: bytes) -> bytes:
        return hashlib.blake2b(salt, key=self._root, digest_size=32, person=purpose).digest()
