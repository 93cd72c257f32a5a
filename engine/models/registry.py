"""From ``model_type`` to the model file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.layers.loader import Loader
from engine.models.fields import Fields
from engine.models.model import Model, Progress
from engine.models.qwen2_moe import Qwen2Moe, Qwen2MoeConfig
from engine.models.qwen3_5_moe import Qwen35Moe, Qwen35MoeConfig
from engine.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from engine.weights.errors import BadConfig, UnknownArchitecture

_OTHERS = "or a server of your own that computes it (--engine http://HOST:PORT)"


@dataclass(frozen=True)
class Architecture:
    """``name``, the model's own context length, routed experts of each row, and how to build it for a context of so
    many tokens."""

    name: str
    context: int
    top_k: int
    build: Callable[[Loader, int, Progress], Model]


def find_architecture(raw: Mapping[str, Any]) -> Architecture:
    """Parse ``config.json``; raises UnknownArchitecture or BadConfig."""
    kind = raw.get("model_type")
    fields = Fields(raw)
    if raw.get("quantization_config") is not None:
        raise BadConfig(f"config.json has a quantization_config: use the unquantized release, {_OTHERS}")
    match kind:
        case "qwen3_5_moe" | "qwen3_5_moe_text":
            hybrid = Qwen35MoeConfig.parse(fields)
            return Architecture("qwen3_5_moe", hybrid.context, hybrid.top_k, lambda *to: Qwen35Moe(hybrid, *to))
        case "qwen3_moe":
            qwen3 = Qwen3MoeConfig.parse(fields)
            return Architecture("qwen3_moe", qwen3.context, qwen3.top_k, lambda *to: Qwen3Moe(qwen3, *to))
        case "qwen2_moe":
            qwen2 = Qwen2MoeConfig.parse(fields)
            return Architecture("qwen2_moe", qwen2.context, qwen2.top_k, lambda *to: Qwen2Moe(qwen2, *to))
        case _:
            raise UnknownArchitecture(
                f"config.json: model_type {kind!r} is not computed here (qwen3_5_moe, qwen3_moe and qwen2_moe are): "
                f"use one of those, {_OTHERS}"
            )
