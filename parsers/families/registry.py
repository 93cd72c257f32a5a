"""All formats, in the order in which a checkpoint is compared with them, and other names for them."""

from __future__ import annotations

from parsers.families import deepseek, gemma, glm, harmony, hermes, kimi, lists, llama, minimax, mistral, qwen3_xml
from parsers.format import Format

_QWEN3_XML = (
    qwen3_xml.QWEN3_XML,
    qwen3_xml.QWEN38,
    qwen3_xml.NEMOTRON3,
    qwen3_xml.MIMO,
    qwen3_xml.STEP35,
    qwen3_xml.SEED,
)
_LISTS = (lists.GRANITE3, lists.NEMOTRON2, lists.HUNYUAN, lists.STEP3, lists.LFM2, lists.OLMO3)
FORMATS: tuple[Format, ...] = (
    *(hermes.HERMES, *_QWEN3_XML, glm.GLM45, glm.GLM47, glm.GLM53, glm.LING3, glm.HY3),
    *(deepseek.V3, deepseek.V31, deepseek.V32, deepseek.V4, deepseek.V41, kimi.K2, kimi.K3),
    *(harmony.HARMONY, harmony.MUSE, minimax.M2, minimax.M3, gemma.GEMMA4, mistral.V3, mistral.V11, mistral.V13),
    *(llama.LLAMA3, llama.LLAMA4, hermes.GRANITE4, *_LISTS),
    *(hermes.ERNIE, hermes.LONGCAT, hermes.PLAIN, hermes.PLAIN_THINKING),
)

ALIASES: dict[str, str] = {
    "qwen25": "hermes",
    "qwen3": "hermes",
    "smollm3": "chatml_thinking",
    "qwen3_coder": "qwen3_xml",
    "qwen35": "qwen3_xml",
    "qwen36": "qwen3_xml",
    "glm46": "glm45",
    "glm5": "glm47",
    "glm52": "glm47",
    "kimi_k25": "kimi_k2",
    "kimi_k27": "kimi_k2",
    "minimax_m25": "minimax_m2",
    "gpt_oss": "harmony",
    "devstral": "mistral_v13",
    "magistral": "mistral_v13",
    "ministral3": "mistral_v13",
}
"""Names that people try with ``--family``."""


def find(name: str) -> Format | None:
    wanted = ALIASES.get(name, name)
    return next((known for known in FORMATS if known.name == wanted), None)
