"""How the text of an untyped argument becomes JSON: the tool's schema decides.

Values are passed on as the model spelled them wherever that is JSON already: numbers keep their digits, objects their
key order.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

FREEFORM_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Formats know only JSON arguments: a free-form tool's input travels as the one string ``input``."""
ALIASES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "dict": "object", "list": "array"}
KINDS = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
_UNKNOWN_ESCAPES = re.compile(r"(?<!\\)(?:\\\\)*\\(?![\\'\"abfnrtvxuUN0-7\n])")
_INTEGER = re.compile(r"-?\d+", re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
NESTING = 128
"""As deep as a value may be nested. Readers of JSON give up somewhere: here, in templates and in clients."""
_ODD = re.compile('[\x00-\x1f"\\\\]')
"""What does not stand for itself in a string of JSON."""
_ESCAPES = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


class Shape:
    """What a schema allows at one place: the types of the value, and the shapes inside it."""

    def __init__(self, schema: object, root: Mapping[str, Any]) -> None:
        self._root = root
        self._places = tuple(_places(schema, root))

    @property
    def types(self) -> frozenset[str]:
        """The JSON types; an empty set where the schema does not say."""
        found: set[str] = set()
        for place in self._places:
            found |= _own_types(place)
        return frozenset(found)

    def member(self, key: str) -> Shape | None:
        """The shape of a member of an object; None if it is not declared."""
        for place in self._places:
            members = place.get("properties")
            if isinstance(members, Mapping) and key in members:
                return Shape(members[key], self._root)
        return next((Shape(more, self._root) for more in self._nested("additionalProperties")), None)

    def item(self) -> Shape | None:
        """The shape of a list's items."""
        return next((Shape(item, self._root) for item in self._nested("items")), None)

    def _nested(self, key: str) -> Iterable[Mapping[str, Any]]:
        return (place[key] for place in self._places if isinstance(place.get(key), Mapping))


def property_types(parameters: Mapping[str, Any], key: str) -> frozenset[str] | None:
    """The JSON types that a declared property may have; an empty set where the schema does not say. None if it is not
    declared."""
    shape = Shape(parameters, parameters).member(key)
    return shape.types if shape else None


def _places(schema: object, root: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """A schema, the alternatives in it, and what they refer to. Each comes once, however many ways lead there."""
    found: dict[int, Mapping[str, Any]] = {}
    ahead = deque([schema])
    while ahead:
        place = ahead.popleft()
        if not isinstance(place, Mapping) or id(place) in found:
            continue
        found[id(place)] = place
        for key in ("anyOf", "oneOf", "allOf"):
            options = place.get(key)
            ahead.extend(options if isinstance(options, list | tuple) else ())
        ahead.append(target(place.get("$ref"), root))
    return found.values()


def target(reference: object, root: Mapping[str, Any]) -> object:
    """What a reference inside the schema points to; None if nothing."""
    found: object = root if isinstance(reference, str) and reference.startswith("#") else None
    for part in filter(None, unquote(str(reference)[1:]).split("/")):
        if isinstance(found, list):
            found = found[int(part)] if part.isdecimal() and len(part) < 9 and int(part) < len(found) else None
        else:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that one place names itself."""
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list | tuple) else []
    found = {ALIASES.get(str(name).lower(), str(name).lower()) for name in names}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not found and isinstance(values, list | tuple):
        found = {KINDS.get(type(value), "object") for value in values}
    if not found and ("properties" in schema or "additionalProperties" in schema):
        found.add("object")
    if not found and "items" in schema:
        found.add("array")
    if schema.get("nullable") is True:
        found.add("null")
    return found


def json_of(raw: str, types: frozenset[str] | None) -> tuple[str, bool]:
    """(JSON text, spelled as a Python literal) for a value; ``types`` is None for a key the schema does not declare."""
    text = raw.strip()
    if types is None:
        # Undeclared: JSON when it is JSON and not itself a string, else the text.
        return (well_formed(text), False) if text[:1] != '"' and is_json(text) else (quoted(raw), False)
    if "null" in types and text in ("null", "None"):
        return "null", False
    if types & {"object", "array"} and text[:1] in ("{", "["):
        if is_json(text):
            return well_formed(text), False
        if (literal := _python_literal(text)) is not None:
            return literal, True
    if "string" in types:
        return quoted(raw), False
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower(), False
    if types & {"integer", "number"} and _INTEGER.fullmatch(text):
        sign, digits = ("-", text[1:]) if text[0] == "-" else ("", text)
        return sign + (digits.lstrip("0") or "0"), False
    if "number" in types and (number := _number(text)) is not None:
        return number, False
    if not types and text[:1] != '"' and is_json(text):
        return well_formed(text), False
    return quoted(raw), False


def wire_json(raw: str) -> tuple[str, bool]:
    """(JSON text, spelled as a Python literal) for what the wire says is no text; the text if it reads as nothing."""
    text = raw.strip()
    if is_json(text):
        return well_formed(text), False
    literal = _python_literal(text)
    return (quoted(raw), False) if literal is None else (literal, True)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def unquoted(text: str) -> str:
    """Text as it stands inside a string of JSON."""
    return quoted(text)[1:-1] if _ODD.search(text) else text


def is_json(text: str) -> bool:
    """Strict JSON: no NaN, no depth that a client could not read either. Numbers are of any size, as in every
    grammar of JSON; what is made of them is the client's business."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=str, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return text.count("[") + text.count("{") <= NESTING or not too_deep(value)


def is_json_object(text: str) -> bool:
    return text.lstrip()[:1] == "{" and is_json(text)


def too_deep(value: object) -> bool:
    """Whether a JSON value has more containers inside each other than what is passed on."""
    level = [value]
    for _ in range(NESTING):
        level = [child for one in level for child in _children(one) if isinstance(child, dict | list | tuple)]
    return bool(level)


def _children(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def well_formed(text: str) -> str:
    """JSON text without half surrogate pairs in its escapes, which no reader could write again."""
    return _ESCAPES.sub(lambda escape: r"\ufffd" if escape[1] else escape[0], text) if r"\u" in text else text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _number(text: str) -> str | None:
    """A number as it is spelled; in JSON's spelling, where it is in Python's."""
    if _NUMBER.fullmatch(text):
        return text
    try:
        value = float(text.replace("_", "x"))
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None


def _python_literal(text: str) -> str | None:
    try:
        value = ast.literal_eval(_UNKNOWN_ESCAPES.sub(r"\\\g<0>", text))
        written = None if too_deep(value) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    # Escapes may have spelled surrogate pairs, or halves of them.
    return written and written.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
