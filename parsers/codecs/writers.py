"""Codecs the other way: decoded arguments to the text that a reader turns back into them.

All text comes from the guard already, so what looks like a delimiter in a value is not one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parsers.format import Codec, Elements, Json, JsonCall, Literals, PythonCalls, Tagged

_BARE_KEY = re.compile(r"[^\s:,{}\[\]()\"'<>|]+")
_UNESCAPED = re.compile(r"[^\\\x00-\x1f]*")
_PYTHON_WORDS = {True: "True", False: "False", None: "None"}
_TYPES = (("string", str), ("boolean", bool), ("number", int | float), ("object", Mapping), ("array", list | tuple))


@dataclass(frozen=True)
class Written:
    """A call to write: its name and id, its arguments decoded and verbatim, where that counts, and its number in the
    conversation, from 0, and in the message, from 1."""

    name: str
    id: str
    arguments: Mapping[str, object]
    json: str = ""
    number: int = 0
    ordinal: int = 1


def arguments_text(codec: Codec, call: Written) -> str:
    """What stands behind the header; all of the call where the codec names the tool itself."""
    match codec:
        case Json():
            return call.json
        case JsonCall():
            names = f'"{codec.names[0]}": {_json(call.name)}, "{codec.arguments[0]}": {call.json}'
            return "{" + names + (f', "{codec.id_key}": {_json(call.id)}' if codec.id_key else "") + "}"
        case Tagged():
            found = [_tagged(codec, *member) + codec.between for member in call.arguments.items()]
            return codec.between + "".join(found or [codec.empty])
        case Literals():
            ordered = sorted(call.arguments.items(), key=lambda member: member[0].lower())
            return _braces(f"{_literal_key(codec, key)}:{_literal(codec, value)}" for key, value in ordered)
        case Elements():
            given = {key: value for key, value in call.arguments.items() if value is not None}
            return "".join(_elements(codec, given))  # a null argument is one that is not there
        case PythonCalls():
            members = ", ".join(f"{key}={python_literal(codec, value)}" for key, value in call.arguments.items())
            return f"{call.name}({members})"


def spelled(codec: Codec, text: str) -> str:
    """A name or a key, where it stands in an attribute."""
    escapes = isinstance(codec, Tagged) and codec.escapes
    return text.replace("&", "&amp;").replace('"', "&quot;") if escapes else text


def _tagged(codec: Tagged, key: str, value: object) -> str:
    edge = "\n" if codec.trim == "newline" else ""
    text = value if isinstance(value, str) else _json(value)
    kind = ""
    if codec.typed == "string":
        kind = codec.key_end + ("true" if isinstance(value, str) else "false")
    elif codec.typed:
        kind = codec.key_end + next((name for name, types in _TYPES if isinstance(value, types)), "null")
    return f"{codec.open}{spelled(codec, key)}{kind}{codec.open_end}{edge}{text}{edge}{codec.close}"


def _literal(codec: Literals, value: object) -> str:
    match value:
        case str():
            return f"{codec.quote}{value}{codec.quote}"
        case dict():
            ordered = sorted(value.items(), key=lambda member: str(member[0]).lower())
            return _braces(f"{_literal_key(codec, key)}:{_literal(codec, one)}" for key, one in ordered)
        case list():
            return "[" + ",".join(_literal(codec, one) for one in value) + "]"
        case None:
            return "None"
    return _json(value)


def _literal_key(codec: Literals, key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else f"{codec.quote}{key}{codec.quote}"


def _braces(members: Iterator[str]) -> str:
    return "{" + ",".join(members) + "}"


def _elements(codec: Elements, value: object) -> Iterator[str]:
    match value:
        case Mapping():
            members = [(str(key), one) for key, one in value.items()]
        case list():
            members = [(codec.item, one) for one in value]
        case _:
            yield value if isinstance(value, str) else _json(value)
            return
    for key, one in members:
        yield f"{codec.prefix}<{key}>"
        yield from _elements(codec, one)
        yield f"{codec.prefix}</{key}>"


def python_literal(codec: PythonCalls, value: object) -> str:
    match value:
        case str() if codec.quote not in value and _UNESCAPED.fullmatch(value):
            return f"{codec.quote}{value}{codec.quote}"
        case bool() | None:
            return _PYTHON_WORDS[value]
        case list():
            return "[" + ", ".join(python_literal(codec, one) for one in value) + "]"
    return _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
