"""What the arguments of a call may be: a tool's schema as rules, in the way a codec spells values.

JSON is left to the engine's own schema compiler. A family's other spellings are put together here from the parts of a
schema that they can express; any other part is refused by its name, or passed over where enforcing is a courtesy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parsers.codecs.call import NAME_LIMIT
from parsers.codecs.writers import python_literal, spelled
from parsers.format import Codec, Elements, Literals, PythonCalls, Tagged
from parsers.lark import ANY, GrammarError, Rules, escaped, one_of, plain, regex, sequence
from parsers.parts import DEPTH, TYPES, Member, Parts
from parsers.schema import json_of

_NO_KEY = {Tagged: "<>\r\n", Elements: "<>/\r\n", Literals: ":,{}[]\"'", PythonCalls: ""}
"""What no key has in it, where keys are no strings."""
_KEY = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"
_SCALARS = frozenset(("integer", "number", "boolean"))


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
                return self._listed(
                    codec, self.root, "=", ", ", lambda one: self._python(codec, one.schema), self._python(codec, True)
                )
            case _:
                return self.json(self.root)

    def json(self, schema: object, escapes: str = "") -> str:
        """A value as JSON, spaced as ``json.dumps`` does, so that no white space can go on for ever."""
        body = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"enum": []}
        if not body.get("type", True):
            del body["type"]
        if '"$ref"' in json.dumps(body):
            body = {**body, "$defs": {"root": self.root}}
        options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        if escapes:
            options["json_allowed_escapes"] = escapes
        if not self.exact:
            options |= {"lenient": True, "coerce_one_of": True}
        return self._rules.rule("%json " + json.dumps({**body, "x-guidance": options}, ensure_ascii=False))

    # ── raw text up to a closer ───────────────────────────────────────────────────────────────────────────────────

    def _tagged(self, codec: Tagged, apart: bool) -> str:
        members, more = self._writable(codec, self.root)
        between = self._rules.layout(codec.between)
        found = [sequence((self._parameter(codec, member), between)) for member in members]
        parts = [one if member.required else f"({one})?" for one, member in zip(found, members, strict=True)]
        if more:
            key = self._other_key(spelled(codec, member.key) for member in members)
            parts.append(f"({sequence((self._opened(codec, key, {}), between))})*")
        empty = "" if any(member.required for member in members) else self._rules.layout(codec.empty)
        return sequence(("" if apart else between, empty, *parts))

    def _parameter(self, codec: Tagged, member: Member) -> str:
        return self._rules.rule(self._opened(codec, plain(spelled(codec, member.key)), member.schema))

    def _opened(self, codec: Tagged, key: str, schema: object) -> str:
        edge = "\n" if codec.trim == "newline" else ""
        alternatives = self._some(schema) if schema != {} else [{"type": "string"}]
        opener, close = self._rules.literal(codec.open), edge + codec.close
        behind = self._rules.literal(codec.open_end + edge)
        if not codec.typed:
            return sequence((opener, key, behind, self._untyped(alternatives, close)))
        kinds = [{**one, "type": kind} for one in alternatives for kind in ([one["type"]] if one["type"] else TYPES)]
        lead = self._rules.literal(codec.key_end)
        options = [sequence((lead, plain(_kind(codec, one["type"])), behind, self._exact(one, close))) for one in kinds]
        return sequence((opener, key, one_of(options)))

    def _exact(self, one: Mapping[str, Any], close: str) -> str:
        if one["type"] == "string":
            return self._rules.upto(close, self.pattern(one), self._never)
        return f"{self.json(one)} {self._rules.literal(close)}"

    def _untyped(self, alternatives: Sequence[Mapping[str, Any]], close: str, nested: bool = False) -> str:
        """Text that the reader makes into what the schema allows: where a string is allowed, all but null, objects and
        lists is one. ``nested``: these are spelled in another way, but text is read as one, too."""
        types = frozenset(one["type"] for one in alternatives)
        for one in alternatives:
            if not one["type"]:
                self.check(one)
                return self._rules.upto(close, "", self._never)
        nested = nested or bool(types & {"object", "array"})
        options = []
        for one in alternatives:
            if "string" in types and one["type"] in _SCALARS:
                continue
            if one["type"] == "string" and "enum" in one:
                one = {**one, "enum": [value for value in one["enum"] if _kept(value, types)]}
                if not one["enum"]:
                    continue
            if one["type"] == "string" and nested:
                never = [*self._never, rf"[ \t\r\n]*[{{\[]{ANY}"]
                options.append(self._rules.upto(close, self.pattern(one), never))
            else:
                options.append(self._exact(one, close))
        if not options:
            raise GrammarError("the schema allows no value for a parameter")
        return one_of(options)

    # ── members in a list ─────────────────────────────────────────────────────────────────────────────────────────

    def _listed(
        self, codec: Codec, schema: object, assign: str, mark: str, spell: Callable[[Member], str], any_value: str
    ) -> str:
        """Members in the order that they are written in, with separators between those that are there."""
        members, more_keys = self._writable(codec, schema)
        members = sorted(members, key=lambda one: one.key.lower()) if isinstance(codec, Literals) else members
        separator, more, first = plain(mark), "", ""
        if more_keys:
            other = sequence((self._other_key(member.key for member in members), plain(assign), any_value))
            more = f"({separator} {other})*"
            first = f"({other} {more})?"
        for member in reversed(members):
            one = sequence((plain(member.key + assign), spell(member)))
            here = self._rules.rule(sequence((one, more)))
            if member.required:
                first, more = here, self._rules.rule(sequence((separator, here)))
            else:
                first = self._rules.rule(f"{here} | {first}") if first else f"({here})?"
                more = self._rules.rule(sequence((f"({separator} {one})?", more)))
        return first

    def _python(self, codec: PythonCalls, schema: object, depth: int = 0) -> str:
        def build() -> str:
            return one_of(self._one_python(codec, one, depth) for one in self._some(schema, depth))

        return self._recursive(schema, f"python {depth if schema is True else ''}", build)

    def _one_python(self, codec: PythonCalls, one: Mapping[str, Any], depth: int) -> str:
        """As JSON, but for its words, and for strings that are written in another quote where they need no escapes."""
        kind, spelled_as_json = one["type"], self.json(one, escapes='nrt"\\')
        if kind == "boolean":
            return one_of(plain(str(value)) for value in one.get("enum", (True, False)))
        if kind == "null":
            return one_of(map(plain, ("None", "null")))
        if codec.quote == '"' or kind not in ("string", "array", ""):
            return spelled_as_json
        if kind == "array":
            return one_of((self._array(one, lambda item: self._python(codec, item, depth + 1), ", "), spelled_as_json))
        if "enum" in one:
            one = {**one, "enum": [value for value in one["enum"] if python_literal(codec, value)[0] == codec.quote]}
            if not one["enum"]:
                return spelled_as_json
        try:
            pattern = self.pattern(one)
        except GrammarError:  # JSON's compiler may know more
            return spelled_as_json
        quote = codec.quote
        unescaped = regex(rf"{quote}[^{quote}\\\x00-\x1f]*{quote}")
        text = self._rules.terminal(f"{regex(f'{quote}(?:{pattern or ANY}){quote}')} & {unescaped}")
        return one_of((text, spelled_as_json))

    def _array(self, one: Mapping[str, Any], spell: Callable[[object], str], mark: str) -> str:
        low, high = self._size(one)
        item = spell(one.get("items", True))
        if high == 0:
            return '"[" "]"'
        rest = f"{item} ({plain(mark)} {item}){{{max(0, low - 1)},{'' if high is None else high - 1}}}"
        return f'"[" {rest} "]"' if low else f'"[" ({rest})? "]"'

    def _literal_object(self, codec: Literals, schema: object, depth: int) -> str:
        def spell(member: Member) -> str:
            return self._literal(codec, member.schema, depth + 1)

        body = self._listed(codec, schema, ":", ",", spell, self._literal(codec, True, depth + 1))
        return sequence(('"{"', body, '"}"'))

    def _literal(self, codec: Literals, schema: object, depth: int) -> str:
        def build() -> str:
            return one_of(self._one_literal(codec, one, depth) for one in self._some(schema, depth))

        return self._recursive(schema, str(depth) if schema is True else "", build)

    def _one_literal(self, codec: Literals, one: Mapping[str, Any], depth: int) -> str:
        quote = self._rules.literal(codec.quote)
        match one["type"]:
            case "string":
                return f"{quote} {self._rules.upto(codec.quote, self.pattern(one))}"
            case "null":
                return one_of(map(plain, ("None", "null")))
            case "object":
                return self._literal_object(codec, one, depth + 1)
            case "array":
                return self._array(one, lambda item: self._literal(codec, item, depth + 1), ",")
            case "":
                self.check(one)
                kinds = [kind for kind in TYPES if depth < 4 or kind not in ("object", "array")]
                return one_of(self._one_literal(codec, {"type": kind}, depth + 1) for kind in kinds)
        return self.json(one)

    # ── nested elements ───────────────────────────────────────────────────────────────────────────────────────────

    def _elements(self, codec: Elements, schema: object, depth: int) -> str:
        """The members of an object, one after the other."""
        members, more = self._writable(codec, schema)
        if more and members:
            self.refuse("additionalProperties")
        parts = []
        for member in members:
            one = self._element(codec, member.key, member.schema, depth + 1)
            parts.append(one if member.required else f"({one})?")
        return sequence(parts)

    def _element(self, codec: Elements, name: str, schema: object, depth: int) -> str:
        """An element: its opener, a value and its closer."""
        close = f"{codec.prefix}</{name}>"

        def build() -> str:
            found = self._some(schema, depth)
            plains = [one for one in found if one["type"] not in ("object", "array")]
            options = [self._untyped(plains, close, nested=plains != found)] if plains else []
            for one in (one for one in found if one not in plains):
                if one["type"] == "object":
                    body = self._elements(codec, one, depth + 1)
                else:
                    low, high = self._size(one)
                    item = self._element(codec, codec.item, one.get("items", True), depth + 1)
                    body = f"({item}){{{low},{'' if high is None else high}}}"
                options.append(sequence((body, self._rules.literal(close))))
            return one_of(options)

        value = self._recursive(schema, close, build)
        return sequence((self._rules.literal(codec.prefix), plain(f"<{name}>"), value))

    # ── parts of all of them ──────────────────────────────────────────────────────────────────────────────────────

    def _writable(self, codec: Codec, schema: object) -> tuple[list[Member], bool]:
        """An object's members whose keys this spelling can write."""
        members, more = self.members(schema)
        without = set(_NO_KEY[type(codec)])
        found = []
        for member in members:
            key = member.key
            writable = (
                key.isidentifier() if not without else bool(key) and key == key.strip() and not set(key) & without
            )
            if member.schema is False and not member.required:
                continue
            if writable and len(key) <= NAME_LIMIT:
                found.append(member)
            elif member.required or self.exact:
                raise GrammarError(f"the parameter {key!r:.80} cannot be written by this model")
        return found, more

    def _some(self, schema: object, depth: int = 0) -> list[dict[str, Any]]:
        if depth > DEPTH:
            raise GrammarError("the schema is nested too deeply")
        found = self.alternatives(schema)
        if not found:
            raise GrammarError("the schema allows no value for a parameter")
        return found

    def _size(self, one: Mapping[str, Any]) -> tuple[int, int | None]:
        self.check(one)
        low, high = one.get("minItems", 0), one.get("maxItems")
        if high is not None and high < low:
            raise GrammarError(f"the schema's minItems {low} and maxItems {high} leave no list")
        return low, high

    def _other_key(self, declared: Any) -> str:
        known = "|".join(escaped(key) for key in declared)
        return self._rules.terminal(f"/{_KEY}/" + (f" & ~/{known}/" if known else ""))

    def _recursive(self, schema: object, where: str, build: Callable[[], str]) -> str:
        """A rule per place of the schema, so that schemas may refer to themselves."""
        target = schema
        for _ in range(DEPTH):
            if not isinstance(target, Mapping) or target.keys() != {"$ref"}:
                break
            target = self.target(target["$ref"])
        key = (id(target), where)
        if key not in self._named:
            self._keep.append(target)
            self._named[key], define = self._rules.reserve()
            define(build())
        return self._named[key]


def _kept(value: str, types: frozenset[str]) -> bool:
    """Whether a string is read as itself."""
    return json_of(value, types)[0] == json.dumps(value, ensure_ascii=False)


def _kind(codec: Tagged, kind: str) -> str:
    """What the wire says of a value's type."""
    if codec.typed == "string":
        return "true" if kind == "string" else "false"
    return "number" if kind == "integer" else kind
