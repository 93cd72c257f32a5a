"""Write TOML: tables, strings, numbers, booleans, dates, and arrays of these. The standard library only reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


def document(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """``table`` as a TOML document; each nested table under its own header."""
    plain = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"[{dotted(path)}]"] if path and (plain or not table) else []
    lines += [f"{key(name)} = {inline(value)}" for name, value in plain.items()]
    text = "".join(f"{line}\n" for line in lines)
    nested = [document(value, (*path, name)) for name, value in table.items() if isinstance(value, Mapping)]
    return "\n".join(part for part in (text, *nested) if part)


def assignments(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    """``a.b=value`` for every leaf of ``table``."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from assignments(value, (*path, name))
        else:
            yield f"{dotted((*path, name))}={inline(value)}"


def inline(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(inline(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key(name)} = {inline(item)}' for name, item in value.items())}}}"
    return str(value)


def key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else inline(name)


def dotted(path: tuple[str, ...]) -> str:
    return ".".join(key(name) for name in path)
