"""Codex, sent to the local server by a configuration directory of ft's own, or by flags alone."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from launchers.agents import toml
from launchers.agents.common import LaunchError, PlannedFile
from launchers.agents.harness import Ask, Harness, Package, Recipe
from launchers.agents.merging import merge
from launchers.running import RunningServer
from sessions.store.words import why

KEY_VARIABLE = "FT_API_KEY"
INSTRUCTIONS = Path(__file__).with_name("codex_instructions.md")
_LEVELS = {
    "none": "No thinking",
    "minimal": "Hardly any thinking",
    "low": "Brief thinking",
    "medium": "Balanced thinking",
    "high": "Long thinking",
    "xhigh": "Very long thinking",
    "max": "All the thinking that the model can do",
}
HEADER = "# `ft launch codex` sets the keys below at each start and keeps all others.\n\n"
DAEMONS = Path("packages", "app-server-daemon")
"""Where, in its home, Codex keeps the copies of itself that go on running after it."""


def recipe(ask: Ask) -> Recipe:
    """Into a CODEX_HOME of the user's nothing is written: the settings go as ``-c`` flags. A later flag wins, so the
    user's own arguments may name another catalog.

    Raises LaunchError where the configuration in ft's own directory cannot be read.
    """
    catalog = PlannedFile(ask.own / "model_catalog.json", json.dumps(model_catalog(ask.server), indent=2) + "\n")
    settings = configuration(ask.server, catalog.path)
    environment = {"CODEX_HOME": str(ask.home or ask.own), KEY_VARIABLE: ask.key}
    if ask.home:
        flags = tuple(part for assignment in toml.assignments(settings) for part in ("-c", assignment))
        return Recipe(environment, flags=flags, files=(catalog,))
    merged = merge(existing(ask.own / "config.toml"), settings)
    written = PlannedFile(ask.own / "config.toml", HEADER + toml.document(merged))
    return Recipe(environment, files=(catalog, written), leftovers=ask.own / DAEMONS)


def configuration(server: RunningServer, catalog: Path) -> dict[str, Any]:
    """The keys of ``config.toml`` that ft decides."""
    return {
        "model": server.model,
        "model_provider": "ft",
        "model_catalog_json": str(catalog),
        # Codex compacts beyond this; the rest is for what one step may add.
        "model_auto_compact_token_limit": server.context_length * 4 // 5,
        "web_search": "disabled",
        "model_providers": {
            "ft": {
                "name": "ft",
                "base_url": f"{server.url}/v1",
                "wire_api": "responses",
                "env_key": KEY_VARIABLE,
                "stream_idle_timeout_ms": 3600000,
                "stream_max_retries": 2,
                "request_max_retries": 2,
                "supports_websockets": True,
            }
        },
        # What is switched off needs a cloud, or costs the prompt thousands of tokens. The daemon would outlive Codex.
        "features": {
            "goals": False,
            "plugins": False,
            "apps": False,
            "skill_search": False,
            "daemon_auto_start": False,
        },
        "skills": {"bundled": {"enabled": False}},
        "agents": {"enabled": False},
        "analytics": {"enabled": False},
    }


def model_catalog(server: RunningServer) -> dict[str, Any]:
    """Without an entry here Codex warns, takes a long prompt of its own, and offers no ``apply_patch``."""
    levels = server.efforts or ("medium",)
    return {
        "models": [
            {
                "slug": server.model,
                "display_name": server.model,
                "description": "Served by ft on this machine",
                "default_reasoning_level": next((name for name in ("medium", "high") if name in levels), levels[-1]),
                "supported_reasoning_levels": [{"effort": name, "description": _LEVELS[name]} for name in levels],
                "shell_type": "unified_exec",
                "visibility": "list",
                "supported_in_api": True,
                "priority": 1,
                "additional_speed_tiers": [],
                "service_tiers": [],
                "availability_nux": None,
                "upgrade": None,
                "model_messages": None,
                "include_skills_usage_instructions": False,
                "include_plugin_usage_instructions": False,
                "include_apps_usage_instructions": False,
                "supports_reasoning_summaries": True,
                "default_reasoning_summary": "auto",
                "support_verbosity": False,
                "default_verbosity": None,
                "apply_patch_tool_type": "freeform",
                "web_search_tool_type": "text",
                "truncation_policy": {"mode": "tokens", "limit": 10000},
                "supports_parallel_tool_calls": True,
                "supports_image_detail_original": False,
                "context_window": server.context_length,
                "max_context_window": server.context_length,
                "effective_context_window_percent": 95,
                "experimental_supported_tools": [],
                "input_modalities": ["text"],
                "supports_search_tool": False,
                "base_instructions": INSTRUCTIONS.read_text(encoding="utf-8"),
            }
        ]
    }


def existing(path: Path) -> dict[str, Any]:
    """What Codex or the user put into ft's own ``config.toml``: trusted projects, for instance."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot read {path} ({why(error)}): correct it, or delete it to start afresh") from error


HARNESS = Harness(
    name="codex",
    title="Codex",
    program="codex",
    package=Package("npm", "@openai/codex", "0.169.0", node=16),
    recipe=recipe,
    first_request=5_000,
    home="CODEX_HOME (nothing is written there; settings go as -c flags)",
    example='exec "fix the failing test"',
)
