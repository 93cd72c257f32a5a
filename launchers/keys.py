"""API keys as people write them: in a file, in the environment, and changed while the server runs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from server.keys import ApiKey, KeyRing
from sessions.store.words import why

VARIABLE = "FT_API_KEYS"
"""Holds keys as the file does; a comma may stand for the end of a line."""
WATCH_SECONDS = 1.0

_log = logging.getLogger(__name__)


class KeysError(Exception):
    """The keys cannot be used, in words that say why and what to do. No key is in them."""


def read_keys(path: Path | None, environ: Mapping[str, str] = os.environ) -> tuple[ApiKey, ...]:
    """The keys of the file, then those of the environment. Raises KeysError, also for a file without any."""
    ours = parse_keys(environ.get(VARIABLE, "").replace(",", "\n"), VARIABLE)
    if path is None:
        return ours
    try:
        theirs = parse_keys(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"cannot read API keys from {path} ({why(error)}): check --api-key-file") from error
    if not theirs:
        raise KeysError(f"{path} holds no API key: put one into it, or name another --api-key-file")
    return (*theirs, *ours)


def parse_keys(text: str, where: str) -> tuple[ApiKey, ...]:
    """One a line: ``KEY`` or ``NAME KEY``. Empty lines and those that begin with # are none. Raises KeysError."""
    out = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = [] if line.lstrip().startswith("#") else line.split()
        if not words:
            continue
        try:
            if len(words) > 2:
                raise ValueError
            out.append(ApiKey(name="".join(words[:-1]), secret=words[-1]))
        except (ValidationError, ValueError) as error:
            raise KeysError(
                f"line {number} of {where} is no API key: write KEY, or NAME KEY with a name of letters, digits and "
                "_ . @ -"
            ) from error
    return tuple(out)


async def watch(path: Path | None, keys: Sequence[ApiKey], ring: KeyRing) -> None:
    """Until cancelled, reads a file that changed. One that cannot be used changes nothing, and that is logged."""
    if path is None:
        return
    told = ""
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        try:
            found = read_keys(path)
        except KeysError as error:
            if str(error) != told:
                _log.warning("the API keys stay as they were: %s", error)
            told = str(error)
            continue
        told = ""
        if found != keys:
            _log.warning("the API keys were changed: %d are good now", len(found))
            keys = found
            ring.replace(found)
