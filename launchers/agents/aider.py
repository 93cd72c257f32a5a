"""aider, sent to the local server by its flags."""

from __future__ import annotations

import json

from launchers.agents.common import PlannedFile
from launchers.agents.harness import Ask, Harness, Package, Recipe


def recipe(ask: Ask) -> Recipe:
    """aider reads a project's ``.env`` over the environment: the address goes as a flag, which wins over both."""
    name = f"openai/{ask.server.model}"
    metadata = {
        name: {
            "max_input_tokens": ask.server.context_length,
            "max_output_tokens": ask.server.output_tokens(8192),
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }
    file = PlannedFile(ask.own / "model_metadata.json", json.dumps(metadata, indent=2) + "\n")
    flags = (
        # A configuration file of the user's may name others for commits and edits.
        *("--model", name, "--weak-model", name, "--editor-model", name),
        *("--edit-format", "diff", "--model-metadata-file", str(file.path)),
        *("--openai-api-base", ask.base),
        *("--no-show-model-warnings", "--no-check-update", "--analytics-disable"),
    )
    environment = {"OPENAI_API_KEY": ask.key, "OPENAI_API_BASE": ask.base, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return Recipe(environment, flags=flags, files=(file,))


HARNESS = Harness(
    name="aider",
    title="aider",
    program="aider",
    package=Package("pip", "aider-chat", "0.86.2"),
    recipe=recipe,
    first_request=3_000,
    example='--message "fix the failing test" stats.py',
)
