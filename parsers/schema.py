"""How the text of an untyped argument becomes JSON: the tool's schema decides.

Values are passed on as the model spelled them wherever that is JSON already: numbers keep their digits, objects their
key order.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

_ALIASES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "dict": "object", "list": "array"}
_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
_INTEGER = re.compile(r"-?\d+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_DEPTH = 16
"""How many references and alternatives are followed."""


def property_types(parameters: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The JSON types that each declared property may have; an empty set where the schema does not say."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {str(key): frozenset(_types(schema, parameters, _DEPTH)) for key, schema in properties.items()}


def _types(schema: object, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list | tuple) else []
    found = {_ALIASES.get(str(name).lower(), str(name).lower()) for name in names}
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list | tuple) else ():
            found |= _types(option, root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: object = root
        for part in reference[2:].split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        found |= _types(target, root, depth - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not found and isinstance(values, list | tuple):
        found = {_TYPES.get(type(value), "object") for value in values}
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
        return (text, False) if text[:1] != '"' and is_json(text) else (quoted(raw), False)
    if "null" in types and text in ("null", "None"):
        return "null", False
    if types & {"object", "array"} and text[:1] in ("{", "["):
        if is_json(text):
            return text, False
        if (literal := _python_literal(text)) is not None:
            return literal, True
    if "string" in types:
        return quoted(raw), False
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower(), False
    if types & {"integer", "number"} and _INTEGER.fullmatch(text):
        sign, digits = ("-", text[1:]) if text[0] == "-" else ("", text)
        return sign + (digits.lstrip("0") or "0"), False
    if "number" in types and (number := _finite(text)) is not None:
        return number, False
    if not types and text[:1] != '"' and is_json(text):
        return text, False
    return quoted(raw), False


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    """Strict JSON: no NaN, no infinities, no depth that a client could not read either."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def is_json_object(text: str) -> bool:
    return text.lstrip()[:1] == "{" and is_json(text)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> str | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value) or "_" in text:
        return None
    return text if _NUMBER.fullmatch(text) else json.dumps(value)


def _python_literal(text: str) -> str | None:
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
