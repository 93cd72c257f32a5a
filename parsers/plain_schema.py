"""Schemas for templates that read them word by word instead of printing them.

Such templates expect a type in every place and one type only. References are followed, of several possibilities the
first that is not null is taken, and what is missing is put in. The model reads less that way; the grammar and the
parser keep the whole schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEPTH = 16


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"properties": {}, "required": [], **_plain({"type": "object", **schema}, schema, 0)}


def _plain(schema: Any, root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return {"type": "string", "description": ""}
    schema = _chosen(_followed(schema, root, depth), root, depth)
    plain: dict[str, Any] = {
        "description": "",
        **{k: v for k, v in schema.items() if k not in ("$defs", "definitions")},
    }
    plain["type"] = _type(schema)
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        plain["properties"] = {key: _plain(value, root, depth + 1) for key, value in properties.items()}
    if plain["type"] == "array" or "items" in schema:
        plain["items"] = _plain(schema.get("items", {}), root, depth + 1)
    return plain


def _followed(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    if not isinstance(reference, str) or depth > _DEPTH:
        return schema
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    rest = {key: value for key, value in schema.items() if key != "$ref"}
    return _followed({**found, **rest}, root, depth + 1) if isinstance(found, Mapping) else rest


def _chosen(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    for union in ("anyOf", "oneOf", "allOf"):
        options = schema.get(union)
        if isinstance(options, list):
            rest = {key: value for key, value in schema.items() if key != union}
            kinds = [_followed(option, root, depth + 1) for option in options if isinstance(option, Mapping)]
            wanted = [kind for kind in kinds if kind.get("type") != "null"]
            return {**(wanted[0] if wanted else {}), **rest}
    return schema


def _type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), "string")
    if isinstance(kind, str):
        return kind
    if "enum" in schema and isinstance(schema["enum"], list):
        return "string"
    return "object" if "properties" in schema else "array" if "items" in schema else "string"
