"""What the arguments of a call may be: a tool's schema as rules, in the way a codec spells values.

JSON is left to the engine's own schema compiler. A family's other spellings are put together here from the parts of a
schema that they can express; any other part is refused by its name, or passed over where enforcing is a courtesy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from parsers.format import Codec, Elements, Literals, PythonCalls, Tagged
from parsers.lark import ANY, GrammarError, Rules, escaped, one_of, plain, sequence
from parsers.parts import DEPTH, NOTES, TYPES, Member, Parts, bare, wire_types
from parsers.schema import json_of

_KEY = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"
_WIRE_TYPES = {"integer": "number"}


class Values(Parts):
    """One tool's schema as rules. ``never``: regular expressions of text that would end a value early, where values are
    raw text."""

    def __init__(self, rules: Rules, root: Mapping[str, Any], *, exact: bool, never: Sequence[str] = ()) -> None:
        super().__init__(root, exact=exact)
        self._rules, self._never = rules, never
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
        moved = self.moved(schema, 0)
        body: dict[str, Any] = moved if isinstance(moved, dict) else {} if moved else {"enum": []}
        if "$ref" in json.dumps(body):
            body = {**body, "$defs": {"root": self.moved(self.root, 0)}}
        options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        if escapes:
            options["json_allowed_escapes"] = escapes
        if not self.exact:
            options |= {"lenient": True, "coerce_one_of": True}
        return self._rules.rule("%json " + json.dumps({**body, "x-guidance": options}, ensure_ascii=False))

    # ── parameters as elements ────────────────────────────────────────────────────────────────────────────────────

    def _tagged(self, codec: Tagged, apart: bool) -> str:
        members, more = self.members(self.root)
        between = self._rules.layout(codec.between)
        parts = ["" if apart else between]
        for member in members:
            one = sequence((self._parameter(codec, member), between))
            parts.append(one if member.required else f"({one})?")
        if more:
            declared = [escaped(_key(codec, member.key)) for member in members]
            parts.append(f"({sequence((self._undeclared(codec, declared), between))})*")
        return sequence(parts)

    def _parameter(self, codec: Tagged, member: Member) -> str:
        opened = f"{self._rules.literal(codec.open)} {plain(_key(codec, member.key))}"
        edge = "\n" if codec.trim == "newline" else ""
        close = edge + codec.close
        alternatives = self.alternatives(member.schema)
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
        types = frozenset(kind for one in alternatives for kind in wire_types(one))
        strings = [one for one in alternatives if one["type"] == "string"]
        if any(one["type"] == "" and "const" not in one for one in alternatives):
            return self._raw("", close)
        nested = bool(types & {"object", "array"}) and bool(strings)
        options = []
        for one in strings:
            kept = _kept(one["enum"], types) if "enum" in one else []
            if "enum" in one and not kept:
                continue
            pattern = self.pattern({**one, "enum": kept} if kept else one)
            never = [*self._never, rf"[ \t\r\n]*[{{\[]{ANY}"] if nested else self._never
            options.append(self._rules.upto(close, pattern, never))
        for one in alternatives:
            if one["type"] == "string" or (strings and one["type"] in ("integer", "number", "boolean")):
                continue
            if strings and "const" in one and isinstance(one["const"], bool | int | float):
                continue
            options.append(f"{self.json(bare(one))} {self._rules.literal(close)}")
        if not options:
            raise GrammarError("the schema allows no value for a parameter")
        return one_of(options)

    def _typed(self, codec: Tagged, alternatives: list[dict[str, Any]], close: str) -> list[tuple[str, str]]:
        """(what the wire says of the type, a value of it up to its closer)."""
        found: list[tuple[str, str]] = []
        for one in alternatives:
            for kind in wire_types(one) or TYPES:
                schema = one if one["type"] else {**one, "type": kind}
                if kind == "string":
                    found.append(("true" if codec.typed == "string" else kind, self._raw(self.pattern(schema), close)))
                else:
                    name = "false" if codec.typed == "string" else _WIRE_TYPES.get(kind, kind)
                    found.append((name, f"{self.json(bare(schema))} {self._rules.literal(close)}"))
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
        members, more = self.members(self.root)
        found = []
        for member in members:
            if not member.key.isidentifier():
                raise GrammarError(f"the parameter {member.key!r:.80} is no name in Python")
            flag = all(one["type"] == "boolean" for one in self.alternatives(member.schema))
            value = '("True" | "False")' if flag else self.json(member.schema, escapes='nrt"\\')
            found.append((f"{plain(member.key + '=')} {value}", member.required))
        return self._listed(found, ", ", self._other(members, "=", self.json({}, '"\\nrt')) if more else "")

    def _other(self, members: list[Member], assign: str, value: str) -> str:
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
                return f"{quote} {self._rules.upto(codec.quote, self.pattern(one))}"
            case "object":
                return self._literal_object(codec, one, depth + 1)
            case "array":
                self.check(one)
                return self._array(one, self._literal(codec, one.get("items", True), depth + 1))
            case "" if "const" not in one:
                return one_of(self._one_literal(codec, {"type": kind}, depth + 1) for kind in self._kinds(depth))
        if isinstance(one.get("const"), dict | list):
            self.refuse("enum of objects or lists")
        return self.json(bare(one))

    def _literal_object(self, codec: Literals, schema: object, depth: int) -> str:
        members, more = self.members(schema)
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
        return tuple(kind for kind in TYPES if depth < 4 or kind not in ("object", "array"))

    @staticmethod
    def _array(one: Mapping[str, Any], item: str) -> str:
        low, high = int(one.get("minItems", 0)), one.get("maxItems")
        if high == 0:
            return '"[" "]"'
        rest = f'("," {item})' + (f"{{{max(0, low - 1)},{int(high) - 1 if high is not None else ''}}}")
        return f'"[" {item} {rest} "]"' if low else f'"[" ({item} {rest})? "]"'

    def _some(self, schema: object, depth: int) -> list[dict[str, Any]]:
        if depth > DEPTH:
            raise GrammarError("the schema is nested too deeply")
        found = self.alternatives(schema)
        if not found:
            raise GrammarError("the schema allows no value for a parameter")
        return found

    def _recursive(self, schema: object, where: str, build: Any) -> str:
        """A rule per place of the schema, so that schemas may refer to themselves."""
        target = schema
        while isinstance(target, Mapping) and isinstance(target.get("$ref"), str) and len(target.keys() - NOTES) == 1:
            target = self.target(target["$ref"])
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
        members, more = self.members(schema)
        if more and members:
            self.refuse("additionalProperties")
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
                self.check(one)
                item = self._element(codec, codec.item, one.get("items", True), depth + 1)
                low, high = int(one.get("minItems", 0)), one.get("maxItems", "")
                body = f"({item}){{{low},{high}}}"
            else:
                continue
            options.append(sequence((body, self._rules.literal(close))))
        return one_of(options)


def _kept(values: Sequence[str], types: frozenset[str]) -> list[str]:
    """The values that are read as themselves."""
    return [value for value in values if json_of(value, types)[0] == json.dumps(value, ensure_ascii=False)]


def _key(codec: Tagged, key: str) -> str:
    return key.replace("&", "&amp;").replace('"', "&quot;") if codec.escapes else key
