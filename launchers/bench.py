"""What the benchmarks share: their checkpoints and families, and how they print."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from parsers.families.registry import FORMATS, find
from parsers.format import Format


def make_tiny(directory: Path, *options: str, architecture: str = "qwen3_5_moe") -> Path:
    """A tiny checkpoint with random weights and a real vocabulary, made by a process that may import torch. Raises
    subprocess.SubprocessError."""
    make = [sys.executable, "-P", "-m", "engine.checkpoint", "tiny", architecture, str(directory)]
    subprocess.run([*make, "--tokenizer", "qwen", *options], check=True, stdout=subprocess.DEVNULL)
    return directory


def chosen_formats(parser: argparse.ArgumentParser, names: Sequence[str] | None) -> list[Format]:
    """Those of the named families, or all. Ends the program for a family that is not known."""
    found = []
    for name in names or [known.name for known in FORMATS]:
        known = find(name)
        if known is None:
            parser.error(f"there is no family {name!r}; see: ft families")
        found.append(known)
    return found


def table(title: str, *columns: str, first_width: int = 0) -> Table:
    """A column of names without a heading, then numbers."""
    shown = Table(box=None, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style="bold")
    shown.add_column("", min_width=first_width or None)
    for column in columns:
        shown.add_column(column, justify="right")
    return shown


def verdict(missed: bool) -> str:
    return "[red]missed[/]" if missed else "[green]pass[/]"


def failed(console: Console, command: str, error: Exception) -> int:
    """Says why nothing was measured; the exit code."""
    console.print(f"ft {command}: error: {error}", style="red", markup=False, soft_wrap=True)
    return 1
