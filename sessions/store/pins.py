"""Which sessions a person wants kept: one small file beside the segments, so that no rebuild loses it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable
from pathlib import Path

from sessions.store.crypt import Cipher, Unreadable
from sessions.store.format import open_record, seal_record
from sessions.store.owner import write_file

_log = logging.getLogger(__name__)
PINS = "pinned"
"""The file's name."""


class Pins:
    """Names of sessions. Any thread. ``path`` None: they last as long as this object."""

    def __init__(self, path: Path | None, cipher: Cipher | None) -> None:
        self._path = path
        self._cipher = cipher
        self._lock = threading.Lock()
        self._names = frozenset(self._read())

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def set(self, session: str, *, pinned: bool) -> None:
        with self._lock:
            self._keep(self._names | {session} if pinned else self._names - {session})

    def clear(self) -> None:
        with self._lock:
            self._keep(())

    def _keep(self, names: Iterable[str]) -> None:
        before, self._names = self._names, frozenset(names)
        if self._path is None or self._names == before:
            return
        try:
            write_file(self._path, seal_record(json.dumps(sorted(self._names)).encode(), self._cipher))
        except OSError as error:
            _log.warning("pins of sessions do not outlive this process: %s", error)

    def _read(self) -> Iterable[str]:
        if self._path is None or not self._path.exists():
            return ()
        try:
            return [str(name) for name in json.loads(open_record(self._path.read_bytes(), self._cipher))]
        except (OSError, Unreadable, ValueError, TypeError) as error:
            _log.warning("the pins of sessions cannot be read and are gone: %s", error)
            return ()
