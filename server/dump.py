"""JSON out: the one place where values become the bytes of an answer."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse


def dump(value: Any) -> bytes:
    """Compact JSON in UTF-8; newlines in strings are escaped, so it is one line. Half a surrogate pair, which UTF-8
    cannot say, becomes U+FFFD: what the model writes must never break an answer."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return dump(content)
