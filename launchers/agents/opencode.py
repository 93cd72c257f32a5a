"""opencode, sent to the local server by a configuration folder of ft's own."""

from __future__ import annotations

import json
from pathlib import Path

from launchers.agents.common import PlannedFile, PlannedLinks
from launchers.agents.harness import Ask, Harness, Package, Recipe


def recipe(ask: Ask) -> Recipe:
    """The user's own configuration would be merged in, and opencode writes to it. Its folder is found through
    XDG_CONFIG_HOME, which other programs read too: what they have there is shown by links."""
    users = Path(ask.environ.get("XDG_CONFIG_HOME", ""))
    users = users if users.is_absolute() else Path.home() / ".config"
    folder = ask.home or ask.own
    environment = {
        "XDG_CONFIG_HOME": str(folder),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }
    if ask.home:
        # It is given as the last and strongest of the configurations that opencode merges.
        return Recipe({**environment, "OPENCODE_CONFIG_CONTENT": json.dumps(configuration(ask))})
    written = PlannedFile(folder / "opencode" / "opencode.json", json.dumps(configuration(ask), indent=2) + "\n")
    return Recipe(environment, files=(written,), links=(PlannedLinks(folder, users, ("opencode",)),))


def configuration(ask: Ask) -> dict[str, object]:
    small = f"{ask.server.model}-small"
    limit = {"context": ask.server.context_length, "output": ask.server.output_tokens(8192)}
    return {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "ft": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "ft",
                "options": {"baseURL": ask.base, "apiKey": ask.key},
                "models": {
                    ask.server.model: {"name": ask.server.model, "limit": limit},
                    small: {"name": small, "limit": limit},
                },
            }
        },
        "enabled_providers": ["ft"],
        "model": f"ft/{ask.server.model}",
        "small_model": f"ft/{small}",
        "autoupdate": False,
        "share": "disabled",
    }


HARNESS = Harness(
    name="opencode",
    title="opencode",
    program="opencode",
    package=Package("npm", "opencode-ai", "1.18.33"),
    recipe=recipe,
    first_request=8_000,
    home="XDG_CONFIG_HOME (nothing is written there by ft; opencode itself may)",
    example='run "fix the failing test"',
)
