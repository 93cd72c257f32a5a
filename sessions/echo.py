"""Does the client's echo of an assistant turn mean what was sampled?

Clients re-spell what they send back. Accepted: permuted keys, added defaults, other spellings of the same number or
string, dropped whitespace-only text, trimmed or merged text and thinking, thinking left out altogether, and invalid
JSON wrapped by Claude Code. Everything else is an edit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from parsers.conversation import Block, Text, Thinking, ToolCall
from sessions.digest import normal_id

Schemas = Mapping[str, Mapping[str, Any]]
"""Parameter schema by tool name."""

WRAPPED_UNITS = 2048

_NO_SCHEMA: Mapping[str, Any] = {}


def same_turn(sent: Sequence[Block], echo: Sequence[Block], schemas: Schemas) -> bool:
    """Blocks are compared kind by kind: chat clients lose the order between kinds, none loses it within one."""
    echoed_thinking = [block.text for block in echo if isinstance(block, Thinking)]
    sent_thinking = [block.text for block in sent if isinstance(block, Thinking)]
    if any(text.strip() for text in echoed_thinking) and not same_text(sent_thinking, echoed_thinking):
        return False
    if not same_text(
        (block.text for block in sent if isinstance(block, Text)),
        (block.text for block in echo if isinstance(block, Text)),
    ):
        return False
    sent_calls = [block for block in sent if isinstance(block, ToolCall)]
    echo_calls = [block for block in echo if isinstance(block, ToolCall)]
    return len(sent_calls) == len(echo_calls) and all(
        same_call(one, other, schemas.get(one.name, _NO_SCHEMA))
        for one, other in zip(sent_calls, echo_calls, strict=True)
    )


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
        return _same(ours, theirs, schema)
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


def _same(ours: Any, theirs: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(ours, dict):
        return isinstance(theirs, dict) and _same_object(ours, theirs, schema)
    if isinstance(ours, list):
        items = _child(schema, "items")
        return (
            isinstance(theirs, list)
            and len(ours) == len(theirs)
            and all(_same(one, other, items) for one, other in zip(ours, theirs, strict=True))
        )
    if _is_number(ours):
        return _is_number(theirs) and _same_number(ours, theirs)
    return type(ours) is type(theirs) and bool(ours == theirs)


def _same_object(ours: dict[str, Any], theirs: dict[str, Any], schema: Mapping[str, Any]) -> bool:
    properties = _child(schema, "properties")
    for name, value in theirs.items():
        child = _child(properties, name)
        if name in ours:
            if not _same(ours[name], value, child):
                return False
        elif not _is_default(value, child):
            return False
    return all(name in theirs for name in ours)


def _is_default(value: Any, schema: Mapping[str, Any]) -> bool:
    if value is None or value is False or value == "" or value == [] or value == {}:
        return True
    return "default" in schema and _same(_load(json.dumps(schema["default"])), value, schema)


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
