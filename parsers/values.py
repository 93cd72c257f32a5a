"""What the arguments of a call may be: a tool's schema as rules, in the way a codec spells values.

JSON is left to the engine's own schema compiler. A family's other spellings are put together here from the parts of a
schema that they can express; any other part is refused by its name, or passed over where enforcing is a courtesy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parsers.format import Codec, Elements, Literals, PythonCalls, Tagged
from parsers.lark import ANY, GrammarError, Rules, escaped, one_of, plain, sequence
from parsers.schema import json_of

_TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
_ALIASES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "dict": "object", "list": "array"}
_NOTES = frozenset(
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
_DEPTH = 64
_MEMBERS = 512
_KEY = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"
_FORMATS = {
    "date": r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])",
    "time": r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-][0-9]{2}:[0-9]{2})",
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[A-Za-z0-9_.+\-]+@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)+",
    "uri": r"[A-Za-z][A-Za-z0-9+.\-]*:[!#-;=?-_a-z~]+",
    "ipv4": r"(?:(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])",
}
_FORMATS["date-time"] = _FORMATS["date"] + "T" + _FORMATS["time"]
_WIRE_TYPES = {"integer": "number"}


@dataclass(frozen=True)
class _Member:
    key: str
    schema: object
    required: bool


class Values:
    """One tool's schema. ``exact`` False: what cannot be enforced is passed over.

    ``never``: regular expressions of text that would end a value early, where values are raw text.
    """

    def __init__(self, rules: Rules, root: Mapping[str, Any], *, exact: bool, never: Sequence[str] = ()) -> None:
        self._rules, self.root, self._exact, self._never = rules, root, exact, never
        self._open = "allOf" in json.dumps(root)
        self._named: dict[tuple[int, str], str] = {}
        self._keep: list[object] = []

    def arguments(self, codec: Codec, apart: bool = False) -> str:
        """The arguments as ``codec`` spells them. ``apart``: there is layout before them already."""
        match codec:
            case Tagged():
                return self._tagged(codec, apart)
            case Literals():
                return self._literal_object(codec, self.root, 0)
            case Elements():
                return self._elements(codec, self.root, 0)
            case PythonCalls():
                return self._python()
            case _:
                return self.json(self.root)

    # ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def json(self, schema: object, escapes: str = "") -> str:
        """A value as JSON, spaced as ``json.dumps`` does, so that no white space can go on for ever."""
        moved = self._moved(schema, 0)
        body: dict[str, Any] = moved if isinstance(moved, dict) else {} if moved else {"enum": []}
        if "$ref" in json.dumps(body):
            body = {**body, "$defs": {"root": self._moved(self.root, 0)}}
        options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        if escapes:
            options["json_allowed_escapes"] = escapes
        if not self._exact:
            options |= {"lenient": True, "coerce_one_of": True}
        return self._rules.rule("%json " + json.dumps({**body, "x-guidance": options}, ensure_ascii=False))

    def _moved(self, schema: object, depth: int) -> object:
        """A schema as it reads elsewhere than at its root. Objects that declare members have no others, unless they
        say so: a harness refuses what a tool does not know."""
        if not isinstance(schema, Mapping):
            return schema
        if depth > _DEPTH:
            raise GrammarError("the schema is nested too deeply")
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _VERBATIM:
                found[key] = value
            elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
                found[key] = "#/$defs/root" + value[1:]
            elif key in _OF_MEMBERS and isinstance(value, Mapping):
                if key not in ("$defs", "definitions") or schema is self.root:
                    found[key] = {name: self._moved(one, depth + 1) for name, one in value.items()}
            elif isinstance(value, Mapping):
                found[key] = self._moved(value, depth + 1)
            elif isinstance(value, list | tuple):
                found[key] = [self._moved(one, depth + 1) for one in value]
            elif key not in _NOTES and not key.startswith("x-"):
                found[key] = value
        if "type" in schema:
            found["type"] = _types(schema)
        if "properties" in schema and not self._open and not found.keys() & {"anyOf", "oneOf", "$ref"}:
            found.setdefault("additionalProperties", False)
        return found

    # ── schemas apart ─────────────────────────────────────────────────────────────────────────────────────────────

    def _refuse(self, keyword: str) -> None:
        if self._exact:
            raise GrammarError(f"the schema's {keyword} cannot be enforced in the way this model writes arguments")

    def _alternatives(self, schema: object, depth: int = 0) -> list[dict[str, Any]]:
        """A schema as alternatives with one type each; "" is any type."""
        if depth > _DEPTH:
            raise GrammarError("the schema's references go round in circles")
        if not isinstance(schema, Mapping):
            return [{"type": ""}] if schema else []
        target = schema.get("$ref")
        if target is not None:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            return self._alternatives({**self._target(target), **rest}, depth + 1)
        own = {key: value for key, value in schema.items() if key not in _NOTES}
        for key, form in _FORMS.items():
            if key in own and not isinstance(own[key], form):
                raise GrammarError(f"the schema's {key} is malformed")
        options = own.get("anyOf", own.get("oneOf", own.get("allOf")))
        if isinstance(options, list | tuple):
            if "allOf" in own and len(options) != 1:
                self._refuse("allOf")
            several = [one for option in options for one in self._alternatives(option, depth + 1)]
            rest = {key: value for key, value in own.items() if key not in ("anyOf", "oneOf", "allOf")}
            if rest and rest != {"type": "object"}:
                self._refuse("anyOf beside other keywords")
            return several
        values = own.get("enum", [own["const"]] if "const" in own else None)
        if isinstance(values, list | tuple):
            texts = [value for value in values if isinstance(value, str)]
            others = [value for value in values if not isinstance(value, str)]
            return [
                *([{"type": "string", "enum": texts}] if texts else ()),
                *({"type": "", "const": v} for v in others),
            ]
        types = _types(schema)
        if not types:
            types = ["object"] if "properties" in own else ["array"] if "items" in own else [""]
        return [{**own, "type": one} for one in types]

    def _target(self, reference: object) -> Mapping[str, Any]:
        found: object = self.root
        parts = reference[1:].split("/") if isinstance(reference, str) and reference.startswith("#") else ["?"]
        for part in filter(None, parts):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            raise GrammarError(f"the schema's $ref {reference!r:.80} leads nowhere")
        return found

    def _check(self, alternative: Mapping[str, Any]) -> None:
        """Refuses keywords that this spelling knows nothing of."""
        kind = alternative["type"]
        for key in alternative.keys() - _KNOWN[kind if kind in _KNOWN else ""] - {"type"}:
            self._refuse(key)

    def _members(self, schema: object) -> tuple[list[_Member], bool]:
        """The members of an object in the schema's order, and whether it may have others."""
        objects = [one for one in self._alternatives(schema) if one["type"] in ("object", "")]
        if not objects:
            raise GrammarError("the schema is not that of an object")
        if len(objects) > 1:
            self._refuse("anyOf")
        known = objects[0]
        self._check({**known, "type": "object"})
        properties, required = known.get("properties", {}), known.get("required", ())
        more = known.get("additionalProperties", "properties" not in known)
        if isinstance(more, Mapping) and more.keys() - _NOTES:
            self._refuse("additionalProperties")
        found = [_Member(key, value, key in required) for key, value in properties.items()]
        found += [_Member(key, {}, True) for key in required if isinstance(key, str) and key not in properties]
        if len(found) > _MEMBERS:
            raise GrammarError(f"the schema has more than {_MEMBERS} properties in one object")
        return found, more is not False

    def _pattern(self, alternative: Mapping[str, Any]) -> str:
        """A regular expression for a string; "" for any."""
        self._check(alternative)
        asked = [key for key in ("enum", "pattern", "format") if key in alternative]
        low, high = alternative.get("minLength", 0), alternative.get("maxLength", "")
        if len(asked) + bool(low or high != "") > 1:
            self._refuse(f"{asked[0]} beside other keywords for the same string")
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
                    self._refuse(f"format {alternative['format']!r:.40}")
                return _FORMATS.get(alternative["format"], "")
        return f"(?s:.){{{low},{high}}}" if low or high != "" else ""

    # ── parameters as elements ────────────────────────────────────────────────────────────────────────────────────

    def _tagged(self, codec: Tagged, apart: bool) -> str:
        members, more = self._members(self.root)
        between = self._rules.layout(codec.between)
        parts = ["" if apart else between]
        for member in members:
            one = sequence((self._parameter(codec, member), between))
            parts.append(one if member.required else f"({one})?")
        if more:
            declared = [escaped(_key(codec, member.key)) for member in members]
            parts.append(f"({sequence((self._undeclared(codec, declared), between))})*")
        return sequence(parts)

    def _parameter(self, codec: Tagged, member: _Member) -> str:
        opened = f"{self._rules.literal(codec.open)} {plain(_key(codec, member.key))}"
        edge = "\n" if codec.trim == "newline" else ""
        close = edge + codec.close
        alternatives = self._alternatives(member.schema)
        if not codec.typed:
            value = self._untyped(alternatives, close)
            return self._rules.rule(f"{opened} {self._rules.literal(codec.open_end + edge)} {value}")
        options = []
        for kind, value in self._typed(codec, alternatives, close):
            lead = f"{self._rules.literal(codec.key_end)} {plain(kind)} {self._rules.literal(codec.open_end + edge)}"
            options.append(f"{lead} {value}")
        return self._rules.rule(f"{opened} {one_of(options)}")

    def _untyped(self, alternatives: list[dict[str, Any]], close: str) -> str:
        """Text that the reader makes into what the schema allows: where a string is allowed, all but null, objects and
        lists is one."""
        types = frozenset(kind for one in alternatives for kind in _wire_types(one))
        strings = [one for one in alternatives if one["type"] == "string"]
        if any(one["type"] == "" and "const" not in one for one in alternatives):
            return self._raw("", close)
        nested = bool(types & {"object", "array"}) and bool(strings)
        options = []
        for one in strings:
            kept = _kept(one["enum"], types) if "enum" in one else []
            if "enum" in one and not kept:
                continue
            pattern = self._pattern({**one, "enum": kept} if kept else one)
            never = [*self._never, rf"[ \t\r\n]*[{{\[]{ANY}"] if nested else self._never
            options.append(self._rules.upto(close, pattern, never))
        for one in alternatives:
            if one["type"] == "string" or (strings and one["type"] in ("integer", "number", "boolean")):
                continue
            if strings and "const" in one and isinstance(one["const"], bool | int | float):
                continue
            options.append(f"{self.json(_bare(one))} {self._rules.literal(close)}")
        if not options:
            raise GrammarError("the schema allows no value for a parameter")
        return one_of(options)

    def _typed(self, codec: Tagged, alternatives: list[dict[str, Any]], close: str) -> list[tuple[str, str]]:
        """(what the wire says of the type, a value of it up to its closer)."""
        found: list[tuple[str, str]] = []
        for one in alternatives:
            for kind in _wire_types(one) or _TYPES:
                schema = one if one["type"] else {**one, "type": kind}
                if kind == "string":
                    found.append(("true" if codec.typed == "string" else kind, self._raw(self._pattern(schema), close)))
                else:
                    name = "false" if codec.typed == "string" else _WIRE_TYPES.get(kind, kind)
                    found.append((name, f"{self.json(_bare(schema))} {self._rules.literal(close)}"))
        if not found:
            raise GrammarError("the schema allows no value for a parameter")
        return found

    def _raw(self, pattern: str, close: str) -> str:
        return self._rules.upto(close, pattern, self._never)

    def _undeclared(self, codec: Tagged, declared: list[str]) -> str:
        excluded = f" & ~/{'|'.join(declared)}/" if declared else ""
        key = self._rules.terminal(f"/{_KEY}/{excluded}")
        edge = "\n" if codec.trim == "newline" else ""
        kinds = {"": "", "string": "true", "type": "string"}
        kind = sequence((self._rules.literal(codec.key_end), plain(kinds[codec.typed])))
        opener = sequence((key, kind, self._rules.literal(codec.open_end + edge)))
        return f"{self._rules.literal(codec.open)} {opener} {self._raw('', edge + codec.close)}"

    # ── Python ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _python(self) -> str:
        members, more = self._members(self.root)
        found = []
        for member in members:
            if not member.key.isidentifier():
                raise GrammarError(f"the parameter {member.key!r:.80} is no name in Python")
            flag = all(one["type"] == "boolean" for one in self._alternatives(member.schema))
            value = '("True" | "False")' if flag else self.json(member.schema, escapes='nrt"\\')
            found.append((f"{plain(member.key + '=')} {value}", member.required))
        return self._listed(found, ", ", self._other(members, "=", self.json({}, '"\\nrt')) if more else "")

    def _other(self, members: list[_Member], assign: str, value: str) -> str:
        declared = "|".join(escaped(member.key) for member in members)
        key = self._rules.terminal(f"/{_KEY}/" + (f" & ~/{declared}/" if declared else ""))
        return f"{key} {plain(assign)} {value}"

    def _listed(self, members: Sequence[tuple[str, bool]], separator: str, other: str) -> str:
        """Members in their order, with separators between those that are there."""
        mark = plain(separator)
        more = f"({mark} {other})*" if other else ""
        first = f"({other} {more})?" if other else ""
        for member, required in reversed(members):
            if required:
                first, more = (
                    self._rules.rule(sequence((member, more))),
                    self._rules.rule(sequence((mark, member, more))),
                )
            else:
                here = sequence((member, more))
                first = self._rules.rule(f"{here} | {first}") if first else f"({self._rules.rule(here)})?"
                more = self._rules.rule(sequence((f"({mark} {member})?", more)))
        return first

    # ── Gemma ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _literal(self, codec: Literals, schema: object, depth: int) -> str:
        return self._recursive(
            schema, "", lambda: one_of(self._one_literal(codec, one, depth) for one in self._some(schema, depth))
        )

    def _one_literal(self, codec: Literals, one: dict[str, Any], depth: int) -> str:
        quote = self._rules.literal(codec.quote)
        match one["type"]:
            case "string":
                return f"{quote} {self._rules.upto(codec.quote, self._pattern(one))}"
            case "object":
                return self._literal_object(codec, one, depth + 1)
            case "array":
                self._check(one)
                return self._array(one, self._literal(codec, one.get("items", True), depth + 1))
            case "" if "const" not in one:
                return one_of(self._one_literal(codec, {"type": kind}, depth + 1) for kind in self._kinds(depth))
        if isinstance(one.get("const"), dict | list):
            self._refuse("enum of objects or lists")
        return self.json(_bare(one))

    def _literal_object(self, codec: Literals, schema: object, depth: int) -> str:
        members, more = self._members(schema)
        found = []
        for member in members:
            if not member.key or set(member.key) & set(":,{}[]\"'") or member.key != member.key.strip():
                raise GrammarError(f"the parameter {member.key!r:.80} cannot be written by this model")
            found.append(
                (f"{plain(member.key + ':')} {self._literal(codec, member.schema, depth + 1)}", member.required)
            )
        other = self._other(members, ":", self._literal(codec, True, depth + 1)) if more else ""
        return sequence(('"{"', self._listed(found, ",", other), '"}"'))

    @staticmethod
    def _kinds(depth: int) -> tuple[str, ...]:
        """The types of a value that may be anything; nested only so far."""
        return tuple(kind for kind in _TYPES if depth < 4 or kind not in ("object", "array"))

    @staticmethod
    def _array(one: Mapping[str, Any], item: str) -> str:
        low, high = int(one.get("minItems", 0)), one.get("maxItems")
        if high == 0:
            return '"[" "]"'
        rest = f'("," {item})' + (f"{{{max(0, low - 1)},{int(high) - 1 if high is not None else ''}}}")
        return f'"[" {item} {rest} "]"' if low else f'"[" ({item} {rest})? "]"'

    def _some(self, schema: object, depth: int) -> list[dict[str, Any]]:
        if depth > _DEPTH:
            raise GrammarError("the schema is nested too deeply")
        found = self._alternatives(schema)
        if not found:
            raise GrammarError("the schema allows no value for a parameter")
        return found

    def _recursive(self, schema: object, where: str, build: Any) -> str:
        """A rule per place of the schema, so that schemas may refer to themselves."""
        target = schema
        while isinstance(target, Mapping) and isinstance(target.get("$ref"), str) and len(target.keys() - _NOTES) == 1:
            target = self._target(target["$ref"])
            if target is schema:
                raise GrammarError("the schema's references go round in circles")
        key = (id(target), where)
        if key not in self._named:
            self._keep.append(target)
            self._named[key], define = self._rules.reserve()
            define(build())
        return self._named[key]

    # ── MiniMax-M3 ────────────────────────────────────────────────────────────────────────────────────────────────

    def _elements(self, codec: Elements, schema: object, depth: int) -> str:
        """The members of an object, one after the other."""
        members, more = self._members(schema)
        if more and members:
            self._refuse("additionalProperties")
        parts = []
        for member in members:
            if not member.key or set(member.key) & set("<>/") or member.key != member.key.strip():
                raise GrammarError(f"the parameter {member.key!r:.80} cannot be written by this model")
            one = self._element(codec, member.key, member.schema, depth + 1)
            parts.append(one if member.required else f"({one})?")
        return sequence(parts)

    def _element(self, codec: Elements, name: str, schema: object, depth: int) -> str:
        lead = f"{self._rules.literal(codec.prefix)} {plain(f'<{name}>')}"
        return f"{lead} {self._element_value(codec, name, schema, depth)}"

    def _element_value(self, codec: Elements, name: str, schema: object, depth: int) -> str:
        """A value and the closer of its element."""
        close = f"{codec.prefix}</{name}>"
        return self._recursive(schema, close, lambda: self._any_element(codec, close, schema, depth))

    def _any_element(self, codec: Elements, close: str, schema: object, depth: int) -> str:
        found = self._some(schema, depth)
        plains = [one for one in found if one["type"] not in ("object", "array")]
        options = [self._untyped(plains, close)] if plains else []
        for one in found:
            if one["type"] == "object":
                body = self._elements(codec, one, depth + 1)
            elif one["type"] == "array":
                self._check(one)
                item = self._element(codec, codec.item, one.get("items", True), depth + 1)
                low, high = int(one.get("minItems", 0)), one.get("maxItems", "")
                body = f"({item}){{{low},{high}}}"
            else:
                continue
            options.append(sequence((body, self._rules.literal(close))))
        return one_of(options)


def _types(schema: Mapping[str, Any]) -> list[str]:
    """The declared types, spelled as JSON Schema does."""
    declared = schema.get("type", [])
    names = [str(name) for name in (declared if isinstance(declared, list | tuple) else [declared])]
    found = [_ALIASES.get(name.lower(), name) for name in names]
    if found and schema.get("nullable") is True:
        found.append("null")
    unknown = [name for name in found if name not in _TYPES]
    if unknown:
        raise GrammarError(f"the schema's type {unknown[0]!r:.40} is none")
    return list(dict.fromkeys(found))


def _wire_types(alternative: Mapping[str, Any]) -> tuple[str, ...]:
    """The types of an alternative's values; none if it may be any."""
    if alternative["type"]:
        return (alternative["type"],)
    if "const" not in alternative:
        return ()
    value = alternative["const"]
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return (names[type(value)],)


def _bare(alternative: Mapping[str, Any]) -> dict[str, Any]:
    """An alternative as a schema."""
    if "const" in alternative:
        return {"const": alternative["const"]}
    return {key: value for key, value in alternative.items() if key != "type" or value}


def _kept(values: Sequence[str], types: frozenset[str]) -> list[str]:
    """The values that are read as themselves."""
    return [value for value in values if json_of(value, types)[0] == json.dumps(value, ensure_ascii=False)]


def _key(codec: Tagged, key: str) -> str:
    return key.replace("&", "&amp;").replace('"', "&quot;") if codec.escapes else key
