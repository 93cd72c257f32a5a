"""What the API process and a worker say to each other, and how: the one place that knows the wire.

On the socket, a frame is two u32 little-endian lengths, then a JSON header, then the token ids as raw u32. The
configuration travels as JSON on the command line, and while a worker loads it reports on stdout, one JSON value a line.
"""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from engine.api import (
    Abort,
    Admin,
    AdminReply,
    Admitted,
    Command,
    Done,
    EngineConfig,
    Failed,
    GetStats,
    ModelInfo,
    Ping,
    Pong,
    Reply,
    Request,
    Shutdown,
    Stats,
    Tokens,
)
from engine.codec import Codec, CodecError, IdReader, Payload, compile_codec

MAX_HEADER = 8 << 20
"""Bytes of JSON in a frame."""
MAX_PAYLOAD = 32 << 20
"""Bytes of token ids in a frame: 8 million tokens."""
LONG = 4096
"""Bytes of a piece that is sent by itself."""


@dataclass(frozen=True)
class Loading:
    """Progress of a load: ``done`` of ``total`` units of ``what``."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """The model is loaded and the socket listens."""


@dataclass(frozen=True)
class LoadFailed:
    """This model cannot be served; trying again will not help. ``message`` is one line for a human."""

    message: str


Status = Loading | Ready | LoadFailed
Message = Command | Reply | Ping | Pong


class MessageError(ValueError):
    """Bytes that are no message of ours, or a message too large to send."""


_MESSAGES: dict[str, type] = {
    "request": Request,
    "abort": Abort,
    "get_stats": GetStats,
    "admin": Admin,
    "shutdown": Shutdown,
    "admitted": Admitted,
    "tokens": Tokens,
    "done": Done,
    "failed": Failed,
    "model_info": ModelInfo,
    "stats": Stats,
    "admin_reply": AdminReply,
    "ping": Ping,
    "pong": Pong,
}
_STATUSES: dict[str, type] = {"loading": Loading, "ready": Ready, "load_failed": LoadFailed}

_CODECS: dict[str, Codec] = {name: compile_codec(cls) for name, cls in (_MESSAGES | _STATUSES).items()}
_NAMES: dict[type, str] = {cls: name for name, cls in (_MESSAGES | _STATUSES).items()}
_CONFIG = compile_codec(EngineConfig)
_LENGTHS = struct.Struct("<II")
_dump = json.JSONEncoder(separators=(",", ":")).encode


def encode(message: Message) -> bytes:
    """One frame. Raises MessageError."""
    return b"".join(encode_parts(message))


def encode_parts(message: Message) -> Payload:
    """One frame in few pieces, the long ones of which are the message's own: joined, a long prompt would be copied for
    nothing. Raises MessageError when a field has a wrong type or the frame would be too large."""
    payload: Payload = []
    name = _NAMES[type(message)]
    try:
        header = _dump([name, _CODECS[name].pack(message, payload)]).encode()
    except CodecError as error:
        raise MessageError(f"{name}: {error}") from error
    size = sum(map(len, payload))
    _check_lengths(len(header), size)
    pieces: Payload = []
    for long, run in groupby([_LENGTHS.pack(len(header), size) + header, *payload], lambda piece: len(piece) > LONG):
        some = [*run]
        pieces += some if long else [b"".join(some)]
    return pieces


def decode(header: bytes, payload: bytes) -> Message:
    """The message of one frame. Raises MessageError."""
    name, body = _tagged(header)
    if name not in _MESSAGES:
        raise MessageError(f"unknown message {name!r:.80}")
    ids = IdReader(payload)
    try:
        message: Message = _CODECS[name].unpack(body, ids)
        ids.finish()
    except CodecError as error:
        raise MessageError(f"{name}: {error}") from error
    return message


async def read_message(reader: asyncio.StreamReader) -> Message:
    """The next message. Raises EOFError when the other side is gone, MessageError for anything that is no frame."""
    header_length, payload_length = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    _check_lengths(header_length, payload_length)
    header = await reader.readexactly(header_length)
    return decode(header, await reader.readexactly(payload_length))


def status_line(status: Status) -> str:
    """A load report as one line of JSON, without its newline."""
    name = _NAMES[type(status)]
    return json.dumps([name, _CODECS[name].pack(status, [])])


def parse_status(line: bytes) -> Status | None:
    """The report in a line of a worker's stdout; None when a library printed the line."""
    try:
        name, body = _tagged(line)
        if name not in _STATUSES:
            return None
        status: Status = _CODECS[name].unpack(body, IdReader(b""))
    except (MessageError, CodecError):
        return None
    return status


def config_to_json(config: EngineConfig) -> str:
    return json.dumps(_CONFIG.pack(config, []))


def config_from_json(text: str) -> EngineConfig:
    """Raises MessageError."""
    try:
        config: EngineConfig = _CONFIG.unpack(_parse(text.encode()), IdReader(b""))
    except CodecError as error:
        raise MessageError(f"configuration: {error}") from error
    return config


def _tagged(data: bytes) -> tuple[str, Any]:
    value = _parse(data)
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        raise MessageError("not a [name, body] pair")
    return value[0], value[1]


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {error}") from error


def _check_lengths(header: int, payload: int) -> None:
    if header > MAX_HEADER or payload > MAX_PAYLOAD or payload % 4:
        raise MessageError(f"a frame of {header} + {payload} bytes; at most {MAX_HEADER} + {MAX_PAYLOAD}")
