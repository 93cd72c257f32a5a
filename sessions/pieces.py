"""How a value lies on disk: cut into pieces, each with a checksum over its key and its bytes, encrypted if there is a
key. A value that grew at its end shares all but its last pieces with what was there before."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from sessions.store.crypt import Cipher, Unreadable

PIECE = 16_000
"""Bytes; with what is added to them they fit four pages of LMDB's."""
_HEADER = struct.Struct("<Q8s")
_MARK = 8


def cut(payload: bytes) -> list[bytes]:
    """At least one piece; the first begins with the length and the checksum of the whole."""
    pieces = [payload[at : at + PIECE] for at in range(0, max(len(payload), 1), PIECE)]
    pieces[0] = _HEADER.pack(len(payload), xxhash.xxh3_64_digest(payload)) + pieces[0]
    return pieces


def join(pieces: Sequence[bytes]) -> bytes:
    """Raises Unreadable for anything but what ``cut`` gave."""
    whole = b"".join(pieces)
    if len(whole) < _HEADER.size:
        raise Unreadable("a value without its beginning")
    length, mark = _HEADER.unpack_from(whole)
    payload = whole[_HEADER.size :]
    if len(payload) != length or xxhash.xxh3_64_digest(payload) != mark:
        raise Unreadable("a value whose pieces do not fit together")
    return payload


def fingerprint(piece: bytes) -> bytes:
    """Tells whether a piece is the one that was written last."""
    return xxhash.xxh3_128_digest(piece)


class Envelope:
    """Puts a checksum on what is stored under a key, and encrypts both."""

    def __init__(self, cipher: Cipher | None) -> None:
        self._cipher = cipher

    def close(self, key: bytes, payload: bytes) -> bytes:
        marked = _mark(key, payload) + payload
        return self._cipher.seal(marked) if self._cipher else marked

    def open(self, key: bytes, stored: bytes) -> bytes:
        """Raises Unreadable."""
        marked = self._cipher.open(stored) if self._cipher else stored
        payload = marked[_MARK:]
        if marked[:_MARK] != _mark(key, payload):
            raise Unreadable("damaged, or stored under another key")
        return payload


def _mark(key: bytes, payload: bytes) -> bytes:
    state = xxhash.xxh3_64(key)
    state.update(payload)
    return state.digest()
