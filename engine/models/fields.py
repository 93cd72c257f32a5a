"""Strict reading of ``config.json``: a value of the wrong type, or one that asks for something else, is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.weights.errors import BadConfig, MissingCheckpoint


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a model directory; raises MissingCheckpoint or BadConfig."""
    if not directory.is_dir():
        raise MissingCheckpoint(f"{directory} is not a directory; give the path of a downloaded model")
    path = directory / "config.json"
    if not path.is_file():
        raise MissingCheckpoint(f"{directory} has no config.json; give the directory that holds it")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadConfig(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise BadConfig(f"{path} is not a JSON object; download it again")
    return raw


class Fields:
    """Typed access to one JSON object of the configuration."""

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self._raw = raw
        self._where = where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._bad(name, "a whole number", value)
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.integer(name, default)
        if value == 0:
            raise self._bad(name, "a number above 0", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._bad(name, "a number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._raw.get(name, default)
        if not isinstance(value, bool):
            raise self._bad(name, "true or false", value)
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        value = self._raw.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._bad(name, "a list of strings", value)
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._raw.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._bad(name, "a list of whole numbers", value)
        return tuple(value)

    def inner(self, name: str) -> Fields | None:
        value = self._raw.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._bad(name, "an object", value)
        return Fields(value, f"{self._where}: {name}")

    def refuse(self, name: str, *accepted: object) -> None:
        """Only these values (or absence) are supported."""
        value = self._raw.get(name)
        if value is not None and value not in accepted:
            raise BadConfig(
                f"{self._where}: {name} = {value!r} is not supported (only {', '.join(map(repr, accepted))}); "
                "use another release of this model"
            )

    def _bad(self, name: str, wanted: str, value: object) -> BadConfig:
        problem = "is missing" if value is None else f"is {value!r}, not {wanted}"
        return BadConfig(f"{self._where}: {name} {problem}; config.json is damaged or of another model")


@dataclass(frozen=True)
class Rope:
    theta: float
    factor: float
    """Which part of each head is rotated."""


def read_rope(fields: Fields, factor: float) -> Rope:
    """Plain RoPE, from ``rope_parameters`` or the older ``rope_theta``; scaled variants are refused."""
    fields.refuse("rope_scaling")
    inner = fields.inner("rope_parameters")
    if inner is None:
        return Rope(fields.number("rope_theta", 10000.0), fields.number("partial_rotary_factor", factor))
    inner.refuse("rope_type", "default")
    inner.refuse("type", "default")
    return Rope(
        inner.number("rope_theta", fields.number("rope_theta", 10000.0)),
        inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", factor)),
    )


def dense_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Layers with one dense FFN instead of experts: ``mlp_only_layers``, and all that ``decoder_sparse_step`` skips."""
    step = fields.positive("decoder_sparse_step", 1)
    listed = set(fields.integers("mlp_only_layers"))
    return frozenset(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
