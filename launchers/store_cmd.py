"""``ft store``: look after what is kept on disk. A running server is asked to do it; else it is done here."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lmdb
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from launchers import ctl
from launchers.running import DEFAULT_URL, ServerProblem, asked
from sessions.store import fsck
from sessions.store.config import StoreBusy, StoreConfig, StoreError
from sessions.store.files import Files
from sessions.store.owner import Namespace, Owner
from sessions.store.words import why

Done = Callable[[int, int], None]


@dataclass(frozen=True)
class Store:
    """In ``directory``, as given to ``ft serve --store``. All methods print, return an exit code, and raise
    ServerProblem. ``url`` None: the usual one, asked when a server has the store."""

    directory: Path
    key: bytes | None
    url: str | None
    api_key: str
    as_json: bool

    def stat(self) -> int:
        """What lies there, by model; and what a server that has it has counted."""
        with _problems():
            models = {one.fingerprint[:16] or one.directory.name: _row(one) for one in fsck.stat(self._state)}
        sessions = sum(path.stat().st_size for path in self._sessions.rglob("*") if path.is_file())
        answer: dict[str, Any] = {"directory": str(self.directory), "sessions_bytes": sessions, "models": models}
        busy = self._busy()
        if self.url is not None or busy is not None:
            try:
                answer["server"] = self._ask("GET", "/v1/store", busy)
            except ServerProblem as problem:
                if self.url is not None:
                    raise
                self._console.print(f"warning: {problem}", markup=False, soft_wrap=True)
        if self.url is not None and answer["server"].get("directory") != str(self.directory):
            answer = {"server": answer["server"]}  # it has another store than the one whose folder was looked at
        return self._show(answer)

    def verify(self) -> int:
        """Read everything; exit code 1 when something is damaged."""
        self._expect_folder()
        answer = self._here_or_there("verify", self._verify)
        self._show(answer)
        return 1 if _damaged(answer) else 0

    def rebuild(self) -> int:
        """Make the index anew from the payload."""
        self._expect_folder()
        busy = self._busy()
        if busy is not None:
            raise ServerProblem(f"{busy}; the index can be rebuilt while no server runs")
        with _problems(), self._each() as models:
            return self._show(
                {
                    name: {"extents": fsck.rebuild(self._state, one.fingerprint, self.key, done)}
                    for name, one, done in models
                }
            )

    def collect(self) -> int:
        """Free what retention no longer keeps."""
        return self._show(self._here_or_there("gc", self._collect))

    def forget(self) -> int:
        """Everything, of every model and session."""
        return self._show(self._here_or_there("forget", self._forget, {"all": True}))

    def _expect_folder(self) -> None:
        """Where nothing is, nothing is in order."""
        if self.url is None and not self.directory.is_dir():
            raise ServerProblem(f"there is no store in {self.directory}: name its folder with --store DIR")

    @property
    def _state(self) -> Path:
        return self.directory / "state"

    @property
    def _sessions(self) -> Path:
        return self.directory / "sessions"

    def _verify(self) -> dict[str, Any]:
        with self._each() as models:
            return {
                name: asdict(fsck.verify(self._state, one.fingerprint, self.key, done)) for name, one, done in models
            }

    def _collect(self) -> dict[str, Any]:
        with self._each() as models:
            return {
                name: fsck.collect(StoreConfig(self._state, one.fingerprint, (), key=self.key))
                for name, one, _ in models
            }

    def _forget(self) -> dict[str, Any]:
        """The locks stay, so that nobody can come in between."""
        if not self.directory.is_dir():
            return {"freed_bytes": 0}
        lock = Owner(self._sessions, Files())
        try:
            freed = fsck.forget(self._state)
            for path in [path for path in self._sessions.iterdir() if path.is_dir()]:
                freed += sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
                shutil.rmtree(path)
        finally:
            lock.close()
        return {"freed_bytes": freed}

    def _here_or_there(self, action: str, here: Callable[[], dict[str, Any]], body: object = None) -> dict[str, Any]:
        busy: StoreBusy | None = None
        if self.url is None:
            try:
                with _problems():
                    return here()
            except StoreBusy as error:
                busy = error
        with self._console.status(f"the server is at it: {action}"):
            return self._ask("POST", f"/v1/store/{action}", busy, body)

    def _ask(self, method: str, path: str, busy: StoreBusy | None, body: object = None) -> dict[str, Any]:
        """``busy`` is why; the server has to have this very store then, unless its address was given."""
        url = self.url or DEFAULT_URL
        if self.url is None:
            try:
                theirs = asked("GET", url, "/v1/store", self.api_key)["directory"]
            except ServerProblem as problem:
                raise ServerProblem(f"{busy}, and {problem}") from problem
            if Path(theirs) != self.directory.absolute():
                raise ServerProblem(f"{busy}; the server at {url} has another: name the right one with --url")
        return asked(method, url, path, self.api_key, json=body, timeout=None)

    def _busy(self) -> StoreBusy | None:
        """What says that another process has the store."""
        for part in (self._sessions, self._state):
            try:
                if part.is_dir():
                    Owner(part, Files()).close()
            except StoreBusy as busy:
                return busy
            except OSError:
                pass
        return None

    @contextmanager
    def _each(self) -> Iterator[Iterator[tuple[str, Namespace, Done]]]:
        """(name, what it is, to be told of progress) of what each model has stored, with a bar on a terminal."""
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
        console = self._console
        bars = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)

        def each() -> Iterator[tuple[str, Namespace, Done]]:
            for one in fsck.stat(self._state):
                name = one.fingerprint[:16] or one.directory.name
                bar = bars.add_task(name)
                yield name, one, lambda done, total, bar=bar: bars.update(bar, completed=done, total=total)  # type: ignore[misc]

        with bars:
            yield each()

    @property
    def _console(self) -> Console:
        return Console(stderr=True)

    def _show(self, answer: dict[str, Any]) -> int:
        if self.as_json:
            print(json.dumps(answer, indent=2, default=str))
        elif answer:
            ctl.show(answer, as_json=False)
        else:
            print(f"nothing is stored in {self.directory}")
        return 0


def _row(one: Namespace) -> dict[str, Any]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used))
    return {"bytes": one.size, "segments": one.segments, "last_used": used, "directory": str(one.directory)}


def _damaged(answer: dict[str, Any]) -> bool:
    return any(part.get("damaged") for part in (answer, *answer.values()) if isinstance(part, dict))


@contextmanager
def _problems() -> Iterator[None]:
    try:
        yield
    except StoreBusy:
        raise
    except StoreError as error:
        raise ServerProblem(f"{error} (--store-key-file FILE)") from error
    except (OSError, lmdb.Error) as error:
        raise ServerProblem(f"the store cannot be used ({why(error)}): check --store DIR, and its owner") from error
