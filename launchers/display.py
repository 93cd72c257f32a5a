"""What ``ft serve`` shows to a human, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine.api import ModelInfo
from launchers.running import AGENT_CONTEXT, DEFAULT_URL

Show = Callable[[str, int, int], None]
"""(what, done, total)"""


class Display:
    def __init__(self) -> None:
        self._console = Console(stderr=True, soft_wrap=True, highlight=False)

    def note(self, text: str) -> None:
        self._console.print(f"ft serve: {text}", markup=False)

    def ready(self, url: str, model: str, info: ModelInfo, *, wants_key: bool) -> None:
        details = f"{info.architecture}, {info.dtype}, {info.context_length:,} tokens of context"
        self.note(f"ready on {url} with {model} ({details})")
        options = ("" if url == DEFAULT_URL else f" --url {url}") + (" --api-key-file FILE" if wants_key else "")
        if info.context_length >= AGENT_CONTEXT:
            self.note(f"now run `ft launch claude{options}` in your project; Ctrl-C ends the server")
        else:
            self.note(
                "for SDKs and trials: coding agents want a model with a longer context (ft serve --model DIR); "
                "Ctrl-C ends the server"
            )

    @contextmanager
    def loading(self) -> Iterator[Show]:
        """One bar, which says what is being loaded; without a terminal, one line for each thing."""
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
        terminal = self._console.is_terminal
        bars = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True, disable=not terminal)
        with bars as progress:
            bar = progress.add_task("starting", total=1)
            shown = ""

            def show(what: str, done: int, total: int) -> None:
                nonlocal shown
                progress.update(bar, description=f"loading: {what}", completed=done, total=max(total, 1))
                if what != shown and not terminal:
                    self.note(f"loading: {what}")
                shown = what

            yield show
