"""Schemas for templates that read them word by word instead of printing them.

Such templates expect a type in every place and one type only. References are followed, of several possibilities the
first that is not null is taken, and what is missing is put in. The model reads less that way; the grammar and the
parser keep the whole schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parsers.schema import target

_DEPTH = 32
_PLACES = 2000
"""Descriptions in one schema; those beyond say nothing."""
_UNIONS = ("anyOf", "oneOf", "allOf")
_Path = tuple[object, ...]
"""References that were followed to get somewhere, None for each step without one."""


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    plain = _plain({"type": "object", **schema}, schema, (), iter(range(_PLACES)))
    return {"properties": {}, "required": [], **plain}


def _plain(schema: Any, root: Mapping[str, Any], path: _Path, places: Iterator[int]) -> dict[str, Any]:
    if not isinstance(schema, Mapping) or next(places, None) is None:
        return {"type": "string", "description": ""}
    schema, path = _chosen(schema, root, path)
    plain: dict[str, Any] = {
        "description": "",
        **{key: value for key, value in schema.items() if key not in ("$defs", "definitions")},
    }
    plain["type"] = _type(schema)
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        plain["properties"] = {key: _plain(value, root, path, places) for key, value in properties.items()}
    if plain["type"] == "array" or "items" in schema:
        plain["items"] = _plain(schema.get("items", {}), root, path, places)
    return plain


def _chosen(schema: Mapping[str, Any], root: Mapping[str, Any], path: _Path) -> tuple[dict[str, Any], _Path]:
    """With what it refers to, of which only the type is told inside itself, and of alternatives the first that is not
    null."""
    reference = schema.get("$ref")
    options = [target(reference, root)]
    if reference in path and isinstance(options[0], Mapping):
        options = [{key: options[0][key] for key in ("type", "description") if key in options[0]}]
    for union in _UNIONS:
        options += schema[union] if isinstance(schema.get(union), list) else []
    own = {key: value for key, value in schema.items() if key not in ("$ref", *_UNIONS)}
    path = (*path, reference)
    for option in options if len(path) < _DEPTH else ():
        if isinstance(option, Mapping):
            first, inside = _chosen(option, root, path)
            if first.get("type") != "null":
                return {**first, **own}, inside
    return own, path


def _type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), "string")
    if isinstance(kind, str):
        return kind
    if "enum" in schema and isinstance(schema["enum"], list):
        return "string"
    return "object" if "properties" in schema else "array" if "items" in schema else "string"
