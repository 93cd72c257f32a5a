"""Claude Code, sent to the local server by its environment alone."""

from __future__ import annotations

from launchers.agents.common import PlannedFile
from launchers.agents.harness import Ask, Harness, Package, Recipe


def recipe(ask: Ask) -> Recipe:
    """A configuration directory of ft's own, since the ``env`` block of the user's ``settings.json`` would win over
    what is set here. A new one would greet the user with a theme picker each time it is made."""
    sizes = [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")]
    models = ["ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", *sizes]
    environment = {
        "ANTHROPIC_BASE_URL": ask.server.url,
        "ANTHROPIC_AUTH_TOKEN": ask.key,
        "ANTHROPIC_API_KEY": "",
        **dict.fromkeys(models, ask.server.model),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        # It takes unknown models to have a million tokens.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(ask.server.context_length),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(ask.server.output_tokens(16384)),
        "API_TIMEOUT_MS": "3000000",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "1800000",
        "API_FORCE_IDLE_TIMEOUT": "0",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "CLAUDE_CODE_DISABLE_FEEDBACK_SURVEY": "1",
        "CLAUDE_CONFIG_DIR": str(ask.home or ask.own),
    }
    onboarded = PlannedFile(ask.own / ".claude.json", '{"hasCompletedOnboarding": true}\n', keep=True)
    return Recipe(environment, files=() if ask.home else (onboarded,))


HARNESS = Harness(
    name="claude",
    title="Claude Code",
    program="claude",
    # A program of its own; but under an older Node, npm silently installs an older release of it.
    package=Package("npm", "@anthropic-ai/claude-code", "2.1.332", node=22),
    recipe=recipe,
    first_request=12_000,
    lean="--tools Bash,Read,Edit,Write",
    home="CLAUDE_CONFIG_DIR (the env block of a settings.json there wins over ft)",
    example='-p "fix the failing test"',
)
