"""openclaw, sent to the local server by a state folder of ft's own."""

from __future__ import annotations

from pathlib import Path

from launchers.agents.harness import Ask, Harness, Package, Recipe
from launchers.agents.merging import merged_json


def recipe(ask: Ask) -> Recipe:
    """It works in its workspace: that has to be the user's project, into which it may not put files about itself."""
    path = ask.own / "openclaw.json"
    environment = {"OPENCLAW_STATE_DIR": str(ask.own), "OPENCLAW_CONFIG_PATH": str(path)}
    model = {
        "id": ask.server.model,
        "name": ask.server.model,
        "reasoning": True,
        "input": ["text"],
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        "contextWindow": ask.server.context_length,
        "maxTokens": ask.server.output_tokens(8192),
    }
    provider = {"baseUrl": ask.base, "apiKey": ask.key, "api": "openai-completions", "models": [model]}
    settings = {
        "models": {"mode": "merge", "providers": {"ft": provider}},
        "agents": {
            "defaults": {
                "model": {"primary": f"ft/{ask.server.model}"},
                "workspace": str(Path.cwd()),
                "skipBootstrap": True,
            },
        },
        "gateway": {"mode": "local"},
    }
    return Recipe(environment, files=(merged_json(path, settings),))


HARNESS = Harness(
    name="openclaw",
    title="openclaw",
    program="openclaw",
    package=Package("npm", "openclaw", "2026.9.6", node=24),
    recipe=recipe,
    first_request=12_500,
    example='agent --local --session-id s1 --message "fix the failing test"',
)
