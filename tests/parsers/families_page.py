"""Writes docs/families.md: ``make families``.

The formats say everything in the table but what survives a new user turn. That is the doing of a template, so it is
found with our encoders and with the templates of the tests, which write what those of the checkpoints do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launchers.families_cmd import markdown, rows
from parsers.encoders.message import Encoder
from parsers.encoders.registry import ENCODERS
from parsers.families.registry import FORMATS
from parsers.format import Format
from parsers.probe import Mismatch, Probe, examine
from parsers.template import ChatTemplate
from tests.parsers.wire_support import machine

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "families.md"
TEMPLATES = (Path(__file__).with_name("templates"), ROOT / "engine" / "templates")
INTRODUCTION = """# Model families

What each family writes, from its format in `parsers/families`: `⏎` is a line break, `…` a text. `make families` writes
this page.

A checkpoint belongs to the family that its chat template and its vocabulary fit. `ft families check DIR` says which one
that is, and why it is no other; `ft serve --family NAME` decides where that cannot be told. A model of no family is
served where its tokenizer has a `response_template`.

ft itself computes models of three architectures only, which the README names; the other families are for models that an
SGLang or vLLM server computes behind it (`ft serve --engine`).

What survives a new user turn is the template's doing, so it is found anew for each checkpoint. The table says what was
found with our encoders and with the templates of our tests.

"""


def page() -> str:
    return INTRODUCTION + markdown(list(rows(dict(probes()))))


def probes() -> Iterator[tuple[str, Probe]]:
    for known in FORMATS:
        found = machine(known.name)
        try:
            yield known.name, examine(found.format, found.tokenizer, encoder_of(known)).probe
        except Mismatch as mismatch:
            raise Mismatch(f"{known.name}: {mismatch}") from mismatch


def encoder_of(known: Format) -> Encoder:
    """Our encoder, or a template of the tests."""
    if known.encoder:
        return ENCODERS[known.encoder]
    files = [directory / f"{known.name}.jinja" for directory in TEMPLATES]
    file = next(file for file in files if file.is_file())
    return ChatTemplate(file.read_text(encoding="utf-8"), {})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
