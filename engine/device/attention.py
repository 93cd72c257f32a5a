"""What computes attention on a device: backends by name, and which of them ``auto`` takes.

A step of more rows than decode kernels take (16) is prefill, decode rows in it included. Decode reduces keys in an
order that depends on the row's position alone, prefill by torch also on how many rows of the sequence are in the step;
prefill by Triton cuts the keys of few rows by how many rows there are in all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from torch import Tensor

from engine.layers.ops import Batch

Attend = Callable[[Tensor, Tensor, Tensor, Batch, float], Tensor]
"""As ``engine.layers.ops.Ops.attention``."""
Phase = Literal["prefill", "decode"]

BACKENDS: Mapping[str, Mapping[Phase, str]] = {
    "triton": {"prefill": "engine.kernels.prefill_attention", "decode": "engine.kernels.attention"},
    "torch": {"prefill": "engine.kernels.torch_attention"},  # in a captured step there is no size to gather by
}
"""The modules whose ``attention`` it is. They are imported where they are chosen."""
AUTO: Mapping[Phase, str] = {"prefill": "triton", "decode": "triton"}
"""Measured on an H200: cuDNN has 1.2 times the rate of Triton's kernel for 8,192
rows behind 60,000 keys, as much for fewer, and takes two seconds to get ready in each process."""


@dataclass(frozen=True)
class Chosen:
    """``name``: of both backends, as flags have it."""

    name: str
    prefill: Attend
    decode: Attend


def choose(asked: tuple[str, str]) -> Chosen:
    """``asked``: for prefill and for decode, each a backend's name or ``auto``."""
    names = {phase: AUTO[phase] if name == "auto" else name for phase, name in zip(AUTO, asked, strict=True)}
    prefill, decode = (import_module(BACKENDS[name][phase]).attention for phase, name in names.items())
    return Chosen(",".join(names.values()), prefill, decode)
