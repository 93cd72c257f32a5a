"""mini-swe-agent, sent to the local server by its environment."""

from __future__ import annotations

from launchers.agents.harness import Ask, Harness, Package, Recipe


def recipe(ask: Ask) -> Recipe:
    """It knows no price of a local model, would stop over that, and looks for a list of prices elsewhere."""
    environment = {
        "OPENAI_API_KEY": ask.key,
        "OPENAI_API_BASE": ask.base,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": str(ask.own),
    }
    return Recipe(environment, flags=("-m", f"openai/{ask.server.model}"))


HARNESS = Harness(
    name="mini",
    title="mini-swe-agent",
    program="mini",
    package=Package("pip", "mini-swe-agent", "2.4.6"),
    recipe=recipe,
    first_request=1_500,
    example='-t "fix the failing test"',
)
