"""Frozen dataclasses to JSON and back, strictly, from their annotations alone.

Every ``tuple[int, ...]`` or ``Sequence[int]`` (token ids, positions) goes to a binary side channel as u32 little-endian
and leaves only its length in the JSON, so that a prompt of 100k tokens never becomes text. Both directions check every
value: a message that was encoded can be decoded, and a decoded one has exactly its annotated types.
"""

from __future__ import annotations

import dataclasses
import struct
import sys
import types
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Payload = list[bytes | memoryview]
"""Bytes in pieces."""
_I64 = 1 << 63
_U32 = sys.byteorder == "little" and array("I").itemsize == 4
"""Whether a view of ints has the bytes that are sent."""


class CodecError(ValueError):
    """A value does not have the shape its annotation says."""


class IdReader:
    """Takes runs of u32 off a payload, in the order they were written."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._offset = 0

    def take(self, count: int) -> tuple[int, ...]:
        size = 4 * count
        if count < 0 or self._offset + size > len(self._payload):
            raise CodecError(f"the payload ends before {count} ids at byte {self._offset}")
        ids = struct.unpack_from(f"<{count}I", self._payload, self._offset)
        self._offset += size
        return ids

    def finish(self) -> None:
        if self._offset != len(self._payload):
            raise CodecError(f"{len(self._payload) - self._offset} bytes of payload belong to nothing")


@dataclass(frozen=True)
class Codec:
    """``pack`` turns a value into JSON and appends its ids to the pieces of a payload; ``unpack`` is its inverse.
    Both raise CodecError."""

    pack: Callable[[Any, Payload], Any]
    unpack: Callable[[Any, IdReader], Any]


def compile_codec(annotation: Any) -> Codec:
    """The codec of a type: str, int, float, bool, Literal, X | None, str | float, tuples, Sequence[int] (which is read
    as a tuple), dict[str, X], dataclasses and tuples of named tuples of these."""
    origin, args = get_origin(annotation), get_args(annotation)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _record(annotation)
    if origin is Literal:
        return _one_of(args)
    if origin in (Union, types.UnionType) and len(args) == 2 and args[1] is type(None):
        return _optional(compile_codec(args[0]))
    if origin in (Union, types.UnionType) and args == (str, float):
        return _text_or_number()
    if args == (int, Ellipsis) or (origin is Sequence and args == (int,)):
        return _ids()
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _table(args[0]) if hasattr(args[0], "_fields") else _sequence(compile_codec(args[0]))
    if origin is tuple:
        return _fixed([compile_codec(arg) for arg in args])
    if origin is dict and args[0] is str:
        return _mapping(compile_codec(args[1]))
    if annotation is float:
        return _float()
    if annotation in (int, str, bool):
        return _scalar(annotation)
    raise TypeError(f"no wire form for {annotation!r}")


def _one_of(known: tuple[Any, ...]) -> Codec:
    def check(value: Any, _: object) -> str:
        if not isinstance(value, str) or value not in known:
            raise CodecError(f"{value!r:.80} is none of {known}")
        return value

    return Codec(check, check)


def _scalar(kind: Any) -> Codec:
    def check(value: Any, _: object) -> Any:
        if type(value) is not kind or (kind is int and not -_I64 <= value < _I64):
            raise CodecError(f"{value!r:.80} is no {kind.__name__} of a message")
        return value

    return Codec(check, check)


def _float() -> Codec:
    def check(value: Any, _: object) -> float:
        if type(value) not in (int, float):
            raise CodecError(f"{value!r:.80} is not a number")
        try:
            return float(value)
        except OverflowError as error:
            raise CodecError("a number is out of range") from error

    return Codec(check, check)


def _text_or_number() -> Codec:
    number = _float()

    def check(value: Any, ids: Any) -> Any:
        return value if type(value) is str else number.pack(value, ids)

    return Codec(check, check)


def _ids() -> Codec:
    def pack(value: Any, payload: Payload) -> int:
        if isinstance(value, memoryview) and value.format == "I" and value.contiguous and _U32:
            payload.append(value.cast("B"))
            return len(value)
        if not isinstance(value, tuple):
            raise CodecError("ids are neither a tuple nor a view of u32")
        try:
            payload.append(struct.pack(f"<{len(value)}I", *value))
        except struct.error as error:
            raise CodecError(f"ids are not u32: {error}") from error
        return len(value)

    def unpack(value: Any, ids: IdReader) -> tuple[int, ...]:
        if type(value) is not int:
            raise CodecError("the count of ids is not an integer")
        return ids.take(value)

    return Codec(pack, unpack)


def _optional(inner: Codec) -> Codec:
    return Codec(
        lambda value, payload: None if value is None else inner.pack(value, payload),
        lambda value, ids: None if value is None else inner.unpack(value, ids),
    )


def _sequence(inner: Codec) -> Codec:
    def pack(value: Any, payload: Payload) -> list[Any]:
        return [inner.pack(item, payload) for item in _expect(value, tuple)]

    def unpack(value: Any, ids: IdReader) -> tuple[Any, ...]:
        return tuple(inner.unpack(item, ids) for item in _expect(value, list))

    return Codec(pack, unpack)


def _fixed(parts: list[Codec]) -> Codec:
    def sized(value: Any, kind: type) -> Any:
        if len(_expect(value, kind)) != len(parts):
            raise CodecError(f"{len(value)} items where {len(parts)} belong")
        return value

    def pack(value: Any, payload: Payload) -> list[Any]:
        return [part.pack(item, payload) for part, item in zip(parts, sized(value, tuple), strict=True)]

    def unpack(value: Any, ids: IdReader) -> tuple[Any, ...]:
        return tuple(part.unpack(item, ids) for part, item in zip(parts, sized(value, list), strict=True))

    return Codec(pack, unpack)


def _table(cls: Any) -> Codec:
    """Rows of one kind, column by column, which takes a fraction of the time."""
    hints = get_type_hints(cls)
    columns = [_column(hints[name]) for name in cls._fields]

    def pack(value: Any, payload: Payload) -> list[Any]:
        if {*map(type, _expect(value, tuple))} - {cls}:
            raise CodecError(f"something else where only {cls.__name__} belongs")
        return [column.pack(one, payload) for column, one in zip(columns, zip(*value, strict=True), strict=False)]

    def unpack(value: Any, ids: IdReader) -> tuple[Any, ...]:
        if len(_expect(value, list)) not in (0, len(columns)):
            raise CodecError(f"{len(value)} columns of {cls.__name__}")
        parts = [column.unpack(one, ids) for column, one in zip(columns, value, strict=False)]
        if len({*map(len, parts)}) > 1:
            raise CodecError(f"columns of {cls.__name__} that differ in length")
        return tuple(map(cls._make, zip(*parts, strict=True)))

    return Codec(pack, unpack)


def _column(annotation: Any) -> Codec:
    """Of values of one type: simple ones are looked at together."""
    one = compile_codec(annotation)

    def simple(values: Any) -> bool:
        if annotation not in (int, str, bool, float) or {*map(type, values)} - {annotation}:
            return False
        return annotation is not int or -_I64 <= min(values, default=0) <= max(values, default=0) < _I64

    return Codec(
        lambda value, payload: value if simple(value) else [one.pack(item, payload) for item in value],
        lambda value, ids: value if simple(_expect(value, list)) else [one.unpack(item, ids) for item in value],
    )


def _mapping(inner: Codec) -> Codec:
    def pack(value: Any, payload: Payload) -> dict[str, Any]:
        return {_expect(key, str): inner.pack(item, payload) for key, item in _expect(value, dict).items()}

    def unpack(value: Any, ids: IdReader) -> dict[str, Any]:
        return {key: inner.unpack(item, ids) for key, item in _expect(value, dict).items()}

    return Codec(pack, unpack)


def _record(cls: type) -> Codec:
    hints = get_type_hints(cls)
    parts = {field.name: compile_codec(hints[field.name]) for field in dataclasses.fields(cls)}

    def pack(value: Any, payload: Payload) -> dict[str, Any]:
        if type(value) is not cls:
            raise CodecError(f"{type(value).__name__} where {cls.__name__} belongs")
        return {name: part.pack(value.__dict__[name], payload) for name, part in parts.items()}

    def unpack(value: Any, ids: IdReader) -> Any:
        body = _expect(value, dict)
        if body.keys() != parts.keys():
            raise CodecError(f"{cls.__name__} with wrong fields: {sorted(body.keys() ^ parts.keys())!r:.200}")
        return cls(**{name: part.unpack(body[name], ids) for name, part in parts.items()})

    return Codec(pack, unpack)


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise CodecError(f"{type(value).__name__} where {kind.__name__} belongs")
    return value
