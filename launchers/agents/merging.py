"""Configuration files of ft's own in which the client, or the user, may have written something too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launchers.agents.common import LaunchError, PlannedFile
from sessions.store.words import why


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``old`` with the leaves of ``new`` set."""
    merged = dict(old)
    for name, value in new.items():
        before = merged.get(name)
        merged[name] = merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def merged_json(path: Path, settings: Mapping[str, Any]) -> PlannedFile:
    """The file at ``path`` with the leaves of ``settings`` set. Raises LaunchError where it cannot be read."""
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(old, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        old = {}
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot read {path} ({why(error)}): correct it, or delete it to start afresh") from error
    return PlannedFile(path, json.dumps(merge(old, settings), indent=2) + "\n")
