"""A tool's schema taken apart: the pieces that a family's own spelling can be put together from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parsers.lark import ANY, GrammarError, escaped

TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
_ALIASES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "dict": "object", "list": "array"}
NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable")
) | frozenset(("$schema", "$id", "$comment", "$anchor", "$defs", "definitions"))
"""Keywords that assert nothing here."""
_OF_MEMBERS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose members are schemas."""
_VERBATIM = ("enum", "const", "default", "examples", "required")
_KNOWN: dict[str, frozenset[str]] = {
    "string": frozenset(("enum", "const", "pattern", "format", "minLength", "maxLength")),
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "": frozenset(),
}
_FORMS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("properties",), Mapping),
    **dict.fromkeys(("required", "anyOf", "oneOf", "allOf", "enum"), (list, tuple)),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), int),
    **dict.fromkeys(("pattern", "format"), str),
}
"""What the value of a keyword is."""
DEPTH = 64
_WEIGHT = 4000
_MEMBERS = 512
_FORMATS = {
    "date": r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])",
    "time": r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-][0-9]{2}:[0-9]{2})",
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[A-Za-z0-9_.+\-]+@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)+",
    "uri": r"[A-Za-z][A-Za-z0-9+.\-]*:[!#-;=?-_a-z~]+",
    "ipv4": r"(?:(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])",
}
_FORMATS["date-time"] = _FORMATS["date"] + "T" + _FORMATS["time"]


@dataclass(frozen=True)
class Member:
    key: str
    schema: object
    required: bool


class Parts:
    """A schema. ``exact`` False: what cannot be enforced is passed over."""

    def __init__(self, root: Mapping[str, Any], *, exact: bool) -> None:
        self.root, self.exact = root, exact
        self._open = _weighed(root)

    def refuse(self, keyword: str) -> None:
        if self.exact:
            raise GrammarError(f"the schema's {keyword} cannot be enforced in the way this model writes arguments")

    def alternatives(self, schema: object, depth: int = 0) -> list[dict[str, Any]]:
        """A schema as alternatives with one type each; "" is any type."""
        if depth > DEPTH:
            raise GrammarError("the schema's references go round in circles")
        if not isinstance(schema, Mapping):
            return [{"type": ""}] if schema else []
        target = schema.get("$ref")
        if target is not None:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            return self.alternatives({**self.target(target), **rest}, depth + 1)
        own = {key: value for key, value in schema.items() if key not in NOTES}
        for key, form in _FORMS.items():
            if key in own and not isinstance(own[key], form):
                raise GrammarError(f"the schema's {key} is malformed")
        options = own.get("anyOf", own.get("oneOf", own.get("allOf")))
        if isinstance(options, list | tuple):
            if "allOf" in own and len(options) != 1:
                self.refuse("allOf")
            several = [one for option in options for one in self.alternatives(option, depth + 1)]
            rest = {key: value for key, value in own.items() if key not in ("anyOf", "oneOf", "allOf")}
            if rest and rest != {"type": "object"}:
                self.refuse("anyOf beside other keywords")
            return several
        values = own.get("enum", [own["const"]] if "const" in own else None)
        if isinstance(values, list | tuple):
            texts = [value for value in values if isinstance(value, str)]
            others = [value for value in values if not isinstance(value, str)]
            return [
                *([{"type": "string", "enum": texts}] if texts else ()),
                *({"type": "", "const": v} for v in others),
            ]
        types = types_of(schema)
        if not types:
            types = ["object"] if "properties" in own else ["array"] if "items" in own else [""]
        return [{**own, "type": one} for one in types]

    def target(self, reference: object) -> Mapping[str, Any]:
        found: object = self.root
        parts = reference[1:].split("/") if isinstance(reference, str) and reference.startswith("#") else ["?"]
        for part in filter(None, parts):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            raise GrammarError(f"the schema's $ref {reference!r:.80} leads nowhere")
        return found

    def check(self, alternative: Mapping[str, Any]) -> None:
        """Refuses keywords that this spelling knows nothing of."""
        kind = alternative["type"]
        for key in alternative.keys() - _KNOWN[kind if kind in _KNOWN else ""] - {"type"}:
            self.refuse(key)

    def members(self, schema: object) -> tuple[list[Member], bool]:
        """The members of an object in the schema's order, and whether it may have others."""
        objects = [one for one in self.alternatives(schema) if one["type"] in ("object", "")]
        if not objects:
            raise GrammarError("the schema is not that of an object")
        if len(objects) > 1:
            self.refuse("anyOf")
        known = objects[0]
        self.check({**known, "type": "object"})
        properties, required = known.get("properties", {}), known.get("required", ())
        more = known.get("additionalProperties", "properties" not in known)
        if isinstance(more, Mapping) and more.keys() - NOTES:
            self.refuse("additionalProperties")
        found = [Member(key, value, key in required) for key, value in properties.items()]
        found += [Member(key, {}, True) for key in required if isinstance(key, str) and key not in properties]
        if len(found) > _MEMBERS:
            raise GrammarError(f"the schema has more than {_MEMBERS} properties in one object")
        return found, more is not False

    def pattern(self, alternative: Mapping[str, Any]) -> str:
        """A regular expression for a string; "" for any."""
        self.check(alternative)
        asked = [key for key in ("enum", "pattern", "format") if key in alternative]
        low, high = alternative.get("minLength", 0), alternative.get("maxLength", "")
        if len(asked) + bool(low or high != "") > 1:
            self.refuse(f"{asked[0]} beside other keywords for the same string")
        match asked:
            case ["enum", *_]:
                return "|".join(escaped(value) for value in alternative["enum"])
            case ["pattern", *_]:
                pattern = str(alternative["pattern"])
                body = pattern.removeprefix("^")
                ends = body.endswith("$") and not body.endswith(r"\$")
                whole = f"(?:{body.removesuffix('$') if ends else body})"
                return ("" if pattern.startswith("^") else ANY) + whole + ("" if ends else ANY)
            case ["format", *_]:
                if alternative["format"] not in _FORMATS:
                    self.refuse(f"format {alternative['format']!r:.40}")
                return _FORMATS.get(alternative["format"], "")
        return f"(?s:.){{{low},{high}}}" if low or high != "" else ""

    def moved(self, schema: object, depth: int) -> object:
        """A schema as it reads elsewhere than at its root. Objects that declare members have no others, unless they
        say so: a harness refuses what a tool does not know."""
        if not isinstance(schema, Mapping):
            return schema
        if depth > DEPTH:
            raise GrammarError("the schema is nested too deeply")
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _VERBATIM:
                found[key] = value
            elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
                found[key] = "#/$defs/root" + value[1:]
            elif key in _OF_MEMBERS and isinstance(value, Mapping):
                if key not in ("$defs", "definitions") or schema is self.root:
                    found[key] = {name: self.moved(one, depth + 1) for name, one in value.items()}
            elif isinstance(value, Mapping):
                found[key] = self.moved(value, depth + 1)
            elif isinstance(value, list | tuple):
                found[key] = [self.moved(one, depth + 1) for one in value]
            elif key not in NOTES and not key.startswith("x-"):
                found[key] = value
        if "type" in schema:
            found["type"] = types_of(schema)
        if "properties" in schema and not self._open and not found.keys() & {"anyOf", "oneOf", "$ref"}:
            found.setdefault("additionalProperties", False)
        return found


def _weighed(root: Mapping[str, Any]) -> bool:
    """Whether the schema joins others with ``allOf``. Raises GrammarError for one that a compiler would go down into
    too far: as deep as it is nested, for each part of it that it refers to."""
    deepest, references, joins = 0, set[str](), False
    ahead: list[tuple[object, int]] = [(root, 1)]
    while ahead:
        part, depth = ahead.pop()
        deepest = max(deepest, depth)
        if isinstance(part, Mapping):
            reference = part.get("$ref")
            references |= {reference} if isinstance(reference, str) else set()
            joins = joins or "allOf" in part
            ahead += ((one, depth + 1) for one in part.values())
        elif isinstance(part, list | tuple):
            ahead += ((one, depth + 1) for one in part)
    if deepest * (1 + len(references)) > _WEIGHT:
        raise GrammarError("the schema is nested too deeply, or refers to too many parts of it")
    return joins


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """The declared types, spelled as JSON Schema does."""
    declared = schema.get("type", [])
    names = [str(name) for name in (declared if isinstance(declared, list | tuple) else [declared])]
    found = [_ALIASES.get(name.lower(), name) for name in names]
    if found and schema.get("nullable") is True:
        found.append("null")
    unknown = [name for name in found if name not in TYPES]
    if unknown:
        raise GrammarError(f"the schema's type {unknown[0]!r:.40} is none")
    return list(dict.fromkeys(found))


def wire_types(alternative: Mapping[str, Any]) -> tuple[str, ...]:
    """The types of an alternative's values; none if it may be any."""
    if alternative["type"]:
        return (alternative["type"],)
    if "const" not in alternative:
        return ()
    value = alternative["const"]
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return (names[type(value)],)


def bare(alternative: Mapping[str, Any]) -> dict[str, Any]:
    """An alternative as a schema."""
    if "const" in alternative:
        return {"const": alternative["const"]}
    return {key: value for key, value in alternative.items() if key != "type" or value}
