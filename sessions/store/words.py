"""Errors of the system in words for people."""

from __future__ import annotations

import re

REMEDY = "check its owner and whether the disk is full, name another one with --store DIR, or keep nothing: --no-store"

_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


def why(error: BaseException) -> str:
    """Without its number, and without the path, which the caller names."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return _NUMBER.sub("", text) or type(error).__name__
