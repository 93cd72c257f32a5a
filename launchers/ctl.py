"""``ft ctl``: ask the running server how it is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from launchers.running import ServerProblem, asked, get

USED = ("cached", "held", "kept")
SIZES = {"pages": "page_bytes", "checkpoints": "checkpoint_slot_bytes"}
DIVIDING_SECONDS = 120.0
"""Memory is divided between two steps, and a step of a long prompt takes a slow machine seconds."""
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def health(url: str, api_key: str, *, as_json: bool) -> int:
    """Print ``GET /health``; 0 when the server can take requests, else 1. Raises ServerProblem."""
    body = get(url, "/health", api_key, any_status=True)
    show(body, as_json=as_json)
    return 0 if body.get("status") == "ok" else 1


def stats(url: str, api_key: str, *, as_json: bool) -> int:
    """Print ``GET /v1/stats``. Raises ServerProblem."""
    show(get(url, "/v1/stats", api_key), as_json=as_json)
    return 0


def count(text: str) -> int:
    """A number, with k or m for 1024 or 1024 times that: ``2000``, ``32k``."""
    number, unit = text.strip().lower(), 1
    if number[-1:] in ("k", "m"):
        number, unit = number[:-1], 1 << (10 if number[-1] == "k" else 20)
    if not number.isascii() or not number.isdigit() or len(number) > 12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: write one such as 2000, or 32k")
    return int(number) * unit


def cache(url: str, api_key: str, wanted: Mapping[str, int | bool | None], *, as_json: bool) -> int:
    """Print ``GET /v1/cache``, after memory is divided as ``wanted``. Raises ServerProblem, which says what does not
    fit."""
    named = {name: value for name, value in wanted.items() if value is not None and value is not False}
    if named.get("auto") and len(named) > 1:
        raise ServerProblem("--auto is for when the engine is to decide: name no number besides it")
    if named:
        asked("POST", url, "/v1/cache", api_key, json=named, timeout=DIVIDING_SECONDS)
    show(asked("GET", url, "/v1/cache", api_key, timeout=DIVIDING_SECONDS), as_json=as_json)
    return 0


def show(body: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(body, indent=2, ensure_ascii=False))
        return
    for title, rows in sections(body):
        if title:
            print(title)
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            print(f"{'  ' if title else ''}{name:<{width}}  {value}")


def sections(body: Mapping[str, Any], title: str = "") -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The values of each (nested) object under its name, as (name, text)."""
    plain = {name: value for name, value in body.items() if not isinstance(value, Mapping)}
    if plain:
        yield title, [(name, text(name, value, plain)) for name, value in plain.items()]
    for name, value in body.items():
        if isinstance(value, Mapping):
            yield from sections(value, f"{title} {name}".strip())


def text(name: str, value: Any, values: Mapping[str, Any]) -> str:
    """``value`` for people; a used amount with its bound, which is the ``_total`` of the same thing, and with the bytes
    of both where the size of one thing is known."""
    thing, _, state = name.rpartition("_")
    bound = values.get(f"{thing}_total") if state in USED else None
    shown = amount(name, value)
    if bound is None:
        return shown
    each = values.get(SIZES.get(thing, ""), 0)
    sizes = f" ({in_bytes(value * each)} of {in_bytes(bound * each)})" if each else ""
    return f"{shown} of at most {amount(name, bound)}{sizes}"


def amount(name: str, value: Any) -> str:
    """A number as people read it: binary units where the name says bytes, thousands apart otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if "bytes" in name:
        return in_bytes(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}"


def in_bytes(value: float) -> str:
    size, unit = float(value), 0
    while size >= 1024 and unit < len(BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {BYTE_UNITS[unit]}"
