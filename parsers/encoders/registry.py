"""The encoders by the name that formats call them."""

from __future__ import annotations

from collections.abc import Mapping

from parsers.encoders.deepseek import DeepseekV4, DeepseekV32, DeepseekV41
from parsers.encoders.kimi import KimiK3
from parsers.encoders.message import Encoder

ENCODERS: Mapping[str, Encoder] = {
    "deepseek_v32": DeepseekV32(),
    "deepseek_v4": DeepseekV4(),
    "deepseek_v41": DeepseekV41(),
    "kimi_k3": KimiK3(),
}
