"""Qwen Code, sent to the local server by its environment and a home of ft's own."""

from __future__ import annotations

from launchers.agents.harness import Ask, Harness, Package, Recipe
from launchers.agents.merging import merged_json


def recipe(ask: Ask) -> Recipe:
    environment = {
        "OPENAI_BASE_URL": ask.base,
        "OPENAI_API_KEY": ask.key,
        "OPENAI_MODEL": ask.server.model,
        "QWEN_HOME": str(ask.own),
    }
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        "model": {
            "name": ask.server.model,
            # Without the size of the window it would never compact in time. Its own patience is that of a cloud.
            "generationConfig": {
                "contextWindowSize": ask.server.context_length,
                "timeout": 3_600_000,
                "samplingParams": {"max_tokens": ask.server.output_tokens(16384)},
            },
        },
    }
    return Recipe(environment, files=(merged_json(ask.own / "settings.json", settings),))


HARNESS = Harness(
    name="qwen",
    title="Qwen Code",
    program="qwen",
    package=Package("npm", "@qwen-code/qwen-code", "0.24.4", node=22),
    recipe=recipe,
    first_request=20_000,
    example='-p "fix the failing test"',
)
