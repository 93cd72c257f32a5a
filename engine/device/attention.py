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
BEST: Mapping[tuple[str, Phase], str] = {}
"""What ``auto`` takes on a kind of GPU (``Machine.kind``), where that is not ``triton``: where it was measured."""


@dataclass(frozen=True)
class Chosen:
    """``name``: of both backends, as flags have it."""

    name: str
    prefill: Attend
    decode: Attend


def choose(asked: tuple[str, str], kind: str) -> Chosen:
    """``asked``: for prefill and for decode, each a backend's name or ``auto``."""
    names = [
        BEST.get((kind, phase), "triton") if name == "auto" else name
        for name, phase in zip(asked, _PHASES, strict=True)
    ]
    prefill, decode = (
        import_module(BACKENDS[name][phase]).attention for name, phase in zip(names, _PHASES, strict=True)
    )
    return Chosen(",".join(names), prefill, decode)


_PHASES: tuple[Phase, Phase] = ("prefill", "decode")
