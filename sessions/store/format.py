"""Bytes on disk. A segment is a 4 KiB header and then extents, each 4 KiB-aligned and self-describing.

Extent: magic, checksum of the rest of the header, fixed fields, place, then per component its size and its check
(xxh3-64, or the GCM tag), then the description (sealed if there is a key), padding; then the payload, component after
component. The place is not part of what is authenticated, so that an extent can be moved without its key.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from sessions.store.crypt import SALT, TAG, Cipher, Unreadable

BLOCK = 4096
FORMAT = 1
EXTENT_MAGIC = b"FTEXTENT"
SEGMENT_MAGIC = b"FTSEGMNT"
MAX_HEADER = 1 << 20
KEY = 16
"""Bytes of a chain key and of a namespace."""

_SEGMENT = struct.Struct("<8s8sHBBI16s")
_PREFIX = struct.Struct("<8s8sII")
"""Magic, checksum, then the place: segment and block."""
_FIXED = struct.Struct("<HBBIIIQ16s16s")
"""Format, shape, flags, header bytes, components, description bytes, payload bytes, namespace, salt."""
_ABOUT = struct.Struct("<BB16s16sQddHHH")
_ENCRYPTED = 1
_SESSION_BYTES, _KIND_BYTES = 128, 32


class Shape(IntEnum):
    """``PARTIAL`` is a page of less than 64 tokens."""

    PAGE = 1
    PARTIAL = 2
    STATE = 3


class Group(IntEnum):
    """What a segment holds: pages and checkpoints live differently long."""

    PAGES = 1
    STATES = 2


def group(shape: Shape) -> Group:
    return Group.STATES if shape is Shape.STATE else Group.PAGES


def aligned(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where an extent begins: ``block`` counts 4 KiB blocks of the segment."""

    segment: int
    block: int

    def pack(self) -> bytes:
        return struct.pack(">II", self.segment, self.block)

    @classmethod
    def unpack(cls, raw: bytes) -> Place:
        return cls(*struct.unpack(">II", raw))


@dataclass(frozen=True, slots=True)
class About:
    """What an extent holds. ``tokens``: a page's, or a state's tail, u32 little-endian; ``key``: only of full pages."""

    shape: Shape
    parent: bytes
    key: bytes | None
    tokens: bytes
    position: int
    kind: str = ""
    priority: float = 0.0
    pinned: bool = False
    session: str = ""
    exact: bool = True
    created: float = 0.0

    def pack(self) -> bytes:
        kind, session = self.kind.encode()[:_KIND_BYTES], self.session.encode()[:_SESSION_BYTES]
        flags = self.pinned | self.exact << 1
        fixed = _ABOUT.pack(
            self.shape, flags, self.parent, self.key or bytes(KEY), self.position, self.priority, self.created,
            len(self.tokens), len(kind), len(session),
        )  # fmt: skip
        return fixed + self.tokens + kind + session

    @classmethod
    def unpack(cls, raw: bytes) -> About:
        """Raises Unreadable."""
        try:
            shape, flags, parent, key, position, priority, created, *lengths = _ABOUT.unpack_from(raw)
            texts, at = [], _ABOUT.size
            for length in lengths:
                texts.append(raw[at : at + length])
                at += length
            if at != len(raw):
                raise Unreadable("a description of the wrong length")
            kind, session = texts[1].decode(errors="ignore"), texts[2].decode(errors="ignore")
            return cls(
                Shape(shape), parent, key if shape == Shape.PAGE else None, texts[0], position, kind, priority,
                bool(flags & 1), session, bool(flags & 2), created,
            )  # fmt: skip
        except (struct.error, ValueError) as error:
            raise Unreadable(f"no description: {error}") from error


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded extent header; ``raw`` is all of it."""

    raw: bytes
    shape: Shape
    encrypted: bool
    place: Place
    size: int
    namespace: bytes
    salt: bytes
    sizes: tuple[int, ...]
    checks: tuple[bytes, ...]
    description: bytes

    @property
    def length(self) -> int:
        """Bytes of the extent on disk."""
        return aligned(len(self.raw) + self.size)

    def about(self, cipher: Cipher | None) -> About:
        """Raises Unreadable."""
        if self.encrypted != (cipher is not None):
            raise Unreadable("encrypted" if self.encrypted else "not encrypted")
        if cipher is None:
            return About.unpack(self.description)
        plain = bytearray(len(self.description) - TAG)
        context = _context(self.raw, len(self.sizes))
        cipher.sealer(self.salt).open(0, self.description, memoryview(plain), context)
        return About.unpack(bytes(plain))

    def check(self, data: Sequence[memoryview], first: int = 0) -> None:
        """Compare components ``first`` and on, in the clear, with their checksums. Raises Unreadable."""
        checks = self.checks[first : first + len(data)]
        for at, (part, expected) in enumerate(zip(data, checks, strict=True), first):
            if xxh3_64_digest(part).ljust(TAG, b"\0") != expected:
                raise Unreadable(f"the checksum of component {at} is wrong")


def encode_extent(
    about: About, payload: memoryview, sizes: Sequence[int], namespace: bytes, cipher: Cipher | None
) -> tuple[bytearray, list[bytes | memoryview]]:
    """(header, payload as written); ``settle`` completes the header once its place is known."""
    salt = os.urandom(SALT) if cipher else bytes(SALT)
    sealer = cipher.sealer(salt) if cipher else None
    at = 0
    parts: list[bytes | memoryview] = []
    checks: list[bytes] = []
    for number, size in enumerate(sizes, 1):
        part = payload[at : at + size]
        at += size
        if sealer is None:
            parts.append(part)
            checks.append(xxh3_64_digest(part).ljust(TAG, b"\0"))
        else:
            sealed = memoryview(sealer.seal(number, part))
            parts.append(sealed[:-TAG])
            checks.append(bytes(sealed[-TAG:]))
    description = about.pack()
    stored = len(description) + (TAG if sealer else 0)
    tables = b"".join(size.to_bytes(8, "little") + check for size, check in zip(sizes, checks, strict=True))
    length = aligned(_PREFIX.size + _FIXED.size + len(tables) + stored)
    fixed = _FIXED.pack(
        FORMAT, about.shape, _ENCRYPTED if cipher else 0, length, len(sizes), stored, len(payload), namespace, salt
    )
    if sealer is not None:
        description = sealer.seal(0, description, fixed + tables)
    header = bytearray(length)
    header[: _PREFIX.size] = _PREFIX.pack(EXTENT_MAGIC, bytes(8), 0, 0)
    body = fixed + tables + description
    header[_PREFIX.size : _PREFIX.size + len(body)] = body
    return header, parts


def settle(header: bytearray, place: Place) -> None:
    """Write an extent's place and checksum into its header."""
    _PREFIX.pack_into(header, 0, EXTENT_MAGIC, bytes(8), place.segment, place.block)
    header[8:16] = xxh3_64_digest(memoryview(header)[16:])


def header_bytes(start: bytes | bytearray) -> int:
    """How long the header is that starts with these bytes (at least a block). Raises Unreadable."""
    if bytes(start[:8]) != EXTENT_MAGIC:
        raise Unreadable("no extent begins here")
    version, _, _, length, *_ = _FIXED.unpack_from(start, _PREFIX.size)
    if version != FORMAT:
        raise Unreadable(f"format {version}")
    if not BLOCK <= length <= MAX_HEADER or length % BLOCK:
        raise Unreadable("a damaged header")
    return int(length)


def decode_header(raw: bytes) -> Header:
    """Raises Unreadable."""
    if header_bytes(raw) != len(raw) or xxh3_64_digest(memoryview(raw)[16:]) != raw[8:16]:
        raise Unreadable("a damaged header")
    _, _, segment, block = _PREFIX.unpack_from(raw)
    _, shape, flags, _, count, stored, size, namespace, salt = _FIXED.unpack_from(raw, _PREFIX.size)
    at = _PREFIX.size + _FIXED.size
    entries = [raw[at + 24 * one : at + 24 * (one + 1)] for one in range(count)]
    description = raw[at + 24 * count : at + 24 * count + stored]
    sizes = tuple(int.from_bytes(entry[:8], "little") for entry in entries)
    if sum(sizes) != size or shape not in tuple(Shape):
        raise Unreadable("a damaged header")
    checks = tuple(entry[8:] for entry in entries)
    return Header(
        raw, Shape(shape), bool(flags & _ENCRYPTED), Place(segment, block), size, namespace, salt, sizes, checks,
        description,
    )  # fmt: skip


def segment_header(kind: Group, number: int, namespace: bytes) -> bytes:
    """The first block of a segment file; for tools and people, nothing depends on it."""
    raw = bytearray(BLOCK)
    raw[: _SEGMENT.size] = _SEGMENT.pack(SEGMENT_MAGIC, bytes(8), FORMAT, kind, 0, number, namespace)
    raw[8:16] = xxh3_64_digest(memoryview(raw)[16:])
    return bytes(raw)


def seal_record(plain: bytes, cipher: Cipher | None) -> bytes:
    """An index record as stored: sealed, or with a checksum before it."""
    return cipher.seal(plain) if cipher else xxh3_64_digest(plain) + plain


def open_record(stored: bytes, cipher: Cipher | None) -> bytes:
    """Raises Unreadable."""
    if cipher is not None:
        return cipher.open(stored)
    if len(stored) < 8 or xxh3_64_intdigest(stored[8:]) != int.from_bytes(stored[:8], "big"):
        raise Unreadable("a damaged index record")
    return stored[8:]


def _context(raw: bytes, components: int) -> bytes:
    start = _PREFIX.size
    return raw[start : start + _FIXED.size + 24 * components]
