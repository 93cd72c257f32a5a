"""What the session half keeps over a restart: one directory with one owner and one writer thread.

A *group* is what belongs to one session: a head, read at every start, and named values, read when the session is asked
for. Requests hand over what changed and go on; the writer commits what has come together meanwhile, whole or not at
all. What waits is kept by name, so that a slow disk costs memory for the newest values only. After a kill the last
fraction of a second is missing. A damaged environment is moved aside, and one that cannot be used is left alone: both
are logged and counted, and neither stops a start.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread

import lmdb

from sessions.environment import Changes, Damaged, DiskFault, Environment
from sessions.store.config import DAY, StoreError
from sessions.store.files import Files
from sessions.store.owner import Owner
from sessions.store.words import REMEDY, why

_log = logging.getLogger(__name__)

_READ_SECONDS = 30.0
_ASIDE = "damaged"
"""Where an environment goes that was damaged."""


@dataclass(frozen=True)
class PersistConfig:
    """``directory`` belongs to the environment alone. ``key`` encrypts all values. The least recently used groups go
    when there are more than ``max_bytes`` or they are ``max_days`` old; pinned ones stay. ``commit_seconds`` is how
    long a change may wait for others. ``map_bytes`` is the first size of the map, which grows."""

    directory: Path
    key: bytes | None = None
    max_bytes: int = 512 << 20
    max_days: float = 30.0
    commit_seconds: float = 0.2
    map_bytes: int = 64 << 20
    clock: Callable[[], float] = time.time


class Persist:
    """Raises StoreBusy when another process owns the directory, StoreKeyError for a wrong, missing or needless key,
    StoreError when the package for encryption is missing. All calls come from one thread; of them only ``read`` may
    wait, for what it is to read."""

    def __init__(self, config: PersistConfig, files: Files | None = None) -> None:
        self._config = config
        self._files = files or Files()
        self._commits = self._errors = self._damaged = self._evicted = 0
        self._waiting: dict[bytes, Changes] = {}
        self._writing: frozenset[bytes] = frozenset()
        self._hurry = self._closing = False
        self._changed = Condition()
        self._owner: Owner | None = None
        self._env = self._open()
        self._thread = Thread(target=self._run, name="session writer", daemon=True)
        if self._env is not None:
            self._thread.start()

    @property
    def on(self) -> bool:
        """False when the directory cannot be used; nothing is kept then."""
        return self._env is not None

    def heads(self, namespace: bytes) -> list[tuple[bytes, bytes]]:
        """(group, head) of all groups whose names begin with ``namespace``, the least recently used first."""
        return self._env.heads(namespace) if self._env else []

    def read(self, group: bytes) -> dict[bytes, bytes]:
        """All values of a group that can be read."""
        with self._changed:
            pending = group in self._waiting or group in self._writing
        if self._env is None or (pending and not self.flush(_READ_SECONDS)):
            return {}
        return self._env.values(group)

    def write(
        self, group: bytes, head: bytes, values: Mapping[bytes, bytes | None], *, used: float, pinned: bool = False
    ) -> None:
        """Adds to a group; a value of None is deleted. ``used`` is when the group was last asked for, in seconds."""
        if self._env is None:
            return
        with self._changed:
            waiting = self._waiting.setdefault(group, Changes())
            waiting.head, waiting.used, waiting.pinned = head, used, pinned
            waiting.values.update(values)
            self._changed.notify_all()

    def drop(self, group: bytes, *, erase: bool = False) -> None:
        """``erase``: so that no trace of it is left in the file."""
        if self._env is None:
            return
        with self._changed:
            self._waiting[group] = Changes(fresh=True, erase=erase)
            self._changed.notify_all()

    def drop_all(self) -> list[bytes]:
        """All groups there are, which are returned."""
        with self._changed:
            groups = list({*(self._env.ages if self._env else ()), *self._waiting})
        for group in groups:
            self.drop(group, erase=True)
        return groups

    def flush(self, timeout: float) -> bool:
        """Waits until everything handed over is committed; False if that takes longer than ``timeout`` seconds."""
        if self._env is None:
            return False
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout)
            self._hurry = False
            return done

    def close(self) -> None:
        """Writes what waits, and lets go of the directory."""
        environment, self._env = self._env, None
        if environment is not None:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()
            environment.close()
        self._release()

    def stats(self) -> dict[str, float]:
        """Counters since the start, and what is held now. ``persist_bytes`` are in use on disk."""
        return {
            "persist_on": float(self.on),
            "persist_commits": self._commits,
            "persist_errors": self._errors,
            "persist_damaged": self._damaged,
            "persist_evicted": self._evicted,
            "persist_corrupt": self._env.corrupt if self._env else 0,
            "persist_bytes": self._env.bytes if self._env else 0,
            "persist_groups": len(self._env.ages) if self._env else 0,
            "persist_waiting": len(self._waiting) + len(self._writing),
        }

    def _open(self) -> Environment | None:
        """None, with the reason in the log, when there is nothing to be done."""
        directory = self._config.directory
        folder = directory / "env"
        try:
            self._owner = Owner(directory, self._files)
            try:
                environment = self._environment(folder)
            except Damaged as damage:
                aside = directory / _ASIDE
                _log.error("remembered sessions are damaged (%s) and were moved to %s", damage, aside)
                self._damaged += 1
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
                environment = self._environment(folder)
        except (Damaged, DiskFault, OSError) as error:
            told = "sessions are not kept over a restart, since the folder %s cannot be used (%s): %s"
            _log.error(told, directory, why(error), REMEDY)
            self._errors += 1
            self._release()
            return None
        except StoreError:
            self._release()
            raise
        self._forget_old(environment)
        return environment

    def _environment(self, folder: Path) -> Environment:
        config = self._config
        return Environment(folder, config.key, config.map_bytes, config.max_bytes, self._files)

    def _release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.close()

    # ── the writer ────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        environment = self._env
        while environment is not None:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
                self._changed.wait_for(lambda: self._hurry or self._closing, self._config.commit_seconds)
                taken, self._waiting = self._waiting, {}
                self._writing = frozenset(taken)
                last = self._closing
            if taken:
                self._commit(environment, taken)
                self._forget_old(environment)
            with self._changed:
                self._writing = frozenset()
                self._changed.notify_all()
            if last:
                return

    def _commit(self, environment: Environment, taken: Mapping[bytes, Changes]) -> None:
        try:
            environment.commit(taken)
            self._commits += 1
            if any(change.erase for change in taken.values()):
                environment.erase()
                aside = self._config.directory / _ASIDE  # nobody can tell whose tokens are in there
                if aside.exists():
                    shutil.rmtree(aside)
        except (DiskFault, lmdb.Error, OSError) as error:
            self._errors += 1
            _log.error("%d sessions were not written: %s", len(taken), error)

    def _forget_old(self, environment: Environment) -> None:
        """Groups that are too old, then the least recently used, until the rest fits."""
        limit = self._config.clock() - self._config.max_days * DAY
        ages = sorted((used, group) for group, (used, pinned) in environment.ages.items() if not pinned)
        for used, group in ages:
            if used >= limit and environment.bytes <= self._config.max_bytes:
                return
            self._evicted += 1
            self._commit(environment, {group: Changes(fresh=True)})


class Nowhere:
    """In place of a ``Persist``: keeps nothing."""

    on = False

    def heads(self, namespace: bytes) -> list[tuple[bytes, bytes]]:
        return []

    def read(self, group: bytes) -> dict[bytes, bytes]:
        return {}

    def write(
        self, group: bytes, head: bytes, values: Mapping[bytes, bytes | None], *, used: float, pinned: bool = False
    ) -> None: ...

    def drop(self, group: bytes, *, erase: bool = False) -> None: ...

    def drop_all(self) -> list[bytes]:
        return []

    def flush(self, timeout: float) -> bool:
        return True

    def close(self) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}
