"""Codex, sent to the local server by a configuration directory of ft's own, or by flags alone."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from launchers.agents import toml
from launchers.agents.common import (
    LOCAL_KEY,
    Launch,
    LaunchError,
    PlannedFile,
    cloud_variables,
    installed,
    state_directory,
    without_proxy,
)
from launchers.running import RunningServer

TESTED_VERSION = "0.169.0"
PACKAGE = f"@openai/codex@{TESTED_VERSION}"
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


def plan(
    server: RunningServer,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    program: str = "codex",
    home: Path | None = None,
    catalog: Path | None = None,
    keep: Collection[str] = (),
) -> Launch:
    """How to start Codex. ``home`` is a CODEX_HOME of the user's: nothing is written there, and the settings go as
    ``-c`` flags. ``catalog`` is a model catalog of the user's, in place of ours. Reads, and touches nothing.

    Raises LaunchError where the configuration in ft's own directory cannot be read.
    """
    own = state_directory(environ) / "codex"
    ours = PlannedFile(own / "model_catalog.json", json.dumps(model_catalog(server), indent=2) + "\n")
    settings = configuration(server, catalog or ours.path)
    files = [] if catalog else [ours]
    flags: tuple[str, ...] = ()
    if home:
        flags = tuple(part for assignment in toml.assignments(settings) for part in ("-c", assignment))
    else:
        merged = merge(existing(own / "config.toml"), settings)
        files.append(PlannedFile(own / "config.toml", HEADER + toml.document(merged)))
    recipe = {
        "CODEX_HOME": str(home or own),
        KEY_VARIABLE: server.api_key or LOCAL_KEY,
        **without_proxy(environ, server),
    }
    return Launch(
        command=(program, *flags, *arguments),
        environment={name: value for name, value in recipe.items() if name not in keep or name not in environ},
        removed=cloud_variables(environ, keep),
        files=tuple(files),
        secrets=(server.api_key,) if server.api_key else (),
    )


def configuration(server: RunningServer, catalog: Path) -> dict[str, Any]:
    """The keys of ``config.toml`` that ft decides."""
    return {
        "model": server.model,
        "model_provider": "ft",
        "model_catalog_json": str(catalog),
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
        raise LaunchError(f"cannot read {path} ({error}): correct it, or delete it to start afresh") from error


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``old`` with the leaves of ``new`` set."""
    merged = dict(old)
    for name, value in new.items():
        before = merged.get(name)
        merged[name] = merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def check_installed(program: str, environ: Mapping[str, str]) -> None:
    """Raises LaunchError with the command that installs it."""
    if not installed(program, environ):
        raise LaunchError(f"{program} is not installed. Install it (Node 16 or newer): npm install -g {PACKAGE}")
