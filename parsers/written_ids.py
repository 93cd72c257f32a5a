"""The ids that a model wrote for its own calls, read off the turn's text.

Outputs must name their call as the model named it, which may have miscounted or made up an id: its tokens stay in
history as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from parsers.format import Format, JsonCall
from parsers.guard import visible
from parsers.messages import NINE

_HOLE = re.compile(r"\{(?:n|id)\}")
_WORD = re.compile(r"\S+")


class WrittenIds:
    """Reads them for one format."""

    def __init__(self, wire_format: Format) -> None:
        call = wire_format.call
        self._usable = {"any": None, "nine": NINE, "numbered": _WORD}[wire_format.call_ids]
        self._key = call.codec.id_key if isinstance(call.codec, JsonCall) else ""
        self._list = call.section.open if call.section else call.open
        before, *behind = _HOLE.split(call.header)
        before = before.rpartition("{name}")[2] if wire_format.call_ids == "nine" else call.open
        self._header = re.compile(f"{re.escape(before)}(.*?){re.escape(behind[0])}") if behind else None

    def of(self, text: str) -> Sequence[str]:
        """One for each call; nothing where one cannot be used."""
        if self._usable is None:
            return ()
        found = self._members(text) if self._key else self._header.findall(text) if self._header else []
        ids = [visible(one).strip() for one in found]
        return ids if all(map(self._usable.fullmatch, ids)) else ()

    def _members(self, text: str) -> list[str]:
        try:
            calls, _ = json.JSONDecoder().raw_decode(visible(text.partition(self._list)[2]).lstrip())
        except (ValueError, RecursionError):
            return []
        found = calls if isinstance(calls, list) else [calls]
        return [str(call.get(self._key, "")) if isinstance(call, dict) else "" for call in found]
