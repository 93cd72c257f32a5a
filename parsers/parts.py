"""A tool's schema taken apart: the pieces that a family's own spelling can be put together from."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from parsers.lark import ANY, GrammarError, escaped
from parsers.schema import ALIASES, KINDS, target

TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
_NOTES = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable"))
_NOTES |= frozenset(("$schema", "$id", "$comment", "$anchor"))
"""Keywords that assert nothing here."""
_OF_MEMBERS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose members are schemas."""
_VERBATIM = ("enum", "const", "required")
_UNIONS = ("anyOf", "oneOf", "allOf")
_KNOWN: dict[str, tuple[str, ...]] = {
    "string": ("enum", "pattern", "format", "minLength", "maxLength"),
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
}
_FORMS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("properties", "$defs", "definitions"), Mapping),
    **dict.fromkeys(("required", "enum", *_UNIONS), (list, tuple)),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), int),
    **dict.fromkeys(("pattern", "format", "$ref"), str),
}
"""What the value of a keyword is."""
_ROOT = "#/$defs/root"
DEPTH = 64
_WEIGHT = 2000
_MEMBERS = 512
_PARTS = 20_000
_LENGTH = 2000
_MULTIPLES = 4096
"""Bounds of what a compiler is asked to do; the last is the sum of all ``multipleOf``, whose squares it takes."""
_ATOMS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^()]", re.DOTALL)
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
        self.exact = exact
        self._joined, self._spent = _joins(root), 0
        self._deepest, self._multiples, self._references = 0, 0.0, set[str]()
        self.root: dict[str, Any] = self._cleaned(root, 1)
        if self._deepest * (1 + len(self._references)) > _WEIGHT:
            raise GrammarError("the schema is nested too deeply, or refers to too many parts of it")
        self._endless = self._without_end()
        if self._endless and exact:
            raise GrammarError(
                f"the schema's $ref {min(self._endless).replace(_ROOT, '#')!r:.80} demands itself for ever"
            )
        if self._endless:
            self.root = self._loosened(self.root)

    def refuse(self, keyword: str) -> None:
        if self.exact:
            raise GrammarError(f"the schema's {keyword} cannot be enforced in the way this model writes arguments")

    def _cleaned(self, schema: Any, depth: int) -> Any:
        """A schema of what asserts something, with references that lead on where it stands inside another one. Objects
        that declare members have no others, unless they say so: a harness refuses what a tool does not know."""
        if not isinstance(schema, Mapping):
            return schema
        if depth > DEPTH:
            raise GrammarError("the schema is nested too deeply")
        self._deepest = max(depth, self._deepest)
        found: dict[str, Any] = {}
        malformed = [key for key, value in schema.items() if not isinstance(value, _FORMS.get(key, object))]
        if malformed:
            raise GrammarError(f"the schema's {malformed[0]} is malformed")
        for key, value in schema.items():
            if key in _VERBATIM:
                found[key] = value
            elif key in _OF_MEMBERS and isinstance(value, Mapping):
                found[key] = {name: self._cleaned(one, depth + 1) for name, one in value.items()}
            elif key == "$ref":
                self._references.add(value)
                found[key] = _ROOT + value[1:] if value.startswith("#") else value
            elif isinstance(value, list | tuple) and key not in _NOTES:
                found[key] = [self._cleaned(one, depth + 1) for one in value]
            elif key not in _NOTES and not key.startswith("x-") and self._bounded(key, value):
                found[key] = self._cleaned(value, depth + 1)
        if "type" in schema:
            found["type"] = _types(schema)
        if "properties" in found and not self._joined and not found.keys() & {"anyOf", "oneOf", "$ref"}:
            if "additionalProperties" not in found:
                found["properties"] |= {key: True for key in _required(found) if key not in found["properties"]}
            found.setdefault("additionalProperties", False)
        if len(found.get("properties", ())) > _MEMBERS:
            raise GrammarError(f"the schema has more than {_MEMBERS} properties in one object")
        return found

    def _without_end(self) -> set[str]:
        """References to what no finite value satisfies: all that a value of it must have demands another one."""
        endless = {_ROOT + one[1:] for one in self._references if one.startswith("#")}
        before = len(endless) + 1
        while len(endless) < before:
            before = len(endless)
            for one in list(endless):
                if _ends(self.target(one), endless):
                    endless.remove(one)
        return endless

    def _loosened(self, schema: Any) -> Any:
        """A schema with anything in the place of what has no end."""
        if isinstance(schema, Mapping):
            if schema.get("$ref") in self._endless:
                return {}
            return {key: one if key in _VERBATIM else self._loosened(one) for key, one in schema.items()}
        return [self._loosened(one) for one in schema] if isinstance(schema, list) else schema

    def _bounded(self, key: str, value: object) -> bool:
        """Whether a compiler can be asked for it."""
        if key != "multipleOf" or not isinstance(value, int | float):
            return True
        self._multiples += max(1, value)
        if self.exact and self._multiples > _MULTIPLES:
            raise GrammarError(f"the schema's multipleOf cannot be enforced: all of them may sum up to {_MULTIPLES}")
        return self._multiples <= _MULTIPLES

    def alternatives(self, schema: object, depth: int = 0) -> list[dict[str, Any]]:
        """A schema as alternatives with one type each; "" is any type."""
        self._spent += 1
        if depth > DEPTH or self._spent > _PARTS:
            raise GrammarError("the schema's references go round in circles, or it has too many alternatives")
        if not isinstance(schema, Mapping):
            return [{"type": ""}] if schema else []
        if "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            return self.alternatives({**self.target(schema["$ref"]), **rest}, depth + 1)
        if union := [key for key in _UNIONS if key in schema]:
            return self._union(schema, union[0], depth)
        declared = schema.get("type") or ()
        types = (declared,) if isinstance(declared, str) else declared
        if "enum" in schema or "const" in schema:
            kinds: dict[str, list[Any]] = {}
            for value in schema.get("enum", [schema.get("const")]):
                kind = KINDS.get(type(value), "object")
                if not types or kind in types or (kind == "integer" and "number" in types):
                    kinds.setdefault(kind, []).append(value)
            return [{"type": kind, "enum": values} for kind, values in kinds.items()]
        implied = "object" if "properties" in schema else "array" if "items" in schema else ""
        return [{**schema, "type": one} for one in types or [implied]]

    def _union(self, schema: Mapping[str, Any], union: str, depth: int) -> list[dict[str, Any]]:
        options = schema[union]
        if union == "allOf" and len(options) != 1:
            self.refuse("allOf")
        rest = {key: value for key, value in schema.items() if key not in (union, "$defs", "definitions")}
        if rest and rest != {"type": ["object"]}:
            self.refuse(f"{union} beside other keywords")
        return [one for option in options for one in self.alternatives(option, depth + 1)]

    def target(self, reference: str) -> Mapping[str, Any]:
        """The part of the schema that a reference leads to."""
        found = target(reference.replace(_ROOT, "#", 1), self.root)
        if not isinstance(found, Mapping):
            raise GrammarError(f"the schema's $ref {reference.replace(_ROOT, '#')!r:.80} leads nowhere")
        return found

    def check(self, alternative: Mapping[str, Any]) -> None:
        """Refuses keywords that this spelling knows nothing of."""
        known = ("type", "$defs", "definitions", *_KNOWN.get(alternative["type"], ()))
        for key in alternative.keys() - set(known):
            self.refuse(key)

    def members(self, schema: object) -> tuple[list[Member], bool]:
        """The members of an object in the schema's order, and whether it may have others."""
        objects = [one for one in self.alternatives(schema) if one["type"] in ("object", "")]
        if not objects:
            raise GrammarError("the schema is not that of an object")
        if len(objects) > 1:
            self.refuse("anyOf")
        known = {**objects[0], "type": "object"}
        self.check(known)
        properties, required = known.get("properties", {}), _required(known)
        more = known.get("additionalProperties", "properties" not in known)
        if isinstance(more, Mapping) and more:
            self.refuse("additionalProperties")
        undeclared = [key for key in required if key not in properties]
        if undeclared and more is False:
            raise GrammarError(f"the schema requires {undeclared[0]!r:.80}, which its additionalProperties rule out")
        found = [Member(key, value, key in required) for key, value in properties.items()]
        return found + [Member(key, True, True) for key in undeclared], more is not False

    def pattern(self, alternative: Mapping[str, Any]) -> str:
        """A regular expression for a string; "" for any."""
        self.check(alternative)
        asked = [key for key in ("enum", "pattern", "format") if key in alternative]
        low, high = alternative.get("minLength", 0), alternative.get("maxLength", "")
        sized = bool(low) or high != ""
        if low < 0 or (high != "" and high < low):
            raise GrammarError(f"the schema's minLength {low} and maxLength {high or low} leave no string")
        if max(low, high or 0) > _LENGTH:
            self.refuse(f"{'maxLength' if high else 'minLength'} beyond {_LENGTH}")
            sized = False
        if len(asked) + sized > 1:
            self.refuse(f"{asked[0]} beside other keywords for the same string")
        match asked:
            case ["enum", *_]:
                return "|".join(escaped(value) for value in alternative["enum"])
            case ["pattern", *_]:
                return _searched(alternative["pattern"])
            case ["format", *_]:
                if alternative["format"] not in _FORMATS:
                    self.refuse(f"format {alternative['format']!r:.40}")
                return _FORMATS.get(alternative["format"], "")
        return f"(?s:.){{{low},{high}}}" if sized else ""


def _ends(schema: object, endless: Collection[str]) -> bool:
    """Whether a finite value satisfies a schema, as far as it does not hang on these references."""
    if not isinstance(schema, Mapping) or schema.keys() & {"enum", "const"}:
        return True
    if schema.get("$ref") in endless or not all(_ends(one, endless) for one in schema.get("allOf", ())):
        return False
    for union in ("anyOf", "oneOf"):
        if union in schema and not any(_ends(one, endless) for one in schema[union]):
            return False
    members = schema.get("properties", {})
    value_ends = {
        "object": all(_ends(members.get(key), endless) for key in _required(schema)),
        "array": not schema.get("minItems") or _ends(schema.get("items"), endless),
    }
    implied = [kind for kind, key in (("object", "properties"), ("array", "items")) if key in schema]
    return any(value_ends.get(kind, True) for kind in schema.get("type") or implied or ("null",))


def _searched(pattern: str) -> str:
    """A regular expression for the whole of a string in which ``pattern`` is found."""
    depth = 0
    for mark in _ATOMS.sub("", pattern):
        depth += 1 if mark == "(" else -1
        if depth < 0:
            break
    if depth:
        raise GrammarError(f"the schema's pattern {pattern!r:.80} has unbalanced parentheses")
    body = pattern.removeprefix("^")
    ends = body.endswith("$") and not body.endswith(r"\$")
    whole = f"(?:{body.removesuffix('$') if ends else body})"
    return ("" if pattern.startswith("^") else ANY) + whole + ("" if ends else ANY)


def _joins(root: object) -> bool:
    """Whether schemas are joined with ``allOf`` anywhere."""
    ahead = [root]
    while ahead:
        part = ahead.pop()
        if isinstance(part, Mapping):
            if "allOf" in part:
                return True
            ahead += part.values()
        elif isinstance(part, list | tuple):
            ahead += part
    return False


def _required(schema: Mapping[str, Any]) -> list[str]:
    return [key for key in schema.get("required", ()) if isinstance(key, str)]


def _types(schema: Mapping[str, Any]) -> list[str]:
    """The declared types, spelled as JSON Schema does."""
    declared = schema["type"]
    names = [str(name) for name in (declared if isinstance(declared, list | tuple) else [declared])]
    found = [ALIASES.get(name.lower(), name) for name in names]
    if found and schema.get("nullable") is True:
        found.append("null")
    unknown = [name for name in found if name not in TYPES]
    if unknown:
        raise GrammarError(f"the schema's type {unknown[0]!r:.40} is none")
    return list(dict.fromkeys(found))
