"""Does the client's echo of an assistant turn mean what was sampled?

Clients re-spell what they send back. Accepted: permuted keys, added defaults, other spellings of the same number or
string, dropped whitespace-only text, trimmed or merged text and thinking, thinking left out altogether, and invalid
JSON wrapped by Claude Code. Everything else is an edit, text that changed its place among the calls too: only chat
clients, which hold a turn's text and its calls apart, put all of it before them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

from parsers.conversation import Block, Text, Thinking, ToolCall
from sessions.digest import normal_id

Schemas = Mapping[str, Mapping[str, Any]]
"""Parameter schema by tool name."""

WRAPPED_UNITS = 2048

_NO_SCHEMA: Mapping[str, Any] = {}
_SCHEMAS = 64
"""As many are read for one value: references may lead anywhere, and in circles."""


def same_turn(sent: Sequence[Block], echo: Sequence[Block], schemas: Schemas) -> bool:
    """Thinking is compared by itself: it may be left out, and no client's copy of it says where it stood."""
    echoed_thinking = [block.text for block in echo if isinstance(block, Thinking)]
    sent_thinking = [block.text for block in sent if isinstance(block, Thinking)]
    if any(text.strip() for text in echoed_thinking) and not same_text(sent_thinking, echoed_thinking):
        return False
    ours, theirs = _texts_by_place(sent), _texts_by_place(echo)
    before_all_calls = not any(text.strip() for texts in theirs[1:] for text in texts)
    if not (
        (len(ours) == len(theirs) and all(map(same_text, ours, theirs)))
        or (before_all_calls and same_text((text for texts in ours for text in texts), theirs[0]))
    ):
        return False
    sent_calls = [block for block in sent if isinstance(block, ToolCall)]
    echo_calls = [block for block in echo if isinstance(block, ToolCall)]
    return len(sent_calls) == len(echo_calls) and all(
        same_call(one, other, schemas.get(one.name, _NO_SCHEMA))
        for one, other in zip(sent_calls, echo_calls, strict=True)
    )


def _texts_by_place(blocks: Sequence[Block]) -> list[list[str]]:
    """The texts before the first call, between the calls, and behind the last one."""
    places: list[list[str]] = [[]]
    for block in blocks:
        if isinstance(block, ToolCall):
            places.append([])
        elif isinstance(block, Text):
            places[-1].append(block.text)
    return places


def same_text(sent: Iterable[str], echo: Iterable[str]) -> bool:
    """Blank blocks may be gone, and either each block is trimmed or they are merged and the whole is trimmed: white
    space between two words never vanishes with the border between two blocks."""
    ours, theirs = list(sent), list(echo)
    worded = [text for text in ours if text.strip()]
    if [text.strip() for text in worded] == [text.strip() for text in theirs if text.strip()]:
        return True
    return "".join(theirs).strip() in ("".join(ours).strip(), "".join(worded).strip())


def same_call(sent: ToolCall, echo: ToolCall, schema: Mapping[str, Any]) -> bool:
    if normal_id(sent.id) != normal_id(echo.id) or sent.name != echo.name:
        return False
    if sent.arguments == echo.arguments:
        return True
    return not sent.freeform and same_arguments(sent.arguments, echo.arguments, schema)


def same_arguments(sent: str, echo: str, schema: Mapping[str, Any]) -> bool:
    """``sent`` and ``echo`` are JSON texts, possibly invalid; ``schema`` is the tool's parameter schema."""
    try:
        theirs = _load(echo)
    except ValueError:
        return False
    try:
        ours = _load(sent or "{}")
    except ValueError:
        return _is_wrapped(sent, theirs)
    try:
        return _same(ours, theirs, _Place(schema))
    except (ValueError, RecursionError):
        return False


def _load(text: str) -> Any:
    """Exact numbers, no NaN. Raises ValueError for everything that is no JSON or too deep or large to compare."""
    try:
        return json.loads(text, parse_float=Decimal, parse_constant=_refuse)
    except (ArithmeticError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _is_wrapped(sent: str, echo: Any) -> bool:
    """Claude Code sends invalid JSON back as the first 2,048 UTF-16 units of the text, and its whole length. Half a
    character at the cut may have become the replacement character."""
    match echo:
        case {"__unparsedToolInput": {"raw": str(raw), "len": int(length), **more}} if len(echo) == 1 and not more:
            units = sent.encode("utf-16-le", "surrogatepass")
            start = units[: 2 * WRAPPED_UNITS]
            spellings = (start.decode("utf-16-le", errors) for errors in ("surrogatepass", "replace"))
            return not isinstance(length, bool) and length == len(units) // 2 and raw in spellings
        case {"__unparsedToolInput": str(raw)} if len(echo) == 1:
            return raw == sent
    return False


def _same(ours: Any, theirs: Any, place: _Place) -> bool:
    if isinstance(ours, dict):
        return isinstance(theirs, dict) and _same_object(ours, theirs, place)
    if isinstance(ours, list):
        items = _Place(place.root, place)
        return (
            isinstance(theirs, list)
            and len(ours) == len(theirs)
            and all(_same(one, other, items) for one, other in zip(ours, theirs, strict=True))
        )
    if _is_number(ours):
        return _is_number(theirs) and _same_number(ours, theirs)
    return type(ours) is type(theirs) and bool(ours == theirs)


def _same_object(ours: dict[str, Any], theirs: dict[str, Any], place: _Place) -> bool:
    for name, value in theirs.items():
        member = _Place(place.root, place, name)
        if name in ours:
            if not _same(ours[name], value, member):
                return False
        elif not _is_default(value, member):
            return False
    return all(name in theirs for name in ours)


def _is_default(value: Any, place: _Place) -> bool:
    """What the schema says a left-out value is; where it does not say, what says nothing."""
    declared = [schema["default"] for schema in place.schemas if "default" in schema]
    if declared:
        return any(_same(_load(json.dumps(one)), value, place) for one in declared)
    return value is None or value is False or value == "" or value == [] or value == {}


@dataclass(frozen=True)
class _Place:
    """Where a value stands: the whole, which ``root`` describes; or, inside the value at ``parent``, the member
    ``name`` of an object or any item of a list."""

    root: Mapping[str, Any]
    parent: _Place | None = None
    name: str | None = None

    @cached_property
    def schemas(self) -> list[Mapping[str, Any]]:
        """What the schema says about it, references and alternatives included."""
        if self.parent is None:
            found = [self.root]
        elif self.name is None:
            found = [_child(one, "items") for one in self.parent.schemas]
        else:
            found = [_child(_child(one, "properties"), self.name) for one in self.parent.schemas]
        for one in found:  # it grows meanwhile
            for other in _related(one, self.root):
                if len(found) < _SCHEMAS and all(other is not known for known in found):
                    found.append(other)
        return found


def _related(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a schema refers to, and its alternatives."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        target = root
        for part in reference.split("/", _SCHEMAS)[1:]:
            target = _child(target, part.replace("~1", "/").replace("~0", "~"))
        yield target
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        yield from (one for one in options[:_SCHEMAS] if isinstance(one, Mapping)) if isinstance(options, list) else ()


def _child(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    child = schema.get(name)
    return child if isinstance(child, Mapping) else _NO_SCHEMA


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _same_number(ours: int | Decimal, theirs: int | Decimal) -> bool:
    """Equal, or ``theirs`` is how a client that holds numbers as doubles spells ``ours``."""
    if ours == theirs:
        return True
    try:
        return Decimal(repr(float(ours))) == theirs
    except OverflowError:
        return False
