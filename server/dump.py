"""JSON out: the one place where values become the bytes of an answer."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

_LINE_ENDS = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}
"""What JSON lets be and readers of lines, Python's among them, take for ends of lines."""


def dump(value: Any) -> bytes:
    """Compact JSON in UTF-8; line ends in strings are escaped, so it is one line to everybody. Half a surrogate pair,
    which UTF-8 cannot say, becomes U+FFFD: what the model writes must never break an answer."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        for raw, escaped in _LINE_ENDS.items():
            if raw in text:
                text = text.replace(raw, escaped)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return dump(content)
