"""``ft sessions``: the sessions of the running server, what their requests reused, and what is kept of them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launchers.ctl import in_bytes
from launchers.running import ServerProblem, Told, ask, asked, not_ft
from sessions.store.words import why

BAR = 16
"""Cells of the longest bar."""
SOURCES = (
    ("device", "█", "green"),
    ("host", "▓", "cyan"),
    ("disk", "▒", "blue"),
    ("remote", "■", "magenta"),
    ("replayed", "x", "red"),
    ("new", "·", "default"),
)
"""Where a prompt's tokens came from; told apart without colours too."""


@dataclass(frozen=True)
class Sessions:
    """Of the server at ``url``. All methods print, return an exit code, and raise ServerProblem. ``name`` is an id, or
    the start of one."""

    url: str
    api_key: str
    as_json: bool

    def list(self) -> int:
        found = self._all()
        if self.as_json:
            print(json.dumps(found, indent=2, ensure_ascii=False))
            return 0
        if not found:
            print("no sessions yet: the first request of an agent begins one")
            return 0
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("session", "client", "last used", "requests", "prompt tokens", "kept", ""):
            numeric = column in ("requests", "prompt tokens", "kept")
            table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
        for one in found:
            table.add_row(
                str(one["id"])[:12],
                one["harness"],
                f"{_span(time.time() - one['last_used'])} ago",
                f"{one['requests']:,}",
                f"{one['prompt']:,}",
                in_bytes(one["kept_bytes"]),
                "pinned" if one["pinned"] else "",
            )
        _console().print(table)
        return 0

    def show(self, name: str) -> int:
        detail = asked("GET", self.url, f"/v1/sessions/{self._find(name)}", self.api_key)
        if self.as_json:
            print(json.dumps(detail, indent=2, ensure_ascii=False))
            return 0
        summary, console = detail["summary"], _console()
        requests = f"{summary['requests']:,} request{'' if summary['requests'] == 1 else 's'}"
        console.print(
            f"session {summary['id']}, {summary['harness']}, {requests}, "
            f"{in_bytes(summary['kept_bytes'])} kept{', pinned' if summary['pinned'] else ''}"
        )
        remote = any(request.get("remote") for request in detail["requests"])
        legend = [one for one in SOURCES if one[0] != "remote" or remote]
        console.print(Text.assemble(*((f"{sign} {source}  ", colour) for source, sign, colour in legend)))
        console.print(timeline(detail["requests"]))
        return 0

    def export(self, name: str, file: Path) -> int:
        """``file`` is for the user alone: it holds the whole conversation. "-" is standard output."""
        data = ask("GET", self.url, f"/v1/sessions/{self._find(name)}/export", self.api_key).content
        if str(file) == "-":
            sys.stdout.buffer.write(data)
            return 0
        try:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(data)
        except FileExistsError as error:
            raise ServerProblem(f"{file} exists: name another file, or remove it") from error
        except OSError as error:
            raise ServerProblem(f"cannot write {file} ({why(error)}): name another file") from error
        return self._done({"file": str(file), "bytes": len(data)}, f"{file}: {len(data):,} bytes")

    def take_in(self, file: Path) -> int:
        try:
            data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        except OSError as error:
            raise ServerProblem(f"cannot read {file} ({why(error)}): name what `ft sessions export` wrote") from error
        answer = asked("POST", self.url, "/v1/sessions/import", self.api_key, content=data, timeout=None)
        return self._done(answer, f"session {answer['id']} is taken in")

    def pin(self, name: str) -> int:
        return self._pin(name, "pin", "pinned: it is kept until you unpin or forget it")

    def unpin(self, name: str) -> int:
        return self._pin(name, "unpin", "no longer pinned")

    def forget(self, name: str) -> int:
        session = self._find(name)
        answer = asked("DELETE", self.url, f"/v1/sessions/{session}", self.api_key, timeout=None)
        return self._done(answer, f"session {session} is forgotten, with {answer['forgotten']:,.0f} pieces of state")

    def _pin(self, name: str, action: str, words: str) -> int:
        session = self._find(name)
        answer = asked("POST", self.url, f"/v1/sessions/{session}/{action}", self.api_key)
        return self._done(answer, f"session {session} is {words}")

    def _done(self, answer: Any, words: str) -> int:
        print(json.dumps(answer, indent=2) if self.as_json else words)
        return 0

    def _all(self) -> Sequence[Told]:
        found = asked("GET", self.url, "/v1/sessions", self.api_key)["data"]
        if not isinstance(found, list) or not all(isinstance(one, Told) for one in found):
            raise not_ft(self.url)
        return found

    def _find(self, name: str) -> str:
        found = [one["id"] for one in self._all() if str(one["id"]).startswith(name)] if name else []
        if len(found) != 1:
            how_many = f"{len(found)} sessions begin" if found else "no session begins"
            raise ServerProblem(f"{how_many} with {name!r}: see `ft sessions list`")
        return str(found[0])


def timeline(requests: list[dict[str, Any]]) -> Table:
    """One row per request: where its prompt came from, to scale, and why something was computed again."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("#", "time", "kind", "prompt", "", "replayed", "new", "cause"):
        numeric = column in ("#", "prompt", "replayed", "new")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    longest = max((one["prompt"] for one in requests), default=1)
    for one in requests:
        table.add_row(
            str(one["number"]),
            time.strftime("%H:%M", time.localtime(one["time"])),
            one["kind"] if one["branch"] == "main" else f"{one['kind']} ({one['branch'][:8]})",
            f"{one['prompt']:,}",
            bar(one, longest),
            f"{one['replayed']:,}",
            f"{one['new']:,}",
            one["cause"] + ("" if one["complete"] else ", cut short"),
        )
    return table


def bar(request: dict[str, Any], longest: int) -> Text:
    """``longest`` is the number of tokens of a full bar. Whatever there is of something shows."""
    shown = Text()
    for source, sign, colour in SOURCES:
        count = request.get(source, 0)
        shown.append(sign * (max(1, round(BAR * count / longest)) if count else 0), colour)
    return shown


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def _span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
