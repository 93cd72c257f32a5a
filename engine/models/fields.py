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
        raise MissingCheckpoint(f"{directory} is not a directory: give --model the path of a downloaded model")
    path = directory / "config.json"
    if not path.is_file():
        raise MissingCheckpoint(f"{directory} has no config.json: give --model the directory that holds it")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise BadConfig(f"{path} is not a JSON object; download it again")
    return raw


_MOST = (1 << 31) - 1
MOST_LAYERS = 1 << 12
MOST_CONTEXT = 1 << 24
"""More than any model has, and few enough to be counted and tabulated."""


class Fields:
    """Typed access to one JSON object of the configuration."""

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self._raw = raw
        self._where = where

    def integer(self, name: str, default: int | None = None, *, least: int = 0, most: int = _MOST) -> int:
        value = self._raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._bad(name, f"a whole number from {least} to {most}", value)
        return value

    def positive(self, name: str, default: int | None = None, *, most: int = _MOST) -> int:
        return self.integer(name, default, least=1, most=most)

    def number(self, name: str, default: float, *, least: float, most: float) -> float:
        value = self._raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self._bad(name, f"a number from {least:g} to {most:g}", value)
        return float(value)

    def epsilon(self) -> float:
        """What RMSNorm adds, in float32, to the mean of squares."""
        return self.number("rms_norm_eps", 1e-6, least=1e-30, most=1.0)

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
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self._bad(name, "a list of whole numbers from 0", value)
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
    dims: int
    """How many dimensions of each head are rotated."""


def read_rope(fields: Fields, factor: float, head_dim: int) -> Rope:
    """Plain RoPE, from ``rope_parameters`` or the older ``rope_theta``; scaled variants are refused. ``factor``: which
    part of each head is rotated if the configuration does not say."""
    fields.refuse("rope_scaling")
    theta = fields.number("rope_theta", 10000.0, least=1.0, most=1e30)
    factor = fields.number("partial_rotary_factor", factor, least=0.0, most=1.0)
    inner = fields.inner("rope_parameters")
    if inner is not None:
        inner.refuse("rope_type", "default")
        inner.refuse("type", "default")
        theta = inner.number("rope_theta", theta, least=1.0, most=1e30)
        factor = inner.number("partial_rotary_factor", factor, least=0.0, most=1.0)
    dims = int(head_dim * factor)
    if dims == 0 or dims % 2:
        raise BadConfig(
            f"config.json: partial_rotary_factor {factor:g} of head_dim {head_dim} is {dims} dimensions, which are not "
            "pairs; config.json is damaged or of another model"
        )
    return Rope(theta, dims)


def check_counts(heads: int, kv_heads: int, experts: int, top_k: int) -> None:
    """What does not go together though every weight may have the right shape; raises BadConfig."""
    if heads % kv_heads:
        raise BadConfig(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}; "
            "config.json is damaged or of another model"
        )
    if top_k > experts:
        raise BadConfig(
            f"config.json: num_experts_per_tok {top_k} is more than num_experts {experts}; "
            "config.json is damaged or of another model"
        )


def dense_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Layers with one dense FFN instead of experts: ``mlp_only_layers``, and all that ``decoder_sparse_step`` skips."""
    step = fields.positive("decoder_sparse_step", 1)
    listed = set(fields.integers("mlp_only_layers"))
    return frozenset(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
