"""pi, sent to the local server by an agent folder of ft's own."""

from __future__ import annotations

import json

from launchers.agents.common import PlannedFile
from launchers.agents.harness import Ask, Harness, Package, Recipe
from launchers.agents.merging import merged_json


def recipe(ask: Ask) -> Recipe:
    environment = {"PI_CODING_AGENT_DIR": str(ask.own), "PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"}
    models = {
        "providers": {
            "ft": {
                "baseUrl": ask.base,
                "api": "openai-completions",
                "apiKey": ask.key,
                "models": [model(ask)],
            }
        }
    }
    context = ask.server.context_length
    settings = {
        "defaultProvider": "ft",
        "defaultModel": ask.server.model,
        # Its own limits suit a far longer context than a local model may have.
        "compaction": {"reserveTokens": min(16384, context // 4), "keepRecentTokens": min(20000, context // 4)},
    }
    written = (
        PlannedFile(ask.own / "models.json", json.dumps(models, indent=2) + "\n"),
        merged_json(ask.own / "settings.json", settings),
    )
    return Recipe(environment, flags=("--provider", "ft", "--model", ask.server.model), files=written)


def model(ask: Ask) -> dict[str, object]:
    """Costs are 0, else pi would show what somebody else takes."""
    return {
        "id": ask.server.model,
        "name": ask.server.model,
        "reasoning": True,
        "input": ["text"],
        "contextWindow": ask.server.context_length,
        "maxTokens": ask.server.output_tokens(8192),
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
    }


HARNESS = Harness(
    name="pi",
    title="pi",
    program="pi",
    package=Package("npm", "@mariozechner/pi-coding-agent", "0.73.1", node=20),
    recipe=recipe,
    first_request=1_500,
    example='-p "fix the failing test"',
)
