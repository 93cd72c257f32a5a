"""One regular expression for many literals."""

from __future__ import annotations

import re
from collections.abc import Iterable


def alternatives(literals: Iterable[str]) -> str:
    """A pattern for the longest of these literals. It shares what they begin with, so that a thousand names like
    ``<SPECIAL_7>`` are not tried one after another."""
    ordered = sorted({literal for literal in literals if literal})
    return _pattern(ordered, 0) if ordered else "(?!)"


def _pattern(ordered: list[str], at: int) -> str:
    """For literals that are equal up to ``at``, in order."""
    if len(ordered) == 1:
        return re.escape(ordered[0][at:])
    shared = at
    while len(ordered[0]) > shared and ordered[0][shared] == ordered[-1][shared]:
        shared += 1
    branches: dict[str, list[str]] = {}
    for literal in ordered:
        branches.setdefault(literal[shared : shared + 1], []).append(literal)
    ends = "" in branches
    inner = "|".join(_pattern(group, shared) for first, group in branches.items() if first)
    return re.escape(ordered[0][at:shared]) + f"(?:{inner})" + ("?" if ends else "")
