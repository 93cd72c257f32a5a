"""``ft families``: what is known of each family, and which one a checkpoint is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from parsers.conversation import ToolCall
from parsers.families.registry import ALIASES, FORMATS
from parsers.format import Format
from parsers.guard import Guard
from parsers.load import ADVICE, FamilyError, compare
from parsers.probe import Probe
from parsers.write import assistant_text

COLUMNS = ("family", "models", "reasoning", "call", "tool output", "call ids", "efforts", "survives a new user turn")
WIRE = ("reasoning", "call", "tool output")
WIDE = 160
_SUFFIX = ":…"
_IDS = {"any": "any", "numbered": "functions.NAME:N", "nine": "nine letters and digits"}


@dataclass(frozen=True)
class Row:
    """One family. Its wire texts show line breaks as ``⏎``."""

    family: str
    models: str
    reasoning: str
    call: str
    output: str
    ids: str
    efforts: str
    survives: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.family, self.models, self.reasoning, self.call, self.output, self.ids, self.efforts, self.survives)


def rows(probes: Mapping[str, Probe]) -> Iterator[Row]:
    """``probes``: what templates of families were found to keep."""
    for known in FORMATS:
        other = [alias for alias, name in ALIASES.items() if name == known.name]
        wire_format = known.with_suffix(_SUFFIX)
        call = ToolCall("a1b2c3d4e", "probe", '{"n": 2}')
        yield Row(
            family=", ".join((known.name, *other)),
            models=", ".join(known.models),
            reasoning=_reasoning(wire_format),
            call=_shown(assistant_text(wire_format, Guard(()), (call,), "closed")),
            output=_output(wire_format),
            ids=_IDS[known.call_ids],
            efforts=", ".join(known.switches.levels),
            survives=survives(probes[known.name]) if known.name in probes else "",
        )


def survives(probe: Probe) -> str:
    """What stays where it stood when the user says something new."""
    if not probe.header_survives:
        return "nothing: even the system turn changes"
    if not probe.turn_end_survives:
        return "all up to the previous query"
    return "everything" if probe.prompt_end_survives else "whole turns"


def _reasoning(wire_format: Format) -> str:
    frames, think = wire_format.frames, wire_format.think
    if frames:
        return _shown(f"{frames.thinking}{frames.message}…{frames.ends[0]}")
    return _shown(f"{think.open}{think.inner}…{think.inner}{think.close}") if think else ""


def _output(wire_format: Format) -> str:
    turns, result = wire_format.turns, wire_format.result
    opener, closer = (text.replace("{{", "{").replace("}}", "}") for text in (result.open, result.close))
    output = f"{result.lead}{opener}{result.inner}…{result.inner}{closer}"
    if output.startswith(turns.tools.open):  # an output is all of the turn
        return _shown(output)
    return _shown(f"{turns.tools.open}{output}{turns.tools.close}")


def _shown(text: str) -> str:
    return text.replace("\n", "⏎")


def markdown(every: Sequence[Row]) -> str:
    """A table in Markdown, with wire texts as code."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for row in every:
        wire = map(_code, (row.reasoning, row.call, row.output))
        cells = (row.family, row.models, *wire, row.ids, row.efforts, row.survives)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    fence = "````" if "`" in text else "`"
    return f"{fence}{text}{fence}".replace("|", r"\|") if text else ""


def show() -> int:
    """Prints the table, without the wire texts where the terminal is too narrow."""
    console = Console(highlight=False, markup=False)
    wide = console.width >= WIDE
    shown = [number for number, name in enumerate(COLUMNS[:-1]) if wide or name not in WIRE]
    table = Table(*(COLUMNS[number] for number in shown), box=None, padding=(0, 2, 0, 0))
    for row in rows({}):
        table.add_row(*(row.cells[number] for number in shown))
    console.print(table)
    if not wide:
        console.print(f"What each writes: ft families --markdown, or a terminal of {WIDE} columns.")
    console.print("What survives a new user turn is the template's doing: ft families check DIR")
    return 0


def check(directory: Path) -> int:
    """1 when no family fits."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    errors = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)
    try:
        if not directory.is_dir():
            raise FamilyError(f"there is no folder {directory}: name one that holds a checkpoint")
        comparison = compare(directory)
    except FamilyError as error:
        errors.print(f"ft families check: error: {error}")
        return 1
    for fit in comparison.fits:
        best = fit is comparison.best
        console.print(f"{fit.renderer.format.name} {'is taken' if best else 'would fit, too, but less well'}")
    for line in comparison.lines():
        console.print(f"does not fit: {line}")
    if not comparison.fits:
        errors.print(f"ft families check: error: no family fits {directory}: {ADVICE}")
        return 1
    probe = comparison.best.probe
    console.print(f"survives a new user turn: {survives(probe)}")
    console.print(f"thinking stays while tools are called: {'yes' if probe.thinking_in_loop else 'no'}")
    return 0
